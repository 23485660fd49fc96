"""Tests heartbeats within a response, for routers that request heartbeats."""

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


async def arrived_bytes(end) -> bytes:
    """Return all bytes that have arrived by now."""
    await wait_all_tasks_blocked()
    with trio.move_on_after(0.001):
        return bytes(await end.receive_some(1 << 20))
    return b""


@pytest.mark.parametrize("stream", [False, True])
async def test_heartbeats_before_the_head_are_interim_responses(autojump_clock, stream):
    async with open_memory_server(response="abc", max_num_seqs=1) as server:
        server.engine.pause()
        end = server.connect()
        await ask(end, stream=stream)
        await trio.sleep(16)
        received = await arrived_bytes(end)
        if not stream:
            assert received.count(INTERIM) == 3
            assert f"x-trioserve-instance: {server.engine.instance}".encode() in received
        server.engine.resume()
        await trio.sleep(1)
        received += await arrived_bytes(end)
        assert received.count(b"HTTP/1.1 200 OK\r\n") == 1
        assert b"x-trioserve-heartbeat: 5\r\n" in received
        await ask(end, stream=False)  # The connection can be used for another request.
        await trio.sleep(1)
        assert (await arrived_bytes(end)).startswith(b"HTTP/1.1 200 OK\r\n")
        await server.assert_all_free()


async def test_heartbeat_comments_are_sent_only_in_a_silent_stream(autojump_clock):
    async with open_memory_server(response="abcdefgh", step_seconds=2) as server:
        end = server.connect()
        await ask(end, stream=True, max_tokens=8)
        await trio.sleep(9)
        assert COMMENT not in await arrived_bytes(end)
        server.engine.pause()
        await trio.sleep(21)
        assert (await arrived_bytes(end)).count(COMMENT) in (3, 4)
        server.engine.resume()
        await trio.sleep(30)
        received = await arrived_bytes(end)
        assert received.endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
        await server.assert_all_free()


async def test_no_heartbeat_is_sent_while_a_step_hangs(autojump_clock):
    async with open_memory_server(response="abc", step_timeout=10) as server:
        server.engine.steps.hold()
        end = server.connect()
        await ask(end)
        await server.engine.steps.entered()
        await trio.sleep(11)
        assert (await arrived_bytes(end)).count(INTERIM) == 2
        await trio.sleep(100)
        assert await arrived_bytes(end) == b""
        server.engine.steps.release()
        await trio.sleep(1)
        assert (await arrived_bytes(end)).startswith(b"HTTP/1.1 200 OK\r\n")
        await server.assert_all_free()


async def test_a_heartbeat_is_sent_at_once_if_asked_for_with_now(autojump_clock):
    async with open_memory_server() as server:
        end = server.connect()
        await ask(end, path="/ready", method="GET", heartbeat="5, now")
        received = await arrived_bytes(end)
        assert received.startswith(INTERIM)
        assert received.count(b"HTTP/1.1 200 OK\r\n") == 1


@pytest.mark.parametrize(
    ("heartbeat", "version"),
    [("", "1.1"), ("0.1", "1.1"), ("5;", "1.1"), ("1e1", "1.1"), ("99999", "1.1"), ("5", "1.0")],
)
async def test_clients_that_did_not_request_heartbeats_get_none(autojump_clock, heartbeat, version):
    async with open_memory_server(response="abc") as server:
        server.engine.pause()
        end = server.connect()
        await ask(end, heartbeat=heartbeat, version=version)
        await trio.sleep(60)
        assert await arrived_bytes(end) == b""
        server.engine.resume()
        await trio.sleep(1)
        received = await arrived_bytes(end)
        assert b" 200 OK\r\n" in received
        assert b"x-trioserve-heartbeat" not in received


async def test_a_client_that_leaves_between_heartbeats_frees_everything(autojump_clock):
    async with open_memory_server(response="abc") as server:
        server.engine.pause()
        end = server.connect()
        await ask(end, stream=True)
        await trio.sleep(7)
        end.close()
        await server.assert_all_free()
