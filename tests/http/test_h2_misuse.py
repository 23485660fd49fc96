"""Tests HTTP/2 with invalid frames, floods, and faults of handlers. Each of them ends at most one connection."""

from __future__ import annotations

import hyperframe.frame as frames
import pytest
import trio
from h2.errors import ErrorCodes
from trio.testing import lockstep_stream_pair

from trioserve.http.http2.frames import Flood, FrameGate
from trioserve.http.limits import FrontendLimits


async def respond_ok(exchange):
    await exchange.respond(200, [], b"ok")


async def check_alive(the_front, client):
    assert (await client.response(await client.request())).body == b"ok"
    other = await the_front.h2()
    assert (await other.response(await other.request())).body == b"ok"


async def check_ended(the_front, client, code):
    """Check that the connection ends with the error code, and that the server still serves another connection."""
    await client.until_eof()
    assert [goaway.error_code for goaway in client.goaways] == [code]
    await client.stream.aclose()
    await the_front.settle()
    assert the_front.connection_count == 0
    other = await the_front.h2()
    assert (await other.response(await other.request())).body == b"ok"


# --- allowed and harmless frames ---


async def test_data_after_an_early_response_is_ignored_but_credited(autojump_clock, front):
    """Scenario S51 of tests/README.md: in another server, one such frame ended the server."""
    the_front = front(respond_ok)
    client = await the_front.h2()
    stream_id = await client.request(body=b"abc", end=False)
    response = await client.response(stream_id)
    await client.until(lambda: response.reset_code is not None)
    assert (response.body, response.ended, response.reset_code) == (b"ok", True, ErrorCodes.NO_ERROR)
    for _ in range(100):  # The client sends 1.6 MB, which is more than the connection's window.
        await client.data(stream_id, bytes(16384))
        await the_front.settle()
    await client.data(stream_id, b"", end=True)
    assert sum(f.window_increment for f in client.frames if isinstance(f, frames.WindowUpdateFrame)) > 0
    await check_alive(the_front, client)


async def test_http2_priority_frames_are_ignored(autojump_clock, front):
    """Scenario S51 of tests/README.md: in another server, 1,001 PRIORITY frames ended the server."""
    the_front = front(respond_ok)
    client = await the_front.h2()
    await client.send(*(frames.PriorityFrame(2 * n + 1001, depends_on=0, stream_weight=n % 256) for n in range(1001)))
    await check_alive(the_front, client)


async def test_headers_with_priority_are_served(autojump_clock, front):
    client = await front(respond_ok).h2()
    stream_id, made = client.request_frames()
    made[0].flags.add("PRIORITY")
    made[0].depends_on, made[0].stream_weight = 0, 15
    await client.send(*made)
    assert (await client.response(stream_id)).body == b"ok"


async def test_unknown_http2_frames_are_ignored(autojump_clock, front):
    the_front = front(respond_ok)
    client = await the_front.h2()
    await client.stream.send_all(b"\x00\x00\x04\xfa\x00\x00\x00\x00\x00abcd")
    await check_alive(the_front, client)


async def test_http2_frames_may_arrive_byte_by_byte(autojump_clock, front, h2_client):
    the_front = front(respond_ok)
    client = h2_client(the_front.connect())
    stream_id, made = client.request_frames(body=b"abc")
    opening = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frames.SettingsFrame(0).serialize()
    for byte in opening + b"".join(frame.serialize() for frame in made):
        await client.stream.send_all(bytes([byte]))
        await the_front.settle()
    assert (await client.response(stream_id)).body == b"ok"


@pytest.mark.parametrize("pieces", [1, 5])
async def test_data_after_the_end_of_the_request_resets_only_its_stream(autojump_clock, front, watched, pieces):
    """Scenario S51 of tests/README.md: a late DATA frame does not end the connection."""
    handler = watched()
    the_front = front(handler)
    client = await the_front.h2()
    await client.request()
    stream_id = await client.request()
    await the_front.settle()
    for _ in range(pieces):
        await client.data(stream_id, bytes(1000))
    response = await client.response(stream_id)
    assert response.reset_code == ErrorCodes.STREAM_CLOSED
    await the_front.settle()
    assert handler.running == 1


async def test_late_reset_and_late_window_update_for_an_ended_stream_are_ignored(autojump_clock, front):
    the_front = front(respond_ok)
    client = await the_front.h2()
    stream_id = await client.request()
    await client.response(stream_id)
    await client.credit(stream_id, 100)
    await client.reset(stream_id)
    await check_alive(the_front, client)


# --- too many frames ---


async def test_streams_beyond_the_limit_are_refused_and_other_streams_continue(autojump_clock, front, watched):
    handler = watched()
    the_front = front(handler, streams_max=3)
    client = await the_front.h2()
    made = [client.request_frames() for _ in range(5)]
    await client.send(*(frame for _, request in made for frame in request))
    await client.until(lambda: client.responses[made[4][0]].over)
    codes = [client.responses[stream_id].reset_code for stream_id, _ in made]
    assert codes == [None, None, None, ErrorCodes.REFUSED_STREAM, ErrorCodes.REFUSED_STREAM]
    await the_front.settle()
    assert handler.running == 3
    assert the_front.server.counters().streams_refused_total["streams_max"] == 2


async def test_reset_flood_ends_the_connection(autojump_clock, front):
    the_front = front(respond_ok, resets_per_second_max=10, resets_burst_max=50)
    client = await the_front.h2()
    for _ in range(51):
        stream_id, made = client.request_frames()
        await client.send(*made, frames.RstStreamFrame(stream_id, error_code=8))
    await check_ended(the_front, client, ErrorCodes.ENHANCE_YOUR_CALM)


async def test_resets_below_the_sustained_rate_do_not_end_the_connection(autojump_clock, front):
    the_front = front(respond_ok, resets_per_second_max=10, resets_burst_max=5)
    client = await the_front.h2()
    for _ in range(50):
        stream_id, made = client.request_frames()
        await client.send(*made, frames.RstStreamFrame(stream_id, error_code=8))
        await trio.sleep(0.11)
    await check_alive(the_front, client)


class UnknownFrame:
    def serialize(self) -> bytes:
        return b"\x00\x00\x04\xfa\x00\x00\x00\x00\x00abcd"

    def __repr__(self) -> str:
        return "UnknownFrame"


@pytest.mark.parametrize(
    "frame",
    [
        frames.PingFrame(0, opaque_data=b"12345678"),
        frames.SettingsFrame(0),
        frames.PriorityFrame(9, depends_on=0),
        frames.WindowUpdateFrame(0, window_increment=1),
        UnknownFrame(),
        frames.DataFrame(1, data=b""),
        frames.DataFrame(1, data=b"a crumb"),
        frames.RstStreamFrame(3, error_code=8),
    ],
    ids=repr,
)
async def test_control_frame_flood_ends_the_connection(autojump_clock, front, watched, frame):
    handler = watched()
    the_front = front(handler, control_frames_burst_max=100, control_frames_per_second_max=10)
    client = await the_front.h2()
    await client.request(end=False)
    await client.reset(await client.request())
    await the_front.settle()
    await client.send(*[frame] * 90)
    await the_front.settle()
    assert not client.goaways
    assert handler.running == 1
    await client.send(*[frame] * 20)
    await client.until_eof()
    assert [goaway.error_code for goaway in client.goaways] == [ErrorCodes.ENHANCE_YOUR_CALM]
    await client.stream.aclose()
    await the_front.settle()
    assert (handler.running, the_front.connection_count) == (0, 0)
    assert the_front.server.counters().connections_refused_total["control_frames"] == 1


def test_each_frame_of_a_response_allows_two_control_frames_once():
    gate = FrameGate(FrontendLimits(control_frames_burst_max=10, control_frames_per_second_max=1), now=0.0)
    ping = frames.PingFrame(0).serialize()
    list(gate.pieces(frames.SettingsFrame(0).serialize() + 9 * ping, now=0.0))
    gate.data_frames_sent += 3
    list(gate.pieces(6 * ping, now=0.0))
    with pytest.raises(Flood):
        list(gate.pieces(ping, now=0.0))


@pytest.mark.parametrize("size", [0, 1])
async def test_continuation_flood_ends_the_connection(autojump_clock, front, size):
    """CVE-2024-27316: the client sends a header block that never ends. The frames may be empty, so a limit in bytes is
    not enough.
    """
    the_front = front(respond_ok)
    client = await the_front.h2()
    flood = [frames.ContinuationFrame(1, data=b"\0" * size) for _ in range(1000)]
    await client.send(frames.HeadersFrame(1, data=b"\x82"), *flood)
    await client.until_eof()
    assert client.goaways[0].error_code in (ErrorCodes.ENHANCE_YOUR_CALM, ErrorCodes.PROTOCOL_ERROR)
    await client.stream.aclose()
    await check_alive(the_front, await the_front.h2())


OVERFLOW = frames.WindowUpdateFrame(1, window_increment=2**31 - 1)
HEADERS_AGAIN = frames.HeadersFrame(1, data=b"\x83\x84\x86\x41\x01t", flags=["END_HEADERS", "END_STREAM"])


@pytest.mark.parametrize("provocation", [OVERFLOW, frames.DataFrame(1, data=b"x" * 200), HEADERS_AGAIN], ids=repr)
async def test_resets_that_a_client_provokes_count_as_its_own_resets(autojump_clock, front, watched, provocation):
    """CVE-2025-8671, "MadeYouReset": the limit on rapid resets must not depend on who sends the RST_STREAM."""
    handler = watched()
    the_front = front(handler, resets_per_second_max=1, resets_burst_max=20)
    client = await the_front.h2()
    for _ in range(21):
        stream_id, made = client.request_frames()
        provocation.stream_id = stream_id
        await client.send(*made, provocation)
        await the_front.settle()
        assert handler.running == 0
    await client.until_eof()
    assert [goaway.error_code for goaway in client.goaways] == [ErrorCodes.ENHANCE_YOUR_CALM]
    assert the_front.server.counters().connections_refused_total["resets"] == 1


async def test_dynamic_table_of_the_client_stays_empty(autojump_clock, front):
    """If the table were used, each response would search the table and add entries, up to gigabytes."""
    number = 0

    async def handler(exchange):
        nonlocal number
        number += 1
        await exchange.respond(200, [("x-request-id", f"{number:0100d}")], b"ok")

    client = await front(handler).h2(HEADER_TABLE_SIZE=2**32 - 1)
    client._decoder.max_allowed_table_size = 2**32 - 1
    for _ in range(100):
        response = await client.response(await client.request())
        assert response.headers["x-request-id"] == f"{number:0100d}"
    assert client._decoder.header_table_size == 0
    assert not client._decoder.header_table.dynamic_entries


async def test_window_updates_for_sent_data_do_not_count_as_a_flood(autojump_clock, front):
    async def handler(exchange):
        await exchange.start(200, [])
        for _ in range(500):
            await exchange.send(b"token")
            await trio.sleep(0.001)
        await exchange.finish()

    client = await front(handler, control_frames_burst_max=20, control_frames_per_second_max=1).h2()
    stream_id = await client.request()
    response = client.responses[stream_id]
    credited = 0
    while not response.ended:
        await client.receive()
        if len(response.body) > credited:
            await client.credit(0, len(response.body) - credited)
            await client.credit(stream_id, len(response.body) - credited)
            credited = len(response.body)
    assert len(response.body) == 2500


async def test_unread_responses_to_pings_end_the_connection(autojump_clock, front, h2_client):
    the_front = front(respond_ok, control_bytes_max=2000)
    client = h2_client(the_front.connect(lockstep_stream_pair))
    await client.open()
    with pytest.raises(trio.BrokenResourceError):
        for _ in range(200):
            await client.send(frames.PingFrame(0, opaque_data=b"12345678"))
    assert the_front.server.counters().connections_refused_total["answers_unread"] == 1


@pytest.mark.parametrize("blocks", [1, 20])
async def test_header_list_beyond_the_limit_ends_the_connection(autojump_clock, front, blocks):
    the_front = front(respond_ok, head_bytes_max=2000)
    client = await the_front.h2()
    field = client._encoder.encode([("x-long", "a" * 3000)], huffman=False)
    pieces = [field[n * len(field) // blocks : (n + 1) * len(field) // blocks] for n in range(blocks)]
    made = [frames.HeadersFrame(1, data=pieces[0]), *(frames.ContinuationFrame(1, data=p) for p in pieces[1:])]
    made[-1].flags.add("END_HEADERS")
    await client.send(*made)
    await check_ended(the_front, client, ErrorCodes.ENHANCE_YOUR_CALM)


async def test_decoded_header_list_beyond_the_limit_ends_the_connection(autojump_clock, front):
    the_front = front(respond_ok, head_bytes_max=2000)
    client = await the_front.h2()
    _, made = client.request_frames(headers=tuple([("x-same", "a" * 500)] * 10))
    assert len(made[0].data) < 2000
    await client.send(*made)
    await client.until_eof()
    assert client.goaways[0].error_code in (ErrorCodes.ENHANCE_YOUR_CALM, ErrorCodes.PROTOCOL_ERROR)


async def test_oversized_frame_ends_the_connection_before_it_is_complete(autojump_clock, front):
    the_front = front(respond_ok)
    client = await the_front.h2()
    await client.stream.send_all(b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(1000))
    await check_ended(the_front, client, ErrorCodes.FRAME_SIZE_ERROR)


# --- against the protocol ---


@pytest.mark.parametrize(
    "fields",
    [
        [(":method", "GET"), (":scheme", "http")],
        [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":path", "/")],
        [(":method", "GET"), (":path", "/"), (":scheme", "http"), ("Upper", "case")],
        [(":method", "GET"), (":path", "/"), (":scheme", "http"), ("connection", "close")],
        [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":status", "200")],
    ],
)
async def test_bad_request_headers_end_the_connection(autojump_clock, front, fields):
    the_front = front(respond_ok)
    client = await the_front.h2()
    head = client._encoder.encode(fields)
    await client.send(frames.HeadersFrame(1, data=head, flags=["END_HEADERS", "END_STREAM"]))
    await check_ended(the_front, client, ErrorCodes.PROTOCOL_ERROR)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x00\x01\x06\x00\x00\x00\x00\x00a",  # This is a PING of one byte.
        b"\x00\x00\x08\x06\x00\x00\x00\x00\x01abcdefgh",  # This is a PING on a stream.
        b"\x00\x00\x04\x08\x00\x00\x00\x00\x00\x00\x00\x00\x00",  # This is a WINDOW_UPDATE with an increment of 0.
        b"\x00\x00\x05\x00\x01\x00\x00\x00\x07hello",  # This is DATA on a stream that was never opened.
        b"\x00\x00\x05\x00\x01\x00\x00\x00\x00hello",  # This is DATA on stream 0.
        b"\x00\x00\x01\x09\x04\x00\x00\x00\x01\x82",  # This is a CONTINUATION without a header block.
        b"\x00\x00\x04\x01\x04\x00\x00\x00\x01\xff\xff\xff\xff",  # This is a header block that HPACK cannot decode.
        b"\x00\x00\x04\x02\x00\x00\x00\x00\x01\x00\x00\x00\x00",  # This is a PRIORITY of four bytes.
        # This is a PRIORITY in the middle of a header block.
        b"\x00\x00\x01\x01\x00\x00\x00\x00\x01\x82\x00\x00\x05\x02\x00\x00\x00\x00\x03\x00\x00\x00\x00\x00",
        # This is a setting with a window of 2**32 - 1 bytes.
        b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x04\xff\xff\xff\xff",
        b"\x00\x00\x04\x05\x04\x00\x00\x00\x01\x00\x00\x00\x02",  # This is a PUSH_PROMISE from a client.
        b"\x00\x00\x03\x07\x00\x00\x00\x00\x00abc",  # This is a GOAWAY of three bytes.
    ],
)
async def test_malformed_frames_end_the_connection(autojump_clock, front, raw):
    the_front = front(respond_ok)
    client = await the_front.h2()
    await client.stream.send_all(raw)
    await client.until_eof()
    assert len(client.goaways) == 1
    assert client.goaways[0].error_code != ErrorCodes.NO_ERROR
    await client.stream.aclose()
    await check_alive(the_front, await the_front.h2())
    assert the_front.server.counters().connections_failed_total == 0


async def test_http2_protocol_error_cancels_the_streams_of_the_connection(autojump_clock, front, watched):
    handler = watched()
    the_front = front(handler)
    client = await the_front.h2()
    await client.request()
    await the_front.settle()
    await client.send(frames.PingFrame(0, opaque_data=b"12345678"), frames.DataFrame(99, data=b"x"))
    assert await handler.passes_until_ended() <= 8
    assert handler.cancelled


async def test_body_of_another_length_than_announced_ends_the_connection(autojump_clock, front):
    async def handler(exchange):
        await exchange.respond(200, [], await exchange.body())

    the_front = front(handler)
    client = await the_front.h2()
    await client.request(headers=(("content-length", "5"),), body=b"abc")
    await client.until_eof()
    assert client.goaways[0].error_code == ErrorCodes.PROTOCOL_ERROR


# --- time ---


async def test_idle_connection_is_closed_with_goaway(autojump_clock, front):
    the_front = front(respond_ok, idle_seconds_max=60)
    client = await the_front.h2()
    await trio.sleep(50)
    await client.response(await client.request())
    responded_at = trio.current_time()
    await client.until_eof()
    assert trio.current_time() - responded_at == pytest.approx(60, abs=0.1)
    assert [goaway.error_code for goaway in client.goaways] == [ErrorCodes.NO_ERROR]


async def test_connection_with_a_running_stream_is_not_idle(autojump_clock, front, watched):
    handler = watched()
    the_front = front(handler, idle_seconds_max=60)
    client = await the_front.h2()
    await client.request()
    await trio.sleep(1000)
    assert handler.running == 1


async def test_connection_with_a_header_block_that_never_ends_is_closed(autojump_clock, front):
    the_front = front(respond_ok, head_seconds_max=10, idle_seconds_max=100)
    client = await the_front.h2()
    began_at = trio.current_time()
    await client.send(frames.HeadersFrame(1, data=b"\x82"))
    await client.until_eof()
    assert trio.current_time() - began_at == pytest.approx(10, abs=0.1)


@pytest.mark.parametrize("opening", [b"", b"PRI * HTTP/2.0\r\n"])
async def test_connection_of_a_silent_http2_client_is_closed(autojump_clock, front, opening):
    the_front = front(respond_ok, sniff_seconds_max=10)
    stream = the_front.connect()
    await stream.send_all(opening)
    began_at = trio.current_time()
    assert await stream.receive_some() == b""
    assert trio.current_time() - began_at == pytest.approx(10, abs=0.1)
    await the_front.settle()
    assert the_front.connection_count == 0


# --- faults of handlers ---


async def test_exception_before_the_response_is_a_500_and_one_line_in_the_log(autojump_clock, front, caplog):
    async def handler(exchange):
        if exchange.path == "/bad":
            raise ZeroDivisionError("a fault")
        await respond_ok(exchange)

    the_front = front(handler)
    client = await the_front.h2()
    response = await client.response(await client.request("/bad"))
    assert response.status == 500
    assert b'"type":"server_error"' in response.body
    assert [record.getMessage() for record in caplog.records] == ["handler failed method=POST path=/bad"]
    assert the_front.server.counters().exchanges_failed_total == 1
    await check_alive(the_front, client)


async def test_exception_of_a_handler_during_its_response_resets_only_its_stream(autojump_clock, front, caplog):
    async def handler(exchange):
        if exchange.path == "/bad":
            await exchange.start(200, [])
            await exchange.send(b"some")
            raise ZeroDivisionError("a fault")
        await respond_ok(exchange)

    the_front = front(handler)
    client = await the_front.h2()
    response = await client.response(await client.request("/bad"))
    assert (response.status, response.ended, response.reset_code) == (200, False, ErrorCodes.INTERNAL_ERROR)
    await check_alive(the_front, client)


@pytest.mark.parametrize("started", [False, True])
async def test_incomplete_response_is_an_internal_error(autojump_clock, front, caplog, started):
    async def handler(exchange):
        if started:
            await exchange.start(200, [])

    client = await front(handler).h2()
    response = await client.response(await client.request())
    assert (response.status, response.reset_code) == ((200, ErrorCodes.INTERNAL_ERROR) if started else (500, None))
    assert "returned without a complete response" in caplog.text


async def test_exception_together_with_a_cancellation_ends_only_its_connection(autojump_clock, front, caplog):
    begun = trio.Event()

    async def handler(exchange):
        async def fail_when_cancelled():
            try:
                begun.set()
                await trio.sleep_forever()
            finally:
                raise ZeroDivisionError("a fault while leaving")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail_when_cancelled)
            nursery.start_soon(trio.sleep_forever)

    the_front = front(handler)
    client = await the_front.h2()
    stream_id = await client.request()
    await begun.wait()
    await client.reset(stream_id)
    await the_front.settle()
    assert "handler failed" in caplog.text
    assert the_front.connection_count == 1
    assert the_front.server.counters().connections_failed_total == 0
