"""One streamed response that may outlive its connection: its cancel scope, its events and its reader.

    running ──► over            with a reader, or for a limited time without a reader

A stream has one reader at a time: first the client that sent the request, later any client that resumes reading. A new
reader takes over at once, because the server may not have noticed that the old reader's connection is dead.

Detached streams and background responses write their numbered events to an EventLog, for readers that disconnect and
return.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice

import trio

from trioserve.api.error_responses import Refusal, refusal
from trioserve.api.sse import KEEP_ALIVE
from trioserve.http.exchange import Exchange, HeaderFields
from trioserve.trio_tools.deadline_keeper import Alarm

__all__ = ["DetachedStream", "EventLog", "EventLogFull", "LoggedExchange", "WholeResponse", "split_events"]


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


READER_BYTES_MAX = 65_536  # If a connected reader has more unread bytes than this, the response waits for the reader.

WholeResponse = tuple[int, HeaderFields, bytes]
"""Status, headers and body of a response that is not streamed."""
CallAt = Callable[[float, Callable[[], None]], Alarm]


class DetachedStream:
    """A streamed response that outlives its connection.

    Args:
        stream_id: Name of the stream, unique among the streams of its owner.
        owner: Caller that sent the request. None without API keys.
        seconds: Time that the response continues without a reader.
        bytes_max: Limit for the size of the kept events.
        call_at: Calls a function at a time of Trio's clock. See Engine.call_at.
        on_unread: Called when the reader has left.
        on_expired: Called `seconds` after the last reader left, if no new reader came.
        silent_seconds_max: After this time without an event, the reader gets a comment.
        is_numbered: True if each event gets its number as its SSE id.

    Attributes:
        reader_count: Number of readers so far: the client that sent the request, and each reader that took over.
        scope: Cancel scope of the handler.
        over: Event that is set when the handler has returned.
        whole: The response, if the handler did not stream.
        head: Status and headers of the stream. None until the handler begins to stream.
        has_responded: Event that is set when `head` or `whole` is set, or when the handler has returned.
    """

    def __init__(
        self,
        stream_id: str,
        owner: str | None,
        *,
        seconds: float,
        bytes_max: int,
        call_at: CallAt,
        on_unread: Callable[[DetachedStream], None],
        on_expired: Callable[[DetachedStream], None],
        silent_seconds_max: float,
        is_numbered: bool = True,
    ) -> None:
        self.id = stream_id
        self.owner = owner
        self.scope = trio.CancelScope()
        self.log = EventLog(first=1, bytes_max=bytes_max, drops_taken=True)
        self.head: tuple[int, HeaderFields] | None = None
        self.whole: WholeResponse | None = None
        self.has_responded = trio.Event()
        self.over = trio.Event()
        self._unread_bytes_max = min(READER_BYTES_MAX, bytes_max // 2)
        self.reader_count = 1
        self._is_numbered = is_numbered
        self._silent_seconds_max = silent_seconds_max
        self._seconds = seconds
        self._call_at = call_at
        self._on_unread = on_unread
        self._on_expired = on_expired
        self._reader: trio.CancelScope | None = None
        self._is_awaited = True
        self._alarm: Alarm | None = None

    @property
    def has_reader(self) -> bool:
        """True while a reader is connected, or while the client that sent the request is connected and will read."""
        return self._reader is not None or self._is_awaited

    def stop_waiting(self) -> None:
        """Note that the client that sent the request will not read any more."""
        self._is_awaited = False
        self.log.reader_left()

    # --- the handler's side: called by its exchange ---

    def begin(self, status: int, headers: HeaderFields) -> None:
        self.head = status, headers
        self.has_responded.set()

    def respond(self, whole: WholeResponse) -> None:
        self.whole = whole
        self.has_responded.set()

    async def add(self, data: bytes) -> None:
        """Append events for the reader. Wait if a reader is connected and slow.

        Args:
            data: One or more complete events.

        Raises:
            Refusal: No reader is connected, and the kept events have reached their size limit.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        for event in split_events(data):
            if event.startswith(b":"):
                # The comment is dropped, because it only keeps one connection alive. Each reader gets its own comments.
                continue
            try:
                self.log.append(self._with_number(event, self.log.last + 1))
            except EventLogFull:
                raise _full(self.log.byte_count) from None
        while self.has_reader and self.log.unread_byte_count > self._unread_bytes_max:
            await self.log.wait_until_taken()

    def end(self, data: bytes) -> None:
        """Append the last events, without a size limit.

        Args:
            data: Complete events. May be empty.
        """
        events = enumerate(split_events(data), self.log.last + 1) if data else ()
        self.log.end([self._with_number(event, number) for number, event in events])

    def finish(self) -> None:
        """Note that the handler has returned or was cancelled."""
        self.log.end()
        self.has_responded.set()
        self.over.set()

    # --- the reader's side ---

    async def read(self, after: int, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Send all events after the event with number `after`, until the stream ends. Replaces an earlier reader.

        Args:
            after: Number of the last event that the reader has. 0: none.
            send: Sends bytes to the reader.

        Raises:
            Refusal: The next event is no longer kept, or another reader takes over.
        """
        # The check is repeated: while the head was sent, the log may have dropped events that an earlier reader had
        # taken.
        self.check_kept(after)
        if self._reader is not None:
            self._reader.cancel()
        reader = self._reader = trio.CancelScope()
        self._stop_clock()
        self.log.rewind(after)
        try:
            with reader:
                await self.log.follow(after, send, silent_seconds_max=self._silent_seconds_max)
        finally:
            if self._reader is reader:
                self._reader = None
                self.log.reader_left()
                self._on_unread(self)
        if reader.cancelled_caught:
            raise _taken_over(self.id)

    def check_kept(self, after: int) -> None:
        """Check that the events after the event with this number are kept.

        Args:
            after: Number of the last event that the reader has.

        Raises:
            Refusal: Events are missing (410).
        """
        if after < self.log.first_kept - 1:
            raise _gone(after, self.log.first_kept)

    def start_clock(self) -> None:
        """Start the time limit of a stream without a reader."""
        self._stop_clock()
        self._alarm = self._call_at(trio.current_time() + self._seconds, lambda: self._on_expired(self))

    def close(self) -> None:
        """Cancel the handler.

        The caller has removed the stream from its table. A reader gets the remaining events, and the last event reports
        how the stream ended.
        """
        self._stop_clock()
        self.scope.cancel()

    def _stop_clock(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _with_number(self, event: bytes, number: int) -> bytes:
        return b"id: %d\n%b" % (number, event) if self._is_numbered else event


def _full(byte_count: int) -> Refusal:
    return refusal(
        "stream_buffer_full",
        f"nobody reads this response, and the next event does not fit beside its {byte_count} bytes of kept events",
    )


def _gone(after: int, first_kept: int) -> Refusal:
    return refusal("events_gone", f"after is {after}, but the oldest kept event is {first_kept}")


def _taken_over(stream_id: str) -> Refusal:
    return refusal("stream_taken_over", f"another reader has taken over the stream {stream_id}")


class LoggedExchange(Exchange):
    """Exchange of a detached stream.

    Args:
        original: Exchange of the connection that sent the request.
        body: Body of the request.
    """

    def __init__(self, original: Exchange, body: bytes, stream: DetachedStream) -> None:
        self.method, self.path, self.query = original.method, original.path, original.query
        self.headers, self.http_version, self.peer = original.headers, original.http_version, original.peer
        self._body = body
        self._stream = stream

    @property
    def started(self) -> bool:
        return self._stream.has_responded.is_set()

    async def body(self) -> bytes:
        return self._body

    async def respond(self, status: int, headers: HeaderFields, body: bytes) -> None:
        self._check(not self.started)
        self._stream.respond((status, headers, body))

    async def start(self, status: int, headers: HeaderFields) -> None:
        self._check(not self.started)
        self._body = b""  # The handler has read the body. Its memory is freed, because the response may take long.
        self._stream.begin(status, headers)

    async def send(self, data: bytes) -> None:
        self._check(self._stream.head is not None and not self._stream.log.is_ended)
        await self._stream.add(data)

    async def finish(self, last: bytes = b"") -> None:
        self._check(self._stream.head is not None and not self._stream.log.is_ended)
        self._stream.end(last)

    @staticmethod
    def _check(is_in_order: bool) -> None:
        if not is_in_order:
            raise RuntimeError("wrong order of calls: a response is started once, then sent, then finished")
