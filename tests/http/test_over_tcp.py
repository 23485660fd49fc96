"""Tests writes to TCP that bypass Trio's sockets: slow readers get all bytes in order, and a disconnect is noticed."""

from __future__ import annotations

import socket

import pytest
import trio

from trioserve.http.http2.protocol import H2Protocol
from trioserve.http.limits import FrontendLimits
from trioserve.http.server import FrontendServer

PIECE = b"0123456789abcdef" * 64
PIECES = 4000  # The pieces have 4 MB together, which is more than the buffers of both sockets.


async def served(nursery: trio.Nursery, handler, **limits) -> tuple[FrontendServer, int]:
    server = FrontendServer(handler, limits=FrontendLimits(**limits))
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    await nursery.start(server.serve, listeners)
    return server, listeners[0].socket.getsockname()[1]


async def stream_pieces(exchange) -> None:
    await exchange.start(200, [])
    for _ in range(PIECES):
        await exchange.send(PIECE)
    await exchange.finish()


async def test_slow_reader_gets_every_byte_over_http1(nursery, h11_client):
    _, port = await served(nursery, stream_pieces)
    client = h11_client(await trio.open_tcp_stream("127.0.0.1", port))
    await client.request()
    await trio.testing.wait_all_tasks_blocked()  # The server has filled the buffers of both sockets.
    status, _, body = await client.response()
    assert status == 200
    assert body == PIECE * PIECES
    await client.stream.aclose()
    nursery.cancel_scope.cancel()


async def test_slow_reader_gets_every_byte_over_http2(nursery, h2_client):
    _, port = await served(nursery, stream_pieces)
    client = h2_client(await trio.open_tcp_stream("127.0.0.1", port))
    await client.open(INITIAL_WINDOW_SIZE=2**31 - 1)
    await client.credit(0, 2**30)
    ids = [await client.request() for _ in range(2)]
    await trio.testing.wait_all_tasks_blocked()
    for stream_id in ids:
        response = await client.response(stream_id)
        assert (response.status, response.body) == (200, PIECE * PIECES)
    await client.stream.aclose()
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("http", [1, 2])
async def test_client_that_stops_reading_is_disconnected_over_tcp(nursery, h11_client, h2_client, http):
    left = trio.Event()

    async def handler(exchange) -> None:
        try:
            await stream_pieces(exchange)
        finally:
            left.set()

    server, port = await served(nursery, handler, stall_seconds_max=0.05)
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    if http == 1:
        await h11_client(stream).request()
    else:
        client = h2_client(stream)
        await client.open(INITIAL_WINDOW_SIZE=2**31 - 1)
        await client.credit(0, 2**30)
        await client.request()
    with trio.fail_after(30):
        await left.wait()
        while server.counters().connections_open:
            await trio.lowlevel.checkpoint()
    assert server.counters().exchanges_open == 0
    await stream.aclose()
    nursery.cancel_scope.cancel()


async def test_reset_during_a_write_cancels_the_handlers(nursery, h2_client):
    left = trio.Event()

    async def handler(exchange) -> None:
        try:
            while True:
                await exchange.send(PIECE) if exchange.started else await exchange.start(200, [])
                await trio.lowlevel.checkpoint()
        finally:
            left.set()

    server, port = await served(nursery, handler)
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    client = h2_client(stream)
    await client.open()
    await client.request()
    await client.until(lambda: any(response.body for response in client.responses.values()))
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    await stream.aclose()
    with trio.fail_after(30):
        await left.wait()
        while server.counters().connections_open:
            await trio.lowlevel.checkpoint()
    nursery.cancel_scope.cancel()


async def test_fault_during_a_flush_ends_only_its_connection(nursery, h2_client, monkeypatch, caplog):
    async def handler(exchange) -> None:
        await exchange.start(200, [])
        if exchange.path == "/bad":
            await exchange.send(b"bad")
            await trio.sleep_forever()
        await exchange.send(b"good")
        await exchange.finish()

    data_frame = H2Protocol.data_frame

    def fail_for_bad(self, stream_id: int, data: bytes, *, end_stream: bool) -> bytes:
        if data == b"bad":
            raise ZeroDivisionError
        return data_frame(self, stream_id, data, end_stream=end_stream)

    monkeypatch.setattr(H2Protocol, "data_frame", fail_for_bad)
    server, port = await served(nursery, handler)
    bad = h2_client(await trio.open_tcp_stream("127.0.0.1", port))
    await bad.open()
    await bad.request("/bad")
    with trio.fail_after(30):
        await bad.until_eof()
        while server.counters().connections_open:
            await trio.lowlevel.checkpoint()
    assert "connection failed" in caplog.text
    good = h2_client(await trio.open_tcp_stream("127.0.0.1", port))
    await good.open()
    response = await good.response(await good.request("/good"))
    assert response.body == b"good"
    assert server.counters().connections_failed_total == 1
    for client in (bad, good):
        await client.stream.aclose()
    nursery.cancel_scope.cancel()
