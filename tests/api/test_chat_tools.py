"""Tests tools in /v1/chat/completions. Whole and streamed output becomes complete tool calls, never a partial call."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from trioserve.engine.request_stream import RequestStream
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Weather in Oslo?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


@asynccontextmanager
async def opened(make_api: Any, response: str, **options: Any) -> AsyncIterator[tuple[Any, FakeEngine]]:
    async with open_fake_engine(
        response=response, block_count=512, max_model_len=2048, max_num_batched_tokens=2048, **options
    ) as engine:
        api = make_api()
        api.engine = engine
        yield api, engine
        await trio.testing.wait_all_tasks_blocked()
        engine.assert_all_free()


async def ask(api: Any, **fields: Any) -> Any:
    return await api.chat(**{"messages": [USER], "tools": [WEATHER, CLOCK], **fields})


def joined(exchange: Any) -> dict[str, Any]:
    """Merge the stream of one choice into a whole message, as a client does, and check each event."""
    *events, done = exchange.events()
    assert done == "[DONE]"
    message: dict[str, Any] = {"content": None, "tool_calls": [], "finish_reason": None, "reasoning": ""}
    for event in events:
        ChatCompletionChunk.model_validate(event, strict=True)
        [choice] = event["choices"]
        delta = choice["delta"]
        assert message["finish_reason"] is None, "nothing follows the end"
        if delta.get("content") is not None:
            message["content"] = (message["content"] or "") + delta["content"]
        message["reasoning"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                assert (call["type"], call["function"]["arguments"]) == ("function", "")
                message["tool_calls"].append(call)
            else:
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return message


async def test_tool_call_is_not_content_and_finishes_with_tool_calls(make_api: Any) -> None:
    async with opened(make_api, CALL) as (api, _):
        whole = ChatCompletion.model_validate((await ask(api)).json(), strict=True)
        [choice] = whole.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.tool_calls is not None
        [call] = choice.message.tool_calls
        assert call.type == "function"
        assert call.id.startswith("call_")
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"city": "Oslo"}


async def test_streamed_tool_call_sends_its_name_and_then_its_arguments(make_api: Any) -> None:
    async with opened(make_api, CALL) as (api, _):
        exchange = await ask(api, stream=True)
        first, second, *_ = exchange.events()
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
        [call] = second["choices"][0]["delta"]["tool_calls"]
        assert call == {
            "index": 0,
            "id": call["id"],
            "type": "function",
            "function": {"name": "weather", "arguments": ""},
        }
        message = joined(exchange)
        assert message["finish_reason"] == "tool_calls"
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}


async def test_the_stream_learns_the_names_of_the_called_tools(make_api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    awaited: list[list[str]] = []
    monkeypatch.setattr(RequestStream, "await_tools", lambda _, tools: awaited.append(list(tools)))
    async with opened(make_api, f"{CALL}\n{SECOND}") as (api, _):
        await ask(api)
        await ask(api, stream=True)
    assert awaited == [["weather", "clock"]] * 2


async def test_text_before_calls_is_content_and_each_call_has_an_id(make_api: Any) -> None:
    async with opened(make_api, f"Let me look.\n{CALL}\n{SECOND}") as (api, _):
        message = joined(await ask(api, stream=True))
        assert message["content"].strip() == "Let me look."
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "clock"]
        whole = (await ask(api)).json()["choices"][0]["message"]
        assert whole["content"].strip() == "Let me look."
        assert len({call["id"] for call in (*message["tool_calls"], *whole["tool_calls"])}) == 4


async def test_parallel_tool_calls_of_a_chat_can_be_disabled(make_api: Any) -> None:
    async with opened(make_api, f"{CALL}\n{SECOND}") as (api, _):
        for stream in (False, True):
            exchange = await ask(api, parallel_tool_calls=False, stream=stream)
            message = joined(exchange) if stream else exchange.json()["choices"][0]["message"]
            assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]


@pytest.mark.parametrize("fields", [{"tools": None}, {"tool_choice": "none"}])
async def test_tool_call_is_text_in_a_request_without_tools(make_api: Any, fields: dict[str, Any]) -> None:
    async with opened(make_api, CALL) as (api, _):
        choice = (await ask(api, **fields)).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
        assert "tool_calls" not in choice["message"]


async def test_strict_tools_demand_nothing_if_the_tool_choice_is_none(make_api: Any) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    strict["function"]["parameters"] = {**WEATHER["function"]["parameters"], "additionalProperties": False}
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    answer = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    async with opened(make_api, CALL) as (api, _):
        fields = {"tools": [strict], "tool_choice": "none", "max_tokens": 400}
        choice = (await ask(api, **fields)).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
        choice = (await ask(api, **fields, response_format=answer)).json()["choices"][0]
        assert choice["message"]["content"].startswith("{")
        assert "tool_calls" not in choice["message"]


async def test_each_choice_has_its_own_tool_calls(make_api: Any) -> None:
    async with opened(make_api, CALL) as (api, _):
        choices = (await ask(api, n=3)).json()["choices"]
        assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3
        events = (await ask(api, n=3, stream=True)).events()[:-1]
        for index in range(3):
            pieces = [
                call["function"]["arguments"]
                for event in events
                if event["choices"][0]["index"] == index
                for call in event["choices"][0]["delta"].get("tool_calls", ())
            ]
            assert json.loads("".join(pieces)) == {"city": "Oslo"}


@pytest.mark.slow
async def test_a_call_that_max_tokens_ends_never_looks_complete(make_api: Any) -> None:
    """The test uses every max_tokens that ends the output before the call is complete."""
    async with opened(make_api, CALL) as (api, _):
        for tokens in range(1, len(CALL) - len("\n</tool_call>")):
            choice = (await ask(api, max_tokens=tokens)).json()["choices"][0]
            assert choice["finish_reason"] == "length"
            assert "tool_calls" not in choice["message"], tokens
        cut = joined(await ask(api, max_tokens=len(CALL) - 20, stream=True))
        assert cut["finish_reason"] == "length"
        with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
            json.loads(cut["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort_in_every_phase_of_a_call_is_an_error_and_frees_its_blocks(make_api: Any, stream: bool) -> None:
    for steps in (0, 1, 5, 20, 45, len(CALL)):
        async with opened(make_api, CALL, paused=True) as (api, engine):
            exchange = api.exchange(
                "POST", CHAT, {"messages": [USER], "tools": [WEATHER], "stream": stream}, {"x-request-id": "mine"}
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(api.app, exchange)
                await trio.testing.wait_all_tasks_blocked()
                await engine.step(steps)
                engine.abort(["mine"])
            if not stream or steps == 0:
                assert exchange.status == 503
                continue
            *events, error = exchange.events()
            assert error["error"]["code"] == "request_aborted"
            assert all(event["choices"][0]["finish_reason"] is None for event in events)


async def test_a_client_that_leaves_during_a_call_frees_its_blocks(make_api: Any) -> None:
    for steps in (1, 20, 45):
        async with opened(make_api, CALL, paused=True) as (api, engine):
            exchange = api.exchange("POST", CHAT, {"messages": [USER], "tools": [WEATHER], "stream": True})
            async with trio.open_nursery() as nursery:
                nursery.start_soon(api.app, exchange)
                await engine.step(steps)
                nursery.cancel_scope.cancel()
            assert not exchange.finished


async def test_logprobs_and_token_ids_work_with_calls(make_api: Any) -> None:
    """The fake model has no log probabilities. So the test checks only that the fields do not break tool calls."""
    async with opened(make_api, f"Hm. {CALL}") as (api, _):
        fields = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
        whole = (await ask(api, **fields)).json()["choices"][0]
        assert whole["message"]["tool_calls"][0]["function"]["name"] == "weather"
        exchange = await ask(api, stream=True, **fields)
        assert joined(exchange)["tool_calls"][0]["function"]["name"] == "weather"
        streamed = [
            token_id for event in exchange.events()[:-1] for token_id in event["choices"][0].get("token_ids", ())
        ]
        assert streamed == whole["token_ids"]


async def test_tools_are_part_of_the_prompt_and_of_the_token_count(make_api: Any) -> None:
    """The chat template of the byte tokenizer does not show tools, so the server adds them to the prompt."""
    async with opened(make_api, "Hello!") as (api, _):
        chat = (await ask(api)).json()["usage"]["prompt_tokens"]
        assert (await ask(api, tool_choice="none")).json()["usage"]["prompt_tokens"] == chat
        assert (await ask(api, tools=None)).json()["usage"]["prompt_tokens"] < chat
        body = {"messages": [USER], "tools": [WEATHER, CLOCK]}
        shown = (await api.context("POST", "/tokenize", body)).json()
        assert shown["count"] == chat
        assert "Weather of a city." in bytes(shown["tokens"]).decode()


async def test_call_ids_are_accepted_by_templates_of_mistral(make_api: Any) -> None:
    async with opened(make_api, '[TOOL_CALLS][{"name": "clock", "arguments": {}}]', tool_call_parser="mistral") as (
        api,
        _,
    ):
        [call] = (await ask(api)).json()["choices"][0]["message"]["tool_calls"]
        assert len(call["id"]) == 9
        assert call["id"].isalnum()


# --- the older functions ---


async def test_request_with_older_functions_gets_a_function_call(make_api: Any) -> None:
    async with opened(make_api, f"{CALL}\n{SECOND}") as (api, _):
        old = {"tools": None, "functions": [WEATHER["function"], CLOCK["function"]], "function_call": "auto"}
        whole = (await ask(api, **old)).json()["choices"][0]
        assert whole["finish_reason"] == "function_call"
        assert "tool_calls" not in whole["message"]
        call = whole["message"]["function_call"]
        assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Oslo"})
        *events, _ = (await ask(api, stream=True, **old)).events()
        deltas = [event["choices"][0]["delta"].get("function_call", {}) for event in events]
        assert [delta["name"] for delta in deltas if "name" in delta] == ["weather"]
        assert json.loads("".join(delta.get("arguments", "") for delta in deltas)) == {"city": "Oslo"}
        assert events[-1]["choices"][0]["finish_reason"] == "function_call"


async def test_messages_with_function_calls_become_calls_and_results(api: Any) -> None:
    call = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    messages = [
        USER,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "rain"},
    ]
    assert (await api.chat(messages=messages)).status == 200
    _, calling, result = api.engine.streams[0].prompt.messages
    assert calling["tool_calls"] == [{"id": "call_1", "type": "function", "function": call}]
    assert "function_call" not in calling
    assert (result["role"], result["tool_call_id"]) == ("tool", "call_1")


# --- refusals ---

LONG = "x" * 129


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def deep_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)], "tools"),
        ([{"function": {"name": "f"}}], "tools[0].type"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "name": "f"}], "tools[0].function"),
        ([function(name="")], "tools[0].function.name"),
        ([function(name=LONG)], "tools[0].function.name"),
        ([function(name="two words")], "tools[0].function.name"),
        ([function(name=3)], "tools[0].function.name"),
        ([function(), function()], "tools[1].function.name"),
        ([function(description=3)], "tools[0].function.description"),
        ([function(strict="yes")], "tools[0].function.strict"),
        ([function(parameters=[])], "tools[0].function.parameters"),
        ([function(parameters={"type": "string"})], "tools[0].function.parameters.type"),
        ([function(parameters=deep_schema(40))], "tools"),
        ([function(description="x" * 300_000)], "tools[0]"),
    ],
)
async def test_invalid_tools_are_refused_with_their_path(api: Any, tools: Any, param: str) -> None:
    await api.check_refused(CHAT, {"messages": [USER], "tools": tools}, param=param)
    assert api.engine.streams == []


@pytest.mark.parametrize(
    "choice",
    [
        "always",
        {"type": "function"},
        {"type": "function", "function": {"name": "unknown"}},
        {"type": "function", "function": {"name": 3}},
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "never", "tools": [CLOCK]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function()]}},
        {"type": "custom", "custom": {"name": "x"}},
        {},
    ],
)
async def test_a_tool_choice_that_does_not_fit_the_tools_is_refused(api: Any, choice: Any) -> None:
    await api.check_refused(
        CHAT, {"messages": [USER], "tools": [WEATHER, CLOCK], "tool_choice": choice}, param="tool_choice"
    )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_a_call_cannot_be_forced_without_tools(api: Any, choice: Any) -> None:
    message = await api.check_refused(CHAT, {"messages": [USER], "tool_choice": choice}, param="tool_choice")
    assert "there are no tools" in message


ONE_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [3]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{**ONE_CALL, "id": ""}]}], "messages[0].tool_calls[0].id"),
        ([{"role": "assistant", "tool_calls": [{**ONE_CALL, "type": "custom"}]}], "messages[0].tool_calls[0].type"),
        ([{"role": "assistant", "tool_calls": [{"id": "c1"}]}], "messages[0].tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": 3}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([USER, {"role": "tool", "content": "x"}], "messages[1].tool_call_id"),
        ([USER, {"role": "tool", "content": "x", "tool_call_id": "c9"}], "messages[1].tool_call_id"),
        ([{"role": "tool", "content": "x", "tool_call_id": "c1"}], "messages[0].tool_call_id"),
        ([USER, {"role": "function", "name": "f", "content": "x"}], "messages[1].role"),
    ],
)
async def test_messages_with_mismatched_calls_and_results_are_refused(api: Any, messages: Any, param: str) -> None:
    await api.check_refused(CHAT, {"messages": messages}, param=param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{"name": "f"}], "tools": [CLOCK]}, "functions"),
        ({"functions": [{"name": "f"}], "function_call": "f"}, "function_call"),
        ({"functions": [{"name": "f"}], "function_call": "auto", "tool_choice": "auto"}, "function_call"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_budget": 1, "max_reasoning_tokens": 2}, "max_reasoning_tokens"),
    ],
)
async def test_fields_that_contradict_each_other_are_refused(api: Any, fields: dict[str, Any], param: str) -> None:
    await api.check_refused(CHAT, {"messages": [USER], **fields}, param=param)
