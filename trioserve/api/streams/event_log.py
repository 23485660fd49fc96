"""The numbered events of one stream, for readers that disconnect and return.

Detached streams and background responses write their events to a log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice

import trio

from trioserve.api.sse import KEEP_ALIVE

__all__ = ["EventLog", "EventLogFull", "split_events"]

END = b"\n\n"
PIECE_BYTES_MAX = 65_536  # One write to a reader has about this size.

Send = Callable[[bytes], Awaitable[None]]


class EventLogFull(Exception):
    """The events that must be kept have reached the size limit."""


class EventLog:
    """The numbered events of one stream.

    Args:
        first: Number of the first event.
        bytes_max: Limit for the size of the kept events.
        drops_taken: If True, a full log drops the oldest events that a reader has taken. Until the log is full, taken
            events are kept, because the reader may not have received them. Events that no reader has taken are never
            dropped. If False, no event is dropped.

    Attributes:
        is_ended: True if no event follows.
        byte_count: Size of the kept events.
    """

    def __init__(self, *, first: int, bytes_max: int, drops_taken: bool) -> None:
        self.is_ended = False
        self.byte_count = 0
        self._bytes_max = bytes_max
        self._drops_taken = drops_taken
        self._events: deque[bytes] = deque()
        self._first = first  # The number of the oldest kept event.
        self._taken = first - 1  # The number of the newest event that a reader has taken.
        self._unread_bytes = 0  # The size of the events after `_taken`.
        self._readers = trio.lowlevel.ParkingLot()  # The readers that wait for an event or for the end of the log.
        self._writers = trio.lowlevel.ParkingLot()  # The writers that wait until a reader takes events.

    @property
    def first_kept(self) -> int:
        """Number of the oldest kept event, or of the next event if none is kept."""
        return self._first

    @property
    def last(self) -> int:
        """Number of the newest event, or `first` - 1 if there is none."""
        return self._first + len(self._events) - 1

    @property
    def unread_byte_count(self) -> int:
        """Size of the events that no reader has taken yet."""
        return self._unread_bytes

    def append(self, event: bytes) -> int:
        """Append an event.

        Args:
            event: A complete event with the empty line at its end.

        Returns:
            The number of the event.

        Raises:
            EventLogFull: The size limit is reached. The event was not appended.
        """
        assert not self.is_ended, "an event after the end"
        while self._drops_taken and self.byte_count + len(event) > self._bytes_max and self._first <= self._taken:
            self.byte_count -= len(self._events.popleft())
            self._first += 1
        if self.byte_count + len(event) > self._bytes_max:
            raise EventLogFull
        self._keep(event)
        self._readers.unpark_all()
        return self.last

    def end(self, events: Iterable[bytes] = ()) -> None:
        """End the log. A second call without events has no effect.

        Args:
            events: Last events, which report the end. They have no size limit.
        """
        for event in events:
            self._keep(event)
        self.is_ended = True
        self._readers.unpark_all()

    def rewind(self, after: int) -> None:
        """Count the events after `after` as not taken, for a reader that begins there.

        Args:
            after: Number of an event, from first_kept - 1 to last.
        """
        assert self._first - 1 <= after <= self.last
        self._taken = after
        self._unread_bytes = sum(len(event) for event in islice(self._events, after + 1 - self._first, None))

    def everything(self) -> bytes:
        """Return all kept events, joined."""
        return b"".join(self._events)

    def take(self, after: int, bytes_max: int) -> tuple[bytes, int]:
        """Return the next events for a reader, and count them as taken.

        Args:
            after: Number of the last event that the reader has. At least first_kept - 1.
            bytes_max: Limit for the size. A larger first event is returned anyway.

        Returns:
            The events, joined, and the number of the last of them. If there are none: b"" and `after`.
        """
        assert after >= self._first - 1, f"event {after + 1} was dropped"
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

    async def follow(self, after: int, send: Send, *, silent_seconds_max: float) -> None:
        """Send the events after the event with number `after`, until the log has ended.

        Args:
            after: Number of the last event that the reader has.
            send: Sends bytes to the reader.
            silent_seconds_max: After each silence of this length, a comment is sent, so that proxies keep the
                connection.
        """
        while True:
            # If this task was woken and cancelled at the same time, it must not take events: they would count as taken,
            # although the next reader needs them.
            await trio.lowlevel.checkpoint_if_cancelled()
            piece, after = self.take(after, PIECE_BYTES_MAX)
            if piece:
                self._writers.unpark_all()
                await send(piece)
            elif self.is_ended:
                return
            else:
                with trio.move_on_after(silent_seconds_max):
                    await self._readers.park()
                    continue
                await send(KEEP_ALIVE)

    async def wait_until_taken(self) -> None:
        """Return when a reader has taken events, or `reader_left` was called."""
        await self._writers.park()

    def reader_left(self) -> None:
        """Wake the tasks in `wait_until_taken`, because no reader is left."""
        self._writers.unpark_all()

    def _keep(self, event: bytes) -> None:
        self._events.append(event)
        self.byte_count += len(event)
        self._unread_bytes += len(event)


def split_events(data: bytes) -> list[bytes]:
    """Split joined events into single events, each with the empty line at its end.

    Args:
        data: One or more complete events.
    """
    assert data.endswith(END), "the last event is incomplete"
    return [piece + END for piece in data[: -len(END)].split(END)]
