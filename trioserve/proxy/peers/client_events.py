"""What a client gets of the events of its response: with their positions as ids, and only those behind its own.

Without peers events go through as they are: that is the `ClientEvents` here. Pure.
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
    """The response does not pass through the position at which the client is."""


class ClientEvents:
    """takes_all: they go to the client as they are. is_behind: nothing of what came so far is for the client. error: it
    came, and said how the response ends. keep_alive: says that the connection lives."""

    keep_alive = KEEP_ALIVE
    takes_all = True
    is_behind = False
    shows_ids = False
    error = b""

    def of(self, events: bytes) -> bytes:
        """Of these events, which are whole, those for the client. Raises NotTheSame."""
        return events

    def last(self, events: bytes) -> bytes:
        """The same of an error with which the response ends; empty: it ends without one."""
        return events

    def head(self, headers: HeaderFields) -> HeaderFields:
        """Of the response: of one that has events, as the client gets them."""
        return headers


class NumberedEvents(ClientEvents):
    """known: where the client is, of a response that comes from its beginning on; None: it wants all that comes.
    keeper: has noted what came before."""

    takes_all = False
    shows_ids = True

    def __init__(self, known: Position | None = None, *, keeper: PositionKeeper | None = None) -> None:
        self.is_behind = known is not None
        self._known = known
        self._keeper = keeper or PositionKeeper()

    def of(self, events: bytes) -> bytes:
        if self._known is not None:
            events = self._rest_of(events)
        return _ID.sub(self._told, events) if b"id: " in events else events

    def _told(self, match: re.Match[bytes]) -> bytes:
        self._keeper.note(match[1])
        return b"id: %b" % str(self._keeper).encode()

    def _rest_of(self, events: bytes) -> bytes:
        """The events behind the one with which the client's position is reached; comments say that it is waited for,
        but they would begin the response."""
        assert self._known is not None
        for match in _ID.finditer(events):
            self._keeper.note(match[1])
            here = self._keeper.position
            if here == self._known and not self._keeper.is_at_end:
                self._known, self.is_behind = None, False
                return events[_end_of_event(events, match.end()) :]
            if self._keeper.is_at_end or here.is_beyond(self._known):
                raise NotTheSame(f"it is at {self._keeper}, and the client at {self._known}")
        if b"id: " not in events and _ERROR.search(events):
            self.error = events  # it has no id, and is told wherever the client is
        return b""


def _end_of_event(events: bytes, start: int) -> int:
    end = events.find(b"\n\n", start)
    return len(events) if end < 0 else end + 2
