"""Signs of life within a response, for those who ask for them."""

from __future__ import annotations

import json

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.testing.memory_server import open_memory_server

INTERIM = b"HTTP/1.1 102 Processing\r\n"
COMMENT = b": keep-alive\n\n"


async def ask(end, *, path="/v1/completions", method="POST", heartbeat="5", version="1.1", **fields):
    body = json.dumps({"model": "fake", "prompt": "hello", "max_tokens": 3, **fields}).encode() * (method == "POST")
    asked = f"x-trioserve-heartbeat: {heartbeat}\r\n" if heartbeat else ""
    head = f"{method} {path} HTTP/{version}\r\nhost: x\r\n{asked}content-length: {len(body)}\r\n\r\n"
    await end.send_all(head.encode() + body)
    await wait_all_tasks_blocked()


async def come(end) -> bytes:
    """All that has come by now."""
    await wait_all_tasks_blocked()
    with trio.move_on_after(0.001):
        return bytes(await end.receive_some(1 << 20))
    return b""


@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_head_interim_responses_go_out(autojump_clock, stream):
    async with open_memory_server(response="abc", max_num_seqs=1) as server:
        server.engine.pause()
        end = server.connect()
        await ask(end, stream=stream)
        await trio.sleep(16)
        received = await come(end)
        if not stream:
            assert received.count(INTERIM) == 3
            assert f"x-trioserve-instance: {server.engine.instance}".encode() in received
        server.engine.resume()
        await trio.sleep(1)
        received += await come(end)
        assert received.count(b"HTTP/1.1 200 OK\r\n") == 1
        assert b"x-trioserve-heartbeat: 5\r\n" in received
        await ask(end, stream=False)  # the connection goes on
        await trio.sleep(1)
        assert (await come(end)).startswith(b"HTTP/1.1 200 OK\r\n")
        await server.assert_all_free()


async def test_within_a_stream_comments_go_out_only_where_nothing_else_does(autojump_clock):
    async with open_memory_server(response="abcdefgh", step_seconds=2) as server:
        end = server.connect()
        await ask(end, stream=True, max_tokens=8)
        await trio.sleep(9)
        assert COMMENT not in await come(end)
        server.engine.pause()
        await trio.sleep(21)
        assert (await come(end)).count(COMMENT) in (3, 4)
        server.engine.resume()
        await trio.sleep(30)
        received = await come(end)
        assert received.endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
        await server.assert_all_free()


async def test_no_beat_goes_out_while_a_step_hangs(autojump_clock):
    async with open_memory_server(response="abc", step_timeout=10) as server:
        server.engine.steps.hold()
        end = server.connect()
        await ask(end)
        await server.engine.steps.entered()
        await trio.sleep(11)
        assert (await come(end)).count(INTERIM) == 2
        await trio.sleep(100)
        assert await come(end) == b""
        server.engine.steps.release()
        await trio.sleep(1)
        assert (await come(end)).startswith(b"HTTP/1.1 200 OK\r\n")
        await server.assert_all_free()


async def test_a_beat_goes_out_at_once_where_somebody_tries_whether_it_arrives(autojump_clock):
    async with open_memory_server() as server:
        end = server.connect()
        await ask(end, path="/ready", method="GET", heartbeat="5, now")
        received = await come(end)
        assert received.startswith(INTERIM)
        assert received.count(b"HTTP/1.1 200 OK\r\n") == 1


@pytest.mark.parametrize(
    ("heartbeat", "version"),
    [("", "1.1"), ("0.1", "1.1"), ("5;", "1.1"), ("1e1", "1.1"), ("99999", "1.1"), ("5", "1.0")],
)
async def test_nobody_else_gets_beats(autojump_clock, heartbeat, version):
    async with open_memory_server(response="abc") as server:
        server.engine.pause()
        end = server.connect()
        await ask(end, heartbeat=heartbeat, version=version)
        await trio.sleep(60)
        assert await come(end) == b""
        server.engine.resume()
        await trio.sleep(1)
        received = await come(end)
        assert b" 200 OK\r\n" in received
        assert b"x-trioserve-heartbeat" not in received


async def test_a_client_that_leaves_between_beats_leaves_nothing(autojump_clock):
    async with open_memory_server(response="abc") as server:
        server.engine.pause()
        end = server.connect()
        await ask(end, stream=True)
        await trio.sleep(7)
        end.close()
        await server.assert_all_free()
