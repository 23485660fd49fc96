"""Tests connections by fuzzing: some bytes of valid conversations are changed, removed, doubled or split.

Each connection must end, release all resources, and cause no fault of the server.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import hpack
import hyperframe.frame as frames
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, memory_stream_pair

from trioserve.http.limits import FrontendLimits
from trioserve.http.server import FrontendServer

LIMITS = FrontendLimits(streams_max=4, head_bytes_max=2048, body_bytes_max=4096, control_frames_burst_max=50)


def http_2() -> bytes:
    encoder = hpack.Encoder()
    head = [(":method", "POST"), (":scheme", "http"), (":authority", "test"), (":path", "/echo")]
    sent: list[frames.Frame] = [frames.SettingsFrame(0), frames.PingFrame(0, opaque_data=b"12345678")]
    for stream_id in (1, 3, 5):
        fields = [*head, ("content-length", "6"), ("x-number", str(stream_id))]
        sent += [
            frames.HeadersFrame(stream_id, data=encoder.encode(fields), flags=["END_HEADERS"]),
            frames.DataFrame(stream_id, data=b"abc"),
            frames.WindowUpdateFrame(stream_id, window_increment=100),
            frames.DataFrame(stream_id, data=b"def", flags=["END_STREAM"]),
        ]
    block = encoder.encode([*head, ("x-long", "a" * 300)])
    sent += [
        frames.HeadersFrame(7, data=block[:20], flags=["END_STREAM"]),
        frames.ContinuationFrame(7, data=block[20:], flags=["END_HEADERS"]),
        frames.RstStreamFrame(5, error_code=8),
        frames.HeadersFrame(9, data=encoder.encode([*head[:3], (":path", "/early")]), flags=["END_HEADERS"]),
        frames.DataFrame(9, data=b"a" * 200),
        frames.DataFrame(9, data=b"b" * 200, flags=["END_STREAM"]),
        frames.PriorityFrame(11, depends_on=0),
        frames.GoAwayFrame(0, last_stream_id=0),
    ]
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"".join(frame.serialize() for frame in sent)


HTTP_1 = (
    b"POST /echo HTTP/1.1\r\nhost: test\r\ncontent-length: 6\r\n\r\nabcdef"
    b"GET /a%20b?c=d HTTP/1.1\r\nhost: test\r\naccept: */*\r\n\r\n"
    b"POST /echo HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx-trailer: 1\r\n\r\n"
    b"POST /echo HTTP/1.1\r\nhost: test\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\nx"
)
CONVERSATIONS = {"HTTP/1.1": HTTP_1, "HTTP/2": http_2()}

POSITION = st.floats(0, 1, exclude_max=True)
CHANGES: st.SearchStrategy[Callable[[bytearray], None]] = st.one_of(
    st.tuples(POSITION, st.binary(min_size=1, max_size=4)).map(lambda c: lambda data: _overwrite(data, *c)),
    st.tuples(POSITION, st.binary(min_size=1, max_size=20)).map(lambda c: lambda data: _insert(data, *c)),
    st.tuples(POSITION, st.integers(1, 40)).map(lambda c: lambda data: _remove(data, *c)),
    st.tuples(POSITION, st.integers(1, 200)).map(lambda c: lambda data: _double(data, *c)),
)


def _overwrite(data: bytearray, where: float, new: bytes) -> None:
    start = int(where * len(data))
    data[start : start + len(new)] = new


def _insert(data: bytearray, where: float, new: bytes) -> None:
    start = int(where * len(data))
    data[start:start] = new


def _remove(data: bytearray, where: float, count: int) -> None:
    start = int(where * len(data))
    del data[start : start + count]


def _double(data: bytearray, where: float, count: int) -> None:
    start = int(where * len(data))
    data[start:start] = data[start : start + count]


async def handler(exchange) -> None:
    """Stream the request body back. Answer some requests without reading the body."""
    if exchange.path == "/early":
        await exchange.respond(200, [], b"enough")
        return
    body = await exchange.body() if exchange.method == "POST" else b"nothing"
    await exchange.start(200, [("x-path", repr(exchange.path))])
    for byte in body[:20]:
        await exchange.send(bytes([byte]))
    await exchange.finish()


@pytest.mark.slow
@pytest.mark.parametrize("conversation", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
@settings(max_examples=150, deadline=None)
@given(changes=st.lists(CHANGES, max_size=4), cuts=st.lists(POSITION, max_size=4), hangs_up=st.booleans())
def test_connections_with_damaged_bytes_end_without_a_fault_of_the_server(conversation, changes, cuts, hangs_up):
    data = bytearray(conversation)
    for change in changes:
        if data:
            change(data)
    places = sorted({0, len(data), *(int(cut * len(data)) for cut in cuts)})
    pieces = [bytes(data[start:end]) for start, end in itertools.pairwise(places)]
    server = FrontendServer(handler, limits=LIMITS)

    async def talk() -> None:
        ours, theirs = memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.serve_connection, theirs)
            try:
                for piece in pieces:
                    await ours.send_all(piece)
                    await trio.sleep(0.001)
                if hangs_up:
                    await ours.aclose()
                # If the client keeps the connection open, sends nothing, and reads everything, the server's timeouts
                # must end the connection.
                while await ours.receive_some():
                    pass
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            await ours.aclose()

    trio.run(talk, clock=MockClock(autojump_threshold=0))
    counters = server.counters()
    assert (counters.connections_open, counters.exchanges_open, counters.request_body_bytes_held) == (0, 0, 0)
    assert (counters.connections_failed_total, counters.exchanges_failed_total) == (0, 0)
