"""Answered requests whose blocks are held for another engine after their scope was left, by the ids that callers
know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trioserve.runtime.request_stream import RequestStream

__all__ = ["KeptHolds"]


class KeptHolds:
    """As many as there are holds in the core, which bounds them by their blocks."""

    def __init__(self) -> None:
        self._streams: dict[str, list[RequestStream]] = {}

    def __bool__(self) -> bool:
        return bool(self._streams)

    def __iter__(self) -> Iterator[RequestStream]:
        """Of a moment: they may go while one iterates."""
        return iter([stream for streams in self._streams.values() for stream in streams])

    def of(self, request_id: str) -> list[RequestStream]:
        return list(self._streams.get(request_id, ()))

    def add(self, stream: RequestStream) -> None:
        self._streams.setdefault(stream.id, []).append(stream)

    def clear(self) -> None:
        self._streams.clear()

    def remove(self, stream: RequestStream) -> None:
        streams = self._streams[stream.id]
        streams.remove(stream)
        if not streams:
            del self._streams[stream.id]
