"""Tests the parser of HTTP/1.1 responses against h11. The pieces of a response may end anywhere."""

from __future__ import annotations

import random

import h11
import pytest

from trioserve.proxy.response_reader import (
    CHUNK_LINE_BYTES_MAX,
    HEAD_BYTES_MAX,
    INTERIM_RESPONSES_MAX,
    TRAILERS_MAX,
    BadResponse,
    ResponseReader,
)

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def read(data: bytes, *, cuts: tuple[int, ...] = (), closes: bool = False) -> tuple[int, dict[str, str], bytes, bool]:
    """Parse a response.

    Returns:
        Status, headers, body, and True if the connection can be reused.

    Raises:
        BadResponse: The bytes are invalid.
        AssertionError: The response is not complete.
    """
    reader = ResponseReader()
    reader.begin()
    head, body, has_ended = None, b"", False
    pieces = [data[begin:end] for begin, end in zip((0, *cuts), (*cuts, len(data)), strict=True) if begin != end]
    for piece in [*pieces, *([b""] if closes else [])]:
        reader.feed(piece)
        head = head or reader.next_head()
        while head is not None and not has_ended and (more := reader.next_piece()) is not None:
            body += more
            has_ended = not more
            assert not reader.is_drained or reader.next_piece() is None
    assert head is not None
    assert has_ended
    return head.status, dict(head.headers), body, reader.is_reusable


def read_with_h11(data: bytes, *, closes: bool) -> tuple[int, dict[str, str], bytes]:
    http = h11.Connection(h11.CLIENT)
    http.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
    http.send(h11.EndOfMessage())
    http.receive_data(data)
    if closes:
        http.receive_data(b"")
    head, body = None, b""
    while not isinstance(event := http.next_event(), h11.EndOfMessage):
        if isinstance(event, h11.Response):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        else:
            assert isinstance(event, h11.InformationalResponse), event
    assert head is not None
    return head.status_code, {name.decode(): value.decode("latin-1") for name, value in head.headers}, body


GOOD = {
    "length": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A:  b c \t\r\n\r\nhello", False),
    "no reason": (b"HTTP/1.1 404\r\ncontent-length: 0\r\n\r\n", False),
    "same length twice": (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\nab", False),
    "chunks": (CHUNKED + b"5\r\nhello\r\n1;a=b\r\n!\r\n00a \r\n0123456789\r\n0\r\n\r\n", False),
    "trailers": (CHUNKED + b"1\r\na\r\n0\r\nx-sum: 1\r\ny: z\r\n\r\n", False),
    "no body by status": (b"HTTP/1.1 204 No Content\r\n\r\n", False),
    "length without a body": (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n", False),
    "interim first": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nl: x\r\n\r\n" + CHUNKED + b"0\r\n\r\n",
        False,
    ),
    "until close": (b"HTTP/1.1 200 OK\r\nserver: old\r\n\r\nall of it", True),
    "until close, nothing": (b"HTTP/1.0 200 OK\r\n\r\n", True),
    "an old server": (b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\na", False),
    "no fields, high bytes": (b"HTTP/1.1 200 \xfcber\r\nx: \xe9\r\ncontent-length: 0\r\n\r\n", False),
}


@pytest.mark.parametrize("name", GOOD)
def test_response_in_pieces_is_parsed_like_h11_parses_it(name):
    data, closes = GOOD[name]
    expected = read_with_h11(data, closes=closes)
    assert read(data, closes=closes)[:3] == expected
    for cut in range(1, len(data)):
        assert read(data, cuts=(cut,), closes=closes)[:3] == expected
    assert read(data, cuts=tuple(range(1, len(data))), closes=closes)[:3] == expected


@pytest.mark.parametrize("seed", range(200))
def test_damaged_response_is_refused_or_parsed_like_h11_parses_it(seed):
    """This parser refuses more input than h11. It reads all other input in the same way as h11."""
    chance = random.Random(seed)
    data, closes = chance.choice(list(GOOD.values()))
    damaged = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(damaged))
        damaged[place : place + chance.randint(0, 2)] = chance.choice(
            [b"", b"\r\n", b"\n", b"\0", b" ", b":", b"0", b"9", b"f", b"Content-Length: 3\r\n", b"\x80"]
        )
    try:
        ours = read(bytes(damaged), closes=closes)[:3]
    except (BadResponse, AssertionError):
        return
    assert ours == read_with_h11(bytes(damaged), closes=closes)


@pytest.mark.parametrize(
    ("data", "goes_on"),
    [
        (GOOD["length"][0], True),
        (GOOD["chunks"][0], True),
        (GOOD["trailers"][0], True),
        (GOOD["no body by status"][0], True),
        (GOOD["an old server"][0], False),
        (b"HTTP/1.1 200 OK\r\nConnection: Keep-Alive, Close\r\ncontent-length: 0\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\nmore than was asked for", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", False),
    ],
)
def test_connection_can_be_reused_only_after_an_unambiguous_end(data, goes_on):
    assert read(data)[3] is goes_on


def test_responses_follow_each_other_on_one_connection():
    reader = ResponseReader()
    for text in (b"one", b"two"):
        reader.begin()
        reader.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n" + text)
        assert reader.next_head().status == 200
        assert (reader.next_piece(), reader.next_piece()) == (text, b"")
        assert reader.is_reusable


def test_events_that_arrive_together_are_read_as_one_piece():
    reader = ResponseReader()
    reader.begin()
    reader.feed(CHUNKED + b"1\r\na\r\n1\r\nb\r\n2\r\nc")
    reader.next_head()
    assert [reader.next_piece(), reader.next_piece()] == [b"abc", None]
    reader.feed(b"d\r\n0\r\n\r\n")
    assert [reader.next_piece(), reader.next_piece()] == [b"d", b""]


def test_response_reader_is_drained_after_a_whole_chunk_until_more_bytes_arrive():
    reader = ResponseReader()
    reader.begin()
    reader.feed(CHUNKED)
    reader.next_head()
    reader.feed(b"1\r\na\r\n")
    assert (reader.next_piece(), reader.is_drained, reader.next_piece()) == (b"a", True, None)
    reader.feed(b"1\r\nb\r\n0\r\n\r\n")
    assert (reader.is_drained, reader.next_piece(), reader.next_piece()) == (False, b"b", b"")
    assert not reader.is_drained


@pytest.mark.parametrize(
    ("data", "closes", "why"),
    [
        (b"", True, "no response arrived"),
        (b"HTTP/1.1 200 OK\r\n", True, "within the head"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhell", True, "a body of known length is missing"),
        (CHUNKED + b"5\r\nhell", True, "a chunk is missing"),
        (CHUNKED + b"5\r\nhello\r\n", True, "the line before a chunk is missing"),
        (CHUNKED + b"0\r\n", True, "the end after the last chunk is missing"),
        (CHUNKED + b"5\r\nhello!\r\n", False, "longer than its size says"),
        (CHUNKED + b"-5\r\nhello\r\n", False, "a chunk begins with"),
        (CHUNKED + b"0x5\r\nhello\r\n", False, "a chunk begins with"),
        (CHUNKED + b"f" * 16 + b"\r\n", False, "a chunk begins with"),
        (CHUNKED + b"1;" + b"a" * CHUNK_LINE_BYTES_MAX, False, "between chunks"),
        (b"ICY 200 OK\r\n\r\n", False, "begins with 'ICY 200 OK'"),
        (b"HTTP/2.0 200 OK\r\n\r\n", False, "begins with"),
        (b"HTTP/1.1 101 Switching\r\nupgrade: x\r\n\r\n", False, "did not ask for"),
        (b"HTTP/1.1 200 OK\r\nx: a\r\n b\r\n\r\n", False, "not a header field"),
        (b"HTTP/1.1 200 OK\r\nx : a\r\n\r\n", False, "not a header field"),
        (b"HTTP/1.1 200 OK\r\nx: a\nb: c\r\n\r\n", False, "not a header field"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", False, "not a number"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: +1\r\n\r\n", False, "not a number"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n", False, "allowed is chunked"),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n",
            False,
            "allowed is chunked",
        ),
        (b"HTTP/1.1 200 OK\r\nx: " + b"a" * HEAD_BYTES_MAX, False, "the head has more than"),
    ],
)
def test_invalid_or_incomplete_response_is_reported(data, closes, why):
    with pytest.raises(BadResponse, match=why):
        read(data, closes=closes)


@pytest.mark.parametrize(
    "before, repeated, count_max, behind",
    [
        (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n", INTERIM_RESPONSES_MAX, b"HTTP/1.1 204 No Content\r\n\r\n"),
        (CHUNKED + b"1\r\na\r\n0\r\n", b"a: b\r\n", TRAILERS_MAX, b"\r\n"),
    ],
    ids=["interim responses", "trailers"],
)
def test_interim_responses_and_trailers_are_limited_in_number(before, repeated, count_max, behind):
    assert read(before + repeated * count_max + behind)[0] in (200, 204)
    with pytest.raises(BadResponse, match=f"more than {count_max}"):
        read(before + repeated * (count_max + 1) + behind)
