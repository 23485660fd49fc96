"""Tests tool calls and reasoning in messages, whole and streamed, with a real engine and a scripted model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message

from trioserve.api.anthropic import bodies as responses
from trioserve.testing.fake_engine import open_fake_engine

pytestmark = pytest.mark.slow  # Each byte is a token, and each token needs a step.

PATH = "/v1/messages"
WEATHER = {
    "name": "weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CLOCK = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nLet me see.\n</think>\n\n"


@asynccontextmanager
async def opened(make_api: Any, response: str, **options: Any) -> AsyncIterator[Any]:
    async with open_fake_engine(
        response=response,
        block_count=512,
        max_model_len=2048,
        max_num_batched_tokens=2048,
        reasoning_parser="qwen3",
        **options,
    ) as engine:
        api = make_api()
        api.engine = engine
        yield api
        await trio.testing.wait_all_tasks_blocked()
        engine.assert_all_free()


async def ask(api: Any, **fields: Any) -> dict[str, Any]:
    """Send a request, and return the message. The client library assembles a streamed message."""
    body = {
        "messages": [{"role": "user", "content": "Weather in Oslo?"}],
        "max_tokens": 300,
        "tools": [WEATHER, CLOCK],
        "temperature": 0,
        **fields,
    }
    exchange = await api.context("POST", PATH, body)
    assert exchange.status == 200, exchange.data
    if not fields.get("stream"):
        msgspec.convert(exchange.json(), responses.MessageResponse)
        return Message.model_validate(exchange.json(), strict=True).to_dict()
    snapshot = None
    buffers: dict[int, bytes] = {}
    for block in exchange.data.decode().removesuffix("\n\n").split("\n\n"):
        event = json.loads(block.split("\n")[1].removeprefix("data: "))
        if event["type"] != "ping":
            snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    return snapshot.to_dict()


def shape(message: dict[str, Any]) -> list[tuple[str, Any]]:
    fields = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [(block["type"], block[fields[block["type"]]]) for block in message["content"]]


BOTH = pytest.mark.parametrize("stream", [True, False])


@BOTH
@pytest.mark.parametrize(
    "response, expected, reason",
    [
        (CALL, [("tool_use", {"city": "Oslo"})], "tool_use"),
        (CALL + SECOND, [("tool_use", {"city": "Oslo"}), ("tool_use", {})], "tool_use"),
        ("It is sunny.", [("text", "It is sunny.")], "end_turn"),
        (THOUGHT + "Sunny.", [("thinking", "Let me see."), ("text", "Sunny.")], "end_turn"),
        (THOUGHT + CALL, [("thinking", "Let me see."), ("tool_use", {"city": "Oslo"})], "tool_use"),
    ],
)
async def test_reasoning_text_and_tool_calls_become_blocks(
    make_api: Any, stream: bool, response: str, expected: Any, reason: str
) -> None:
    async with opened(make_api, response) as api:
        message = await ask(api, stream=stream)
        found = [(kind, value.strip() if isinstance(value, str) else value) for kind, value in shape(message)]
        assert found == expected
        assert message["stop_reason"] == reason
        names = [block["name"] for block in message["content"] if block["type"] == "tool_use"]
        assert names == ["weather", "clock"][: len(names)]
        ids = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
        assert len(set(ids)) == len(ids)
        if THOUGHT in response:
            assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0


@BOTH
async def test_parallel_tool_calls_of_a_message_can_be_disabled(make_api: Any, stream: bool) -> None:
    async with opened(make_api, CALL + SECOND) as api:
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        message = await ask(api, stream=stream, tool_choice=choice)
        assert shape(message) == [("tool_use", {"city": "Oslo"})]


@BOTH
async def test_tool_choice_of_a_message_forces_a_tool_call(make_api: Any, stream: bool) -> None:
    paint = {
        "name": "paint",
        "input_schema": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "green"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    }
    async with opened(make_api, "I would rather talk about something else.") as api:
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "paint"}):
            message = await ask(api, stream=stream, tools=[paint], tool_choice=choice)
            assert message["stop_reason"] == "tool_use"
            [block] = message["content"]
            assert block["name"] == "paint"
            assert block["input"]["colour"] in ("red", "green")


@BOTH
async def test_tool_call_syntax_is_text_without_tools(make_api: Any, stream: bool) -> None:
    async with opened(make_api, CALL) as api:
        message = await ask(api, stream=stream, tool_choice={"type": "none"})
        assert message["stop_reason"] == "end_turn"
        assert [kind for kind, _ in shape(message)] == ["text"]


async def test_tool_call_that_max_tokens_interrupts_is_not_reported_as_complete(make_api: Any) -> None:
    async with opened(make_api, CALL) as api:
        message = await ask(api, max_tokens=60)
        assert message["stop_reason"] == "max_tokens"
        assert [kind for kind, _ in shape(message)] == ["text"]
        streamed = await ask(api, max_tokens=60, stream=True)
        assert streamed["stop_reason"] == "max_tokens"


@BOTH
async def test_omitted_reasoning_block_has_only_a_signature(make_api: Any, stream: bool) -> None:
    async with opened(make_api, THOUGHT + "Sunny.") as api:
        thinking = {"type": "enabled", "budget_tokens": 100, "display": "omitted"}
        message = await ask(api, stream=stream, thinking=thinking, max_tokens=200)
        assert shape(message)[0] == ("thinking", "")
        assert message["content"][0]["signature"]


@BOTH
async def test_budget_tokens_end_the_reasoning(make_api: Any, stream: bool) -> None:
    async with opened(make_api, "<think>\n" + "thinking " * 50 + "</think>\n\nSunny.") as api:
        thinking = {"type": "enabled", "budget_tokens": 30}
        message = await ask(api, stream=stream, thinking=thinking, max_tokens=200)
        assert len(shape(message)[0][1]) < 60
        assert message["usage"]["output_tokens_details"]["thinking_tokens"] < 60


@BOTH
async def test_response_follows_the_requested_schema(make_api: Any, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    }
    async with opened(make_api, "No JSON at all.") as api:
        wanted = {"type": "json_schema", "schema": schema}
        for fields in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
            message = await ask(api, stream=stream, tools=[], **fields)
            assert set(json.loads(message["content"][0]["text"])) == {"city"}


async def test_invalid_schema_is_refused_with_its_path(make_api: Any) -> None:
    async with opened(make_api, "x") as api:
        body = {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 30,
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}},
        }
        exchange = await api.context("POST", PATH, body)
        assert exchange.status == 400
        assert exchange.json()["error"]["type"] == "invalid_request_error"
        assert "output_config.format" in exchange.json()["error"]["message"]
