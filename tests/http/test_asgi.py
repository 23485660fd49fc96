"""Tests the ASGI app with a fake host, and with Hypercorn on a real socket."""

from __future__ import annotations

import builtins
import functools
import logging
from contextlib import asynccontextmanager, suppress

import httpx
import hypercorn.protocol.h2
import pytest
import trio
import trio.testing

from trioserve.contracts.errors import StartupError
from trioserve.http.asgi.app import AsgiApp, ResponseBrokenOff
from trioserve.http.asgi.hypercorn_server import serve_with_hypercorn
from trioserve.http.http2.frames import SETTINGS, frame
from trioserve.http.limits import FrontendLimits
from trioserve.http.listener import addresses, open_listeners


class Host:
    """A fake ASGI host with one request. Tests add messages for the app, and read the messages that the app sent."""

    def __init__(self, app: AsgiApp, **scope) -> None:
        self.app = app
        self.sent: list[dict] = []
        self.may_send = trio.Event()
        self.may_send.set()
        self.shields_send = False
        self._put, self._take = trio.open_memory_channel(100)
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/a b",
            "query_string": b"c=d",
            "headers": [(b"host", b"test"), (b"x-key", b"1")],
            "http_version": "2",
            "client": ("192.0.2.7", 99),
            "root_path": "",
            **scope,
        }

    def put(self, body: bytes, *, more_body: bool = False) -> None:
        self._put.send_nowait({"type": "http.request", "body": body, "more_body": more_body})

    def disconnect(self) -> None:
        self._put.send_nowait({"type": "http.disconnect"})

    async def run(self) -> None:
        await self.app(self.scope, self._take.receive, self._send)

    async def _send(self, message) -> None:
        with trio.CancelScope(shield=self.shields_send):
            await self.may_send.wait()
            self.sent.append(message)

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def ended(self) -> bool:
        return not self.sent[-1].get("more_body", True)


async def echo(exchange):
    body = await exchange.body()
    fields = [("x-seen", f"{exchange.method} {exchange.path} {exchange.query} {exchange.headers.get('x-key')}")]
    await exchange.respond(200, fields, body + exchange.peer.encode())


async def stream_for_ever(exchange):
    await exchange.start(200, [])
    while True:
        await exchange.send(bytes(1000))


async def test_asgi_request_reaches_the_handler_and_its_response_reaches_the_host(autojump_clock):
    host = Host(AsgiApp(echo))
    host.put(b"hel", more_body=True)
    host.put(b"lo ")
    await host.run()
    assert (host.status, host.body, host.ended) == (200, b"hello 192.0.2.7:99", True)
    fields = dict(host.sent[0]["headers"])
    assert fields[b"x-seen"] == b"POST /v1/a b c=d 1"
    assert fields[b"content-length"] == b"18"


async def test_app_mounted_under_a_prefix_gets_paths_without_the_prefix(autojump_clock):
    host = Host(AsgiApp(echo), path="/llm/v1/models", root_path="/llm")
    host.put(b"")
    await host.run()
    assert b"POST /v1/models" in dict(host.sent[0]["headers"])[b"x-seen"]


async def test_streamed_response_reaches_the_host_piece_by_piece(autojump_clock, nursery):
    proceed = trio.Event()

    async def handler(exchange):
        await exchange.start(200, [])
        await exchange.send(b"one")
        await proceed.wait()
        await exchange.finish(b"two")

    host = Host(AsgiApp(handler))
    host.put(b"")
    nursery.start_soon(host.run)
    await trio.testing.wait_all_tasks_blocked()
    assert (host.body, host.ended) == (b"one", False)
    proceed.set()
    await trio.testing.wait_all_tasks_blocked()
    assert (host.body, host.ended) == (b"onetwo", True)


@pytest.mark.parametrize("body_complete", [True, False])
async def test_disconnect_cancels_the_handler_at_once(autojump_clock, nursery, watched, body_complete):
    async def handler(exchange):
        await exchange.body()
        await trio.sleep_forever()

    handler = watched(handler)
    app = AsgiApp(handler)
    host = Host(app)
    host.put(b"abc", more_body=not body_complete)
    nursery.start_soon(host.run)
    await trio.testing.wait_all_tasks_blocked()
    assert app.counters().request_body_bytes_held == 3
    host.disconnect()
    assert await handler.passes_until_ended() <= 4
    assert handler.cancelled
    await trio.testing.wait_all_tasks_blocked()
    counters = app.counters()
    assert (counters.exchanges_left_total, counters.exchanges_open, counters.request_body_bytes_held) == (1, 0, 0)
    assert len(nursery.child_tasks) == 0


async def test_disconnect_cancels_the_handler_while_the_host_is_in_a_shielded_send(autojump_clock, nursery, watched):
    """Scenarios S43 and S50 of tests/README.md: a disconnect is noticed although the host is sending."""
    handler = watched(stream_for_ever)
    app = AsgiApp(handler)
    host = Host(app)
    host.shields_send = True
    host.may_send = trio.Event()
    host.put(b"")
    nursery.start_soon(host.run)
    await trio.testing.wait_all_tasks_blocked()
    host.disconnect()
    assert await handler.passes_until_ended() <= 4
    assert app.counters().exchanges_open == 0
    assert len(nursery.child_tasks) == 1  # The remaining task is the host, which is inside of its shielded send.
    host.may_send.set()
    await trio.testing.wait_all_tasks_blocked()
    assert len(nursery.child_tasks) == 0


async def test_response_to_a_host_that_reads_nothing_is_bounded_and_stalls(autojump_clock, watched):
    accepted = 0

    async def handler(exchange):
        nonlocal accepted
        await exchange.start(200, [])
        while True:
            await exchange.send(bytes(1000))
            accepted += 1000

    handler = watched(handler)
    app = AsgiApp(handler, FrontendLimits(stream_buffer_bytes_max=10_000, stall_seconds_max=30))
    host = Host(app)
    host.may_send = trio.Event()
    host.put(b"")
    began_at = trio.current_time()

    async def look():
        await trio.sleep(10)
        counters = app.counters()
        assert (counters.answer_bytes_held, counters.exchanges_behind) == (10_000, 1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        with pytest.raises(ResponseBrokenOff, match="POST /v1/a b"):
            await host.run()
    assert app.counters().answer_bytes_held == 0
    assert trio.current_time() - began_at == pytest.approx(30, abs=0.1)
    assert (accepted, handler.cancelled) == (10_000, True)
    assert app.counters().exchanges_stalled_total == 1


async def test_asgi_request_body_beyond_the_limit_gets_413(autojump_clock):
    host = Host(AsgiApp(echo, FrontendLimits(body_bytes_max=1000)))
    host.put(bytes(600), more_body=True)
    host.put(bytes(600), more_body=True)
    await host.run()
    assert host.status == 413


async def test_exception_of_the_handler_before_the_response_gives_500(autojump_clock, caplog):
    async def handler(exchange):
        raise ZeroDivisionError("a fault")

    host = Host(AsgiApp(handler))
    await host.run()
    assert host.status == 500
    assert "handler failed" in caplog.text


async def test_exception_during_a_streamed_response_makes_the_host_break_it_off(autojump_clock, caplog):
    async def handler(exchange):
        await exchange.start(200, [])
        raise ZeroDivisionError("a fault")

    host = Host(AsgiApp(handler))
    with pytest.raises(ResponseBrokenOff):
        await host.run()


async def test_asgi_head_request_gets_no_response_body(autojump_clock):
    host = Host(AsgiApp(echo), method="HEAD")
    host.put(b"")
    await host.run()
    assert (host.status, host.body, host.ended) == (200, b"", True)


async def test_asgi_app_answers_the_lifespan_events(autojump_clock):
    messages = iter(["lifespan.startup", "lifespan.shutdown"])
    sent = []

    async def receive():
        return {"type": next(messages)}

    async def send(message):
        sent.append(message["type"])

    await AsgiApp(echo)({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_asgi_app_refuses_other_scopes():
    with pytest.raises(NotImplementedError, match="webtransport"):
        await AsgiApp(echo)({"type": "webtransport"}, None, None)


# --- Hypercorn ---


async def test_hypercorn_serves_the_handler_and_cancels_it_at_a_disconnect(watched, caplog):
    handler = watched()

    async def route(exchange):
        if exchange.path == "/wait":
            await handler(exchange)
        else:
            await echo(exchange)

    listeners = await open_listeners("127.0.0.1", 0)
    url = f"http://{addresses(listeners)[0]}"
    stop = trio.Event()
    async with trio.open_nursery() as nursery:

        async def serve(task_status=trio.TASK_STATUS_IGNORED):
            await serve_with_hypercorn(
                AsgiApp(route), listeners, shutdown_trigger=stop.wait, drain_seconds_max=1, task_status=task_status
            )

        with caplog.at_level(logging.WARNING):
            await nursery.start(serve)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "buffers without bound" in caplog.text
        for http2 in (False, True):
            async with httpx.AsyncClient(http1=not http2, http2=http2, trust_env=False) as client:
                response = await client.post(f"{url}/echo", content=b"hello ")
                assert response.content.startswith(b"hello 127.0.0.1")
        async with httpx.AsyncClient(trust_env=False) as client:
            with trio.move_on_after(10):
                async with trio.open_nursery() as asking:
                    asking.start_soon(client.get, f"{url}/wait")
                    await handler.begun.wait()
                    asking.cancel_scope.cancel()
        with trio.fail_after(5):
            await handler.ended.wait()
        assert handler.cancelled
        stop.set()


@asynccontextmanager
async def under_hypercorn(handler, **limits):
    """Serve a handler with Hypercorn."""
    (listener,) = await open_listeners("127.0.0.1", 0)
    address = listener.socket.getsockname()
    stop = trio.Event()
    serve = functools.partial(
        serve_with_hypercorn,
        AsgiApp(handler),
        [listener],
        shutdown_trigger=stop.wait,
        drain_seconds_max=1,
        limits=FrontendLimits(**limits),
    )
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(serve)
            yield address
            stop.set()


async def test_unknown_http2_settings_are_removed_under_hypercorn(h2_client, monkeypatch):
    made = []
    before = hypercorn.protocol.h2.H2Protocol.__init__

    def look(self, *args, **kwargs):
        before(self, *args, **kwargs)
        made.append(self.connection)

    monkeypatch.setattr(hypercorn.protocol.h2.H2Protocol, "__init__", look)
    async with under_hypercorn(echo) as address:
        client = h2_client(await trio.open_tcp_stream(*address))
        await client.open()
        for start in range(9, 20000, 2500):
            payload = b"".join(number.to_bytes(2) + bytes(4) for number in range(start, start + 2500))
            await client.stream.send_all(frame(SETTINGS, 0, 0, payload))
        assert (await client.response(await client.request(body=b"a"))).status == 200
        assert len(made[0].remote_settings) <= 7
        await client.stream.aclose()


@pytest.mark.parametrize("kind", [SETTINGS, 2, 6])
async def test_hypercorn_ends_a_connection_with_too_many_control_frames(h2_client, kind):
    payload, stream_id = {SETTINGS: (b"", 0), 2: (bytes(5), 1), 6: (bytes(8), 0)}[kind]
    async with under_hypercorn(echo, control_frames_burst_max=100, control_frames_per_second_max=1) as address:
        client = h2_client(await trio.open_tcp_stream(*address))
        await client.open()
        with suppress(trio.BrokenResourceError):
            await client.stream.send_all(frame(kind, 0, stream_id, payload) * 200)
        await client.until_eof()
        await client.stream.aclose()
        other = h2_client(await trio.open_tcp_stream(*address))
        await other.open()
        assert (await other.response(await other.request(body=b"a"))).status == 200
        await other.stream.aclose()


async def test_idle_and_silent_connections_end_for_new_connections_under_hypercorn():
    async with under_hypercorn(echo, connections_max=3) as address:
        strangers = [await trio.open_tcp_stream(*address) for _ in range(10)]
        for stream in strangers[::2]:
            with suppress(trio.BrokenResourceError):
                await stream.send_all(b"GET / HTTP/1.1\r\nhost: a\r\nx-slow: ")
        new = await trio.open_tcp_stream(*address)
        await new.send_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        assert (await new.receive_some()).startswith(b"HTTP/1.1 200")
        for stream in (new, *strangers):
            await stream.aclose()


async def test_missing_hypercorn_is_a_startup_error(monkeypatch):
    real_import = builtins.__import__

    def without_hypercorn(name, *arguments, **keywords):
        if name.startswith("hypercorn"):
            raise ImportError(name)
        return real_import(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_hypercorn)
    with pytest.raises(StartupError, match=r"pip install .*\[asgi\]'"):
        await serve_with_hypercorn(AsgiApp(echo), [], shutdown_trigger=trio.sleep_forever, drain_seconds_max=1)
