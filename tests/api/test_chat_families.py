"""Tests /v1/chat/completions with every family of models: a scripted model writes in the format of the family."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from trioserve.testing.byte_tokenizer import byte_tokenizer
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing.scripted_model import (
    FAMILIES,
    Call,
    PreferringModel,
    Rule,
    ScriptedChat,
    UncheckedExecutor,
    chat_template,
)

USER = {"role": "user", "content": "Weather in Oslo, please"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
ARGUMENTS = {"city": "Oslo", "days": 3}
RULES = [
    Rule(says="Oslo", calls=[Call(name="get_weather", arguments=ARGUMENTS)]),
    Rule(says="Oslo", after=1, content="It rains."),
    Rule(says="JSON", content='{"ok": true}'),
]


@asynccontextmanager
async def opened(make_api: Any, family: str, *, thinks: bool = False) -> AsyncIterator[Any]:
    chat = ScriptedChat(family, RULES, thinks=thinks)
    async with open_fake_engine(
        model=PreferringModel(chat.drafts),
        tokenizer=byte_tokenizer(chat_template(family)),
        new_executor=UncheckedExecutor,
        block_count=64,
        block_size=64,
        max_model_len=4096,
        max_num_batched_tokens=4096,
        reasoning_parser="qwen3" if thinks and family != "openai" else "auto",
    ) as engine:
        api = make_api()
        api.engine = engine
        yield api
        engine.assert_all_free()


def call_of(message: dict[str, Any]) -> tuple[str, Any]:
    [call] = message["tool_calls"]
    return call["function"]["name"], json.loads(call["function"]["arguments"])


def streamed_call(exchange: Any) -> tuple[str, Any]:
    name = arguments = ""
    *events, _ = exchange.events()
    for event in events:
        for call in event["choices"][0]["delta"].get("tool_calls", ()):
            name += call["function"].get("name", "")
            arguments += call["function"]["arguments"]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    return name, json.loads(arguments)


@pytest.mark.parametrize("family", sorted(FAMILIES))
async def test_a_tool_call_is_found_in_the_output(make_api: Any, family: str) -> None:
    async with opened(make_api, family) as api:
        fields = {"tools": [TOOL], "messages": [USER]}
        whole = (await api.chat(**fields)).json()["choices"][0]
        assert whole["finish_reason"] == "tool_calls"
        assert whole["message"]["content"] is None
        assert call_of(whole["message"]) == ("get_weather", ARGUMENTS)
        assert streamed_call(await api.chat(stream=True, **fields)) == ("get_weather", ARGUMENTS)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("family", sorted(FAMILIES))
async def test_a_forced_call_fits_its_schema(make_api: Any, family: str, choice: Any) -> None:
    """The family's grammar sets the format for this vocabulary, which may differ from the script's format."""
    async with opened(make_api, family) as api:
        fields = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False, "messages": [USER]}
        whole = (await api.chat(**fields)).json()["choices"][0]
        assert whole["finish_reason"] == "tool_calls"
        assert whole["message"]["content"] is None
        for name, arguments in (call_of(whole["message"]), streamed_call(await api.chat(stream=True, **fields))):
            assert name == "get_weather"
            assert arguments["city"] in ("Oslo", "Rome")
            assert arguments["days"] in (1, 3)


@pytest.mark.parametrize("family", sorted(FAMILIES))
async def test_conversation_with_a_tool_result_continues_in_every_family(make_api: Any, family: str) -> None:
    async with opened(make_api, family) as api:
        first = (await api.chat(messages=[USER], tools=[TOOL])).json()["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "rain"}
        second = (await api.chat(messages=[USER, first, result], tools=[TOOL])).json()["choices"][0]
        assert (second["finish_reason"], second["message"]["content"]) == ("stop", "It rains.")


@pytest.mark.parametrize("family", ["hermes", "openai"])
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_reasoning_precedes_the_tool_call_in_every_family(make_api: Any, family: str, choice: str) -> None:
    async with opened(make_api, family, thinks=True) as api:
        whole = (await api.chat(messages=[USER], tools=[TOOL], tool_choice=choice)).json()["choices"][0]
        assert whole["message"]["reasoning_content"] == "Let me think."
        assert call_of(whole["message"])[0] == "get_weather"


@pytest.mark.parametrize("family", ["hermes", "openai"])
@pytest.mark.parametrize("thinks", [False, True])
async def test_structured_output_applies_to_the_content(make_api: Any, family: str, thinks: bool) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}}}
    async with opened(make_api, family, thinks=thinks) as api:
        user = {"role": "user", "content": "JSON, please"}
        message = (await api.chat(messages=[user], response_format=form)).json()["choices"][0]["message"]
        assert json.loads(message["content"]) == {"ok": True}
        assert message.get("reasoning_content") == ("Let me think." if thinks else None)


async def test_structured_output_with_tools_is_refused_for_models_with_channels(make_api: Any) -> None:
    async with opened(make_api, "openai") as api:
        fields = {"messages": [USER], "tools": [TOOL], "response_format": {"type": "json_object"}}
        message = await api.check_refused("/v1/chat/completions", fields, param="response_format")
        assert "both set" in message
