"""Splitters that cut the stream of an endpoint into complete server-sent events (HTML standard, 9.2) or lines.

The router forwards only complete events, so it can insert an event of its own at any time. After a partial event, the
client would read the inserted event as a part of the partial event.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from trioserve.contracts.errors import EndpointLost

__all__ = ["BrokenEvents", "EventLines", "EventSplitter", "LineSplitter", "is_comment"]

# The event of a token has hundreds of bytes. An image of the largest size has 17 million bytes in base64.
EVENT_BYTES_MAX = 24 * 1024 * 1024

# An event ends with an empty line after the end of a line. Each line end is LF, CRLF or CR. A CR at the end of the data
# counts as a line end, although an LF may still follow. That LF is then read as an empty line, which has no meaning.
_END = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_END_BYTES_MAX = 4


class EventSplitter:
    """Splitter for one event stream.

    Attributes:
        rest: Bytes of an event that is not complete.
    """

    def __init__(self) -> None:
        self._held = bytearray()

    @property
    def rest(self) -> bytes:
        return bytes(self._held)

    @property
    def holds_any(self) -> bool:
        return bool(self._held)

    def feed(self, piece: bytes) -> bytes:
        """Add bytes and return the events that are complete now.

        Args:
            piece: Bytes that follow the previous piece.

        Returns:
            Complete events, unchanged, in order. Empty if no event is complete.

        Raises:
            EndpointLost: An event is longer than EVENT_BYTES_MAX.
        """
        if not self._held and piece.endswith(b"\n\n"):
            return piece  # Nearly all pieces take this fast path.
        searched = max(0, len(self._held) - _END_BYTES_MAX + 1)
        self._held += piece
        end = max((match.end() for match in _END.finditer(self._held, searched)), default=0)
        if len(self._held) - end > EVENT_BYTES_MAX:
            raise EndpointLost(f"the endpoint sent an event of more than {EVENT_BYTES_MAX} bytes")
        events = bytes(self._held[:end])
        del self._held[:end]
        return events


def is_comment(events: bytes) -> bool:
    """Return True if the events contain only comments, which keep the connection alive.

    Args:
        events: Complete events.
    """
    return all(not line or line.startswith(b":") for line in events.splitlines())


JSON_EVENT_BYTES_MAX = 1024 * 1024  # For comparison, trioserve's own events have up to 14 KB.

Event = TypeVar("Event")


class BrokenEvents(Exception):
    """The event stream is invalid or has a gap. The reader must restart the stream."""


class EventLines(Generic[Event]):
    """Parser for server-sent events. Pieces of the stream may end anywhere.

    Args:
        type: msgspec type of the events.
    """

    def __init__(self, type: Any) -> None:
        self._held = bytearray()
        self._decode = msgspec.json.Decoder(type).decode

    def events(self, piece: bytes) -> Iterator[Event]:
        """Parse the next piece of the stream.

        Args:
            piece: Bytes that follow the previous piece.

        Returns:
            Iterator over the events that are complete now.

        Raises:
            BrokenEvents: An event has another type or is longer than JSON_EVENT_BYTES_MAX.
        """
        searched = max(0, len(self._held) - 1)  # The bytes of earlier pieces are not searched again.
        self._held += piece
        end = self._held.rfind(b"\n\n", searched) + 2
        blocks = []
        if end > 1:
            blocks = bytes(self._held[:end]).split(b"\n\n")
            del self._held[:end]
        if len(self._held) > JSON_EVENT_BYTES_MAX:
            raise BrokenEvents(f"an event has more than {JSON_EVENT_BYTES_MAX} bytes")
        for block in blocks:
            if block.startswith(b"data: "):
                try:
                    yield self._decode(block[len(b"data: ") :])
                except msgspec.DecodeError as error:
                    raise BrokenEvents(f"an event has an unexpected form: {error}") from None


class LineSplitter:
    """Splitter for the stream of an endpoint that sends lines. It cuts the stream into complete lines.

    The router can insert a line of its own after complete lines at any time.
    """

    def __init__(self) -> None:
        self._held = bytearray()  # The buffer is empty, or has the beginning of a line that is not blank.

    def feed(self, piece: bytes) -> bytes:
        """Add bytes and return the lines that are complete now.

        Args:
            piece: Bytes that follow the previous piece.

        Returns:
            Complete lines with the white space after them.

        Raises:
            EndpointLost: A line is longer than EVENT_BYTES_MAX.
        """
        held = len(self._held)
        self._held += piece
        end = self._held.rfind(b"\n", held) + 1
        if (end or not held) and not self._held[end:].strip():
            end = len(self._held)
        if len(self._held) - end > EVENT_BYTES_MAX:
            raise EndpointLost(f"the endpoint sent a line of more than {EVENT_BYTES_MAX} bytes")
        whole = bytes(self._held[:end])
        del self._held[:end]
        return whole

    def end(self) -> bytes:
        """Return the bytes that remain when the response has ended."""
        return bytes(self._held)
