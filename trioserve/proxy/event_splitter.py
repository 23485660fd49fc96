"""Server-sent events (the HTML standard, 9.2) of another server, out of bytes cut anywhere: whole, as they are.

What follows an event that never ended would be read as a part of it; so whoever passes on only whole ones can add one
of its own at any moment.
"""

from __future__ import annotations

import re

from trioserve.contracts.errors import EndpointLost

__all__ = ["EventSplitter", "is_comment"]

EVENT_BYTES_MAX = 24 * 1024 * 1024  # a token has some hundreds; a picture of the largest size, in base64, 17 million

# An empty line behind the end of a line, each of them LF, CRLF or CR. One whose LF is still to come counts as CR: then
# that LF begins what follows, as an empty line, which says nothing.
_END = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_END_BYTES_MAX = 4


class EventSplitter:
    """rest: what has come of an event that is not whole."""

    def __init__(self) -> None:
        self._held = bytearray()

    @property
    def rest(self) -> bytes:
        return bytes(self._held)

    @property
    def holds_any(self) -> bool:
        return bool(self._held)

    def feed(self, piece: bytes) -> bytes:
        """The events that are whole now, one behind the other; empty if there is none. Raises EndpointLost for one that
        is longer than EVENT_BYTES_MAX."""
        if not self._held and piece.endswith(b"\n\n"):
            return piece  # what nearly all of them look like
        searched = max(0, len(self._held) - _END_BYTES_MAX + 1)
        self._held += piece
        end = max((match.end() for match in _END.finditer(self._held, searched)), default=0)
        if len(self._held) - end > EVENT_BYTES_MAX:
            raise EndpointLost(f"the endpoint sent an event of more than {EVENT_BYTES_MAX} bytes")
        events = bytes(self._held[:end])
        del self._held[:end]
        return events


def is_comment(events: bytes) -> bool:
    """Whether these are only lines that keep the connection alive."""
    return all(not line or line.startswith(b":") for line in events.splitlines())
