"""Tests that tool_choice and strict have the same meaning in embedded engines as over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from trioserve import ChatPrompt, ContentText, InvalidRequest, SamplingParams, ToolCallArguments, ToolCallBegin
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine

OPTIONS: dict[str, Any] = {"block_count": 512, "max_model_len": 2048, "max_num_batched_tokens": 2048}
CALL = '<tool_call>\n{"name": "wash", "arguments": {"colour": "blue"}}\n</tool_call>'


def tool(name: str, colour: str, **fields: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": [colour]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema, **fields}}


PAINT, WASH = tool("paint", "red"), tool("wash", "blue")
NAMED = {"type": "function", "function": {"name": "wash"}}
COOK = {"type": "function", "function": {"name": "cook"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


def chat(*tools: dict[str, Any]) -> ChatPrompt:
    return ChatPrompt(messages=[{"role": "user", "content": "Go."}], tools=list(tools) or None)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    """Open an engine that generates random tokens unless a grammar restrains them."""
    async with open_fake_engine(**OPTIONS) as engine:
        yield engine
        engine.assert_all_free()


async def parts_of(engine: FakeEngine, prompt: ChatPrompt, seed: int = 0, **arguments: Any) -> list[Any]:
    found: list[Any] = []
    async with engine.generate(prompt, SamplingParams(max_tokens=400, seed=seed), **arguments) as stream:
        async for piece in engine.read_parts(stream, tools=prompt.tools):
            found += piece.parts
    return found


def calls_in(parts: list[Any]) -> list[tuple[str, str]]:
    names = [part.name for part in parts if isinstance(part, ToolCallBegin)]
    written = ["" for _ in names]
    for part in parts:
        if isinstance(part, ToolCallArguments):
            written[part.index] += part.text
    return list(zip(names, written, strict=True))


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"paint", "wash"}), (NAMED, {"wash"}), (ALLOWED, {"wash"})],
    ids=["required", "named", "allowed"],
)
async def test_forced_tool_call_does_not_depend_on_the_model(engine: FakeEngine, choice: Any, names: set[str]) -> None:
    for seed in range(2):
        name, arguments = calls_in(await parts_of(engine, chat(PAINT, WASH), seed, tool_choice=choice))[0]
        assert name in names
        assert json.loads(arguments) == {"colour": {"paint": "red", "wash": "blue"}[name]}


async def test_tool_choice_none_keeps_the_prompt(engine: FakeEngine) -> None:
    """The prefix cache then serves a turn without calls between two turns with calls."""
    async with (
        engine.generate(chat(PAINT), SamplingParams(max_tokens=1), tool_choice="none") as stream,
        engine.generate(chat(PAINT), SamplingParams(max_tokens=1)) as auto,
    ):
        assert stream.prompt_token_ids == auto.prompt_token_ids


async def test_tool_choice_auto_allows_text() -> None:
    async with open_fake_engine(response="Hello", **OPTIONS) as engine:
        for arguments in ({}, {"tool_choice": "auto"}, {"tool_choice": "auto", "strict": False}):
            parts = await parts_of(engine, chat(PAINT), **arguments)
            assert "".join(part.text for part in parts if isinstance(part, ContentText)) == "Hello"


@pytest.mark.parametrize(
    ("tools", "strict", "is_kept"),
    [
        ([WASH], None, False),
        ([WASH], False, False),
        ([WASH], True, True),
        ([tool("wash", "blue", strict=True)], None, True),
        ([tool("wash", "blue", strict=True)], False, False),
    ],
)
async def test_strict_makes_free_tool_calls_match_their_schemas(tools: Any, strict: bool | None, is_kept: bool) -> None:
    wrong = CALL.replace("blue", "pink")
    async with open_fake_engine(response=wrong, **OPTIONS) as engine:
        [(_, arguments)] = calls_in(await parts_of(engine, chat(*tools), strict=strict))[:1] or [("", "")]
        assert ("pink" in arguments) is not is_kept


@pytest.mark.parametrize(
    ("prompt", "arguments", "words"),
    [
        (
            chat(PAINT, WASH),
            {"tool_choice": {**NAMED, "function": {"name": "cook"}}},
            "'cook', but tools has paint, wash",
        ),
        (chat(), {"tool_choice": "required"}, "there are no tools"),
        (chat(PAINT), {"tool_choice": "sometimes"}, 'allowed are "auto", "none", "required"'),
        (chat(PAINT), {"strict": "yes"}, "True or False"),
        ("a text", {"tool_choice": "auto"}, "tool_choice is for tools"),
        ("a text", {"strict": True}, "strict is for tools"),
    ],
)
async def test_invalid_tool_choice_is_refused(
    engine: FakeEngine, prompt: Any, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        engine.generate(prompt, **arguments)
