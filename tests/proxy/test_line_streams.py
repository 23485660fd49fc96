"""Tests Ollama's API through a router: the client gets lines, and its stream resumes at another endpoint."""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import Any

import ollama
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.proxy.router_context import RoutingRules
from trioserve.proxy.streams.client_events import LineSplitter
from trioserve.testing.httpx_transport import MemoryTransport

CHAT, GENERATE = "/api/chat", "/api/generate"
LINES = "application/x-ndjson"
USER = {"role": "user", "content": "Weather in Oslo?"}
BODY = {"model": "fake", "messages": [USER]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
LARGE = {"block_count": 512, "max_model_len": 2048, "max_num_batched_tokens": 2048}


def lines(response: Any) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == LINES
    assert response.body.endswith(b"\n")
    return [json.loads(line) for line in response.body.decode().splitlines()]


def said(values: list[dict[str, Any]]) -> tuple[str, str, list[Any], dict[str, Any]]:
    """Return text, reasoning, tool calls, and the last line without times."""
    messages = [value.get("message", value) for value in values]
    text = "".join(message.get("content", message.get("response")) for message in messages)
    thought = "".join(message.get("thinking", "") for message in messages)
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    last = {name: value for name, value in values[-1].items() if "duration" not in name and name != "created_at"}
    return text, thought, calls, last


async def test_client_of_a_router_gets_the_same_lines_as_from_a_server(open_setup):
    async with open_setup(engine={"response": "Hello!", **LARGE}) as setup:
        client = ollama.AsyncClient(host="http://memory", transport=MemoryTransport(setup.client))
        async with client._client:
            assert (await client.chat("fake:latest", [USER])).message.content == "Hello!"
            pieces = [piece async for piece in await client.chat("fake:latest", [USER], stream=True)]
            assert "".join(piece.message.content for piece in pieces) == "Hello!"
            assert (pieces[-1].done_reason, pieces[-1].eval_count) == ("stop", 7)
            assert (await client.generate("fake", "Hi")).response == "Hello!"
            assert (await client.generate("fake")).done_reason == "load"
            assert [model.model for model in (await client.list()).models] == ["fake:latest"]
            assert [model.model for model in (await client.ps()).models] == ["fake:latest"]
            assert "completion" in (await client.show("fake:latest")).capabilities
            assert len((await client.embed("fake", ["a", "b"])).embeddings) == 2
            with pytest.raises(ollama.ResponseError, match="nobody") as unknown:
                await client.chat("nobody", [USER])
            assert unknown.value.status_code == 404
            with pytest.raises(ollama.ResponseError, match=r"options\.top_p"):
                await client.chat("fake", [USER], options={"top_p": 2})
        async with setup.client().ask("/api/show", {"name": "fake:latest"}) as response:
            assert "capabilities" in await response.json()
        async with setup.client().ask("/api/version", method="GET") as response:
            assert set(await response.json()) == {"version"}
        await setup.assert_all_free()


@pytest.mark.slow
@pytest.mark.parametrize(
    "path, response, fields",
    [
        (CHAT, None, {"messages": [USER]}),
        (GENERATE, None, {"prompt": "hello"}),
        (GENERATE, None, {"prompt": "hello", "raw": True}),
        (CHAT, f"<think>Hm.</think>Well. {CALL}\n{CALL}", {"messages": [USER], "tools": [TOOL]}),
    ],
)
async def test_stream_is_the_same_wherever_its_endpoint_breaks(open_setup, read_cut, path, response, fields):
    options = {"num_predict": 8 if response is None else 400, "temperature": 1, "seed": 5}
    body = {"model": "fake", "options": options, **fields}
    engine = {"paused": True, "response": response, "reasoning_parser": "qwen3", **LARGE}
    async with open_setup(engine=engine, failures_max=1_000_000, continuations_per_second_max=1e6) as setup:
        step, undisturbed, is_over = 1, None, False
        while not is_over:
            answer, is_over = await read_cut(setup, path, body, step=step)
            made = said(lines(answer))
            undisturbed = undisturbed or made
            assert made == undisturbed, f"cut behind step {step}"
            assert len({value["created_at"] for value in lines(answer)}) == 1
            step += 1 if response is None else 17
        assert step > 5
        assert response is None or [bool(part) for part in undisturbed] == [True] * 4
        for id in "ab":
            setup.servers[id].engine.resume()
        await setup.assert_all_free()


@pytest.mark.parametrize("is_continued", [True, False])
@pytest.mark.parametrize("way", ["leave", "abort"])
async def test_ended_stream_releases_all_leases_and_blocks(open_setup, way, is_continued):
    rules = RoutingRules(continuation_bytes_max=2**20 if is_continued else 0)
    async with open_setup(engine={"paused": True, **LARGE}, rules=rules) as setup:
        body = {**BODY, "options": {"num_predict": 100}}
        async with setup.client().ask(CHAT, body, headers={"x-request-id": "mine"}) as response:
            await wait_all_tasks_blocked()
            [first] = [id for id, count in setup.leases().items() if count]
            await setup.servers[first].engine.step(3)
            await wait_all_tasks_blocked()
            assert setup.servers[first].engine.core.stats().blocks_used > 0
            if way == "abort":
                await setup.client().post("/v1/requests/abort", {"ids": ["mine"]})
                for server in setup.servers.values():
                    server.engine.resume()
                await response.read()
                *pieces, last = lines(response)
                assert pieces
                assert set(last) == {"error"}
        for server in setup.servers.values():
            server.engine.resume()
        await setup.assert_all_free()


async def first_piece(response) -> bytes:
    async with aclosing(response.pieces()) as pieces:
        return await anext(pieces)


@pytest.mark.parametrize("has_peers", [False, True])
async def test_callers_with_different_keys_share_no_blocks(open_setup, has_peers):
    """Keys separate callers, as on any other path. Routers with peers and without peers send the same lines."""
    options = {"api_keys": ("x", "y"), "endpoint_api_key": None, "has_peers": has_peers}
    async with open_setup("a", engine={"response": "Hello!", **LARGE}, **options) as setup:
        async with setup.client().ask(CHAT, BODY) as response:
            assert set(await response.json()) == {"error"}
            assert response.status == 401
        cached = []
        for key in ("x", "y", "x"):
            headers = {"authorization": f"Bearer {key}", "x-request-id": "mine"}
            before = setup.servers["a"].engine.core.stats().prefix_hit_tokens_total
            async with setup.client().ask(CHAT, BODY, headers=headers) as response:
                await response.read()
                assert said(lines(response))[0] == "Hello!"
            cached.append(setup.servers["a"].engine.core.stats().prefix_hit_tokens_total > before)
        assert cached == [False, False, True]
        await setup.assert_all_free()


async def test_deadline_in_the_body_ends_a_stream_of_lines(open_setup, autojump_clock):
    async with open_setup(engine={"step_seconds": 1.0, **LARGE}) as setup:
        async with setup.client().ask(CHAT, {**BODY, "timeout": 5.5}) as response:
            await response.read()
        *pieces, last = lines(response)
        assert pieces
        assert "deadline" in last["error"] or "time" in last["error"]
        await trio.sleep(5)
        await setup.assert_all_free()


async def the_ask(pair):
    await wait_all_tasks_blocked()
    [(id, ask)] = [(id, ask) for id, each in pair.endpoints.items() for ask in each.open]
    return id, ask


async def test_events_of_the_endpoint_become_lines_for_the_client(open_pair, autojump_clock):
    async with open_pair("w1 w2") as pair, pair.client().ask(CHAT, BODY) as response:
        _, ask = await the_ask(pair)
        assert ask.headers["x-trioserve-resumable"] == "1"
        ask.begin_resumable()
        ask.say('data: {"a":1}\nid: 0:1\n\n')
        assert await first_piece(response) == b'{"a":1}\n'
        ask.say(": keep-alive\n\n")
        ask.hang_up()
        await trio.sleep(40)  # The client gets blanks while the endpoint sends nothing.
        _, again = await the_ask(pair)
        again.begin_resumable()
        again.say('data: {"a":2}\nid: 0:2\n\n')
        again.say('data: {"done":true}\nid: .\n\n')
        again.end()
        await response.read()
        assert lines(response) == [{"a": 1}, {"a": 2}, {"done": True}]
        assert response.body.count(b" ") >= 3
        assert "x-trioserve-resume" not in response.headers
    await pair.assert_all_free()


async def test_client_can_request_events_instead_of_lines(open_pair):
    asks = {"x-trioserve-resumable": "1"}
    async with open_pair("w1 w2") as pair, pair.client().ask(CHAT, BODY, headers=asks) as response:
        _, ask = await the_ask(pair)
        ask.begin_resumable()
        ask.say('data: {"a":1}\nid: 0:1\n\n')
        ask.say('data: {"done":true}\nid: .\n\n')
        ask.end()
        await response.read()
        assert response.headers["content-type"] == "text/event-stream"
        assert response.body == b'data: {"a":1}\nid: 0:1\n\ndata: {"done":true}\nid: .\n\n'
    await pair.assert_all_free()


async def test_error_of_the_endpoint_is_the_last_line(open_pair):
    async with open_pair("w1") as pair, pair.client().ask(CHAT, BODY) as response:
        ask = await pair.ask_of("w1")
        ask.begin_resumable()
        ask.say('data: {"a":1}\nid: 0:1\n\n')
        ask.fail("request_aborted")
        await response.read()
        assert lines(response) == [{"a": 1}, {"error": "said so"}]
    await pair.assert_all_free()


async def test_lines_of_another_server_are_forwarded_unchanged(open_pair):
    async with open_pair("w1 w2") as pair, pair.client().ask(CHAT, BODY) as response:
        _, lost = await the_ask(pair)
        lost.begin(content_type=LINES)
        lost.hang_up()  # The endpoint breaks before the first line, so another endpoint starts the response.
        _, ask = await the_ask(pair)
        assert "resume" not in ask.body
        ask.begin(content_type=LINES)
        ask.say('{"a":1}\n{"a"')
        assert await first_piece(response) == b'{"a":1}\n'
        ask.say(':2,"done":true}\n')
        ask.end()
        await response.read()
        assert lines(response) == [{"a": 1}, {"a": 2, "done": True}]
    await pair.assert_all_free()


async def test_error_of_the_router_is_separate_from_an_incomplete_line(open_pair):
    async with open_pair("w1 w2") as pair, pair.client().ask(CHAT, BODY) as response:
        _, ask = await the_ask(pair)
        ask.begin(content_type=LINES)
        ask.say('{"a":1}\n{"a"')
        await wait_all_tasks_blocked()
        ask.hang_up()
        await response.read()
        first, error = lines(response)
        assert first == {"a": 1}
        assert set(error) == {"error"}
    await pair.assert_all_free()


@pytest.mark.parametrize(
    "pieces, expected",
    [
        (["a\nb", "c\n"], ["a\n", "bc\n"]),
        ([" ", "a", "b\n "], [" ", "", "ab\n "]),
        (["a\n  b\n"], ["a\n  b\n"]),
        (["\n"], ["\n"]),
    ],
)
def test_router_forwards_only_complete_lines(pieces, expected):
    splitter = LineSplitter()
    assert [splitter.feed(piece.encode()).decode() for piece in pieces] == expected
    assert splitter.end() == b""
