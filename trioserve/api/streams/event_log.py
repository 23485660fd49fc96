"""The events of one stream, numbered, for readers that come, leave and come again: which are still there, and when
there are too many. Pure; who waits for more is elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

__all__ = ["EventLog", "EventLogFull", "split_events"]

END = b"\n\n"


class EventLogFull(Exception):
    """Events that have to stay take all the room."""


class EventLog:
    """first: the number of the first event. bytes_max: of the events that are kept. drops_taken: those that a reader
    has taken go when room is needed, the oldest first; they stay until then, since it may not have got them. Those that
    none has taken never go.
    """

    def __init__(self, *, first: int, bytes_max: int, drops_taken: bool) -> None:
        self.is_ended = False
        self.byte_count = 0
        self._bytes_max = bytes_max
        self._drops_taken = drops_taken
        self._events: deque[bytes] = deque()
        self._first = first  # of those that are kept
        self._taken = first - 1  # the last one that a reader has taken
        self._unread_bytes = 0  # of those behind it

    @property
    def first_kept(self) -> int:
        """The number of the oldest event that is kept, or of the next one if there is none."""
        return self._first

    @property
    def last(self) -> int:
        """The number of the newest event; one below the first if there is none."""
        return self._first + len(self._events) - 1

    @property
    def unread_byte_count(self) -> int:
        """Of the events that no reader has taken yet."""
        return self._unread_bytes

    def append(self, event: bytes) -> int:
        """Its number. Raises EventLogFull, and has not appended it, when what has to stay leaves no room."""
        assert not self.is_ended, "an event after the end"
        while self._drops_taken and self.byte_count + len(event) > self._bytes_max and self._first <= self._taken:
            self.byte_count -= len(self._events.popleft())
            self._first += 1
        if self.byte_count + len(event) > self._bytes_max:
            raise EventLogFull
        self._keep(event)
        return self.last

    def append_last(self, events: Iterable[bytes]) -> None:
        """The events that tell of the end; there is always room for them. Nothing comes after them."""
        for event in events:
            self._keep(event)
        self.is_ended = True

    def rewind(self, after: int) -> None:
        """A reader begins behind the event with this number, so what comes then counts as not taken. after:
        first_kept - 1 to last."""
        assert self._first - 1 <= after <= self.last
        self._taken = after
        self._unread_bytes = sum(len(event) for event in islice(self._events, after + 1 - self._first, None))

    def everything(self) -> bytes:
        """All that is kept, joined."""
        return b"".join(self._events)

    def take(self, after: int, bytes_max: int) -> tuple[bytes, int]:
        """Events behind the one with this number, joined, one at least if there are any, and the number of the last of
        them. after: first_kept - 1 at least."""
        assert after >= self._first - 1, f"event {after + 1} is gone"
        pieces: list[bytes] = []
        size = 0
        for index in range(after + 1 - self._first, len(self._events)):
            event = self._events[index]
            if pieces and size + len(event) > bytes_max:
                break
            pieces.append(event)
            size += len(event)
            if after + len(pieces) > self._taken:
                self._unread_bytes -= len(event)
        after += len(pieces)
        self._taken = max(self._taken, after)
        return b"".join(pieces), after

    def _keep(self, event: bytes) -> None:
        self._events.append(event)
        self.byte_count += len(event)
        self._unread_bytes += len(event)


def split_events(data: bytes) -> list[bytes]:
    """Several events in one piece, as the single ones, each with the empty line at its end."""
    assert data.endswith(END), "an event in two pieces"
    return [piece + END for piece in data[: -len(END)].split(END)]
