"""Tests ChatTurn, the layer below all chat-like APIs, whose results are the same for every API."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import trio

from trioserve.api.error_responses import Refusal
from trioserve.api.turn.chat_turn import ChatTurn, CollectedChoice, Reasoning, ToolCall, TurnChoice, TurnRequest
from trioserve.contracts.events import FinishReason
from trioserve.contracts.output import Delta
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.text.response_parsers.offered_tools import ToolChoice, ToolMode
from trioserve.text.response_parts import (
    ContentText,
    ReasoningText,
    ResponsePart,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)

USER = {"role": "user", "content": "Hi"}


def turn_of(engine: FakeEngine, *, request_id: str = "mine", **fields: Any) -> ChatTurn:
    request = TurnRequest(messages=[USER], sampling=SamplingParams(n=fields.pop("n", 1)), **fields)
    numbers = itertools.count()
    return ChatTurn(
        engine,
        request,
        lambda prompt, sampling: engine.generate(prompt, sampling, request_id=request_id),
        new_id=lambda _: str(next(numbers)),
    )


async def test_chat_turn_is_read_piece_by_piece_in_order() -> None:
    async with open_fake_engine(response="Hello!") as engine:
        texts: dict[int, str] = {0: "", 1: ""}
        ends = []

        async def take(index: int, parts: list[ResponsePart], delta: Delta) -> None:
            for part in parts:
                assert isinstance(part, ContentText)
                texts[index] += part.text
            if delta.finish_reason is not None:
                ends.append((index, turn.choices[index].finish_reason))

        async with turn_of(engine, n=2) as turn:
            await turn.wait_until_begun()
            await turn.read(take)
            assert turn.usage().completion_tokens == 14
        assert texts == {0: "Hello!", 1: "Hello!"}
        assert sorted(ends) == [(0, "stop"), (1, "stop")]
        engine.assert_all_free()


async def test_whole_chat_turn_is_collected() -> None:
    async with open_fake_engine(response="Hello!") as engine:
        async with turn_of(engine) as turn:
            [choice] = await turn.collect()
        assert (choice.content, choice.reasoning, choice.tool_calls, choice.finish_reason) == (
            "Hello!",
            None,
            [],
            "stop",
        )
        engine.assert_all_free()


async def test_leaving_a_chat_turn_frees_its_blocks() -> None:
    async with open_fake_engine(response="Hello!", paused=True) as engine:
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                async with turn_of(engine) as turn:
                    await turn.collect()

            nursery.start_soon(run)
            await engine.step(2)
            nursery.cancel_scope.cancel()
        engine.assert_all_free()


async def test_abort_ends_a_chat_turn_with_an_error() -> None:
    async with open_fake_engine(response="Hello!", paused=True) as engine:
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                with pytest.raises(Refusal, match="aborted"):
                    async with turn_of(engine) as turn:
                        await turn.collect()

            nursery.start_soon(run)
            await engine.step(2)
            engine.abort(["mine"])
        engine.assert_all_free()


# --- meaning of parts, with a scripted parser ---


class ScriptedParser:
    """A parser that returns scripted parts: one list for each feed, and the last list at the end."""

    def __init__(self, *told: list[ResponsePart]) -> None:
        self._told = list(told)

    def feed(self, text: str) -> list[ResponsePart]:
        return self._told.pop(0)

    def end(self) -> list[ResponsePart]:
        return self._told.pop(0) if self._told else []


def collected(
    *told: list[ResponsePart], finish: FinishReason = FinishReason.STOP, calls_max: int | None = None
) -> CollectedChoice:
    choice = TurnChoice(
        0, ScriptedParser(*told), calls_max=calls_max, new_call_id=map("call_{}".format, itertools.count()).__next__
    )
    whole = CollectedChoice()
    for index in range(len(told)):
        is_last = index == len(told) - 1
        delta = Delta(
            index=0, text="" if is_last else "text", token_ids=(1, 2), finish_reason=finish if is_last else None
        )
        whole.take(choice, choice.take(delta), delta)
    return whole


CALL: list[ResponsePart] = [ToolCallBegin(0, "look"), ToolCallArguments(0, '{"a":'), ToolCallArguments(0, "1}")]


def test_turn_with_a_complete_tool_call_finishes_with_tool_calls() -> None:
    whole = collected([*CALL, ToolCallEnd(0)], [])
    assert whole.tool_calls == [ToolCall(id="call_0", name="look", arguments='{"a":1}')]
    assert (whole.content, whole.finish_reason) == (None, "tool_calls")


@pytest.mark.parametrize(("finish", "shown"), [(FinishReason.STOP, "stop"), (FinishReason.LENGTH, "length")])
def test_partial_tool_call_is_not_in_a_chat_turn(finish: FinishReason, shown: str) -> None:
    whole = collected(CALL, [], finish=finish)
    assert whole.tool_calls == []
    assert whole.finish_reason == shown


def test_tool_call_id_of_the_model_is_kept() -> None:
    whole = collected([ToolCallBegin(0, "f", id="functions.f:0"), ToolCallEnd(0)], [])
    assert whole.tool_calls[0].id == "functions.f:0"


def test_only_the_first_tool_call_is_kept_without_parallel_calls() -> None:
    second: list[ResponsePart] = [ToolCallBegin(1, "look"), ToolCallEnd(1)]
    whole = collected([*CALL, ToolCallEnd(0)], second, calls_max=1)
    assert len(whole.tool_calls) == 1
    assert whole.finish_reason == "tool_calls"


def test_reasoning_tokens_are_counted() -> None:
    whole = collected([ReasoningText("ab")], [], [ReasoningText("c"), ContentText("d")], [ContentText("e")], [])
    assert whole.reasoning == "abc"
    assert whole.content == "de"
    assert whole.reasoning_token_count == 2 + 2 + 1  # The second delta has reasoning tokens, but no text.


# --- arguments of the template ---


@pytest.mark.parametrize(
    ("reasoning", "told"),
    [
        (Reasoning(), {}),
        (Reasoning(effort="none"), {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        (Reasoning(effort="high"), {"reasoning_effort": "high", "enable_thinking": True, "thinking": True}),
        (Reasoning(is_on=False), {"enable_thinking": False, "thinking": False}),
    ],
)
def test_reasoning_reaches_the_template(reasoning: Reasoning, told: dict[str, Any]) -> None:
    request = TurnRequest(messages=[USER], sampling=SamplingParams(), reasoning=reasoning)
    assert request.prompt().template_arguments == told


def test_prompt_has_the_allowed_tools_also_of_a_turn_without_calls() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]

    def shown(choice: ToolChoice) -> list[str]:
        request = TurnRequest(messages=[USER], sampling=SamplingParams(), tools=tools, tool_choice=choice)
        return [tool["function"]["name"] for tool in request.prompt().tools or []]

    assert shown(ToolChoice()) == ["a", "b"]
    assert shown(ToolChoice(mode=ToolMode.NONE)) == ["a", "b"]
    assert shown(ToolChoice(mode=ToolMode.REQUIRED, allowed=("b",))) == ["b"]
