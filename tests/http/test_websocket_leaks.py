"""Tests that websockets leave nothing behind: many clients leave in seeded random phases and ways."""

from __future__ import annotations

import random

import h2.exceptions
import pytest
import trio
import wsproto.utilities

from trioserve.contracts.errors import TrioserveError
from trioserve.testing.memory_client import memory_connection
from trioserve.testing.memory_server import Http2Tunnel, MemoryWebSocket

CLIENT_ERRORS = (
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    TrioserveError,
    # The client may continue after the end, for example with a second close frame.
    h2.exceptions.ProtocolError,
    wsproto.utilities.ProtocolError,
)


class Handler:
    """A handler that echoes, sends without a pause, closes, fails, or waits, as the path of the request says."""

    def __init__(self) -> None:
        self.running = 0

    async def __call__(self, exchange) -> None:
        self.running += 1
        try:
            await self._run(exchange)
        finally:
            self.running -= 1

    async def _run(self, exchange) -> None:
        if exchange.path == "/late":
            await trio.sleep(1)
        if exchange.path == "/refuse":
            await exchange.respond(403, [], b"no")
            return
        websocket = await exchange.accept_websocket()
        if exchange.path == "/close":
            await trio.sleep(1)
            await websocket.close(4000, "enough")
        elif exchange.path == "/send":
            while True:
                await websocket.send(bytes(3000))
                await trio.sleep(0.1)  # A connection that has gone silent would accept any number of bytes at once.
        elif exchange.path == "/wait":
            await trio.sleep_forever()
        elif exchange.path != "/return":
            while True:
                await websocket.send(await websocket.receive())


async def visit(front, rng: random.Random) -> None:
    """Open a websocket, do something, and leave in some way. Each step may find that the server has ended first."""
    stream = front.connect(memory_connection)
    websocket = MemoryWebSocket(stream, http=rng.choice((1, 2)))
    path = rng.choice(("/echo", "/echo", "/send", "/wait", "/close", "/return", "/refuse", "/late"))
    await trio.sleep(rng.random() * 20)
    with trio.move_on_after(rng.random() * 3):
        try:
            await websocket.open(path)
            for _ in range(rng.randrange(4)):
                step = rng.randrange(4)
                if step == 0:
                    await websocket.send(bytes(rng.randrange(9000)))
                elif step == 1:
                    await websocket.receive()
                elif step == 2:
                    await websocket.send_raw(b"\x01\x85\x00\x00\x00\x00hel")  # a frame without its last bytes
                else:
                    await websocket.send_raw(bytes(rng.randrange(30)))
        except CLIENT_ERRORS:
            pass
    way = rng.choice(("leave", "abort", "half_close", "close", "silent", "reset", "stay"))
    try:
        with trio.move_on_after(rng.random() * 3):
            if way in ("leave", "abort"):
                getattr(websocket, way)()
            elif way in ("half_close", "close"):
                await getattr(websocket, way)()
            elif way == "silent":
                stream.go_silent()
            elif way == "reset" and isinstance(websocket.tunnel, Http2Tunnel):
                await websocket.tunnel.reset()
    except CLIENT_ERRORS:
        stream.abort()
    await trio.sleep(rng.choice((0, 1, 200)))
    stream.close()


@pytest.mark.parametrize("seed, client_count", [(1, 100), (2, 100), pytest.param(3, 1000, marks=pytest.mark.slow)])
async def test_websocket_clients_that_disconnect_in_any_phase_leak_nothing(
    autojump_clock, front, caplog, seed, client_count
):
    handler = Handler()
    the_front = front(handler, ping_seconds=5.0)
    rng = random.Random(seed)
    async with trio.open_nursery() as nursery:
        for _ in range(client_count):
            nursery.start_soon(visit, the_front, random.Random(rng.random()))
    await trio.sleep(200)
    counters = the_front.server.counters()
    assert counters.connections_total == client_count
    assert counters.websockets_total > client_count / 3
    assert handler.running == 0
    assert the_front.connection_count == 0
    held = (counters.request_body_bytes_held, counters.answer_bytes_held)
    assert (counters.websockets_open, counters.exchanges_open, counters.connections_open, *held) == (0, 0, 0, 0, 0)
    assert counters.connections_failed_total == counters.exchanges_failed_total == 0, caplog.text
