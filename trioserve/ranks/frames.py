"""Messages on a stream of bytes: each behind its length, four bytes, the lowest first."""

from __future__ import annotations

import struct
from collections.abc import Iterator

__all__ = ["FRAME_BYTES_MAX", "FrameReader", "framed"]

FRAME_BYTES_MAX = 2**31 - 1  # an adapter is the largest, and has hundreds of megabytes at most
LENGTH = struct.Struct("<I")


def framed(message: bytes) -> bytes:
    """As it goes over the wire. Raises ValueError if it is too long."""
    if len(message) > FRAME_BYTES_MAX:
        raise ValueError(f"a message has {len(message)} bytes, allowed are {FRAME_BYTES_MAX}")
    return LENGTH.pack(len(message)) + message


class FrameReader:
    """Told what comes, it gives the messages that are complete."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Raises ValueError for a length that no message has: whoever speaks is not one of ours."""
        held = self._held
        held += received
        first = 0
        while len(held) - first >= LENGTH.size:
            (length,) = LENGTH.unpack_from(held, first)
            if length > FRAME_BYTES_MAX:
                raise ValueError(f"a message is to have {length} bytes, allowed are {FRAME_BYTES_MAX}")
            end = first + LENGTH.size + length
            if len(held) < end:
                break
            message = bytes(memoryview(held)[first + LENGTH.size : end])
            first = end
            yield message
        del held[:first]
