"""Tests conformance with RFC 9113, section by section: which frames are a stream error or a connection error.

The RFC allows treating a stream error as a connection error (5.4.1). The tests expect the kind of error that the h2
library chooses.
"""

from __future__ import annotations

import hpack
import hyperframe.frame as frames
import pytest
import trio
from h2.errors import ErrorCodes as Code

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20
REQUEST = ((":method", "POST"), (":scheme", "http"), (":authority", "test"), (":path", "/"))


def raw(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def block(*fields: tuple[str, str]) -> bytes:
    """Return a header block without table entries."""
    return hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*field) for field in fields])


def head(*fields: tuple[str, str], stream: int = 1, flags: int = END_HEADERS | END_STREAM) -> bytes:
    return raw(HEADERS, block(*(fields or REQUEST)), flags=flags, stream=stream)


def setting(number: int, value: int) -> bytes:
    return raw(SETTINGS, number.to_bytes(2, "big") + value.to_bytes(4, "big"))


async def handle(exchange):
    """Wait forever at "/wait", and echo the body at other paths."""
    if exchange.path == "/wait":
        await trio.sleep_forever()
    await exchange.respond(200, [], b"got " + await exchange.body())


OPEN = head(flags=END_HEADERS)  # This frame opens stream 1, whose body follows.
# This frame is a request on stream 1, which the server does not answer.
WAITING = head(*REQUEST[:3], (":path", "/wait"))

CONNECTION_ERRORS = {
    "3.4 first frame is not SETTINGS": (None, raw(PING, b"12345678"), Code.PROTOCOL_ERROR),
    "4.2 frame larger than allowed": (b"", raw(DATA, bytes(16385), stream=1), Code.FRAME_SIZE_ERROR),
    "4.3 block that cannot be unpacked": (b"", raw(HEADERS, b"\xff" * 8, flags=5, stream=1), Code.COMPRESSION_ERROR),
    "4.3 other stream's HEADERS in a block": (raw(HEADERS, b"\x82", stream=1), head(stream=3), Code.PROTOCOL_ERROR),
    "4.3 DATA in a block": (raw(HEADERS, b"\x82", stream=1), raw(DATA, b"x", stream=1), Code.PROTOCOL_ERROR),
    "4.3 RST_STREAM in a block": (
        raw(HEADERS, b"\x82", stream=1),
        raw(RST_STREAM, bytes(4), stream=1),
        Code.PROTOCOL_ERROR,
    ),
    "5.1 DATA on an idle stream": (b"", raw(DATA, b"x", stream=1), Code.PROTOCOL_ERROR),
    "5.1 RST_STREAM on an idle stream": (b"", raw(RST_STREAM, bytes(4), stream=1), Code.PROTOCOL_ERROR),
    "5.1 WINDOW_UPDATE on an idle stream": (b"", raw(WINDOW_UPDATE, b"\0\0\0\1", stream=1), Code.PROTOCOL_ERROR),
    "5.1 CONTINUATION on an idle stream": (
        b"",
        raw(CONTINUATION, block(*REQUEST), flags=4, stream=1),
        Code.PROTOCOL_ERROR,
    ),
    "5.1.1 even stream": (b"", head(stream=2), Code.PROTOCOL_ERROR),
    "5.1.1 lower stream": (head(stream=5), head(stream=3), Code.PROTOCOL_ERROR),
    "5.5 unknown frame in a block": (raw(HEADERS, b"\x82", stream=1), raw(0xFA, b"x", stream=1), Code.PROTOCOL_ERROR),
    "6.1 DATA on stream 0": (b"", raw(DATA, b"x"), Code.PROTOCOL_ERROR),
    "6.1 padding longer than DATA": (OPEN, raw(DATA, b"\x05abc", flags=PADDED, stream=1), Code.PROTOCOL_ERROR),
    "6.2 HEADERS on stream 0": (b"", head(stream=0), Code.PROTOCOL_ERROR),
    "6.2 padding longer than HEADERS": (
        b"",
        raw(HEADERS, b"\x09" + block(*REQUEST)[:4], flags=0xD, stream=1),
        Code.PROTOCOL_ERROR,
    ),
    "6.3 PRIORITY on stream 0": (b"", raw(PRIORITY, bytes(5)), Code.PROTOCOL_ERROR),
    "6.3 PRIORITY of four bytes": (b"", raw(PRIORITY, bytes(4), stream=1), Code.FRAME_SIZE_ERROR),
    "6.4 RST_STREAM on stream 0": (b"", raw(RST_STREAM, bytes(4)), Code.PROTOCOL_ERROR),
    "6.4 RST_STREAM of three bytes": (OPEN, raw(RST_STREAM, bytes(3), stream=1), Code.FRAME_SIZE_ERROR),
    "6.5 SETTINGS acknowledgement with a payload": (b"", raw(SETTINGS, bytes(6), flags=ACK), Code.FRAME_SIZE_ERROR),
    "6.5 SETTINGS on a stream": (b"", raw(SETTINGS, stream=1), Code.PROTOCOL_ERROR),
    "6.5 SETTINGS of seven bytes": (b"", raw(SETTINGS, bytes(7)), Code.FRAME_SIZE_ERROR),
    "6.5.2 ENABLE_PUSH of 2": (b"", setting(2, 2), Code.PROTOCOL_ERROR),
    "6.5.2 INITIAL_WINDOW_SIZE of 2**31": (b"", setting(4, 2**31), Code.FLOW_CONTROL_ERROR),
    "6.5.2 MAX_FRAME_SIZE of 2**14 - 1": (b"", setting(5, 2**14 - 1), Code.PROTOCOL_ERROR),
    "6.5.2 MAX_FRAME_SIZE of 2**24": (b"", setting(5, 2**24), Code.PROTOCOL_ERROR),
    "6.6 PUSH_PROMISE from a client": (
        OPEN,
        raw(PUSH_PROMISE, b"\0\0\0\2\x82", flags=4, stream=1),
        Code.PROTOCOL_ERROR,
    ),
    "6.7 PING of seven bytes": (b"", raw(PING, bytes(7)), Code.FRAME_SIZE_ERROR),
    "6.7 PING on a stream": (b"", raw(PING, bytes(8), stream=1), Code.PROTOCOL_ERROR),
    "6.8 GOAWAY on a stream": (b"", raw(GOAWAY, bytes(8), stream=1), Code.PROTOCOL_ERROR),
    "6.9 WINDOW_UPDATE by 0": (b"", raw(WINDOW_UPDATE, bytes(4)), Code.PROTOCOL_ERROR),
    "6.9 WINDOW_UPDATE of three bytes": (b"", raw(WINDOW_UPDATE, bytes(3)), Code.FRAME_SIZE_ERROR),
    "6.9.1 window beyond 2**31 - 1": (b"", raw(WINDOW_UPDATE, b"\x7f\xff\xff\xff"), Code.FLOW_CONTROL_ERROR),
    "6.9.1 more DATA than our window": (
        head(*REQUEST[:3], (":path", "/wait"), flags=END_HEADERS),
        raw(DATA, bytes(16384), stream=1) * 4,
        Code.FLOW_CONTROL_ERROR,
    ),
    "6.9.2 window of a stream raised beyond 2**31 - 1": (
        WAITING + raw(WINDOW_UPDATE, b"\x7f\xff\0\0", stream=1),
        setting(4, 2**31 - 1),
        Code.FLOW_CONTROL_ERROR,
    ),
    "6.10 CONTINUATION after END_HEADERS": (OPEN, raw(CONTINUATION, b"\x82", flags=4, stream=1), Code.PROTOCOL_ERROR),
    "6.10 CONTINUATION on stream 0": (b"", raw(CONTINUATION, b"\x82", flags=4), Code.PROTOCOL_ERROR),
    "8.1 trailers that do not end the stream": (OPEN, head(("x-trailer", "1"), flags=END_HEADERS), Code.PROTOCOL_ERROR),
    "8.1 pseudo-header in trailers": (OPEN, head((":path", "/")), Code.PROTOCOL_ERROR),
    "8.1 a request for trailers": (OPEN, head(*REQUEST), Code.PROTOCOL_ERROR),
    "8.1.1 body longer than content-length": (
        head(*REQUEST, ("content-length", "1"), flags=4),
        raw(DATA, b"ab", flags=1, stream=1),
        Code.PROTOCOL_ERROR,
    ),
    "8.1.1 two content-lengths": (
        head(*REQUEST, ("content-length", "1"), ("content-length", "2"), flags=4),
        raw(DATA, b"ab", flags=1, stream=1),
        Code.PROTOCOL_ERROR,
    ),
    "8.2 upper case": (b"", head(*REQUEST, ("X-Upper", "1")), Code.PROTOCOL_ERROR),
    "8.2.1 line break in a value": (b"", head(*REQUEST, ("x-a", "1\r\nx-b: 2")), Code.PROTOCOL_ERROR),
    "8.2.1 NUL in a value": (b"", head(*REQUEST, ("x-a", "1\0")), Code.PROTOCOL_ERROR),
    "8.2.1 blank in a name": (b"", head(*REQUEST, ("x a", "1")), Code.PROTOCOL_ERROR),
    "8.2.1 empty name": (b"", head(*REQUEST, ("", "1")), Code.PROTOCOL_ERROR),
    "8.2.2 connection": (b"", head(*REQUEST, ("connection", "close")), Code.PROTOCOL_ERROR),
    "8.2.2 transfer-encoding": (b"", head(*REQUEST, ("transfer-encoding", "chunked")), Code.PROTOCOL_ERROR),
    "8.2.2 te other than trailers": (b"", head(*REQUEST, ("te", "gzip")), Code.PROTOCOL_ERROR),
    "8.3 pseudo-header behind others": (b"", head(*REQUEST[:3], ("x-a", "1"), REQUEST[3]), Code.PROTOCOL_ERROR),
    "8.3 unknown pseudo-header": (b"", head(*REQUEST, (":more", "1")), Code.PROTOCOL_ERROR),
    "8.3 pseudo-header of a response": (b"", head(*REQUEST, (":status", "200")), Code.PROTOCOL_ERROR),
    "8.3.1 no method": (b"", head(*REQUEST[1:]), Code.PROTOCOL_ERROR),
    "8.3.1 no scheme": (b"", head(REQUEST[0], *REQUEST[2:]), Code.PROTOCOL_ERROR),
    "8.3.1 no path": (b"", head(*REQUEST[:3]), Code.PROTOCOL_ERROR),
    "8.3.1 empty path": (b"", head(*REQUEST[:3], (":path", "")), Code.PROTOCOL_ERROR),
    "8.3.1 two methods": (b"", head(REQUEST[0], *REQUEST), Code.PROTOCOL_ERROR),
    "8.3.1 host that differs from authority": (b"", head(*REQUEST, ("host", "other")), Code.PROTOCOL_ERROR),
}


@pytest.mark.parametrize("before, sent, code", CONNECTION_ERRORS.values(), ids=CONNECTION_ERRORS.keys())
async def test_frames_that_break_the_rfc_cause_a_connection_error(autojump_clock, front, h2_client, before, sent, code):
    the_front = front(handle)
    client = h2_client(the_front.connect())
    if before is None:
        await client.stream.send_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    else:
        await client.open()
        await client.stream.send_all(before)
    await the_front.settle()
    await client.stream.send_all(sent)
    await client.until_eof()
    assert [Code(goaway.error_code) for goaway in client.goaways] == [code]
    assert the_front.server.counters().connections_failed_total == 0


STREAM_ERRORS = {
    "5.1 DATA after END_STREAM": (WAITING, raw(DATA, b"x", stream=1), Code.STREAM_CLOSED),
    "5.1 HEADERS after END_STREAM": (WAITING, head(), Code.STREAM_CLOSED),
    "5.1 DATA after both ends": (head(), raw(DATA, b"x", stream=1), Code.STREAM_CLOSED),
    "5.1 DATA after RST_STREAM": (
        OPEN + raw(RST_STREAM, bytes(4), stream=1),
        raw(DATA, b"x", stream=1),
        Code.STREAM_CLOSED,
    ),
    "5.1 HEADERS after RST_STREAM": (OPEN + raw(RST_STREAM, bytes(4), stream=1), head(), Code.STREAM_CLOSED),
    "6.9.1 window of a stream beyond 2**31 - 1": (
        WAITING,
        raw(WINDOW_UPDATE, b"\x7f\xff\xff\xff", stream=1),
        Code.FLOW_CONTROL_ERROR,
    ),
    "8.1.1 no body, content-length 1": (b"", head(*REQUEST, ("content-length", "1")), Code.PROTOCOL_ERROR),
}


@pytest.mark.parametrize("before, sent, code", STREAM_ERRORS.values(), ids=STREAM_ERRORS.keys())
async def test_frames_that_break_one_stream_cause_a_stream_error(autojump_clock, front, h2_client, before, sent, code):
    the_front = front(handle)
    client = h2_client(the_front.connect())
    await client.open()
    await client.stream.send_all(before)
    await the_front.settle()
    await client.stream.send_all(sent)
    await client.until(lambda: any(isinstance(frame, frames.RstStreamFrame) for frame in client.frames))
    [reset] = [frame for frame in client.frames if isinstance(frame, frames.RstStreamFrame)]
    assert (reset.stream_id, Code(reset.error_code)) == (1, code)
    client._next_id = 99
    assert (await client.response(await client.request(body=b"next"))).body == b"got next"
    assert the_front.server.counters().exchanges_open == 0


HARMLESS = {
    "4.1 unknown frame": raw(0xFA, b"x", flags=0xFF, stream=1),
    "4.1 undefined flags": raw(PING, b"12345678", flags=0xFE),
    "4.1 reserved bit": raw(PING, b"12345678", stream=2**31),
    "5.1 WINDOW_UPDATE after both ends": head() + raw(WINDOW_UPDATE, b"\0\0\0\1", stream=1),
    "5.1 RST_STREAM after both ends": head() + raw(RST_STREAM, bytes(4), stream=1),
    "5.1 PRIORITY on an idle stream": raw(PRIORITY, bytes(5), stream=7),
    "5.3 stream that depends on itself": raw(PRIORITY, b"\0\0\0\7\0", stream=7),
    "6.5.2 unknown setting": setting(0xFA, 1),
    "6.5.2 MAX_FRAME_SIZE of 2**24 - 1": setting(5, 2**24 - 1),
    "6.5.2 HEADER_TABLE_SIZE of 0": setting(1, 0),
    "6.7 acknowledgement of no PING": raw(PING, bytes(8), flags=ACK),
    "8.2.2 te: trailers": head(*REQUEST, ("te", "trailers")),
    "8.3.1 OPTIONS *": head((":method", "OPTIONS"), *REQUEST[1:3], (":path", "*")),
    "8.2.3 cookie in crumbs": head(*REQUEST, ("cookie", "a=1"), ("cookie", "b=2")),
}


@pytest.mark.parametrize("sent", HARMLESS.values(), ids=HARMLESS.keys())
async def test_unusual_but_valid_frames_cause_no_error(autojump_clock, front, h2_client, sent):
    the_front = front(handle)
    client = h2_client(the_front.connect())
    await client.open()
    await client.stream.send_all(sent)
    await the_front.settle()
    client._next_id = 99
    assert (await client.response(await client.request(body=b"next"))).body == b"got next"


async def test_settings_and_pings_are_acknowledged_in_order(autojump_clock, front, h2_client):
    """RFC 9113, 6.5.3 and 6.7."""
    client = h2_client(front(handle).connect())
    await client.open()
    await client.stream.send_all(raw(PING, b"one     ") + setting(4, 1000) + raw(PING, b"two     "))
    acknowledged = []
    while len(acknowledged) < 4:
        await client.receive()
        acknowledged = [frame for frame in client.frames if "ACK" in frame.flags]
    assert [getattr(frame, "opaque_data", None) for frame in acknowledged] == [None, b"one     ", None, b"two     "]
    assert isinstance(client.frames[0], frames.SettingsFrame)  # The server's preface comes first (RFC 9113, 3.4).


async def test_negative_window_must_open_before_data_is_sent(autojump_clock, front):
    """RFC 9113, 6.9.2."""

    async def handler(exchange):
        await exchange.respond(200, [], bytes(1000))

    the_front = front(handler)
    client = await the_front.h2(INITIAL_WINDOW_SIZE=100)
    stream_id = await client.request()
    await client.until(lambda: len(client.responses[stream_id].body) == 100)
    await client.stream.send_all(setting(4, 20))  # After this setting, the window is 80 bytes below zero.
    await client.credit(stream_id, 80)
    await the_front.settle()
    await client.credit(stream_id, 5)
    await client.until(lambda: len(client.responses[stream_id].body) > 100)
    assert len(client.responses[stream_id].body) == 105


async def test_frames_are_no_larger_than_the_client_allows(autojump_clock, front):
    """RFC 9113, 4.2 and 6.5.2."""

    async def handler(exchange):
        await exchange.respond(200, [], bytes(50_000))

    client = await front(handler).h2()
    await client.response(await client.request())
    assert max(len(frame.data) for frame in client.frames if isinstance(frame, frames.DataFrame)) == 16384
