"""Tests that readers need time linear in the number of bytes, even if a server or client sends tiny pieces."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from trioserve.api.form import FormPart, form_parts
from trioserve.contracts.errors import EndpointLost, InvalidRequest
from trioserve.http.http1.protocol import ChunkSizes
from trioserve.proxy.response_reader import BadResponse, ResponseReader
from trioserve.proxy.streams.client_events import BrokenEvents, EventLines, EventSplitter, LineSplitter
from trioserve.proxy.streams.continued_stream import ContinuedStream

SHORT, GROWTH = 10_000, 4
SECONDS_MIN = 0.15
GROWTH_MAX = 9.0  # In linear time the ratio is 4, and in quadratic time it is 16.


def growth(work: Callable[[int], object]) -> float:
    """Return by which factor the time grows for GROWTH times as many bytes. 0 if the time is too short to measure."""

    def seconds(size: int) -> float:
        began_at = time.process_time()
        work(size)
        return time.process_time() - began_at

    if seconds(SHORT * GROWTH) < SECONDS_MIN:
        return 0
    return min(seconds(SHORT * GROWTH) / max(seconds(SHORT), 1e-6) for _ in range(3))


def continued() -> ContinuedStream:
    stream = ContinuedStream(choice_count=1, bytes_max=1 << 20)
    stream.begin("{}")
    return stream


def chunked() -> ResponseReader:
    reader = ResponseReader()
    reader.begin()
    reader.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    assert reader.next_head()
    return reader


def read_chunks(reader: ResponseReader, piece: bytes) -> None:
    reader.feed(piece)
    reader.next_piece()


READERS = {
    "events of load": (lambda: EventLines(object), lambda reader, piece: list(reader.events(piece))),
    "events": (EventSplitter, lambda reader, piece: reader.feed(piece)),
    "continued events": (continued, lambda reader, piece: reader.feed(piece)),
    "lines": (LineSplitter, lambda reader, piece: reader.feed(piece)),
    "chunk sizes": (ChunkSizes, lambda reader, piece: reader.feed(piece)),
    "chunks": (chunked, read_chunks),
}
PIECES = (b"a", b"\r\n", b"1\r\nx\r\n", b"data: 1\n\n")


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("piece", PIECES)
def test_tiny_pieces_are_read_in_linear_time(name: str, piece: bytes) -> None:
    new_reader, feed = READERS[name]

    def work(size: int) -> None:
        reader = new_reader()
        with suppress(BadResponse, BrokenEvents, EndpointLost):
            for _ in range(size // len(piece)):
                feed(reader, piece)

    assert growth(work) < GROWTH_MAX


@pytest.mark.parametrize("unit", [b"--b\r\n", b"--b", b"\r\n", b"a", b'; name="', b"\r\n--b\r\nContent-Disposition: "])
def test_multipart_forms_are_parsed_in_linear_time(unit: bytes) -> None:
    def work(size: int) -> list[FormPart]:
        begin = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n'
        try:
            return list(form_parts(begin + unit * (size // len(unit)) + b"\r\n--b--\r\n", "b"))
        except InvalidRequest:
            return []

    assert growth(work) < GROWTH_MAX
