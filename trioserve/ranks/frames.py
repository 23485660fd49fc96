"""Framing of messages on a byte stream: a length of four bytes, little-endian, then the message."""

from __future__ import annotations

import struct
from collections.abc import Iterator

__all__ = ["FRAME_BYTES_MAX", "FrameReader", "framed"]

FRAME_BYTES_MAX = 2**31 - 1  # The largest message contains an adapter, and has some hundred megabytes.
LENGTH = struct.Struct("<I")


def framed(message: bytes) -> bytes:
    """Return a message with its length before it.

    Args:
        message: at most FRAME_BYTES_MAX bytes.

    Raises:
        ValueError: the message is too long.
    """
    if len(message) > FRAME_BYTES_MAX:
        raise ValueError(f"a message has {len(message)} bytes, {FRAME_BYTES_MAX} are allowed")
    return LENGTH.pack(len(message)) + message


class FrameReader:
    """Splits a byte stream into messages, and keeps an incomplete last message until its other bytes arrive."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Yield the messages that are complete now.

        Args:
            received: the next bytes of the stream.

        Raises:
            ValueError: a length is above FRAME_BYTES_MAX. The peer does not use this protocol.
        """
        unread = self._unread
        unread += received
        first = 0
        while len(unread) - first >= LENGTH.size:
            (length,) = LENGTH.unpack_from(unread, first)
            if length > FRAME_BYTES_MAX:
                raise ValueError(f"a message announces {length} bytes, {FRAME_BYTES_MAX} are allowed")
            end = first + LENGTH.size + length
            if len(unread) < end:
                break
            message = bytes(memoryview(unread)[first + LENGTH.size : end])
            first = end
            yield message
        del unread[:first]
