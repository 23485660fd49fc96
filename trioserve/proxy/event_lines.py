"""Server-sent events of one type out of bytes that are cut anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

__all__ = ["BrokenEvents", "EventLines"]

EVENT_BYTES_MAX = 1024 * 1024  # ours have 14 KB

Event = TypeVar("Event")


class BrokenEvents(Exception):
    """What came cannot be followed; the stream has to begin anew."""


class EventLines(Generic[Event]):
    """type: of the events, as msgspec knows it."""

    def __init__(self, type: Any) -> None:
        self._held = bytearray()
        self._decode = msgspec.json.Decoder(type).decode

    def events(self, piece: bytes) -> Iterator[Event]:
        """Raises BrokenEvents for what is no event of ours."""
        searched = max(0, len(self._held) - 1)  # an event that comes in many pieces is not searched anew for each
        self._held += piece
        end = self._held.rfind(b"\n\n", searched) + 2
        blocks = []
        if end > 1:
            blocks = bytes(self._held[:end]).split(b"\n\n")
            del self._held[:end]
        if len(self._held) > EVENT_BYTES_MAX:
            raise BrokenEvents("its events have no end")
        for block in blocks:
            if block.startswith(b"data: "):
                try:
                    yield self._decode(block[len(b"data: ") :])
                except msgspec.DecodeError as error:
                    raise BrokenEvents(f"its events are not ours: {error}") from None
