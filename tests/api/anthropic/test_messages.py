"""Tests POST /v1/messages and /v1/messages/count_tokens with the types of Anthropic's client library."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from anthropic.types import Message, MessageTokensCount

from trioserve.api.anthropic import bodies as responses
from trioserve.api.surface import MessagesError
from trioserve.contracts.errors import Draining, InvalidRequest, Overloaded, RequestFailed
from trioserve.contracts.events import FinishReason
from trioserve.contracts.output import Delta
from trioserve.http.exchange import BodyTimeout, BodyTooLarge

PATH = "/v1/messages"
USER = {"role": "user", "content": "Hi"}
EVENTS = {
    "message_start": responses.MessageStart,
    "content_block_start": responses.ContentBlockStart,
    "content_block_delta": responses.ContentBlockDelta,
    "content_block_stop": responses.ContentBlockStop,
    "message_delta": responses.MessageDelta,
    "message_stop": responses.MessageStop,
    "ping": responses.Ping,
    "error": MessagesError,
}


async def ask(api: Any, *, path: str = PATH, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"messages": [USER], "max_tokens": 20, **fields}
    return await api.context("POST", path, {k: v for k, v in body.items() if v is not ...}, **(headers or {}))


def message(exchange: Any) -> Message:
    assert exchange.status == 200, exchange.data
    msgspec.convert(exchange.json(), responses.MessageResponse)
    return Message.model_validate(exchange.json(), strict=True)


def events(exchange: Any) -> list[dict[str, Any]]:
    found = []
    for block in exchange.data.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        msgspec.convert(value, EVENTS[value["type"]])
        found.append(value)
    return found


async def check_refused(api: Any, *, status: int = 400, kind: str = "invalid_request_error", **fields: Any) -> str:
    exchange = await ask(api, **fields)
    assert exchange.status == status, exchange.data
    error = msgspec.convert(exchange.json(), MessagesError)
    assert error.error.type == kind
    assert not api.engine.streams or api.left()
    return error.error.message


async def test_refusal_of_a_thread_matches_its_description(api: Any) -> None:
    assert "thread" in await check_refused(api, thread={"id": "a"})


async def test_streamed_message_without_content_has_one_described_text_block(api: Any) -> None:
    api.engine.script = lambda token_ids, sampling: [
        Delta(index=0, text="", token_ids=(97,), finish_reason=FinishReason.STOP)
    ]
    [start] = [event for event in events(await ask(api, stream=True)) if event["type"] == "content_block_start"]
    assert start["content_block"] == {"type": "text", "text": "", "citations": None}


# --- whole responses ---


async def test_whole_message_has_text_usage_and_stop_reason(api: Any) -> None:
    api.engine.cached_token_count = 3
    exchange = await ask(api, model="org/letters")
    response = message(exchange)
    assert response.id == "msg_" + exchange.response_headers["x-request-id"]
    assert response.model == "org/letters"
    assert [block.text for block in response.content] == ["Hello!"]  # type: ignore[union-attr]
    assert (response.stop_reason, response.stop_sequence) == ("end_turn", None)
    usage = response.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (6, 3, 6)
    assert api.left()


@pytest.mark.parametrize(
    "reason, stop, expected",
    [
        (FinishReason.STOP, None, ("end_turn", None)),
        (FinishReason.STOP, 7, ("end_turn", None)),
        (FinishReason.STOP, "END", ("stop_sequence", "END")),
        (FinishReason.LENGTH, None, ("max_tokens", None)),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_each_kind_of_message_end_has_its_stop_reason(
    api: Any, reason: FinishReason, stop: Any, expected: Any, stream: bool
) -> None:
    api.engine.script = lambda *_: [Delta(index=0, text="ab", token_ids=(1, 2), finish_reason=reason, stop_reason=stop)]
    exchange = await ask(api, stream=stream, max_tokens=2)
    said = events(exchange)[-2]["delta"] if stream else exchange.json()
    assert (said["stop_reason"], said["stop_sequence"]) == expected


async def test_max_tokens_beyond_the_context_is_reduced(api: Any) -> None:
    api.engine.script = api.say("ab", reason=FinishReason.LENGTH)
    response = message(await ask(api, max_tokens=api.engine.model.context_tokens_max))
    assert response.stop_reason == "model_context_window_exceeded"
    assert api.engine.streams[0].sampling.clamp_max_tokens


# --- streams ---


async def test_streamed_message_equals_the_whole_message(api: Any) -> None:
    exchange = await ask(api, stream=True)
    found = events(exchange)
    assert [event["type"] for event in found] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert found[0]["message"]["usage"]["input_tokens"] == 9
    assert "".join(event["delta"]["text"] for event in found[3:5]) == "Hello!"
    assert found[-2]["usage"]["output_tokens"] == 6
    assert exchange.response_headers["content-type"].startswith("text/event-stream")
    assert exchange.response_headers["request-id"] == exchange.response_headers["x-request-id"]


async def test_error_in_a_stream_is_its_last_event(api: Any) -> None:
    api.engine.script = lambda *_: [Delta(index=0, text="x", token_ids=(1,)), RequestFailed("it broke")]
    exchange = await ask(api, stream=True)
    *_, last = events(exchange)
    assert last == {
        "type": "error",
        "error": {"type": "api_error", "message": "it broke"},
        "request_id": exchange.response_headers["request-id"],
    }
    assert "content_block_stop" not in [event["type"] for event in events(exchange)]


@pytest.mark.parametrize(
    "reason, status, kind",
    [(FinishReason.ABORT, 529, "overloaded_error"), (FinishReason.DEADLINE, 504, "timeout_error")],
)
async def test_aborted_request_is_an_error_and_no_message(api: Any, reason: Any, status: int, kind: str) -> None:
    api.engine.script = api.say("a", reason=reason)
    await check_refused(api, status=status, kind=kind)
    assert events(await ask(api, stream=True))[-1]["error"]["type"] == kind


# --- requests ---


async def test_fields_of_a_message_body_reach_the_engine(api: Any) -> None:
    schema = {"type": "object"}
    tool = {"name": "f", "description": "d", "input_schema": schema}
    await ask(
        api,
        system="Be brief.",
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        stop_sequences=["END"],
        seed=3,
        priority=4,
        tools=[tool],
        tool_choice={"type": "auto"},
        metadata={"user_id": "u"},
        service_tier="auto",
        headers={"x_queue_timeout": "5"},
    )
    [stream], [options] = api.engine.streams, api.engine.options
    sampling = stream.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.stop, sampling.seed, sampling.max_tokens) == (("END",), 3, 20)
    assert (options["priority"], options["deadlines"].queue_timeout) == (4, 5.0)
    assert stream.prompt.messages[0] == {"role": "system", "content": "Be brief."}
    assert stream.prompt.tools == [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}
    ]


async def test_response_continues_a_last_message_of_the_assistant(api: Any) -> None:
    await ask(api, messages=[USER, {"role": "assistant", "content": "I am"}])
    prompt = api.engine.streams[0].prompt
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)


@pytest.mark.parametrize(
    "fields, arguments",
    [
        ({}, {}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, {"enable_thinking": True, "thinking": True}),
        (
            {"output_config": {"effort": "low"}},
            {"reasoning_effort": "low", "enable_thinking": True, "thinking": True},
        ),
    ],
)
async def test_thinking_options_reach_the_template(api: Any, fields: Any, arguments: Any) -> None:
    await ask(api, **fields)
    assert api.engine.streams[0].prompt.template_arguments == arguments


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"max_tokens": ...}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens is 0, allowed is 1 or more"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "must have a source"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"priority": 101}, "priority"),
        ({"seed": 2**65}, "seed"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "allowed is 1 or more"),
        ({"thinking": {"type": "enabled", "budget_tokens": 20}}, "less than max_tokens, which is 20"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [{"name": "f", "input_schema": {}}]}, "tools are: f"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": {}}] * 2}, "tools[1].name"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
    ],
)
async def test_error_of_an_unsupported_messages_field_says_what_is_wrong(api: Any, fields: Any, words: str) -> None:
    assert words in await check_refused(api, **fields)
    assert not api.engine.streams


async def test_unknown_model_is_refused_with_the_served_names(api: Any) -> None:
    assert "letters" in await check_refused(api, model="claude", status=404, kind="not_found_error")


@pytest.mark.parametrize(
    "error, status, kind",
    [
        (BodyTooLarge("too large"), 413, "request_too_large"),
        (BodyTimeout("too slow"), 408, "timeout_error"),
        (InvalidRequest("broken"), 400, "invalid_request_error"),
    ],
)
async def test_errors_before_the_body_arrived_have_the_error_format_of_anthropic(
    api: Any, error: Any, status: int, kind: str
) -> None:
    exchange = api.exchange("POST", PATH, {})
    exchange.body_error = error
    await api.app(exchange)
    assert (exchange.status, exchange.json()["error"]["type"]) == (status, kind)


@pytest.mark.parametrize(
    "error, status, kind",
    [
        (Overloaded("full", reason="queue_full", retry_after_seconds=2.5), 429, "rate_limit_error"),
        (Draining("leaving", reason="draining", retry_after_seconds=1), 529, "overloaded_error"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_overloaded_server_sends_retry_after(api: Any, error: Any, status: int, kind: str, stream: bool) -> None:
    api.engine.enter_errors = [error]
    exchange = await ask(api, stream=stream)
    assert (exchange.status, exchange.json()["error"]["type"]) == (status, kind)
    assert exchange.response_headers["retry-after"] in ("1", "3")


# --- counting tokens ---


async def test_counted_tokens_equal_the_prompt_tokens_of_a_message(api: Any) -> None:
    fields = {"messages": [USER, {"role": "assistant", "content": "A"}, USER], "system": "S"}
    counted = await ask(api, path=PATH + "/count_tokens", max_tokens=..., **fields)
    said = MessageTokensCount.model_validate(counted.json(), strict=True)
    msgspec.convert(counted.json(), responses.MessageTokens)
    assert said.input_tokens == message(await ask(api, **fields)).usage.input_tokens
    assert len(api.engine.streams) == 1


async def test_invalid_count_request_is_refused(api: Any) -> None:
    assert "messages" in await check_refused(api, path=PATH + "/count_tokens", messages=[])


# --- OpenAPI ---


async def test_number_ranges_in_the_openapi_document_are_enforced(api: Any) -> None:
    schemas = (await api.context("GET", "/openapi.json")).json()["components"]["schemas"]
    fields = schemas["MessagesBody"]["properties"]
    assert fields["max_tokens"]["minimum"] == 1
    assert schemas["Thinking"]["properties"]["budget_tokens"]["anyOf"][0]["minimum"] == 1
    assert set(schemas["MessagesBody"]["required"]) == {"messages", "max_tokens"}
    for name, (low, high) in {"temperature": (0, 100), "priority": (-100, 100)}.items():
        assert (fields[name]["anyOf"][0]["minimum"], fields[name]["anyOf"][0]["maximum"]) == (low, high)
        for value, status in ((low, 200), (high, 200), (low - 1, 400), (high + 1, 400)):
            assert (await ask(api, **{name: value})).status == status
