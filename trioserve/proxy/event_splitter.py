"""Splitter that cuts the server-sent events (HTML standard, 9.2) of an endpoint into complete events.

Forwarding only complete events lets the router insert an event of its own at any time. After a partial event, the
client would read the inserted event as a part of the partial one.
"""

from __future__ import annotations

import re

from trioserve.contracts.errors import EndpointLost

__all__ = ["EventSplitter", "is_comment"]

# a token has hundreds of bytes; an image of the largest size has 17 million bytes in base64
EVENT_BYTES_MAX = 24 * 1024 * 1024

# An event ends with an empty line after the end of a line. Each line end is LF, CRLF or CR. A CR at the end of the data
# counts as a line end, although its LF may still come. That LF is then read as an empty line, which has no meaning.
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
            return piece  # fast path for nearly all pieces
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
