"""Tests that a grammar makes a forced tool call valid, even if the model's output is random."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from trioserve.testing.fake_engine import FakeEngine, open_fake_engine

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Go."}


def tool(name: str, *colours: str, **fields: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": list(colours)}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["colour", "count"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema, **fields}}


PAINT = tool("paint", "red", "green")
WASH = tool("wash", "blue")
NAMED = {"type": "function", "function": {"name": "wash"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    """An engine whose output looks random unless a grammar restricts it."""
    async with open_fake_engine(block_count=512, max_model_len=2048, max_num_batched_tokens=2048) as engine:
        yield engine
        engine.assert_all_free()


@pytest.fixture
def api(make_api: Any, engine: FakeEngine) -> Any:
    made = make_api()
    made.engine = engine
    return made


def calls_of(exchange: Any, *, stream: bool) -> list[tuple[str, Any]]:
    if not stream:
        choice = exchange.json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        functions = [call["function"] for call in choice["message"]["tool_calls"]]
        return [(function["name"], json.loads(function["arguments"])) for function in functions]
    calls: list[list[str]] = []
    *events, done = exchange.events()
    assert done == "[DONE]"
    for event in events:
        for call in event["choices"][0]["delta"].get("tool_calls", ()):
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"paint", "wash"}), (NAMED, {"wash"}), (ALLOWED, {"wash"})],
    ids=["required", "named", "allowed"],
)
async def test_a_forced_call_is_valid_for_any_model(api: Any, choice: Any, names: set[str], stream: bool) -> None:
    for seed in range(3):
        exchange = await api.chat(
            messages=[USER],
            tools=[PAINT, WASH],
            tool_choice=choice,
            parallel_tool_calls=False,
            stream=stream,
            seed=seed,
        )
        [(name, arguments)] = calls_of(exchange, stream=stream)
        assert name in names
        assert arguments["colour"] in {"paint": ("red", "green"), "wash": ("blue",)}[name]
        assert 0 <= arguments["count"] <= 9


async def test_older_functions_can_be_forced(api: Any) -> None:
    exchange = await api.chat(
        messages=[USER], functions=[PAINT["function"], WASH["function"]], function_call={"name": "wash"}
    )
    choice = exchange.json()["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"]["name"] == "wash"


async def test_each_choice_has_its_own_forced_call(api: Any) -> None:
    exchange = await api.chat(messages=[USER], tools=[PAINT, WASH], tool_choice="required", n=3, seed=1)
    assert all(choice["message"]["tool_calls"] for choice in exchange.json()["choices"])


async def test_a_partial_forced_call_is_not_shown(api: Any) -> None:
    exchange = await api.chat(messages=[USER], tools=[PAINT], tool_choice="required", max_tokens=20)
    choice = exchange.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]


async def test_response_to_tools_and_a_schema_is_a_tool_call_or_json(api: Any) -> None:
    """The random model may write a call or JSON."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}}}
    kinds = set()
    for seed in range(12):
        exchange = await api.chat(
            messages=[USER], tools=[WASH], response_format=form, parallel_tool_calls=False, seed=seed
        )
        choice = exchange.json()["choices"][0]
        kinds.add(choice["finish_reason"])
        if choice["finish_reason"] == "tool_calls":
            assert choice["message"]["tool_calls"][0]["function"]["name"] == "wash"
        else:
            assert set(json.loads(choice["message"]["content"])) == {"ok"}
    assert kinds == {"tool_calls", "stop"}


async def test_structured_output_other_than_json_is_refused_with_tools(api: Any) -> None:
    message = await api.check_refused(
        CHAT, {"messages": [USER], "tools": [WASH], "guided_regex": "a+"}, param="guided_regex"
    )
    assert 'tool_choice "none"' in message
    exchange = await api.chat(messages=[USER], tools=[WASH], guided_regex="a{3}", tool_choice="none")
    assert exchange.json()["choices"][0]["message"]["content"] == "aaa"


async def test_an_unsupported_pattern_is_ignored_unless_the_tool_is_strict(api: Any) -> None:
    text = {"type": "string", "pattern": r"^(?!a)\w*$", "maxLength": 3}
    schema = {"type": "object", "properties": {"pattern": text}, "required": ["pattern"], "additionalProperties": False}
    function = {"name": "pay", "parameters": schema}
    fields = {"messages": [USER], "tool_choice": "required", "parallel_tool_calls": False}
    exchange = await api.chat(tools=[{"type": "function", "function": function}], **fields)
    [(name, arguments)] = calls_of(exchange, stream=False)
    assert (name, list(arguments)) == ("pay", ["pattern"])
    assert exchange.response_headers["x-trioserve-ignored"] == "tools.properties.pattern.pattern"
    strict = {"type": "function", "function": {**function, "strict": True}}
    message = await api.check_refused(CHAT, {"tools": [strict], **fields}, param="tools")
    assert "look-around" in message


async def test_unsatisfiable_tool_schemas_are_refused(api: Any) -> None:
    broken = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "$ref": "#/nowhere"}}}
    await api.check_refused(CHAT, {"messages": [USER], "tools": [broken], "tool_choice": "required"}, param="tools")


async def test_tool_schemas_that_are_too_large_to_force_are_refused(api: Any) -> None:
    long = [tool(f"f{index}", *(f"{index}{'x' * 1000}{number}" for number in range(100))) for index in range(3)]
    message = await api.check_refused(
        CHAT, {"messages": [USER], "tools": long, "tool_choice": "required"}, param="tools"
    )
    assert "too long" in message


# --- strict tools, without a forced call ---


@pytest.mark.parametrize("stream", [False, True])
async def test_arguments_of_strict_tools_fit_their_schema(make_api: Any, stream: bool) -> None:
    """The model begins a call and prefers other arguments, but the grammar forbids those arguments."""
    script = 'I will. <tool_call>\n{"name": "wash", "arguments": {"colour": "pink", "count": 77}}\n</tool_call>'
    async with open_fake_engine(
        response=script, block_count=512, max_model_len=2048, max_num_batched_tokens=2048
    ) as engine:
        api = make_api()
        api.engine = engine
        exchange = await api.chat(
            messages=[USER], tools=[tool("wash", "blue", strict=True)], stream=stream, max_tokens=300
        )
        text = exchange.data.decode()
        assert "pink" not in text
        if not stream:
            for call in exchange.json()["choices"][0]["message"].get("tool_calls", ()):
                assert re.fullmatch(r'\{"colour": "blue", "count": [0-9]\}', call["function"]["arguments"])
        engine.assert_all_free()
