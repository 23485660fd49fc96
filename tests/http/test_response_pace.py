"""Tests the minimum rate of responses: the request of a client that reads only a byte from time to time is cancelled.

A slow client that keeps the minimum rate is served, and so is a client that reads a slow stream.
"""

from __future__ import annotations

import pytest
import trio

from trioserve.http.asgi.app import AsgiApp
from trioserve.http.limits import FrontendLimits
from trioserve.http.pace import ResponsePace
from trioserve.testing.memory_client import memory_connection

WAIT = FrontendLimits().stall_seconds_max
PIECE_BYTES = 1500  # A piece is larger than stream_buffer_bytes_max of these tests.


async def whole(exchange) -> None:
    await exchange.respond(200, [], bytes(60_000))


async def in_pieces(exchange) -> None:
    await exchange.start(200, [])
    for _ in range(600):
        await exchange.send(bytes(100))
    await exchange.finish()


def in_pieces_every(seconds: float):
    async def handler(exchange) -> None:
        await exchange.start(200, [])
        for _ in range(20):
            await exchange.send(bytes(PIECE_BYTES))
            await trio.sleep(seconds)
        await exchange.finish()

    return handler


async def take(the_front, http: int, *, byte_count: int, seconds: float) -> tuple[bool, float]:
    """Let a client read `byte_count` bytes every `seconds`.

    Returns:
        A pair: True if the client got the whole response, and the seconds after which the exchange ended.
    """
    began_at = trio.current_time()
    if http == 1:
        client = the_front.connect(lambda: memory_connection(buffer_bytes=1))
        await client.send_all(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n")
    else:
        client = await the_front.h2(INITIAL_WINDOW_SIZE=0)
        stream_id = await client.request()
    received = b""

    async def take_some() -> None:
        nonlocal received
        while True:
            await trio.sleep(seconds)
            if http == 1:
                for _ in range(byte_count):
                    received += await client.receive_some(1)
            else:
                await client.credit(stream_id, byte_count)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_some)
        await trio.sleep(0.1)
        while the_front.server.counters().exchanges_open:
            await trio.sleep(0.5)
            assert trio.current_time() - began_at < 20 * WAIT, "the exchange does not end"
        ended_at = trio.current_time()
        nursery.cancel_scope.cancel()
    if http == 1:
        while taken := await client.receive_some():
            received += taken
        await client.aclose()
        return received.count(b"\0") == 60_000, ended_at - began_at
    response = await client.response(stream_id)
    again = await client.request(method="HEAD")  # The connection still works.
    assert (await client.response(again)).status == 200
    return response.ended, ended_at - began_at


@pytest.mark.parametrize("http", [1, 2])
@pytest.mark.parametrize("seconds", [1.0, 25.0])
@pytest.mark.parametrize("handler", [whole, in_pieces])
async def test_response_to_a_client_that_reads_a_byte_from_time_to_time_is_cancelled(
    autojump_clock, front, http, seconds, handler
):
    the_front = front(handler, stream_buffer_bytes_max=1024)
    _, ended_at = await take(the_front, http, byte_count=1, seconds=seconds)
    assert WAIT <= ended_at <= WAIT + 1
    counters = the_front.server.counters()
    assert counters.exchanges_stalled_total == 1
    assert counters.exchanges_open == 0
    # Over HTTP/1.1, the server does not know how many bytes of a single write the client has read.
    reason = "stalled" if http == 1 else "slow_reader"
    assert {name: count for name, count in counters.connections_refused_total.items() if count} == {reason: 1}


@pytest.mark.parametrize("http", [1, 2])
async def test_response_to_a_client_at_half_the_minimum_rate_is_cancelled_after_twice_the_wait(
    autojump_clock, front, http
):
    """The client reads each piece in time, but so late that less time remains for the next piece."""
    the_front = front(in_pieces, stream_buffer_bytes_max=1024)
    was_whole, ended_at = await take(the_front, http, byte_count=PIECE_BYTES, seconds=PIECE_BYTES / 128)
    assert not was_whole
    assert ended_at == pytest.approx(2 * WAIT, abs=PIECE_BYTES / 128 + 1)
    counters = the_front.server.counters()
    assert (counters.exchanges_stalled_total, counters.connections_refused_total["slow_reader"]) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("http", [1, 2])
async def test_client_at_the_minimum_rate_is_served(autojump_clock, front, http):
    the_front = front(in_pieces, stream_buffer_bytes_max=1024)
    was_whole, ended_at = await take(the_front, http, byte_count=300, seconds=1)
    assert was_whole
    assert ended_at > 5 * WAIT
    assert the_front.server.counters().exchanges_stalled_total == 0


@pytest.mark.parametrize("http", [1, 2])
async def test_readers_of_a_slow_stream_are_served(autojump_clock, front, http):
    """The clients read each piece 10 s after it arrived, which is below the minimum rate. After each reading, no bytes
    wait until the next piece.
    """
    the_front = front(in_pieces_every(seconds=60), stream_buffer_bytes_max=1024)
    if http == 1:
        client = the_front.connect(lambda: memory_connection(buffer_bytes=1))
        await client.send_all(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n")
        received = b""
        while not received.endswith(b"\0\r\n0\r\n\r\n"):
            first = await client.receive_some(1)
            assert first
            received += first
            if first == b"\0":
                await trio.sleep(10)
                while not received.endswith(b"\0\r\n"):
                    received += await client.receive_some(65536)
        await client.aclose()
    else:
        client = await the_front.h2(INITIAL_WINDOW_SIZE=0)
        stream_id = await client.request()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.response, stream_id)
            for _ in range(20):
                await trio.sleep(10)
                await client.credit(stream_id, PIECE_BYTES)
                await trio.sleep(60)
        assert client.responses[stream_id].ended
        await client.stream.aclose()
    assert the_front.server.counters().exchanges_stalled_total == 0


async def test_response_to_an_asgi_host_that_reads_too_slowly_is_cancelled(autojump_clock):
    app = AsgiApp(in_pieces, FrontendLimits(stream_buffer_bytes_max=1024))

    async def receive() -> dict:
        if not app.counters().exchanges_open:
            return {"type": "http.request"}
        await trio.sleep_forever()
        raise AssertionError

    async def send(message) -> None:
        if message["type"] == "http.response.body":
            await trio.sleep(20)

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "http_version": "1.1"}
    began_at = trio.current_time()
    with pytest.raises(Exception, match="broken off"):
        await app(scope, receive, send)
    assert trio.current_time() - began_at < 3 * WAIT
    counters = app.counters()
    assert (counters.exchanges_stalled_total, counters.connections_refused_total["slow_reader"]) == (1, 1)


# --- ResponsePace alone ---


def pace() -> ResponsePace:
    return ResponsePace(FrontendLimits(response_bytes_per_second_min=100, stall_seconds_max=10), now=50.0)


def test_response_deadline_moves_with_each_byte_while_bytes_wait():
    running = pace()
    assert running.start(now=60.0) == 70.0
    assert running.advance(100, now=61.0) == 71.0
    assert running.start(now=65.0) == 71.0
    assert running.advance(1, now=70.0) == pytest.approx(71.01)
    assert running.saw_progress
    assert running.advance(1_000_000, now=71.0) == 81.0


def test_time_allowance_of_a_client_grows_by_one_second_per_second_without_unsent_bytes():
    running = pace()
    running.start(now=60.0)
    running.stop(100, now=69.0)
    assert running.start(now=69.5) == pytest.approx(69.5 + 2.5)
    running.stop(0, now=70.0)
    assert running.start(now=100.0) == 110.0
    assert not running.saw_progress
