"""One streamed response that may outlive the connection it was asked over: its scope, its events, its reader.

    running ──► over            with a reader, or without one for at most so many seconds

It has one reader at a time: the client that asked, and later whoever goes on reading. A new one takes over, since the
connection of the old one may be dead, and nobody has noticed yet.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from trioserve.api.error_responses import Refusal, refusal
from trioserve.api.streams.event_log import EventLogFull, split_events
from trioserve.api.streams.followed_log import FollowedLog
from trioserve.http.exchange import HeaderFields
from trioserve.trio_tools.deadline_keeper import Alarm

__all__ = ["DetachedStream", "WholeResponse"]

READER_BYTES_MAX = 65_536  # unread events beyond which the response waits for a reader that is there

WholeResponse = tuple[int, HeaderFields, bytes]
CallAt = Callable[[float, Callable[[], None]], Alarm]


class DetachedStream:
    """A streamed response that outlives its connection.

    Args:
        seconds: how long the response continues without a reader.
        bytes_max: size of the events that are kept.
        on_unread: called when the reader has left.
        on_expired: called when `seconds` have passed since then.
        is_numbered: each event gets its number as its SSE id.
        silent_seconds_max: seconds of silence after which the reader gets a comment.

    Attributes:
        reader_count: the client that asked for the response, and those that took over.
        scope: the cancel scope of the handler.
        over: set when the handler has returned.
        whole: the response, if it is not a stream.
        head: status and headers of the stream, once it has begun.
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
        self.log = FollowedLog(first=1, bytes_max=bytes_max, drops_taken=True)
        self.head: tuple[int, HeaderFields] | None = None
        self.whole: WholeResponse | None = None
        self.has_responded = trio.Event()  # begun as a stream, or as a whole; or it is over
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
        """Or somebody who is about to read: the client that asked, until it does or has left."""
        return self._reader is not None or self._is_awaited

    def stop_waiting(self) -> None:
        """The client that asked will not read any more."""
        self._is_awaited = False
        self.log.let_go()

    # --- the handler's side: called by its exchange ---

    def begin(self, status: int, headers: HeaderFields) -> None:
        self.head = status, headers
        self.has_responded.set()

    def respond(self, whole: WholeResponse) -> None:
        self.whole = whole
        self.has_responded.set()

    async def add(self, data: bytes) -> None:
        """Events for the reader. Waits for one that is there and slow. Raises Refusal when there is no room for more:
        nobody reads."""
        await trio.lowlevel.checkpoint_if_cancelled()
        for event in split_events(data):
            if event.startswith(b":"):
                continue  # a comment for the connection at hand; the reader has its own
            try:
                self.log.append(self._with_number(event, self.log.last + 1))
            except EventLogFull:
                raise _full(self.log.byte_count) from None
        self.log.wake()
        while self.has_reader and self.log.unread_byte_count > self._unread_bytes_max:
            await self.log.wait_until_taken()

    def end(self, data: bytes) -> None:
        """The last events, for which there is always room."""
        if data:
            numbered = enumerate(split_events(data), self.log.last + 1)
            self.log.append_last([self._with_number(event, number) for number, event in numbered])
        self.log.is_ended = True
        self.log.wake()

    def finish(self) -> None:
        """The handler has returned, or was cancelled."""
        self.log.is_ended = True
        self.log.wake()
        self.has_responded.set()
        self.over.set()

    # --- the reader's side ---

    async def read(self, after: int, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Send what comes behind the event with this number, to the end. Raises Refusal when that is gone, and when
        another reader takes over."""
        self.check_kept(after)  # again: what another reader had taken may have gone while the head was sent
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
                self.log.let_go()
                self._on_unread(self)
        if reader.cancelled_caught:
            raise _taken_over(self.id)

    def check_kept(self, after: int) -> None:
        """Raises Refusal (410) if the event behind this number is gone."""
        if after < self.log.first_kept - 1:
            raise _gone(after, self.log.first_kept)

    def start_clock(self) -> None:
        """Nobody reads from now on."""
        self._stop_clock()
        self._alarm = self._call_at(trio.current_time() + self._seconds, lambda: self._on_expired(self))

    def close(self) -> None:
        """It is off the table. A reader gets what there is, and how it ended."""
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
        "stream_buffer_full", f"nobody reads this response, and {byte_count} bytes of its events leave no room for more"
    )


def _gone(after: int, first_kept: int) -> Refusal:
    return refusal("events_gone", f"after is {after}, but the oldest event that is kept is {first_kept}")


def _taken_over(stream_id: str) -> Refusal:
    return refusal("stream_taken_over", f"another reader has taken over the stream {stream_id}")
