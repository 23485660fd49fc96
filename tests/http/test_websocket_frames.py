"""Tests of a websocket's frames against RFC 6455: lengths, fragments, control frames, UTF-8, close codes, and masks.

A case is a list of frames from the client, and the expected reaction of a server that echoes messages.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from trioserve.http.counters import ConnectionRefusal
from trioserve.testing.memory_client import memory_connection
from trioserve.testing.memory_server import MemoryWebSocket

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
KEY = b"\x12\x34\x56\x78"


def frame(
    kind: int,
    payload: bytes = b"",
    *,
    last: bool = True,
    reserved: int = 0,
    masked: bool = True,
    length_bytes: int | None = None,
) -> bytes:
    """Encode a frame. The extended length has `length_bytes` bytes (0, 2 or 8), or the fewest possible if None."""
    size = len(payload)
    if length_bytes is None:
        length_bytes = 0 if size < 126 else 2 if size < 65536 else 8
    short = {0: size, 2: 126, 8: 127}[length_bytes]
    head = bytes(((0x80 if last else 0) | reserved << 4 | kind, (0x80 if masked else 0) | short))
    head += {0: b"", 2: struct.pack(">H", size & 0xFFFF), 8: struct.pack(">Q", size)}[length_bytes]
    if not masked:
        return head + payload
    return head + KEY + bytes(byte ^ KEY[index % 4] for index, byte in enumerate(payload))


def close(code: int | None = None, reason: bytes = b"") -> bytes:
    return frame(CLOSE, b"" if code is None else struct.pack(">H", code) + reason)


def plain(kind: int, payload: bytes = b"") -> bytes:
    return frame(kind, payload, masked=False)


async def echo(exchange):
    websocket = await exchange.accept_websocket()
    while True:
        await websocket.send(await websocket.receive())


@pytest.fixture(params=[1, 2])
def http(request) -> int:
    return request.param


class Wire:
    """A client that sends raw frames, and collects the raw bytes of the server."""

    def __init__(self, websocket: MemoryWebSocket) -> None:
        self.websocket = websocket
        self.received = b""

    async def send(self, data: bytes, *, bytes_at_once: int | None = None) -> None:
        size = bytes_at_once or len(data)
        for start in range(0, len(data), size):
            await self.websocket.send_raw(data[start : start + size])

    async def until(self, expected: bytes) -> None:
        """Read until the server has sent exactly these bytes."""
        while len(self.received) < len(expected):
            piece = await self.websocket.receive_raw()
            assert piece, f"the server ended after {self.received!r}"
            self.received += piece
        assert self.received == expected

    async def close_code(self) -> int | None:
        """Read to the end. Return the code of the server's close frame, which must be its last frame."""
        while piece := await self.websocket.receive_raw():
            self.received += piece
        position, code = 0, None
        while position < len(self.received):
            assert code is None, "a frame follows the close frame"
            kind, size = self.received[position] & 0x0F, self.received[position + 1]
            assert size < 126
            payload = self.received[position + 2 : position + 2 + size]
            position += 2 + size
            if kind == CLOSE:
                code = int.from_bytes(payload[:2], "big") if payload else 0
        return code


@pytest.fixture
def wire(front, http):
    """Return a context manager that opens a websocket at an echo server with the given limits."""

    @asynccontextmanager
    async def connect(**limits) -> AsyncIterator[Wire]:
        the_front = front(echo, **limits)
        websocket = MemoryWebSocket(the_front.connect(memory_connection), http=http)
        await websocket.open("/")
        opened = Wire(websocket)
        opened.counters = the_front.server.counters
        try:
            yield opened
        finally:
            websocket.leave()
        await trio.testing.wait_all_tasks_blocked()
        counters = the_front.server.counters()
        assert (counters.websockets_open, counters.request_body_bytes_held) == (0, 0)

    return connect


SPLIT = "κόσμε🙂".encode()

ECHOED = {
    **{f"text of {size} bytes": (frame(TEXT, b"x" * size), plain(TEXT, b"x" * size)) for size in (0, 1, 125, 126, 127)},
    **{
        f"binary of {size} bytes": (frame(BINARY, b"\xfe" * size), plain(BINARY, b"\xfe" * size))
        for size in (0, 125, 126, 127, 128, 65535, 65536)
    },
    "two messages in one read": (frame(TEXT, b"a") + frame(BINARY, b"b"), plain(TEXT, b"a") + plain(BINARY, b"b")),
    "three fragments": (
        frame(TEXT, b"a", last=False) + frame(CONTINUATION, b"b", last=False) + frame(CONTINUATION, b"c"),
        plain(TEXT, b"abc"),
    ),
    "empty fragments": (
        frame(TEXT, last=False) + frame(CONTINUATION, last=False) + frame(CONTINUATION),
        plain(TEXT),
    ),
    "a ping between fragments": (
        frame(BINARY, b"a", last=False) + frame(PING, b"!") + frame(CONTINUATION, b"b"),
        plain(PONG, b"!") + plain(BINARY, b"ab"),
    ),
    "pings with and without payload": (
        frame(PING) + frame(PING, b"x" * 125),
        plain(PONG) + plain(PONG, b"x" * 125),
    ),
    "pongs that answer no ping": (frame(PONG) + frame(PONG, b"x") + frame(TEXT, b"a"), plain(TEXT, b"a")),
    "code points that fragments split": (
        b"".join(
            [
                frame(TEXT, SPLIT[:1], last=False),
                *[frame(CONTINUATION, SPLIT[i : i + 1], last=False) for i in range(1, len(SPLIT))],
                frame(CONTINUATION),
            ]
        ),
        plain(TEXT, SPLIT),
    ),
    "noncharacters": (frame(TEXT, "\ufffe\uffff\U0010ffff".encode()), plain(TEXT, "\ufffe\uffff\U0010ffff".encode())),
    "a null character": (frame(TEXT, b"\0"), plain(TEXT, b"\0")),
}


@pytest.mark.parametrize("bytes_at_once", [None, 1, 7])
@pytest.mark.parametrize("case", ECHOED)
async def test_valid_frames_are_echoed(autojump_clock, wire, case, bytes_at_once):
    sent, expected = ECHOED[case]
    if bytes_at_once is not None and len(sent) > 500:
        bytes_at_once = 4096
    async with wire() as client, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: client.send(sent, bytes_at_once=bytes_at_once))
        await client.until(expected)


BROKEN = {
    **{f"reserved bits {bits}": (frame(TEXT, b"a", reserved=bits), 1002) for bits in range(1, 8)},
    "a reserved bit of a ping": (frame(PING, reserved=4), 1002),
    **{f"reserved opcode {kind}": (frame(kind), 1002) for kind in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15)},
    "no mask": (plain(TEXT, b"a"), 1002),
    "a ping without a mask": (plain(PING), 1002),
    "a fragmented ping": (frame(PING, last=False), 1002),
    "a fragmented close": (frame(CLOSE, last=False), 1002),
    "a ping of 126 bytes": (frame(PING, bytes(126)), 1002),
    "a pong of 126 bytes": (frame(PONG, bytes(126)), 1002),
    "a close of 126 bytes": (frame(CLOSE, b"\x03\xe8" + b"x" * 124), 1002),
    "a continuation without a message": (frame(CONTINUATION, b"a"), 1002),
    "a continuation after a whole message": (frame(TEXT) + frame(CONTINUATION), 1002),
    "a message within a message": (frame(TEXT, b"a", last=False) + frame(TEXT, b"b"), 1002),
    "a binary message within a text": (frame(TEXT, b"a", last=False) + frame(BINARY, b"b"), 1002),
    "two bytes for a short length": (frame(TEXT, b"a", length_bytes=2), 1002),
    "eight bytes for a short length": (frame(TEXT, b"a" * 200, length_bytes=8), 1002),
    "a length with the highest bit": (b"\x82\xff" + b"\x80" + bytes(7) + KEY, 1002),
    "a close of one byte": (frame(CLOSE, b"\x03"), 1002),
    "a close reason that is no UTF-8": (close(1000, b"\xff"), 1007),
    **{
        f"text {text.hex()}": (frame(TEXT, text), 1007)
        for text in (
            b"\xff",
            b"\xc0\xaf",
            b"\xe0\x80\x80",
            b"\xed\xa0\x80",
            b"\xf4\x90\x80\x80",
            b"\xf8\x88\x80\x80\x80",
        )
    },
    "text that ends within a code point": (frame(TEXT, "€".encode()[:2]), 1007),
    "text that ends within a code point of a fragment": (
        frame(TEXT, "€".encode()[:1], last=False) + frame(CONTINUATION, "€".encode()[1:2]),
        1007,
    ),
    # No valid code point begins with these bytes, so the server need not wait for the rest of the message.
    "text that is broken before its end": (frame(TEXT, b"a\xf4\x90", last=False), 1007),
    "text that is broken within a frame": (frame(TEXT, b"a\xff" + bytes(100))[:20], 1007),
}


@pytest.mark.parametrize("bytes_at_once", [None, 1])
@pytest.mark.parametrize("case", BROKEN)
async def test_malformed_frames_end_the_websocket(autojump_clock, wire, case, bytes_at_once):
    sent, code = BROKEN[case]
    async with wire() as client:
        await client.send(sent, bytes_at_once=bytes_at_once)
        assert await client.close_code() == code
        assert client.counters().connections_refused_total[ConnectionRefusal.MALFORMED] == 1


@pytest.mark.parametrize(
    "code", [1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 3000, 3999, 4000, 4999]
)
async def test_valid_close_codes_are_returned(autojump_clock, wire, code):
    async with wire() as client:
        await client.send(close(code, b"reason") + frame(TEXT, b"after the close"))
        assert await client.close_code() == code


async def test_close_without_a_code_gets_a_close_without_a_code(autojump_clock, wire):
    async with wire() as client:
        await client.send(close())
        assert await client.close_code() == 0
        assert client.received == plain(CLOSE)


@pytest.mark.parametrize("code", [0, 999, 1004, 1005, 1006, 1015, 1016, 1100, 2000, 2999, 5000, 65535])
async def test_invalid_close_codes_are_errors_of_the_protocol(autojump_clock, wire, code):
    async with wire() as client:
        await client.send(close(code))
        assert await client.close_code() == 1002


BOUNDS = {
    "a message of one frame": (
        {"websocket_message_bytes_max": 1000},
        frame(BINARY, bytes(1001)),
        1009,
        ConnectionRefusal.MESSAGE_TOO_LARGE,
    ),
    "a message that has not ended": (
        {"websocket_message_bytes_max": 1000},
        frame(TEXT, b"x" * 600, last=False) + frame(CONTINUATION, b"x" * 600, last=False),
        1009,
        ConnectionRefusal.MESSAGE_TOO_LARGE,
    ),
    "a text counted in bytes": (
        {"websocket_message_bytes_max": 1000},
        frame(TEXT, "€".encode() * 334),
        1009,
        ConnectionRefusal.MESSAGE_TOO_LARGE,
    ),
    "fragments": (
        {"websocket_fragments_max": 5},
        frame(TEXT, b"x", last=False) + frame(CONTINUATION, b"x", last=False) * 5,
        1008,
        ConnectionRefusal.FRAGMENTS,
    ),
    "pings": (
        {"websocket_control_frames_burst_max": 10},
        frame(PING) * 11,
        1008,
        ConnectionRefusal.CONTROL_FRAMES,
    ),
    "pongs": (
        {"websocket_control_frames_burst_max": 10},
        frame(PONG) * 11,
        1008,
        ConnectionRefusal.CONTROL_FRAMES,
    ),
    "empty fragments": (
        {"websocket_control_frames_burst_max": 10},
        frame(TEXT, last=False) + frame(CONTINUATION, last=False) * 10,
        1008,
        ConnectionRefusal.CONTROL_FRAMES,
    ),
    "bytes of all clients": (
        {"bodies_bytes_max": 1000},
        frame(BINARY, bytes(1001)),
        1013,
        ConnectionRefusal.BODIES_FULL,
    ),
}


@pytest.mark.parametrize("case", BOUNDS)
async def test_client_beyond_a_limit_loses_its_websocket(autojump_clock, wire, case):
    limits, sent, code, refusal = BOUNDS[case]
    async with wire(**limits) as client:
        await client.send(sent)
        assert await client.close_code() == code
        refused = client.counters().connections_refused_total
        assert {reason for reason, count in refused.items() if count} == {refusal}


async def test_messages_at_the_limits_are_accepted(autojump_clock, wire):
    async with wire(websocket_message_bytes_max=1000, websocket_fragments_max=5) as client:
        sent = frame(TEXT, b"x" * 200, last=False) + frame(CONTINUATION, b"x" * 200, last=False) * 3
        await client.send(sent + frame(CONTINUATION, b"x" * 200))
        await client.until(plain(TEXT, b"x" * 1000))


async def test_client_may_send_a_message_of_any_number_ahead_only_within_the_bytes(autojump_clock, front, http):
    async def handler(exchange):
        await exchange.accept_websocket()
        await trio.sleep_forever()

    the_front = front(handler, websocket_unread_bytes_max=3000)
    websocket = MemoryWebSocket(the_front.connect(memory_connection), http=http)
    await websocket.open("/")
    await websocket.send_raw(frame(BINARY, bytes(5000)))  # A single message may always wait.
    await trio.testing.wait_all_tasks_blocked()
    assert the_front.server.counters().request_body_bytes_held == 5000
    await websocket.send_raw(frame(BINARY, b"one more"))
    assert (await websocket.closed()).code == 1008
    counters = the_front.server.counters()
    assert counters.connections_refused_total[ConnectionRefusal.SENT_AHEAD] == 1
    assert counters.request_body_bytes_held == 0
    websocket.leave()


async def test_websocket_is_closed_if_a_message_arrives_below_the_minimum_rate(autojump_clock, wire):
    async with wire(body_wait_seconds_max=30, websocket_idle_seconds_max=10_000) as client:
        began_at = trio.current_time()
        await client.send(frame(TEXT, b"x" * 1000)[:100])
        for _ in range(5):  # A byte now and then does not help.
            await trio.sleep(5)
            await client.send(b"x")
        assert await client.close_code() == 1008
        assert trio.current_time() - began_at == pytest.approx(30, abs=0.3)
        assert client.counters().connections_refused_total[ConnectionRefusal.BODY_TIMEOUT] == 1


async def test_other_tasks_run_while_many_small_frames_are_parsed(autojump_clock, wire):
    async with wire() as client:
        passes = 0

        async def count():
            nonlocal passes
            while True:
                await trio.lowlevel.checkpoint()
                passes += 1

        async with trio.open_nursery() as nursery:
            sent = frame(TEXT, b"x") * 2000
            nursery.start_soon(count)
            nursery.start_soon(client.send, sent)
            await client.until(plain(TEXT, b"x") * 2000)
            nursery.cancel_scope.cancel()
        assert passes >= 2000 // 64  # The parser lets other tasks run after each 64 frames.
