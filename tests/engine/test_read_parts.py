"""Tests of splitting a chat response into text, reasoning, and complete or incomplete tool calls, in embedded
engines.
"""

from __future__ import annotations

from typing import Any

import pytest

from trioserve import (
    ChatPrompt,
    ContentText,
    FinishReason,
    InvalidRequest,
    ReasoningText,
    SamplingParams,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine

TOOL = {"type": "function", "function": {"name": "look"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
PROMPT = ChatPrompt(messages=[{"role": "user", "content": "Hi"}], tools=[TOOL])
OPTIONS: dict[str, Any] = {
    "block_count": 512,
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "reasoning_parser": "qwen3",
}


async def parts_of(engine: FakeEngine, sampling: SamplingParams | None = None) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    async with engine.generate(PROMPT, sampling) as stream:
        async for piece in engine.read_parts(stream, tools=PROMPT.tools):
            found.setdefault(piece.index, []).extend(piece.parts)
    return found


async def test_chat_response_is_split_into_its_parts() -> None:
    async with open_fake_engine(response=f"<think>Hm.</think>I look.\n{CALL}", **OPTIONS) as engine:
        found = await parts_of(engine, SamplingParams(n=2))
        for parts in (found[0], found[1]):
            assert "".join(part.text for part in parts if isinstance(part, ReasoningText)) == "Hm."
            assert "".join(part.text for part in parts if isinstance(part, ContentText)).strip() == "I look."
            assert ToolCallBegin(0, "look") in parts
            assert "".join(part.text for part in parts if isinstance(part, ToolCallArguments)) == '{"a": 1}'
            assert parts[-1] == ToolCallEnd(0)
        engine.assert_all_free()


async def test_incomplete_tool_call_has_no_end() -> None:
    async with open_fake_engine(response=CALL, **OPTIONS) as engine:
        [parts] = (await parts_of(engine, SamplingParams(max_tokens=len(CALL) - 20))).values()
        assert any(isinstance(part, ToolCallBegin) for part in parts)
        assert not any(isinstance(part, ToolCallEnd) for part in parts)


async def test_abort_drops_text_that_the_parser_held_back() -> None:
    async with open_fake_engine(response=CALL, paused=True, **OPTIONS) as engine:
        async with engine.generate(PROMPT, request_id="mine") as stream:
            await engine.step(len(CALL) - 15)
            engine.abort(["mine"])
            pieces = [piece async for piece in engine.read_parts(stream, tools=PROMPT.tools)]
        assert pieces[-1].delta.finish_reason is FinishReason.ABORT
        assert not any(isinstance(part, ToolCallEnd) for piece in pieces for part in piece.parts)
        engine.assert_all_free()


@pytest.mark.parametrize("tools", [[3], [{}], [{"function": {}}], [{"function": {"name": 3}}]])
async def test_tools_of_a_wrong_format_are_refused(tools: Any) -> None:
    async with open_fake_engine(response="x") as engine, engine.generate("x") as stream:
        with pytest.raises(InvalidRequest, match="tools holds"):
            engine.read_parts(stream, tools=tools)
