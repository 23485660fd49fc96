"""Tests POST /api/chat and /api/generate with the types of Ollama's client library."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import ollama
import pytest

from trioserve.api.ollama import answer as responses
from trioserve.api.surface import OllamaError
from trioserve.contracts.errors import Draining, Overloaded, RequestFailed
from trioserve.contracts.events import FinishReason
from trioserve.contracts.output import Delta
from trioserve.contracts.structured_output import SchemaKind
from trioserve.http.exchange import BodyTimeout, BodyTooLarge

USER = {"role": "user", "content": "Hi"}
CHAT = ("/api/chat", {"messages": [USER]})
GENERATE = ("/api/generate", {"prompt": "Hi"})
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


async def ask(api: Any, asked: tuple[str, dict[str, Any]] = CHAT, **fields: Any) -> Any:
    path, body = asked
    return await api.context("POST", path, {**body, **fields})


def lines(exchange: Any) -> list[dict[str, Any]]:
    assert exchange.status == 200, exchange.data
    assert exchange.response_headers["content-type"] == "application/x-ndjson"
    kind: Any = responses.OllamaChatLine if exchange.path == "/api/chat" else responses.OllamaTextLine
    text = exchange.data.decode()
    assert text.endswith("\n")
    values = [json.loads(line) for line in text.splitlines()]
    assert text.count("\n") == len(values)
    for value in values:
        msgspec.convert(value, kind)
    return values


def whole(exchange: Any) -> dict[str, Any]:
    assert exchange.status == 200, exchange.data
    said = exchange.json()
    if exchange.path == "/api/chat":
        msgspec.convert(said, responses.OllamaChatLine)
        ollama.ChatResponse(**said)
    else:
        msgspec.convert(said, responses.OllamaTextLine)
        ollama.GenerateResponse(**said)
    return said


async def check_refused(api: Any, asked: Any = CHAT, *, status: int = 400, **fields: Any) -> str:
    exchange = await ask(api, asked, **fields)
    assert exchange.status == status, exchange.data
    assert not api.engine.streams or api.left()
    return msgspec.convert(exchange.json(), OllamaError).error


def text_of(said: dict[str, Any]) -> str:
    return said["message"]["content"] if "message" in said else said["response"]


# --- streams and whole responses ---


@pytest.mark.parametrize("asked", [CHAT, GENERATE])
async def test_ollama_response_is_streamed_by_default(api: Any, asked: Any) -> None:
    exchange = await ask(api, asked, model="org/letters:latest")
    *pieces, last = lines(exchange)
    assert [text_of(piece) for piece in pieces] == ["Hello", "!"]
    assert all(set(piece) == set(pieces[0]) and piece["done"] is False for piece in pieces)
    assert {line["model"] for line in (*pieces, last)} == {"org/letters:latest"}
    assert (last["done"], last["done_reason"], text_of(last)) == (True, "stop", "")
    assert last["eval_count"] == 6
    assert exchange.response_headers["x-request-id"]
    assert api.left()


@pytest.mark.parametrize("asked", [CHAT, GENERATE])
async def test_whole_ollama_response_is_one_object(api: Any, asked: Any) -> None:
    said = whole(await ask(api, asked, stream=False))
    assert (text_of(said), said["done"], said["done_reason"]) == ("Hello!", True, "stop")
    assert said["model"] == "letters"
    assert said["prompt_eval_count"] == len(api.engine.streams[0].prompt_token_ids) > 0
    assert said["load_duration"] == 0
    assert said["total_duration"] >= said["eval_duration"] >= 0
    assert "context" not in said
    assert api.left()


@pytest.mark.parametrize("reason, expected", [(FinishReason.STOP, "stop"), (FinishReason.LENGTH, "length")])
@pytest.mark.parametrize("stream", [True, False])
async def test_each_kind_of_ollama_response_end_has_its_stop_reason(
    api: Any, reason: FinishReason, expected: str, stream: bool
) -> None:
    api.engine.script = api.say("ab", reason=reason)
    exchange = await ask(api, stream=stream)
    assert (lines(exchange)[-1] if stream else whole(exchange))["done_reason"] == expected


async def test_line_breaks_in_text_do_not_split_a_line(api: Any) -> None:
    api.engine.script = api.say("a\nb\u2028c\u0085", "d\re")
    assert "".join(map(text_of, lines(await ask(api)))) == "a\nb\u2028c\u0085d\re"


@pytest.mark.parametrize("asked", [("/api/chat", {}), ("/api/chat", {"messages": []}), ("/api/generate", {})])
@pytest.mark.parametrize("keep_alive", [None, 0, "5m", -1, 1.5])
async def test_request_without_a_prompt_reports_that_the_model_is_loaded(api: Any, asked: Any, keep_alive: Any) -> None:
    said = whole(await ask(api, asked, keep_alive=keep_alive))
    assert (said["done"], said["done_reason"], text_of(said)) == (True, "load", "")
    assert api.engine.streams == []


# --- requests ---


async def test_ollama_options_become_sampling_params(api: Any) -> None:
    options = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 7,
        "num_predict": 9,
        "stop": ["a", "b"],
        "repeat_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repeat_last_n": -1,
        "typical_p": 1.0,
        "mirostat": 0,
        "num_ctx": 4096,
        "num_gpu": 1,
        "never_heard_of": True,
    }
    await ask(api, options=options)
    sampling = api.engine.streams[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.seed, sampling.max_tokens, sampling.stop) == (7, 9, ("a", "b"))
    assert sampling.repetition_penalty == 1.1
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)


@pytest.mark.parametrize("num_predict", [-2, -1, 0])
async def test_num_predict_of_zero_or_less_means_as_many_tokens_as_fit(api: Any, num_predict: int) -> None:
    await ask(api, options={"num_predict": num_predict})
    assert api.engine.streams[0].sampling.max_tokens is None


@pytest.mark.parametrize("num_predict", [9, 100, 2**31 - 1])
async def test_num_predict_beyond_the_context_is_reduced(api: Any, num_predict: int) -> None:
    await ask(api, options={"num_predict": num_predict})
    sampling = api.engine.streams[0].sampling
    assert (sampling.max_tokens, sampling.clamp_max_tokens) == (num_predict, True)


async def test_ollama_seed_of_minus_one_is_random(api: Any) -> None:
    await ask(api, options={"seed": -1})
    assert api.engine.streams[0].sampling.seed is None


async def test_repeat_last_n_of_zero_switches_penalties_off(api: Any) -> None:
    await ask(api, options={"repeat_last_n": 0, "repeat_penalty": 1.5})
    assert api.engine.streams[0].sampling.repetition_penalty == 1.0
    await ask(api, options={"repeat_last_n": 64})
    assert api.left()


@pytest.mark.parametrize(
    "options, place",
    [
        ({"temperature": -1}, "options.temperature"),
        ({"repeat_penalty": 0}, "options.repeat_penalty"),
        ({"num_predict": -3}, "options.num_predict"),
        ({"mirostat": 2}, "options.mirostat"),
        ({"typical_p": 0.7}, "options.typical_p"),
        ({"tfs_z": 0.5}, "options.tfs_z"),
        ({"repeat_last_n": 64, "repeat_penalty": 1.1}, "options.repeat_last_n"),
        ({"stop": [""]}, "options.stop"),
        ({"top_k": "many"}, "options.top_k"),
    ],
)
@pytest.mark.parametrize("asked", [CHAT, GENERATE])
async def test_error_of_an_unsupported_ollama_option_names_it(api: Any, asked: Any, options: Any, place: str) -> None:
    assert (await check_refused(api, asked, options=options)).startswith(place)
    assert (await check_refused(api, (asked[0], {}), options=options)).startswith(place)
    assert api.engine.streams == []


@pytest.mark.parametrize(
    "asked, fields, place",
    [
        (CHAT, {"think": True}, "think"),
        (CHAT, {"format": "xml"}, "format"),
        (CHAT, {"priority": 101}, "priority"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": [{"role": "tool", "content": "rain"}]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "judge", "content": "guilty"}]}, "messages[0].role"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        (GENERATE, {"raw": True, "images": ["aGk="]}, "images"),
        (GENERATE, {"template": "{{ .Prompt }}"}, "template"),
        (GENERATE, {"context": [1, 2]}, "context"),
        (GENERATE, {"suffix": "end"}, "suffix"),
        (GENERATE, {"raw": True, "system": "Be short."}, "system"),
        (GENERATE, {"raw": True, "think": True}, "think"),
    ],
)
async def test_error_of_an_unsupported_ollama_field_names_it(api: Any, asked: Any, fields: Any, place: str) -> None:
    assert place in (await check_refused(api, asked, **fields))
    assert api.engine.streams == []


async def test_ollama_format_is_json_or_a_schema(api: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for asked in (CHAT, GENERATE):
        for given, kind in (
            ("json", SchemaKind.JSON_OBJECT),
            (schema, SchemaKind.JSON_SCHEMA),
            ("", None),
            (None, None),
        ):
            await ask(api, asked, format=given)
            form = api.engine.streams[-1].sampling.structured
            assert (None if form is None else form.kind) == kind


async def test_prompt_becomes_a_message_of_the_user(api: Any) -> None:
    await ask(api, GENERATE, system="Be short.")
    prompt = api.engine.streams[0].prompt
    assert prompt.messages == [{"role": "system", "content": "Be short."}, USER]
    assert prompt.add_generation_prompt


async def test_raw_prompt_uses_no_template(api: Any) -> None:
    api.engine.script = api.say("<think>no</think>")
    *_, last = lines(exchange := await ask(api, GENERATE, raw=True, format="json", template=""))
    assert api.engine.streams[0].prompt == "Hi"
    assert api.engine.streams[0].sampling.structured.kind is SchemaKind.JSON_OBJECT
    assert "".join(map(text_of, lines(exchange))) == "<think>no</think>"
    assert last["prompt_eval_count"] == 3  # The prompt has two characters and the token that begins every text.


async def test_last_message_of_the_assistant_is_continued(api: Any) -> None:
    await ask(api, messages=[USER, {"role": "assistant", "content": "Well"}])
    prompt = api.engine.streams[0].prompt
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)


async def test_priority_and_deadlines_reach_the_engine(api: Any) -> None:
    for path, body in (CHAT, GENERATE):
        await api.context(
            "POST", path, {**body, "priority": 3, "cache_salt": "s", "timeout": 2.5}, x_ttft_timeout="1.5"
        )
        options = api.engine.options[-1]
        assert (options["priority"], options["cache_salt"]) == (3, "s")
        assert (options["deadlines"].timeout, options["deadlines"].ttft_timeout) == (2.5, 1.5)


# --- tool calls and reasoning ---


@pytest.mark.parametrize("stream", [True, False])
async def test_tool_call_is_sent_whole_with_its_arguments_as_an_object(api: Any, stream: bool) -> None:
    api.engine.script = api.say("Let me see. ", CALL[:20], CALL[20:50], CALL[50:], CALL)
    exchange = await ask(api, tools=[TOOL], stream=stream)
    told = lines(exchange) if stream else [whole(exchange)]
    calls = [call for line in told for call in line["message"].get("tool_calls", ())]
    assert [(call["function"]["index"], call["function"]["name"]) for call in calls] == [(0, "weather"), (1, "weather")]
    assert all(call["function"]["arguments"] == {"city": "Oslo"} for call in calls)
    assert len({call["id"] for call in calls}) == 2
    assert "".join(map(text_of, told)).strip() == "Let me see."
    assert told[-1]["done_reason"] == "stop"


@pytest.mark.parametrize("stream", [True, False])
async def test_incomplete_tool_call_is_not_sent(api: Any, stream: bool) -> None:
    api.engine.script = api.say(CALL[:40], reason=FinishReason.LENGTH)
    exchange = await ask(api, tools=[TOOL], stream=stream)
    told = lines(exchange) if stream else [whole(exchange)]
    assert not any("tool_calls" in line["message"] for line in told)
    assert told[-1]["done_reason"] == "length"


async def test_tool_results_are_matched_to_calls_by_name_or_order(api: Any) -> None:
    called = [{"function": {"name": name, "arguments": {}}} for name in ("first", "second", "second")]
    results = [
        {"role": "tool", "content": "2", "tool_name": "second"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "3", "tool_name": "second"},
    ]
    await ask(api, messages=[USER, {"role": "assistant", "tool_calls": called}, *results])
    _, said, *answered = api.engine.streams[0].prompt.messages
    ids = [call["id"] for call in said["tool_calls"]]
    assert len(set(ids)) == 3
    assert [(message["tool_call_id"], message["name"]) for message in answered] == [
        (ids[1], "second"),
        (ids[0], "first"),
        (ids[2], "second"),
    ]


async def test_call_ids_of_the_client_are_used(api: Any) -> None:
    called = {"role": "assistant", "tool_calls": [{"id": "mine", "function": {"name": "f", "arguments": {"a": 1}}}]}
    await ask(api, messages=[USER, called, {"role": "tool", "tool_call_id": "mine", "content": "1"}])
    _, said, answered = api.engine.streams[0].prompt.messages
    assert said["tool_calls"][0] == {
        "id": "mine",
        "type": "function",
        "function": {"name": "f", "arguments": {"a": 1}},
    }
    assert answered["tool_call_id"] == "mine"


async def test_earlier_reasoning_reaches_the_template(api: Any) -> None:
    await ask(api, messages=[USER, {"role": "assistant", "content": "a", "thinking": "t"}, USER])
    assert api.engine.streams[0].prompt.messages[1]["reasoning_content"] == "t"


# --- log probabilities ---


@pytest.mark.parametrize("stream", [True, False])
async def test_every_token_has_a_log_probability(api: Any, stream: bool) -> None:
    exchange = await ask(api, stream=stream, logprobs=True, top_logprobs=2)
    told = lines(exchange) if stream else [whole(exchange)]
    tokens = [one for line in told for one in line.get("logprobs", ())]
    assert [one["token"] for one in tokens] == list("Hello!")
    assert len(tokens[0]["top_logprobs"]) == 2


# --- errors ---


@pytest.mark.parametrize(
    "error, status",
    [
        (Overloaded("too much", reason="queue_full", retry_after_seconds=2), 429),
        (Draining("leaving", reason="draining", retry_after_seconds=5), 503),
        (RequestFailed("broken"), 500),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_refusal_has_the_error_shape_of_ollama(api: Any, error: Exception, status: int, stream: bool) -> None:
    api.engine.enter_errors = [error]
    assert await check_refused(api, status=status, stream=stream) == str(error)


@pytest.mark.parametrize("error, status", [(BodyTimeout("slow"), 408), (BodyTooLarge("long"), 413)])
async def test_errors_before_the_body_arrived_have_the_error_shape_of_ollama(
    api: Any, error: Exception, status: int
) -> None:
    exchange = api.exchange("POST", "/api/chat", {})
    exchange.body_error = error
    await api.app(exchange)
    assert (exchange.status, exchange.json()) == (status, {"error": str(error)})


async def test_failed_stream_ends_with_an_error_line(api: Any) -> None:
    api.engine.script = lambda *_: [Delta(index=0, text="a", token_ids=(97,)), RequestFailed("broken")]
    exchange = await ask(api)
    *pieces, last = [json.loads(line) for line in exchange.data.splitlines()]
    assert [text_of(piece) for piece in pieces] == ["a"]
    assert last == {"error": "broken"}
    assert api.left()


@pytest.mark.parametrize("path", ["/api/pull", "/api/", "/api/chat/more", "/api/blobs/sha256:00"])
async def test_unknown_path_has_the_error_shape_of_ollama(api: Any, path: str) -> None:
    exchange = await api.context("POST", path)
    assert exchange.status == 404
    assert f"there is nothing at {path}" in msgspec.convert(exchange.json(), OllamaError).error


async def test_missing_key_has_the_error_shape_of_ollama(make_api: Any) -> None:
    api = make_api(api_keys=["first"])
    for path, body in (CHAT, GENERATE, ("/api/embed", {"input": "a"}), ("/api/show", {})):
        exchange = await api.context("POST", path, body)
        assert exchange.status == 401
        msgspec.convert(exchange.json(), OllamaError)
        assert (await api.context("POST", path, body, authorization="Bearer first")).status in (200, 400, 500)
    assert (await api.context("GET", "/api/tags")).status == 401
    assert (await api.context("GET", "/api/version")).status == 200


@pytest.mark.parametrize("model", ["nobody", "nobody:latest", "letters:7b"])
async def test_ollama_request_for_an_unknown_model_is_404(api: Any, model: str) -> None:
    for asked in (CHAT, GENERATE, ("/api/show", {}), ("/api/embed", {"input": "a"})):
        assert "not served here" in await check_refused(api, asked, status=404, model=model)


@pytest.mark.parametrize("path", ["/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"])
async def test_paths_that_manage_models_explain_the_refusal(api: Any, path: str) -> None:
    exchange = await api.context("POST", path, {"model": "m"})
    assert (exchange.status, exchange.response_headers["x-trioserve-reason"]) == (404, "other_path")
    assert "models are chosen at the start of the server" in exchange.json()["error"]
    assert exchange.json()["error"].endswith("see docs/guides/ollama.md")
