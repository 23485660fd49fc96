"""Tests that the handler is cancelled if its client leaves an HTTP/2 connection, in each phase and in each way."""

from __future__ import annotations

import hyperframe.frame as frames
import pytest
import trio
from trio.testing import lockstep_stream_pair, memory_stream_pair

# First the reader wakes and cancels the scope, and then the handler's task runs. The client's own send takes a few
# passes of the scheduler.
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


async def while_sending(exchange):
    await exchange.start(200, [])
    while True:
        await exchange.send(bytes(10_000))


async def after_the_last_byte(exchange):
    await exchange.respond(200, [], b"done")
    await trio.sleep_forever()


PHASES = [before_the_body_is_complete, before_the_response, mid_stream, while_sending, after_the_last_byte]


async def reset(client, stream_id):
    await client.reset(stream_id)


async def close(client, stream_id):
    await client.stream.aclose()


async def half_close(client, stream_id):
    await client.stream.send_eof()


async def goaway_and_close(client, stream_id):
    await client.send(frames.GoAwayFrame(0, last_stream_id=0, error_code=0))
    await client.stream.aclose()


WAYS = [reset, close, half_close, goaway_and_close]


# A stream that has ended on both sides cannot be reset.
CASES = [(phase, way) for phase in PHASES for way in WAYS if (phase, way) != (after_the_last_byte, reset)]


@pytest.mark.parametrize("phase, leave", CASES)
async def test_handler_of_a_client_that_leaves_is_cancelled_within_a_few_scheduler_passes(
    autojump_clock, front, watched, phase, leave
):
    handler = watched(phase)
    the_front = front(handler)
    client = await the_front.h2()
    stream_id = await client.request(body=b"abc", end=phase is not before_the_body_is_complete)
    await the_front.settle()
    assert handler.running == 1
    await leave(client, stream_id)
    assert await handler.passes_until_ended() <= PASSES_MAX
    assert handler.cancelled
    await the_front.settle()
    counters = the_front.server.counters()
    assert (counters.exchanges_open, counters.exchanges_left_total, counters.exchanges_failed_total) == (0, 1, 0)
    if leave is not reset:
        assert the_front.connection_count == 0


async def test_reset_of_a_stream_does_not_affect_other_streams(autojump_clock, front, watched):
    handler = watched()
    the_front = front(handler)
    client = await the_front.h2()
    ids = [await client.request() for _ in range(5)]
    await the_front.settle()
    await client.reset(ids[2])
    await the_front.settle()
    assert handler.running == 4
    assert the_front.server.counters().exchanges_open == 4


async def test_close_cancels_all_streams_of_only_that_connection(autojump_clock, front, watched):
    handler = watched()
    the_front = front(handler)
    one, other = await the_front.h2(), await the_front.h2()
    for client in (one, one, one, other):
        await client.request()
    await the_front.settle()
    assert handler.running == 4
    await one.stream.aclose()
    await the_front.settle()
    assert (handler.running, the_front.connection_count) == (1, 1)


async def test_stream_reset_in_the_same_read_as_its_request_never_reaches_the_handler(autojump_clock, front, watched):
    handler = watched()
    the_front = front(handler)
    client = await the_front.h2()
    stream_id, made = client.request_frames()
    await client.send(*made, frames.RstStreamFrame(stream_id, error_code=8))
    await the_front.settle()
    assert not handler.begun.is_set()
    assert the_front.server.counters().exchanges_open == 0


async def test_running_streams_finish_after_a_goaway_of_the_client(autojump_clock, front):
    proceed = trio.Event()

    async def handler(exchange):
        await proceed.wait()
        await exchange.respond(200, [], b"finished")

    the_front = front(handler)
    client = await the_front.h2()
    stream_id = await client.request()
    # The client sends all frames in one write, so that the server reads the GOAWAY and the later frames together.
    await client.send(frames.GoAwayFrame(0, last_stream_id=0), frames.PingFrame(0, opaque_data=b"12345678"))
    await the_front.settle()
    proceed.set()
    assert (await client.response(stream_id)).body == b"finished"
    await client.until_eof()
    await client.stream.aclose()
    await the_front.settle()
    assert the_front.connection_count == 0


async def test_writes_to_a_client_that_is_gone_end_the_connection(autojump_clock, front):
    """Scenario S11 of tests/README.md: the client's FIN was lost, and the server notices at a failed write."""

    async def handler(exchange):
        await exchange.start(200, [])
        await gone.wait()
        await exchange.send(b"anybody there?")
        await trio.sleep_forever()

    gone = trio.Event()
    the_front = front(handler)
    client = await the_front.h2()
    await client.request()
    await the_front.settle()
    client.stream.receive_stream.close()
    gone.set()
    await the_front.settle()
    assert the_front.connection_count == 0
    assert the_front.server.counters().exchanges_left_total == 1


async def test_stream_without_window_is_reset_after_the_stall_limit(autojump_clock, front, watched):
    """Scenario S49 of tests/README.md: the other streams of the connection continue."""

    async def stream(exchange):
        if exchange.path == "/other":
            await exchange.respond(200, [], b"other")
            return
        await while_sending(exchange)

    handler = watched(stream)
    the_front = front(handler, stall_seconds_max=30)
    client = await the_front.h2(INITIAL_WINDOW_SIZE=100)
    began_at = trio.current_time()
    stalled = await client.request()
    response = await client.response(stalled)
    assert trio.current_time() - began_at == pytest.approx(30, abs=0.1)
    assert (len(response.body), response.reset_code) == (100, 8)
    assert handler.cancelled
    other = await client.request("/other")
    await client.credit(other, 100)
    assert (await client.response(other)).body == b"other"
    assert the_front.server.counters().exchanges_stalled_total == 1


async def test_stall_limit_applies_after_the_handler_has_returned(autojump_clock, front, watched):
    async def respond(exchange):
        await exchange.respond(200, [], bytes(1000))

    handler = watched(respond)
    the_front = front(handler, stall_seconds_max=30)
    client = await the_front.h2(INITIAL_WINDOW_SIZE=100)
    stream_id = await client.request()
    await the_front.settle()
    assert handler.ended.is_set()
    response = await client.response(stream_id)
    assert (len(response.body), response.reset_code) == (100, 8)


async def test_slow_reader_with_progress_is_not_reset(autojump_clock, front):
    async def handler(exchange):
        await exchange.respond(200, [], bytes(1000))

    client = await front(handler, stall_seconds_max=30, response_bytes_per_second_min=4).h2(INITIAL_WINDOW_SIZE=100)
    stream_id = await client.request()
    for _ in range(9):
        await trio.sleep(25)
        await client.credit(stream_id, 100)
    assert len((await client.response(stream_id)).body) == 1000


async def test_client_that_reads_nothing_from_tcp_loses_its_connection(autojump_clock, front, watched, h2_client):
    handler = watched(while_sending)
    the_front = front(handler, stall_seconds_max=30)
    client = h2_client(the_front.connect(lockstep_stream_pair))
    began_at = trio.current_time()
    await client.open()
    await client.request()
    await handler.ended.wait()
    assert trio.current_time() - began_at == pytest.approx(30, abs=0.1)
    assert handler.cancelled
    await the_front.settle()
    assert the_front.connection_count == 0


async def test_reset_by_the_client_is_noticed_while_a_write_is_blocked(autojump_clock, front, watched, h2_client):
    handler = watched(while_sending)
    the_front = front(handler)
    client = h2_client(the_front.connect(lockstep_stream_pair))
    await client.open()
    stream_id = await client.request()
    await the_front.settle()
    await client.send(frames.PingFrame(0, opaque_data=b"12345678"))  # The server cannot write the reply to this PING.
    await client.reset(stream_id)
    assert await handler.passes_until_ended() <= PASSES_MAX


async def test_cancelling_the_server_ends_its_connections_at_once_even_if_a_write_is_blocked(
    autojump_clock, front, watched, h2_client
):
    """Scenario S50 of tests/README.md: a client that reads nothing cannot block the shutdown."""
    handler = watched(while_sending)
    the_front = front(handler, close_seconds_max=1)
    stuck = h2_client(the_front.connect(lockstep_stream_pair))
    await stuck.open()
    await stuck.request()
    well = await the_front.h2()
    stream_id = await well.request()
    await the_front.settle()
    began_at = trio.current_time()
    the_front.cancel()
    await well.until_eof()
    await the_front.settle()
    await handler.ended.wait()
    assert trio.current_time() - began_at <= 1.1
    assert (handler.running, the_front.connection_count) == (0, 0)
    assert well.responses[stream_id].reset_code == 8
    assert [goaway.last_stream_id for goaway in well.goaways] == [stream_id]


class SticksOnDemand(trio.abc.Stream):
    """A stream whose writes block while `sticks` is set, as with a full TCP window. It counts the blocked writes."""

    def __init__(self, stream: trio.StapledStream) -> None:
        self.stream = stream
        self.sticks = False
        self.stuck_writes = 0

    async def send_all(self, data):
        if self.sticks:
            self.stuck_writes += 1
            await trio.sleep_forever()
        await self.stream.send_all(data)

    async def wait_send_all_might_not_block(self):
        await self.stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes=None):
        return await self.stream.receive_some(max_bytes)

    async def aclose(self):
        await self.stream.aclose()


async def test_no_bytes_are_sent_after_an_incomplete_write(autojump_clock, front, watched, h2_client):
    """After a partial frame, the client would read further bytes as the rest of that frame."""
    handler = watched(while_sending)
    the_front = front(handler)
    ours, theirs = memory_stream_pair()
    stream = SticksOnDemand(theirs)
    client = h2_client(the_front.connect(lambda: (ours, stream)))
    await client.open()
    await the_front.settle()
    stream.sticks = True
    await client.request()
    await the_front.settle()
    assert stream.stuck_writes == 1
    the_front.cancel()
    await client.until_eof()
    assert handler.cancelled
    assert stream.stuck_writes == 1


async def test_many_reset_streams_leave_no_state_behind(autojump_clock, front, watched):
    handler = watched()
    the_front = front(handler)
    client = await the_front.h2()
    for _ in range(20):
        ids = [await client.request() for _ in range(10)]
        await the_front.settle()
        assert handler.running == 10
        for stream_id in ids:
            await client.reset(stream_id)
        await the_front.settle()
        assert handler.running == 0
        assert the_front.server.counters().exchanges_open == 0


async def test_client_that_answers_no_ping_loses_its_streams(autojump_clock, front, watched):
    """The client forgot its streams: it neither reset them nor closed the connection."""
    handler = watched()
    the_front = front(handler, ping_seconds=5, ping_answer_seconds_max=10)
    client = await the_front.h2()
    began_at = trio.current_time()
    for _ in range(3):
        await client.request()
    await handler.ended.wait()
    assert trio.current_time() - began_at == pytest.approx(15, abs=0.1)
    await the_front.settle()
    counters = the_front.server.counters()
    assert (counters.exchanges_open, counters.exchanges_left_total, counters.connections_open) == (0, 3, 0)
    assert counters.connections_refused_total["ping_unanswered"] == 1


@pytest.mark.parametrize("sign", ["PING", "WINDOW_UPDATE"])
async def test_silent_client_that_still_reads_keeps_its_streams(autojump_clock, front, watched, sign):
    handler = watched()
    the_front = front(handler, ping_seconds=5, ping_answer_seconds_max=10)
    client = await the_front.h2()
    await client.request()
    for _ in range(10):
        await client.until(lambda: any(isinstance(each, frames.PingFrame) for each in client.frames))
        (ping,) = [each for each in client.frames if isinstance(each, frames.PingFrame)]
        client.frames.clear()
        await trio.sleep(9)
        if sign == "PING":
            await client.send(frames.PingFrame(0, opaque_data=ping.opaque_data, flags=["ACK"]))
        else:
            await client.credit(0, 1)
    await the_front.settle()
    assert handler.running == 1
    await client.stream.aclose()


async def test_client_without_streams_gets_no_ping(autojump_clock, front):
    async def respond_ok(exchange):
        await exchange.respond(200, [], b"ok")

    the_front = front(respond_ok, ping_seconds=5, ping_answer_seconds_max=10)
    client = await the_front.h2()
    await client.response(await client.request())
    await trio.sleep(60)
    await client.send(frames.PingFrame(0, opaque_data=b"of mine."))
    await client.until(lambda: bool(client.frames) and isinstance(client.frames[-1], frames.PingFrame))
    assert client.frames[-1].opaque_data == b"of mine."
    await client.stream.aclose()
