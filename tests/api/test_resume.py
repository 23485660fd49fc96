"""A stream that is cut behind any of its groups and asked for again elsewhere goes on there, and both together are the
stream that was not cut."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from trioserve.testing.fake_engine import FakeEngine, open_fake_engine

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
ASKED = {"x_trioserve_resumable": "1", "x_request_id": "mine"}
USER = {"role": "user", "content": "Weather in Oslo?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@asynccontextmanager
async def opened(make_api: Any, response: Any = None, **options: Any) -> AsyncIterator[tuple[Any, FakeEngine]]:
    async with open_fake_engine(
        response=response, block_count=512, context_tokens_max=2048, step_tokens_max=2048, **options
    ) as engine:
        api = make_api()
        api.engine = engine
        yield api, engine
        await trio.testing.wait_all_tasks_blocked()
        engine.assert_all_free()


async def groups_of(api: Any, path: str, body: dict[str, Any], headers: dict[str, str] = ASKED) -> tuple[Any, list]:
    """What was asked, and its events in groups: (events, the id with which they end)."""
    exchange = await api.context("POST", path, body, **headers)
    assert exchange.status == 200, exchange.data
    groups: list[tuple[list[Any], str]] = []
    events: list[Any] = []
    for event in exchange.data.decode().removesuffix("\n\n").split("\n\n"):
        lines = event.split("\n")
        data = "".join(line.removeprefix("data: ") for line in lines if line.startswith("data: "))
        events.append(data if data == "[DONE]" else json.loads(data))
        ids = [line.removeprefix("id: ") for line in lines if line.startswith("id: ")]
        if ids:
            groups.append((events, *ids))
            events = []
    assert not events, "events behind the last group"
    return exchange, groups


def resume_behind(head: Any, groups: list, choice_count: int) -> dict[str, Any]:
    """As whoever kept the stream's groups asks for the rest."""
    token_ids: list[list[int]] = [[] for _ in range(choice_count)]
    finished = [False] * choice_count
    for _, group_id in groups:
        if group_id == ".":
            continue
        choice, _, ids = group_id.partition(":")
        finished[int(choice)] |= ids.endswith("!")
        token_ids[int(choice)] += [int(token_id) for token_id in ids.removesuffix("!").split(",") if token_id]
    return {"token_ids": token_ids, "finished": finished, **json.loads(head["x-trioserve-resume"])}


def said(groups: list) -> dict[str, Any]:
    """All that a client makes of the events, however they were split."""
    response: dict[str, Any] = {"usage": None, "done": False, "heads": set(), "choices": {}}
    for events, _ in groups:
        for event in events:
            assert not response["done"], "nothing follows the end"
            if event == "[DONE]":
                response["done"] = True
                continue
            assert "error" not in event, event
            response["heads"].add((event["id"], event["object"], event["created"], event["model"]))
            response["usage"] = event.get("usage") or response["usage"]
            for choice in event["choices"]:
                _say(response["choices"].setdefault(choice["index"], {"text": "", "roles": 0}), choice)
    if response["usage"]:
        response["usage"].pop("prompt_tokens_details")  # what was cached is another thing
    return response


def _say(made: dict[str, Any], choice: dict[str, Any]) -> None:
    assert "finish_reason" not in made, "a choice ends once"
    delta = choice.get("delta", {})
    made["text"] += choice.get("text") or delta.get("content") or ""
    made["roles"] += "role" in delta
    for name in ("token_ids", "prompt_token_ids"):
        made[name] = made.get(name, []) + choice.get(name, [])
    made["reasoning"] = made.get("reasoning", "") + (delta.get("reasoning_content") or "")
    for name, entries in (choice["logprobs"] or {}).items():
        made[name] = made.get(name, []) + (entries or [])
    for call in delta.get("tool_calls", ()):
        calls = made.setdefault("calls", {})
        own = calls.setdefault(call["index"], {"arguments": "", "name": "", "id": ""})
        own["arguments"] += call["function"].get("arguments", "")
        own["name"] += call["function"].get("name", "")
        own["id"] += call.get("id", "")
    if choice["finish_reason"] is not None:
        made["finish_reason"], made["stop_reason"] = choice["finish_reason"], choice.get("stop_reason")


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
    "calls and token ids": (CHAT, CALL + CALL, {"messages": [USER], "tools": [WEATHER], "return_token_ids": True}),
    "a form": (CHAT, None, {"messages": [USER], "structured_outputs": {"regex": "[a-c]{7}é"}}),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_that_is_cut_behind_any_group_goes_on(make_api: Any, name: str) -> None:
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
            again = {**body, "resume": resume_behind(head, begun, choice_count)}
            other, rest = await groups_of(api, path, again)
            assert said(begun + rest) == whole, f"cut behind group {cut}"
            assert other.response_headers["x-trioserve-resume"] == head["x-trioserve-resume"]
            told = resume_behind(head, begun + rest, choice_count)
            assert told == resume_behind(head, groups, choice_count)


async def test_a_stream_goes_on_twice(make_api: Any) -> None:
    body = {**USAGE, "prompt": "hello", "max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    async with opened(make_api) as (api, _):
        exchange, groups = await groups_of(api, TEXT, body)
        head = exchange.response_headers
        begun = groups[:3]
        _, rest = await groups_of(api, TEXT, {**body, "resume": resume_behind(head, begun, 1)})
        begun += rest[:2]
        _, rest = await groups_of(api, TEXT, {**body, "resume": resume_behind(head, begun, 1)})
        assert said(begun + rest) == said(groups)


async def test_without_the_header_a_stream_is_as_ever(make_api: Any) -> None:
    async with opened(make_api) as (api, _):
        for path, fields in ((TEXT, {"prompt": "hello"}), (CHAT, {"messages": [USER]})):
            exchange = await api.context("POST", path, {**fields, "stream": True, "max_tokens": 5})
            assert b"id: " not in exchange.data
            assert not {name for name in exchange.response_headers if name.startswith("x-trioserve-")}


async def test_a_whole_response_holds_what_was_known(make_api: Any) -> None:
    body = {"prompt": "hello", "max_tokens": 9, "temperature": 1.0, "n": 2, "seed": 3}
    async with opened(make_api) as (api, _):
        whole = (await api.context("POST", TEXT, body)).json()
        exchange, groups = await groups_of(api, TEXT, {**body, "stream": True})
        for cut in range(len(groups)):
            resume = resume_behind(exchange.response_headers, groups[:cut], 2)
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
async def test_what_cannot_go_on_is_refused_by_name(
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


async def test_prompts_that_differ_are_refused(make_api: Any) -> None:
    body = {"prompt": ["one", "two"], "max_tokens": 8, "stream": True}
    async with opened(make_api) as (api, _):
        exchange, groups = await groups_of(api, TEXT, body)
        resume = resume_behind(exchange.response_headers, groups[:1], 2)
        exchange = await api.context("POST", TEXT, {**body, "prompt": ["one", "tow"], "resume": resume})
        assert exchange.status == 409
        assert exchange.json()["error"]["code"] == "resume_mismatch"


async def test_a_whole_response_cannot_have_logprobs_that_nobody_kept(make_api: Any) -> None:
    async with opened(make_api) as (api, _):
        resume = {"token_ids": [[65]], "finished": [False]}
        exchange = await api.context("POST", TEXT, {"prompt": "hello", "logprobs": 1, "resume": resume})
        assert exchange.status == 400
        assert exchange.json()["error"]["param"] == "logprobs"


async def test_who_computes_is_told_by_name(make_api: Any) -> None:
    async with opened(make_api) as (api, engine):
        exchange, _ = await groups_of(api, TEXT, {"prompt": "hello", "stream": True})
        assert exchange.response_headers["x-trioserve-fingerprint"] == engine.model.fingerprint
        assert (await api.context("GET", "/load")).json()["fingerprint"] == engine.model.fingerprint
        [model] = (await api.context("GET", "/v1/models")).json()["data"]
        assert model["fingerprint"] == engine.model.fingerprint
