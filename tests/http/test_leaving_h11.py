"""Tests that the handler is cancelled if its client leaves an HTTP/1.1 connection, in each phase of a request."""

from __future__ import annotations

import pytest
import trio
from trio.testing import lockstep_stream_pair

PASSES_MAX = 6


async def before_the_body_is_complete(exchange):
    await exchange.body()


async def before_the_response(exchange):
    await exchange.body()
    await trio.sleep_forever()


async def mid_stream(exchange):
    await exchange.start(200, [])
    await exchange.send(b"one")
    await trio.sleep_forever()


async def after_the_last_byte(exchange):
    await exchange.respond(200, [], b"done")
    await trio.sleep_forever()


async def while_sending(exchange):
    await exchange.start(200, [])
    while True:
        await exchange.send(bytes(10_000))


async def close(stream):
    await stream.aclose()


async def half_close(stream):
    await stream.send_eof()


COMPLETE = b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 3\r\n\r\nabc"
INCOMPLETE = b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 9\r\n\r\nabc"
PIPELINED = COMPLETE + COMPLETE
STRAY = COMPLETE + b"\r\n"


@pytest.mark.parametrize("leave", [close, half_close])
@pytest.mark.parametrize(
    "phase, sent",
    [
        (before_the_body_is_complete, INCOMPLETE),
        *[(phase, COMPLETE) for phase in (before_the_response, mid_stream, after_the_last_byte)],
        *[(phase, PIPELINED) for phase in (before_the_response, mid_stream, after_the_last_byte)],
        *[(phase, STRAY) for phase in (before_the_response, mid_stream)],
    ],
)
async def test_handler_of_a_client_that_leaves_is_cancelled_within_a_few_scheduler_passes(
    autojump_clock, front, watched, phase, sent, leave
):
    handler = watched(phase)
    the_front = front(handler)
    stream = the_front.connect()
    await stream.send_all(sent)
    await the_front.settle()
    assert handler.running == 1
    await leave(stream)
    assert await handler.passes_until_ended() <= PASSES_MAX
    assert handler.cancelled
    await the_front.settle()
    counters = the_front.server.counters()
    assert (counters.exchanges_total, counters.exchanges_left_total, counters.exchanges_failed_total) == (1, 1, 0)
    assert the_front.connection_count == 0


async def test_close_after_a_get_is_noticed_while_the_handler_waits(autojump_clock, front, watched):
    handler = watched()
    the_front = front(handler)
    stream = the_front.connect()
    await stream.send_all(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n" * 3)
    await the_front.settle()
    await stream.aclose()
    assert await handler.passes_until_ended() <= PASSES_MAX


async def test_client_that_stops_reading_loses_its_connection_after_the_stall_limit(autojump_clock, front, watched):
    handler = watched(while_sending)
    the_front = front(handler, stall_seconds_max=30)
    stream = the_front.connect(lockstep_stream_pair)
    began_at = trio.current_time()
    await stream.send_all(COMPLETE)
    await handler.ended.wait()
    assert trio.current_time() - began_at == pytest.approx(30, abs=0.1)
    assert handler.cancelled
    await the_front.settle()
    assert the_front.connection_count == 0
    assert the_front.server.counters().exchanges_stalled_total == 1


async def test_close_by_the_client_is_noticed_while_a_write_is_blocked(autojump_clock, front, watched):
    handler = watched(while_sending)
    the_front = front(handler)
    stream = the_front.connect(lockstep_stream_pair)
    await stream.send_all(COMPLETE)
    await the_front.settle()
    await stream.aclose()
    assert await handler.passes_until_ended() <= PASSES_MAX


@pytest.mark.parametrize("phase", [before_the_response, mid_stream, while_sending])
async def test_cancelling_the_server_ends_the_connection_at_once(autojump_clock, front, watched, phase):
    handler = watched(phase)
    the_front = front(handler, close_seconds_max=1)
    stream = the_front.connect(lockstep_stream_pair)
    await stream.send_all(COMPLETE)
    await the_front.settle()
    began_at = trio.current_time()
    the_front.cancel()
    await handler.ended.wait()
    await the_front.settle()
    assert the_front.connection_count == 0
    assert trio.current_time() - began_at <= 1.1
