"""Parser for a stream of server-sent events that all have one msgspec type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

__all__ = ["BrokenEvents", "EventLines"]

EVENT_BYTES_MAX = 1024 * 1024  # bytes; trioserve's own events have 14 KB

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
            BrokenEvents: An event has another type or is longer than EVENT_BYTES_MAX.
        """
        searched = max(0, len(self._held) - 1)  # bytes of earlier pieces are not searched again
        self._held += piece
        end = self._held.rfind(b"\n\n", searched) + 2
        blocks = []
        if end > 1:
            blocks = bytes(self._held[:end]).split(b"\n\n")
            del self._held[:end]
        if len(self._held) > EVENT_BYTES_MAX:
            raise BrokenEvents(f"an event has more than {EVENT_BYTES_MAX} bytes")
        for block in blocks:
            if block.startswith(b"data: "):
                try:
                    yield self._decode(block[len(b"data: ") :])
                except msgspec.DecodeError as error:
                    raise BrokenEvents(f"an event has an unexpected form: {error}") from None
