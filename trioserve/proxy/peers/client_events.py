"""Conversion of a stream's events for the client: ids become positions, and events that the client has are dropped.

A router without peers forwards events unchanged, with the class `ClientEvents`. No I/O.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from trioserve.api.sse import KEEP_ALIVE
from trioserve.proxy.peers.stream_position import Position, PositionKeeper

if TYPE_CHECKING:
    from trioserve.http.exchange import HeaderFields

__all__ = ["ClientEvents", "NotTheSame", "NumberedEvents"]

_ID = re.compile(rb"^id: ([^\r\n]*)", re.MULTILINE)
_ERROR = re.compile(rb'^(?:event: error|data: \{"(?:error|type":"error)")', re.MULTILINE)


class NotTheSame(Exception):
    """The stream does not pass through the client's position, so it is not the same response."""


class ClientEvents:
    """Events that are forwarded unchanged.

    Attributes:
        keep_alive: Comment that keeps the connection alive.
        takes_all: Whether events are forwarded unchanged.
        is_behind: Whether the client already has all events so far.
        shows_ids: Whether the client gets token ids.
        error: Error event that has ended the response. Empty without an error.
    """

    keep_alive = KEEP_ALIVE
    takes_all = True
    is_behind = False
    shows_ids = False
    error = b""

    def convert(self, events: bytes) -> bytes:
        """Convert events.

        Args:
            events: Complete events.

        Returns:
            Events for the client.

        Raises:
            NotTheSame: The stream is another response than the client has.
        """
        return events

    def last(self, events: bytes) -> bytes:
        """Convert the last event.

        Args:
            events: Error that ends the response. Empty if it ends without an error.

        Returns:
            Event for the client.
        """
        return events

    def head(self, headers: HeaderFields) -> HeaderFields:
        """Convert the headers of an event stream.

        Args:
            headers: Response headers of the endpoint.

        Returns:
            Headers for the client.
        """
        return headers


class NumberedEvents(ClientEvents):
    """Events whose ids are positions.

    Args:
        known: Position of the client in a stream that is repeated from its beginning. None: the client needs all
            events.
        keeper: Position at the beginning of this stream. None: the beginning of the response.
    """

    takes_all = False
    shows_ids = True

    def __init__(self, known: Position | None = None, *, keeper: PositionKeeper | None = None) -> None:
        self.is_behind = known is not None
        self._known = known
        self._keeper = keeper or PositionKeeper()

    def convert(self, events: bytes) -> bytes:
        if self._known is not None:
            events = self._rest_of(events)
        return _ID.sub(self._numbered, events) if b"id: " in events else events

    def _numbered(self, match: re.Match[bytes]) -> bytes:
        self._keeper.note(match[1])
        return b"id: %b" % str(self._keeper).encode()

    def _rest_of(self, events: bytes) -> bytes:
        """Return the events after the client's position.

        Comments before this position are dropped too: sending them would begin the response.
        """
        assert self._known is not None
        for match in _ID.finditer(events):
            self._keeper.note(match[1])
            here = self._keeper.position
            if here == self._known and not self._keeper.is_at_end:
                self._known, self.is_behind = None, False
                return events[_end_of_event(events, match.end()) :]
            if self._keeper.is_at_end or here.is_beyond(self._known):
                raise NotTheSame(f"the stream is at {self._keeper}, and the client at {self._known}")
        if b"id: " not in events and _ERROR.search(events):
            self.error = events  # an error has no id, and is sent to the client at any position
        return b""


def _end_of_event(events: bytes, start: int) -> int:
    end = events.find(b"\n\n", start)
    return len(events) if end < 0 else end + 2
