"""Converts the events of a stream for the client. Ids become positions, and events that the client already has are
dropped.

A router without peers forwards events unchanged, with the class `ClientEvents`. A client of Ollama's API gets lines.
The router asks the endpoint for server-sent events with ids, so that the stream can resume at another endpoint. This
module performs no I/O.

Splitters cut the stream of an endpoint into complete server-sent events (HTML standard, 9.2) or lines. The router
forwards only complete events, so it can insert an event of its own at any time. After a partial event, the client would
read the inserted event as a part of the partial event.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from trioserve.api.error_responses import Refusal, refusal
from trioserve.api.sse import KEEP_ALIVE
from trioserve.api.streams.cursors import DETACH_HEADER, RESUMABLE_HEADER, Position, PositionKeeper
from trioserve.api.surface import LINE_KEEP_ALIVE, LINES_TYPE, line
from trioserve.contracts.errors import EndpointLost
from trioserve.http.exchange import HeaderFields, Headers
from trioserve.proxy.routed_body import LINE_PATHS

__all__ = [
    "BrokenEvents",
    "ClientEvents",
    "ClientLines",
    "EventLines",
    "EventSplitter",
    "LineSplitter",
    "NumberedEvents",
    "is_comment",
    "not_the_same",
    "wants_lines",
]


_ID = re.compile(rb"^id: ([^\r\n]*)", re.MULTILINE)
_ERROR = re.compile(rb'^(?:event: error|data: \{"(?:error|type":"error)")', re.MULTILINE)


class ClientEvents:
    """Converts the events of one stream. This class forwards them unchanged, and its subclasses change or drop events.

    Attributes:
        keep_alive: Comment that keeps the connection alive.
        takes_all: True if every event is forwarded unchanged. The router then need not call `convert`.
        is_behind: True while the endpoint repeats events that the client already has. They are dropped.
        shows_ids: True if the client gets token ids.
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
            Refusal: The endpoint streams a different response than the one that the client has begun to read (409).
        """
        return events

    def last(self, events: bytes) -> bytes:
        """Convert the event that ends the response.

        Args:
            events: Error event. Empty if the response ends without an error.

        Returns:
            Event that the client gets.
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
        """Convert the event that ends the response to lines.

        Args:
            events: Error event. Empty if the response ends without an error.
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
