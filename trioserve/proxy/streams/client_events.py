"""Converts the events of a stream for the client. Ids become positions, and events that the client already has are
dropped.

A router without peers forwards events unchanged, with the class `ClientEvents`. A client of Ollama's API gets lines.
The router asks the endpoint for server-sent events with ids, so that the stream can resume at another endpoint. This
module performs no I/O.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from trioserve.api.error_responses import Refusal, refusal
from trioserve.api.sse import KEEP_ALIVE
from trioserve.api.streams.cursors import DETACH_HEADER, RESUMABLE_HEADER, Position, PositionKeeper
from trioserve.api.surface import LINE_KEEP_ALIVE, LINES_TYPE, line
from trioserve.http.exchange import HeaderFields, Headers
from trioserve.proxy.routed_body import LINE_PATHS

__all__ = ["ClientEvents", "ClientLines", "NumberedEvents", "not_the_same", "wants_lines"]

_ID = re.compile(rb"^id: ([^\r\n]*)", re.MULTILINE)
_ERROR = re.compile(rb'^(?:event: error|data: \{"(?:error|type":"error)")', re.MULTILINE)


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
            Refusal: The stream is another response than the client has (409).
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

        Comments before this position are dropped too, because sending a comment would begin the response.
        """
        assert self._known is not None
        for match in _ID.finditer(events):
            self._keeper.note(match[1])
            here = self._keeper.position
            if here == self._known and not self._keeper.is_at_end:
                self._known, self.is_behind = None, False
                return events[_end_of_event(events, match.end()) :]
            if self._keeper.is_at_end or here.is_beyond(self._known):
                raise not_the_same(f"the stream is at {self._keeper}, and the client at {self._known}")
        if b"id: " not in events and _ERROR.search(events):
            self.error = events  # An error has no id, so the client gets it however many events it has.
        return b""


def _end_of_event(events: bytes, start: int) -> int:
    end = events.find(b"\n\n", start)
    return len(events) if end < 0 else end + 2


def not_the_same(difference: str) -> Refusal:
    """Make the error for a client whose stream is gone and cannot be recomputed with the same tokens.

    Args:
        difference: Half a sentence that names the difference between the streams.
    """
    return refusal(
        "resume_mismatch",
        f"the stream no longer exists, and computing it again gave another response ({difference}): send the "
        "request without Last-Event-ID, with another X-Request-Id",
    )


EVENT_HEADERS = (RESUMABLE_HEADER, DETACH_HEADER)
"""A client that sends one of these headers gets events instead of lines."""
_DATA = b"data: "
_ERROR_LINE = b'{"error"'


class _Failed(msgspec.Struct):
    error: dict[str, Any] | str


def wants_lines(path: str, headers: Headers) -> bool:
    """Return True if the client gets lines when the response is streamed.

    Args:
        path: Path of the request.
        headers: Headers of the request.
    """
    return path in LINE_PATHS and not any(headers.get(name) for name in EVENT_HEADERS)


class ClientLines(ClientEvents):
    """Converter from events to lines: each line is the data of one event."""

    takes_all = False
    keep_alive = LINE_KEEP_ALIVE

    def convert(self, events: bytes) -> bytes:
        """Convert complete events to lines.

        Args:
            events: Complete events.

        Returns:
            Lines. A blank that keeps the connection alive if there are only comments.
        """
        values = [found[len(_DATA) :] for found in events.split(b"\n") if found.startswith(_DATA)]
        return b"".join(map(_line, values)) or self.keep_alive

    def last(self, events: bytes) -> bytes:
        """Convert the last events of a stream to lines.

        Args:
            events: Complete events, or nothing.
        """
        return self.convert(events) if events else b""

    def head(self, headers: HeaderFields) -> HeaderFields:
        return [(name, LINES_TYPE if name == "content-type" else value) for name, value in headers]


def _line(value: bytes) -> bytes:
    if value.startswith(_ERROR_LINE):
        # Errors are converted here, because within the router they need the format of the other APIs.
        error = msgspec.json.decode(value, type=_Failed).error
        if isinstance(error, dict):
            return line({"error": error.get("message")})
    return value + b"\n"
