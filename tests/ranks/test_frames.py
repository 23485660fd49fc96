"""Tests of framing: messages on a byte stream."""

from __future__ import annotations

import pytest

from trioserve.ranks.messages import FrameReader, framed


@pytest.mark.parametrize("piece_bytes", [1, 3, 1000])
def test_messages_are_decoded_for_any_division_of_the_byte_stream(piece_bytes: int) -> None:
    messages = [b"", b"one", bytes(range(256)), b"last"]
    stream = b"".join(map(framed, messages))
    reader = FrameReader()
    found = [
        message
        for first in range(0, len(stream), piece_bytes)
        for message in reader.feed(stream[first : first + piece_bytes])
    ]
    assert found == messages


def test_frame_with_a_too_large_length_is_refused() -> None:
    with pytest.raises(ValueError, match="4294967295 bytes"):
        list(FrameReader().feed(b"\xff\xff\xff\xff"))
