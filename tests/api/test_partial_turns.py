"""Tests aborted messages and responses with return_partial: clients get the partial result, and can resume it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import trio

from trioserve.api.anthropic import bodies as messages_types
from trioserve.api.responses import response_types as responses_types
from trioserve.testing.memory_server import MemoryServer, open_memory_server

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
MESSAGE = {
    "messages": [{"role": "user", "content": "say it"}],
    "max_tokens": 30,
    "temperature": 1,
    "seed": 3,
    "return_partial": True,
}
RESPONSE = {
    "model": "fake",
    "input": "say it",
    "max_output_tokens": 30,
    "temperature": 1,
    "seed": 3,
    "ignore_eos": True,
    "return_partial": True,
}
APIS = pytest.mark.parametrize(
    ("path", "body"), [(MESSAGES, MESSAGE), (RESPONSES, RESPONSE)], ids=["message", "response"]
)
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: dict[str, dict[str, Any]] = {
    MESSAGES: {"tools": [{"name": "weather", "input_schema": WEATHER}]},
    RESPONSES: {"tools": [{"type": "function", "name": "weather", "parameters": WEATHER}]},
}
THOUGHT = (
    '<think>\nHm.\n</think>\n\nSee.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)

ROOM = {"block_count": 512, "max_model_len": 2048, "max_num_batched_tokens": 2048}


async def ask(server: MemoryServer, path: str, body: object) -> tuple[int, Any]:
    async with server.client(headers={"x-request-id": "r"}).ask(path, body) as response:
        return await response.head(), await response.json()


async def events_of(server: MemoryServer, path: str, body: dict[str, Any]) -> list[Any]:
    async with server.client(headers={"x-request-id": "r"}).ask(path, {**body, "stream": True}) as response:
        assert await response.head() == 200, await response.read()
        events = [event async for event in response]
    return [event for event in events if event["type"] != "ping"]


async def aborted(
    server: MemoryServer, ask: Any, path: str, body: dict[str, Any], how: str = "abort", steps: int = 8
) -> Any:
    """Return the response to a request that is aborted after some steps of a paused engine."""
    answers: list[Any] = []

    async def one() -> None:
        answers.append(await ask(server, path, body))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one)
        for _ in range(steps):
            if await server.engine.step() is None:
                break
        if how == "abort":
            server.engine.abort("r")
        elif how == "pause":
            await server.engine.pause_generation()
            server.engine.resume_generation()
        else:
            await trio.sleep(2)
    return answers[0]


def text_of(path: str, said: Any) -> str:
    if path == MESSAGES:
        return "".join(block.get("text", "") for block in said["content"])
    return "".join(part["text"] for item in said["output"] for part in item.get("content", ()))


def checked(path: str, said: Any) -> Any:
    """Check that the response matches its description, and return it."""
    kind: Any = messages_types.MessageResponse if path == MESSAGES else responses_types.ResponseObject
    msgspec.convert(said, kind)
    return said


def end_of(path: str, said: Any) -> Any:
    if path == MESSAGES:
        assert said["stop_reason"] == said["stop_details"]["type"] == "abort"
        return said["stop_details"]["reason"]
    assert said["status"] == "incomplete"
    assert said["incomplete_details"]["reason"] == "abort"
    return said["incomplete_details"]["stop_reason"]


def rest_of(path: str, said: Any) -> Any:
    """Return the response without ids and without the count of cached tokens."""
    names = {"id", "created_at", "completed_at", "usage"}
    kept = {name: value for name, value in said.items() if name not in names}
    if path == RESPONSES:
        kept["output"] = [{**item, "id": "", "call_id": ""} for item in kept["output"]]
    else:
        kept["content"] = [{**block, "id": ""} for block in kept["content"]]
    return kept


@pytest.mark.parametrize("how", ["abort", "pause", "deadline"])
@APIS
async def test_an_aborted_response_has_its_partial_result_and_can_be_resumed(autojump_clock, path, body, how) -> None:
    async with open_memory_server() as whole_server:
        _, whole = await ask(whole_server, path, body)
    async with open_memory_server(paused=True) as server:
        limit = {"timeout": 1} if how == "deadline" else {}
        status, partial = await aborted(server, ask, path, {**body, **limit}, how)
        assert status == 200, partial
        assert end_of(path, checked(path, partial)) == {"abort": None, "pause": "paused", "deadline": "timeout"}[how]
        assert text_of(path, whole).startswith(text_of(path, partial))
        assert 0 < len(text_of(path, partial)) < len(text_of(path, whole))
        resume = partial["resume"]
        assert (len(resume["token_ids"][0]), resume["finished"]) == (8, [False])
        assert partial["usage"]["output_tokens"] == 8
        server.engine.resume()
        status, continued = await ask(server, path, {**body, "resume": resume})
        assert status == 200, continued
        assert rest_of(path, continued) == rest_of(path, whole)
        server.engine.assert_all_free()


@APIS
async def test_aborted_message_without_return_partial_is_an_error(autojump_clock, path, body) -> None:
    async with open_memory_server(paused=True) as server:
        status, said = await aborted(server, ask, path, {**body, "return_partial": False})
        assert status == (529 if path == MESSAGES else 503)
        assert "resume" not in said


@pytest.mark.parametrize("steps", [1, 12, 28, 90])
@APIS
async def test_a_partial_and_a_resumed_stream_form_the_whole_stream(autojump_clock, path, body, steps) -> None:
    """The first stream is aborted in reasoning, in text, or in a tool call."""
    body = {**body, **TOOLS[path], "stop_sequences" if path == MESSAGES else "stop": ["never"]}
    body |= {"max_tokens": 200} if path == MESSAGES else {"max_output_tokens": 200, "ignore_eos": False}
    options: dict[str, Any] = {"response": THOUGHT, "reasoning_parser": "qwen3", **ROOM}
    async with open_memory_server(**options) as whole_server:
        whole = await events_of(whole_server, path, body)
    async with open_memory_server(paused=True, **options) as server:
        partial = await aborted(server, events_of, path, body, steps=steps)
        last = partial[-2] if path == MESSAGES else partial[-1]["response"]
        if path == MESSAGES:
            for event in partial:
                msgspec.convert(event, EVENT)
            assert last["delta"]["stop_reason"] == "abort"
        else:
            checked(path, last)
            assert end_of(path, last) is None
            assert [event["sequence_number"] for event in partial] == list(range(len(partial)))
        server.engine.resume()
        continued = await events_of(server, path, {**body, "resume": last["resume"]})
        assert joined(continued) == joined(whole)
        server.engine.assert_all_free()


EVENT = (
    messages_types.MessageStart
    | messages_types.ContentBlockStart
    | messages_types.ContentBlockDelta
    | messages_types.ContentBlockStop
    | messages_types.MessageDelta
    | messages_types.MessageStop
)


def joined(events: list[Any]) -> list[Any]:
    """Merge consecutive events that have the same type and the same indices. Drop ids and counts of cached tokens."""
    made: list[Any] = []
    for event in events:
        told = json.loads(json.dumps(event), object_hook=nameless)
        told.pop("sequence_number", None)
        before = made[-1] if made else {}
        if "delta" in told["type"] and before.get("type") == told["type"] and told["type"] != "message_delta":
            if isinstance(told["delta"], str):
                before["delta"] += told["delta"]
                continue
            if before["delta"]["type"] == told["delta"]["type"]:
                for name, text in told["delta"].items():
                    before["delta"][name] = text if name == "type" else before["delta"][name] + text
                continue
        made.append(told)
    return made


def nameless(value: dict[str, Any]) -> dict[str, Any]:
    gone = {"id", "item_id", "call_id", "created_at", "completed_at", "usage"}
    return {name: content for name, content in value.items() if name not in gone}


async def test_log_probabilities_continue_in_a_resumed_response(autojump_clock) -> None:
    body = {**RESPONSE, "top_logprobs": 2}
    async with open_memory_server() as whole_server:
        _, whole = await ask(whole_server, RESPONSES, body)
    async with open_memory_server(paused=True) as server:
        _, partial = await aborted(server, ask, RESPONSES, body)
        [logprobs] = partial["resume"]["logprobs"]
        assert [len(entry["top"]) for entry in logprobs] == [2] * 8
        server.engine.resume()
        _, continued = await ask(server, RESPONSES, {**body, "resume": partial["resume"]})
        assert rest_of(RESPONSES, continued) == rest_of(RESPONSES, whole)
        events = await events_of(server, RESPONSES, {**body, "resume": partial["resume"]})
        assert rest_of(RESPONSES, events[-1]["response"]) == rest_of(RESPONSES, whole)


@pytest.mark.parametrize("how", ["cancel", "abort"])
async def test_a_cancelled_background_response_can_be_resumed(autojump_clock, how) -> None:
    async with open_memory_server() as whole_server:
        _, whole = await ask(whole_server, RESPONSES, RESPONSE)
    async with open_memory_server(paused=True) as server:
        _, queued = await ask(server, RESPONSES, {**RESPONSE, "background": True})
        for _ in range(8):
            await server.engine.step()
        if how == "cancel":
            status, ended = await ask(server, f"{RESPONSES}/{queued['id']}/cancel", {})
            assert (status, ended["status"]) == (200, "cancelled")
        else:
            server.engine.abort("r")
            await trio.testing.wait_all_tasks_blocked()
            _, ended = await ask(server, f"{RESPONSES}/{queued['id']}", None)
            assert end_of(RESPONSES, ended) is None
        assert text_of(RESPONSES, whole).startswith(text_of(RESPONSES, checked(RESPONSES, ended)))
        assert len(ended["resume"]["token_ids"][0]) == 8
        server.engine.resume()
        _, continued = await ask(server, RESPONSES, {**RESPONSE, "resume": ended["resume"]})
        assert rest_of(RESPONSES, continued) == rest_of(RESPONSES, whole)


CHAT = "/v1/chat/completions"


def said_in(events: list[Any]) -> Any:
    """Merge the chunks of a chat as a client does."""
    made: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": {}, "finish": None}
    for choice in [choice for event in events for choice in event["choices"]]:
        for name in ("content", "reasoning_content"):
            made[name] += choice["delta"].get(name) or ""
        for call in choice["delta"].get("tool_calls", ()):
            own = made["calls"].setdefault(call["index"], [])
            own.append(call["function"].get("name", "") + call["function"].get("arguments", ""))
        made["finish"] = choice["finish_reason"] or made["finish"]
    return {**made, "calls": {index: "".join(pieces) for index, pieces in made["calls"].items()}}


async def chunks_of(server: MemoryServer, path: str, body: dict[str, Any]) -> list[Any]:
    async with server.client(headers={"x-request-id": "r"}).ask(path, {**body, "stream": True}) as response:
        assert await response.head() == 200, await response.read()
        return [event async for event in response]


@pytest.mark.parametrize("steps", [4, 12, 24, 36, 60])
async def test_a_resumed_chat_shows_text_that_could_become_a_tag_only_once(autojump_clock, steps) -> None:
    """The first stream did not show an unfinished tag. The resumed stream sends only new text."""
    tool = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
    body = {**MESSAGE, "max_tokens": 200, "tools": [tool]}
    options: dict[str, Any] = {"response": THOUGHT, "reasoning_parser": "qwen3", **ROOM}
    async with open_memory_server(**options) as whole_server:
        whole = said_in(await chunks_of(whole_server, CHAT, body))
    async with open_memory_server(paused=True, **options) as server:
        partial = await aborted(server, chunks_of, CHAT, body, steps=steps)
        server.engine.resume()
        rest = await chunks_of(server, CHAT, {**body, "resume": partial[-1]["resume"]})
        assert said_in([*partial, *rest]) == whole
