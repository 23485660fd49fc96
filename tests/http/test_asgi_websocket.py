"""Tests websockets of the ASGI app with a fake host, and with Hypercorn on a real socket."""

from __future__ import annotations

from functools import partial

import pytest
import trio
import trio.testing

from trioserve.http.asgi.app import AsgiApp
from trioserve.http.asgi.hypercorn_server import serve_with_hypercorn
from trioserve.http.counters import ConnectionRefusal
from trioserve.http.limits import FrontendLimits
from trioserve.http.listener import open_listeners
from trioserve.testing.memory_server import MemoryWebSocket


class Host:
    """A fake ASGI host with one websocket. Tests add messages for the app, and read the messages that the app sent."""

    def __init__(self, handler, *, extensions: dict | None = None, **limits) -> None:
        self.app = AsgiApp(handler, FrontendLimits(**limits))
        self.sent: list[dict] = []
        self.may_send = trio.Event()
        self.may_send.set()
        self._put, self._take = trio.open_memory_channel(100)
        self.scope = {
            "type": "websocket",
            "path": "/v1/a",
            "query_string": b"",
            "headers": [(b"host", b"test")],
            "http_version": "1.1",
            "client": ("192.0.2.7", 99),
            "extensions": extensions,
        }
        self.put("websocket.connect")

    def put(self, kind: str, **fields) -> None:
        self._put.send_nowait({"type": kind, **fields})

    async def run(self) -> None:
        await self.app(self.scope, self._take.receive, self._send)

    async def _send(self, message) -> None:
        await self.may_send.wait()
        self.sent.append(message)

    def assert_free(self) -> None:
        counters = self.app.counters()
        assert (counters.websockets_open, counters.exchanges_open, counters.request_body_bytes_held) == (0, 0, 0)


async def echo(exchange):
    assert exchange.is_websocket
    assert exchange.method == "GET"
    websocket = await exchange.accept_websocket([("x-a", "b")])
    while True:
        await websocket.send(await websocket.receive())


async def test_messages_of_the_host_are_echoed_until_it_disconnects(autojump_clock):
    host = Host(echo)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(host.run)
        await trio.testing.wait_all_tasks_blocked()
        host.put("websocket.receive", text="hello")
        host.put("websocket.receive", bytes=b"\0", text=None)
        await trio.testing.wait_all_tasks_blocked()
        assert host.sent[0]["type"] == "websocket.accept"
        assert (b"x-a", b"b") in host.sent[0]["headers"]
        assert host.sent[1:] == [
            {"type": "websocket.send", "text": "hello"},
            {"type": "websocket.send", "bytes": b"\0"},
        ]
        host.put("websocket.disconnect", code=1006)
    assert host.app.counters().exchanges_left_total == 1
    host.assert_free()


@pytest.mark.parametrize("fails", [True, False])
async def test_end_of_the_handler_closes_the_websocket(autojump_clock, fails):
    async def handler(exchange):
        websocket = await exchange.accept_websocket()
        await websocket.send("bye")
        if fails:
            raise ValueError("a bug")

    host = Host(handler)
    await host.run()
    assert host.sent[1] == {"type": "websocket.send", "text": "bye"}
    assert (host.sent[2]["type"], host.sent[2]["code"]) == ("websocket.close", 1011 if fails else 1000)
    assert host.app.counters().exchanges_failed_total == fails
    host.assert_free()


@pytest.mark.parametrize("can_respond", [True, False])
async def test_refusal_has_a_status_if_the_host_can_send_one(autojump_clock, can_respond):
    async def handler(exchange):
        await exchange.respond(429, [], b"later")

    host = Host(handler, extensions={"websocket.http.response": {}} if can_respond else None)
    await host.run()
    if can_respond:
        head, body = host.sent
        assert (head["type"], head["status"]) == ("websocket.http.response.start", 429)
        assert (body["type"], body["body"]) == ("websocket.http.response.body", b"later")
    else:
        assert host.sent == [{"type": "websocket.close"}]
    host.assert_free()


@pytest.mark.parametrize(
    "limits, messages, code, refusal",
    [
        ({"websocket_message_bytes_max": 10}, ["€€€€"], 1009, ConnectionRefusal.MESSAGE_TOO_LARGE),
        ({"websocket_unread_bytes_max": 400}, ["a", "b", "c", "d"], 1008, ConnectionRefusal.SENT_AHEAD),
        ({"bodies_bytes_max": 10}, ["x" * 11], 1013, ConnectionRefusal.BODIES_FULL),
    ],
)
async def test_client_beyond_a_limit_loses_its_websocket(autojump_clock, limits, messages, code, refusal):
    async def handler(exchange):
        await exchange.accept_websocket()
        await trio.sleep_forever()

    host = Host(handler, **limits)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(host.run)
        await trio.testing.wait_all_tasks_blocked()
        for message in messages:
            host.put("websocket.receive", text=message)
    assert (host.sent[-1]["type"], host.sent[-1]["code"]) == ("websocket.close", code)
    assert host.app.counters().connections_refused_total[refusal] == 1
    host.assert_free()


async def test_websocket_without_messages_ends_after_the_idle_limit(autojump_clock):
    host = Host(echo, websocket_idle_seconds_max=100)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(host.run)
        await trio.sleep(60)
        host.put("websocket.receive", text="still here")
        await trio.sleep(60)
        assert host.app.counters().websockets_open == 1
        began_at = trio.current_time()
    assert trio.current_time() - began_at == 40
    assert host.sent[-1]["code"] == 1001
    host.assert_free()


async def test_handler_is_cancelled_if_the_host_accepts_no_messages_for_the_stall_limit(autojump_clock):
    async def handler(exchange):
        websocket = await exchange.accept_websocket()
        while True:
            await websocket.send(bytes(10_000))

    host = Host(handler, stall_seconds_max=30, close_seconds_max=1)
    began_at = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_ignoring_the_end, host)
        await trio.testing.wait_all_tasks_blocked()
        host.may_send = trio.Event()
    assert trio.current_time() - began_at == pytest.approx(31, abs=0.1)
    assert host.app.counters().exchanges_stalled_total == 1
    host.assert_free()


async def _ignoring_the_end(host: Host) -> None:
    host.may_send = trio.Event()
    try:
        await host.run()
    except* RuntimeError:
        pass


async def test_drain_is_announced_to_the_handler(autojump_clock):
    async def handler(exchange):
        websocket = await exchange.accept_websocket()
        await websocket.draining.wait()
        await websocket.close(1001, "the server stops")

    host = Host(handler)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(host.run)
        await trio.testing.wait_all_tasks_blocked()
        host.app.announce_drain()
        await host.app.wait_until_answered()
    assert host.sent[-1] == {"type": "websocket.close", "code": 1001, "reason": "the server stops"}


async def test_hypercorn_serves_websockets():
    listeners = await open_listeners("127.0.0.1", 0)
    port = listeners[0].socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        serve = partial(
            serve_with_hypercorn, AsgiApp(echo), listeners, shutdown_trigger=trio.sleep_forever, drain_seconds_max=1
        )
        await nursery.start(serve)
        with trio.fail_after(10):
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            websocket = MemoryWebSocket(stream)
            await websocket.open("/")
            await websocket.send("hello")
            assert await websocket.receive() == "hello"
            assert (await websocket.close()).code == 1000
            await stream.aclose()
        nursery.cancel_scope.cancel()
