"""Tests resumable streams: the events before an interruption and the resumed stream together equal the uninterrupted
stream.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from trioserve.http.exchange import ClockAndIds
from trioserve.testing.byte_tokenizer import byte_tokenizer
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.testing.scripted_model import (
    FAMILIES,
    Call,
    PreferringModel,
    Rule,
    ScriptedChat,
    UncheckedExecutor,
    chat_template,
)

from .resume_client import ASKED, USAGE, groups_of, merged_message, merged_response, resume_after, said

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
USER = {"role": "user", "content": "Weather in Oslo?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
WASH = {
    "type": "function",
    "function": {
        "name": "wash",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["blue", "red"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


SECONDS = itertools.count(1_800_000_000)
CLOCK = ClockAndIds(wall_clock=lambda: next(SECONDS))  # Each reading of the clock returns another second.


@asynccontextmanager
async def opened(make_api: Any, response: Any = None, **options: Any) -> AsyncIterator[tuple[Any, FakeEngine]]:
    async with open_fake_engine(
        response=response, block_count=512, max_model_len=2048, max_num_batched_tokens=2048, **options
    ) as engine:
        api = make_api(clock_and_ids=CLOCK)
        api.engine = engine
        yield api, engine
        await trio.testing.wait_all_tasks_blocked()
        engine.assert_all_free()


CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "text": (TEXT, None, {"prompt": "hello", "max_tokens": 24}),
    "sampled": (TEXT, None, {"prompt": "hello", "max_tokens": 12, "temperature": 1.0, "ignore_eos": True}),
    "with its own seed": (TEXT, None, {"prompt": "hello", "max_tokens": 9, "temperature": 1.0, "seed": 5}),
    "two choices": (TEXT, None, {"prompt": "hello", "max_tokens": 9, "temperature": 1.0, "n": 2, "ignore_eos": True}),
    "two prompts": (TEXT, None, {"prompt": ["one", "two"], "max_tokens": 6, "temperature": 1.0, "n": 2}),
    "many bytes a character": (TEXT, "zwölf Äpfel 🍎🍏 für 5 €", {"prompt": "x", "max_tokens": 100}),
    "a stop string": (TEXT, "one two STop three STOP four", {"prompt": "x", "max_tokens": 100, "stop": ["STOP", "zz"]}),
    "an echo with logprobs": (TEXT, "abc def", {"prompt": "xy", "max_tokens": 100, "logprobs": 2, "echo": True}),
    "token ids": (TEXT, "abc def", {"prompt": "xy", "max_tokens": 100, "return_token_ids": True}),
    "a chat": (CHAT, "Hello you!", {"messages": [USER]}),
    "a chat with logprobs": (CHAT, "Hello you!", {"messages": [USER], "logprobs": True, "top_logprobs": 1, "n": 2}),
    "a call": (CHAT, f"Let me see.\n{CALL}", {"messages": [USER], "tools": [WEATHER]}),
    "a call with logprobs": (CHAT, CALL, {"messages": [USER], "tools": [WEATHER], "logprobs": True}),
    "calls and token ids": (CHAT, CALL + CALL, {"messages": [USER], "tools": [WEATHER], "return_token_ids": True}),
    "functions": (CHAT, CALL, {"messages": [USER], "functions": [WEATHER["function"]]}),
    "a call that is forced": (CHAT, None, {"messages": [USER], "tools": [WASH], "tool_choice": "required"}),
    "calls of two choices": (CHAT, f"Well.{CALL}", {"messages": [USER], "tools": [WEATHER], "n": 2, "logprobs": True}),
    "an echo in a chat": (
        CHAT,
        "lo",
        {
            "messages": [USER, {"role": "assistant", "content": "Hel"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
            "echo": True,
        },
    ),
    "a schema": (
        CHAT,
        None,
        {
            "messages": [USER],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}},
        },
    ),
    "a form": (CHAT, None, {"messages": [USER], "structured_outputs": {"regex": "[a-c]{7}é"}}),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_that_ends_after_any_group_can_be_resumed(make_api: Any, name: str) -> None:
    path, response, fields = CASES[name]
    body = {**USAGE, **fields}
    choice_count = body.get("n", 1) * (len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1)
    async with opened(make_api, response) as (api, _):
        exchange, groups = await groups_of(api, path, body)
        whole = said(groups)
        assert whole["done"]
        assert groups[-1][1] == "."
        assert sum(group_id.endswith("!") for _, group_id in groups) == choice_count
        head = exchange.response_headers
    async with opened(make_api, response) as (api, _):
        for cut in range(len(groups)):
            begun = groups[:cut]
            again = {**body, "resume": resume_after(head, begun, choice_count)}
            other, rest = await groups_of(api, path, again)
            assert said(begun + rest) == whole, f"cut behind group {cut}"
            assert other.response_headers["x-trioserve-resume"] == head["x-trioserve-resume"]
            told = resume_after(head, begun + rest, choice_count)
            assert told == resume_after(head, groups, choice_count)


THOUGHT = f"<think>\nHm, Öl?\n</think>\n\nSee.\n{CALL}"
INPUT_TOOL = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
OTHERS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "a message": (MESSAGES, "Hello you, 🍎 STOP it", {"stop_sequences": ["STOP"]}),
    "a message that is cut": (MESSAGES, None, {"max_tokens": 7, "temperature": 1.0}),
    "a message with a thought and a call": (MESSAGES, THOUGHT, {"tools": [INPUT_TOOL]}),
    "an empty message": (MESSAGES, "", {}),
    "a response": (RESPONSES, "Hello you, 🍎", {}),
    "a response that is cut": (RESPONSES, None, {"max_output_tokens": 7, "temperature": 1.0}),
    "a response with a thought and a call": (
        RESPONSES,
        THOUGHT,
        {"tools": [{"type": "function", **WEATHER["function"]}], "reasoning": {"summary": "auto"}},
    ),
    "an empty response": (RESPONSES, "", {}),
}


@pytest.mark.parametrize("name", OTHERS)
async def test_streams_of_other_apis_can_be_resumed(make_api: Any, name: str) -> None:
    path, response, fields = OTHERS[name]
    made_of = merged_message if path == MESSAGES else merged_response
    asked = (
        {"messages": [USER], "max_tokens": 200}
        if path == MESSAGES
        else {"model": "fake", "input": "Oslo?", "store": False}
    )
    body = {"stream": True, **asked, **fields}
    async with opened(make_api, response, reasoning_parser="qwen3") as (api, _):
        exchange, groups = await groups_of(api, path, body)
        head = exchange.response_headers
        whole = made_of(copy.deepcopy(groups))
        assert groups[-1][1] == "."
    async with opened(make_api, response, reasoning_parser="qwen3") as (api, _):
        for cut in range(len(groups)):
            again = {**body, "resume": resume_after(head, groups[:cut], 1)}
            _, rest = await groups_of(api, path, again)
            assert made_of(copy.deepcopy(groups[:cut] + rest)) == whole, f"cut behind group {cut}"


@pytest.mark.parametrize(("thinks", "family"), [(thinks, family) for thinks in (False, True) for family in FAMILIES])
async def test_calls_and_reasoning_of_every_family_can_be_resumed(make_api: Any, family: str, thinks: bool) -> None:
    rules = [Rule(says="Oslo", calls=[Call(name="weather", arguments={"city": "Oslo"})])]
    options = {
        "model": PreferringModel(ScriptedChat(family, rules, thinks=thinks).drafts),
        "tokenizer": byte_tokenizer(chat_template(family)),
        "new_executor": UncheckedExecutor,
        "reasoning_parser": "qwen3" if thinks and family != "openai" else "auto",
    }
    body = {**USAGE, "messages": [USER], "tools": [WEATHER]}
    async with opened(make_api, block_size=64, **options) as (api, _):
        exchange, groups = await groups_of(api, CHAT, body)
        whole = said(copy.deepcopy(groups))
        [choice] = whole["choices"].values()
        assert choice["finish_reason"] == "tool_calls"
        for cut in range(0, len(groups), 1 + len(groups) // 12):
            resume = resume_after(exchange.response_headers, groups[:cut], 1)
            _, rest = await groups_of(api, CHAT, {**body, "resume": resume})
            assert said(copy.deepcopy(groups[:cut] + rest)) == whole, f"cut behind group {cut}"


async def test_resumable_stream_ends_with_an_error_event_at_a_shutdown_in_every_api(make_api: Any) -> None:
    for path, fields in (
        (TEXT, {"prompt": "hello"}),
        (CHAT, {"messages": [USER]}),
        (MESSAGES, {"messages": [USER]}),
        (RESPONSES, {"model": "fake", "input": "hello", "store": False}),
    ):
        async with opened(make_api, "and so on", paused=True) as (api, engine):
            name = "max_output_tokens" if path == RESPONSES else "max_tokens"
            headers = {key.replace("_", "-"): value for key, value in ASKED.items()}
            exchange = api.exchange("POST", path, {"stream": True, name: 50, **fields}, headers)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(api.app, exchange)
                await engine.step(4)
                engine.abort_all("the server leaves")
            *_, failed = exchange.data.decode().removesuffix("\n\n").split("\n\n")
            assert "id: " not in failed
            event = json.loads(failed.partition("data: ")[2])
            error = event["response"]["error"] if path == RESPONSES else event["error"]
            assert error["code"] == "server_stopping"


async def test_a_stream_with_logprobs_cannot_be_resumed(make_api: Any) -> None:
    body = {"model": "fake", "input": "hello", "store": False, "top_logprobs": 1, "stream": True}
    async with opened(make_api) as (api, _):
        exchange = await api.context("POST", RESPONSES, body, **ASKED)
        assert "x-trioserve-resume" not in exchange.response_headers
        assert b"id: " not in exchange.data
        exchange = await api.context("POST", RESPONSES, {**body, "resume": {"token_ids": [[65]], "finished": [False]}})
        assert exchange.status == 400
        assert exchange.json()["error"]["param"] == "logprobs"


@pytest.mark.parametrize(
    ("fields", "change", "param"),
    [
        ({}, {"id": "../x"}, "resume.id"),
        ({}, {"id": "x", "state": "-1"}, "resume.state"),
        ({}, {"state": "-1"}, "resume.state"),
        ({}, {"created": -1}, "resume.created"),
        ({}, {"created": 10**20}, "resume.created"),
        ({"background": True, "store": True}, {"id": "x"}, "resume"),
    ],
)
async def test_a_resumed_response_keeps_its_id_and_creation_time(
    make_api: Any, fields: Any, change: Any, param: str
) -> None:
    body = {"model": "fake", "input": "hello", "store": False, "stream": True, **fields}
    async with opened(make_api) as (api, _):
        resume = {"token_ids": [[65]], "finished": [False], **change}
        exchange = await api.context("POST", RESPONSES, {**body, "resume": resume})
        assert exchange.status == 400, exchange.data
        assert exchange.json()["error"]["param"] == param


async def test_a_resumed_stream_can_be_resumed_again(make_api: Any) -> None:
    body = {**USAGE, "prompt": "hello", "max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    async with opened(make_api) as (api, _):
        exchange, groups = await groups_of(api, TEXT, body)
        head = exchange.response_headers
        begun = groups[:3]
        _, rest = await groups_of(api, TEXT, {**body, "resume": resume_after(head, begun, 1)})
        begun += rest[:2]
        _, rest = await groups_of(api, TEXT, {**body, "resume": resume_after(head, begun, 1)})
        assert said(begun + rest) == said(groups)


async def test_stream_events_have_no_ids_without_the_resume_header(make_api: Any) -> None:
    async with opened(make_api) as (api, _):
        for path, fields in ((TEXT, {"prompt": "hello"}), (CHAT, {"messages": [USER]})):
            exchange = await api.context("POST", path, {**fields, "stream": True, "max_tokens": 5})
            assert b"id: " not in exchange.data
            assert not {name for name in exchange.response_headers if name.startswith("x-trioserve-")}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_known_output_is_freed_after_it_was_read(make_api: Any, path: str, is_streamed: bool) -> None:
    asked = {"prompt": "hello"} if path == TEXT else {"messages": [USER]}
    resume = {"token_ids": [[65] * 10], "finished": [False]}
    async with opened(make_api, paused=True) as (api, engine):
        streams: list[Any] = []
        generate = engine.generate

        def watched(*arguments: Any, **options: Any) -> Any:
            streams.append(generate(*arguments, **options))
            return streams[-1]

        engine.generate = watched
        body = {**asked, "max_tokens": 40, "stream": is_streamed, "ignore_eos": True, "resume": resume}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(api.context, "POST", path, body)
            await engine.step(3)
            await trio.testing.wait_all_tasks_blocked()
            [stream] = streams
            assert stream.completion_token_count == 13
            assert not stream.known
            engine.resume()


async def test_whole_resumed_response_includes_the_known_output(make_api: Any) -> None:
    body = {"prompt": "hello", "max_tokens": 9, "temperature": 1.0, "n": 2, "seed": 3}
    async with opened(make_api) as (api, _):
        whole = (await api.context("POST", TEXT, body)).json()
        exchange, groups = await groups_of(api, TEXT, {**body, "stream": True})
        for cut in range(len(groups)):
            resume = resume_after(exchange.response_headers, groups[:cut], 2)
            again = (await api.context("POST", TEXT, {**body, "resume": resume})).json()
            assert again["choices"] == whole["choices"]
            assert again["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"token_ids": [[1], [2]]}, 400, "resume.token_ids"),
        ({"token_ids": [[-1]]}, 400, "resume.token_ids"),
        ({"token_ids": [[10**6]]}, 400, "resume.token_ids"),
        ({"token_ids": [["a"]]}, 400, "resume.token_ids[0][0]"),
        ({"token_ids": [[65] * 8]}, 400, "resume.token_ids"),
        ({"token_ids": [[65] * 5000]}, 400, "resume.token_ids"),
        ({"token_ids": [[256]]}, 400, "resume.token_ids"),
        ({"token_ids": [list(b"a stop")]}, 400, "resume.token_ids"),
        ({"finished": []}, 400, "resume.finished"),
        ({"finished": None}, 400, "resume.finished"),
        ({"seed": 2**70}, 400, "resume.seed"),
        ({"prompt_digest": "0" * 32}, 409, "resume.prompt_digest"),
    ],
)
async def test_error_of_an_invalid_resume_value_names_the_field(
    make_api: Any, change: dict[str, Any], status: int, param: str
) -> None:
    body = {"prompt": "hello", "max_tokens": 8, "stop": "stop", "stream": True}
    async with opened(make_api) as (api, _):
        exchange = await api.context(
            "POST", TEXT, {**body, "resume": {"token_ids": [[65]], "finished": [False], **change}}
        )
        assert exchange.status == status
        error = exchange.json()["error"]
        assert error["param"] == param
        assert (error["code"] == "resume_mismatch") == (status == 409)


async def test_resuming_with_other_prompts_is_refused(make_api: Any) -> None:
    body = {"prompt": ["one", "two"], "max_tokens": 8, "stream": True}
    async with opened(make_api) as (api, _):
        exchange, groups = await groups_of(api, TEXT, body)
        resume = resume_after(exchange.response_headers, groups[:1], 2)
        exchange = await api.context("POST", TEXT, {**body, "prompt": ["one", "tow"], "resume": resume})
        assert exchange.status == 409
        assert exchange.json()["error"]["code"] == "resume_mismatch"


async def test_whole_resumed_response_with_logprobs_needs_the_known_logprobs(make_api: Any) -> None:
    async with opened(make_api) as (api, _):
        resume = {"token_ids": [[65]], "finished": [False]}
        exchange = await api.context("POST", TEXT, {"prompt": "hello", "logprobs": 1, "resume": resume})
        assert exchange.status == 400
        assert exchange.json()["error"]["param"] == "logprobs"


async def test_response_head_has_the_fingerprint_of_the_model(make_api: Any) -> None:
    async with opened(make_api) as (api, engine):
        exchange, _ = await groups_of(api, TEXT, {"prompt": "hello", "stream": True})
        assert exchange.response_headers["x-trioserve-fingerprint"] == engine.model.fingerprint
        assert (await api.context("GET", "/load")).json()["fingerprint"] == engine.model.fingerprint
        [model] = (await api.context("GET", "/v1/models")).json()["data"]
        assert model["fingerprint"] == engine.model.fingerprint
