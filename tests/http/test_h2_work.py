"""Tests limits on the work that an HTTP/2 client can cause: settings, large heads, and frames that cost CPU time."""

from __future__ import annotations

import logging
import random

import h2.config
import hpack
import hyperframe.frame as frames
import pytest
import trio
from h2.errors import ErrorCodes
from hpack.huffman_table import decode_huffman

from trioserve.http.exchange import ClockAndIds
from trioserve.http.http2.frames import PIECE_WORK_US_MAX, SETTINGS, SETTINGS_WORK_US, FrameGate, frame
from trioserve.http.http2.protocol import SIZE_UPDATES_MAX, FieldDecoder
from trioserve.http.limits import FrontendLimits
from trioserve.http.server import FrontendServer
from trioserve.trio_tools.http2_client import HEADER_TABLE_BYTES_MAX, known_settings

HEAD = [(b":method", b"GET"), (b":scheme", b"http"), (b":authority", b"test"), (b":path", b"/")]


def settings_payload(values) -> bytes:
    return b"".join(number.to_bytes(2, "big") + value.to_bytes(4, "big") for number, value in values)


async def respond_ok(exchange):
    await exchange.respond(200, [], b"ok")


# --- settings ---


def test_known_http2_settings_are_kept_once_with_their_last_value():
    every = [(number, 1) for number in range(65536)]
    assert len(known_settings(settings_payload(every))) == 7 * 6
    assert known_settings(settings_payload([(3, 1), (9, 5), (3, 2)])) == settings_payload([(3, 2)])
    assert known_settings(settings_payload([(0x10, 1)])) == b""
    assert known_settings(b"12345") == b"12345", "h2 reports the wrong length"


def test_hpack_table_size_is_limited_to_the_default():
    assert known_settings(settings_payload([(1, 2**32 - 1)])) == settings_payload([(1, HEADER_TABLE_BYTES_MAX)])
    assert known_settings(settings_payload([(1, 100)])) == settings_payload([(1, 100)])


async def test_unknown_http2_settings_are_dropped(autojump_clock, front):
    the_front = front(respond_ok)
    client = await the_front.h2()
    for start in range(7, 65536, 2730):
        payload = settings_payload((number, 1) for number in range(start, min(start + 2730, 65536)))
        await client.stream.send_all(frame(SETTINGS, 0, 0, payload))
    assert (await client.response(await client.request())).body == b"ok"
    (connection,) = the_front.server._connections
    assert len(connection._protocol.remote_settings) <= 7
    assert sum(isinstance(each, frames.SettingsFrame) and "ACK" in each.flags for each in client.frames) >= 25


async def test_invalid_http2_settings_end_the_connection(autojump_clock, front):
    client = await front(respond_ok).h2()
    await client.stream.send_all(frame(SETTINGS, 0, 0, settings_payload([(0x7777, 1), (4, 2**31)])))
    await client.until_eof()
    assert [goaway.error_code for goaway in client.goaways] == [ErrorCodes.FLOW_CONTROL_ERROR]


# --- pauses for other tasks, and CPU time ---


def test_frames_of_one_read_are_split_into_pieces_of_a_few_milliseconds():
    limits = FrontendLimits()
    empty = frame(SETTINGS, 0, 0, b"")
    gate = FrameGate(limits, now=0.0)
    pieces = list(gate.pieces(empty * 1820, now=0.0))
    assert b"".join(pieces) == empty * 1820
    at_most = PIECE_WORK_US_MAX // SETTINGS_WORK_US + 1
    assert max(map(len, pieces)) <= at_most * len(empty)


def test_each_large_head_is_parsed_in_a_piece_of_its_own():
    encoder = hpack.Encoder()
    block = encoder.encode([*HEAD, *((f"x-{n}".encode(), b"a" * 700) for n in range(18))], huffman=False)
    assert 10_000 < len(block) < 16_384
    head = frame(1, 0x5, 1, block)
    gate = FrameGate(FrontendLimits(), now=0.0)
    assert list(gate.pieces(frame(SETTINGS, 0, 0, b"") + head * 3, now=0.0))[1:] == [head, head]


async def test_other_tasks_run_while_the_frames_of_one_read_are_processed(autojump_clock, front, nursery):
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    client = await front(respond_ok).h2()
    ping = frames.PingFrame(0, opaque_data=b"12345678")
    await client.send(ping)
    await client.until(lambda: any(isinstance(each, frames.PingFrame) for each in client.frames))
    client.frames.clear()
    nursery.start_soon(other)
    await client.stream.send_all(frame(SETTINGS, 0, 0, b"") * 1800 + frames.PingFrame(0).serialize())
    turns = 0
    await client.until(lambda: any(isinstance(each, frames.PingFrame) for each in client.frames))
    assert turns >= 1800 * SETTINGS_WORK_US // PIECE_WORK_US_MAX // 2
    nursery.cancel_scope.cancel()


class SlowCpu:
    """A fake CPU clock. It advances by `piece_seconds` for each piece of frames."""

    def __init__(self, piece_seconds: float) -> None:
        self.now = 0.0
        self.piece_seconds = piece_seconds

    def __call__(self) -> float:
        self.now += self.piece_seconds
        return self.now


async def test_frames_that_cost_too_much_cpu_time_end_the_connection(autojump_clock, front):
    the_front = front(respond_ok)
    the_front.server = FrontendServer(respond_ok, clock_and_ids=ClockAndIds(cpu_clock=SlowCpu(0.05)))
    client = await the_front.h2()
    for _ in range(20):
        await client.send(frames.PingFrame(0))
        await the_front.settle()
        if the_front.connection_count == 0:
            break
    await client.until_eof()
    assert [goaway.error_code for goaway in client.goaways] == [ErrorCodes.ENHANCE_YOUR_CALM]
    assert the_front.server.counters().connections_refused_total["frame_work"] == 1


async def test_rare_expensive_frames_and_requests_do_not_end_the_connection(autojump_clock, front):
    the_front = front(respond_ok)
    cpu = SlowCpu(0.05)
    the_front.server = FrontendServer(respond_ok, clock_and_ids=ClockAndIds(cpu_clock=cpu))
    client = await the_front.h2()
    for _ in range(50):
        await client.send(frames.PingFrame(0))
        await trio.sleep(1.1)
    cpu.piece_seconds = 0.0009  # This is a little less than REQUEST_CPU_SECONDS.
    for _ in range(2000):
        assert (await client.response(await client.request())).body == b"ok"
    await client.stream.aclose()


async def test_body_of_tiny_frames_is_held_in_few_pieces(autojump_clock, front, watched):
    the_front = front(watched())
    client = await the_front.h2()
    stream_id = await client.request(end=False)
    for _ in range(1000):
        await client.data(stream_id, b"x")
        await client.data(stream_id, b"")
    await the_front.settle()
    (connection,) = the_front.server._connections
    arrived = connection._streams[stream_id]._arrived
    assert len(arrived) == 1
    assert arrived[0] == (b"x" * 1000, 1000)
    await client.stream.aclose()


# --- heads ---


def decoder() -> FieldDecoder:
    config = h2.config.H2Configuration(client_side=False, header_encoding=None)
    return FieldDecoder(config, list_bytes_max=65536, fields_max=256)


@pytest.mark.parametrize("field", [b"\x90", b"\x0f\x01\x00", b"\x00\x01a\x00", b"\x40\x01a\x00"])
def test_head_decoding_stops_at_the_limit_of_fields(field):
    assert len(decoder().decode(field * 256)) == 256
    with pytest.raises(hpack.OversizedHeaderListError, match="at most 256"):
        decoder().decode(field * 257)


async def test_request_head_with_too_many_fields_ends_the_http2_connection(autojump_clock, front):
    the_front = front(respond_ok, fields_max=10)
    client = await the_front.h2()
    await client.request(headers=tuple((f"x-{number}", "") for number in range(10)))
    await client.until_eof()
    assert [goaway.error_code for goaway in client.goaways] == [ErrorCodes.ENHANCE_YOUR_CALM]
    assert the_front.server.counters().connections_refused_total["head_too_large"] == 1


@pytest.mark.parametrize("update", [b"\x20", b"\x3f\xe1\x1f"])
def test_table_size_updates_in_one_head_are_bounded(update):
    block = b"\x82\x86\x84\x41\x01x"
    assert len(decoder().decode(update * SIZE_UPDATES_MAX + block)) == 4
    with pytest.raises(hpack.HPACKDecodingError, match="too often"):
        decoder().decode(update * (SIZE_UPDATES_MAX + 1) + block)


def test_hpack_integer_without_end_is_refused():
    with pytest.raises(hpack.HPACKDecodingError, match="too many bytes"):
        decoder().decode(b"\x0f" + b"\x80" * 60000 + b"\x00")


@pytest.mark.parametrize("block", [b"\x0f", b"\x40", b"\x40\x05ab", b"\x40\x01a", b"\x40\x01a\x7f", b"\x3f", b"\xff"])
def test_truncated_header_block_is_refused(block):
    with pytest.raises(hpack.HPACKDecodingError):
        decoder().decode(block)


@pytest.mark.parametrize("seed", range(20))
def test_huffman_decoding_agrees_with_hpack(seed):
    chosen = random.Random(seed)
    coder = hpack.Encoder().huffman_coder
    for _ in range(200):
        text = coder.encode(chosen.randbytes(chosen.randrange(12)))
        if chosen.random() < 0.5:
            text = chosen.randbytes(chosen.randrange(12))
        block = b"\x00\x01a" + bytes((0x80 | len(text),)) + text
        try:
            expected = decode_huffman(text)
        except hpack.HPACKDecodingError:
            with pytest.raises(hpack.HPACKDecodingError):
                decoder().decode(block)
        else:
            assert decoder().decode(block) == [(b"a", expected)]


async def test_log_line_of_a_broken_head_is_short(autojump_clock, front, caplog):
    client = await front(respond_ok).h2()
    with caplog.at_level(logging.INFO):
        fields = [*HEAD, (b"X" * 20000, b"a")]
        block = hpack.Encoder().encode(fields, huffman=False)
        await client.send(frames.HeadersFrame(1, data=block[:16000]))
        await client.send(frames.ContinuationFrame(1, data=block[16000:], flags=["END_HEADERS"]))
        await client.until_eof()
    lines = [record.getMessage() for record in caplog.records if "connection ended" in record.getMessage()]
    assert len(lines) == 1
    assert len(lines[0]) < 400
