"""An event log whose readers can wait for the next event: the Trio shell of EventLog."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from trioserve.api.sse import KEEP_ALIVE
from trioserve.api.streams.event_log import EventLog

__all__ = ["FollowedLog"]

PIECE_BYTES_MAX = 65_536  # size of one write to a reader

Send = Callable[[bytes], Awaitable[None]]


class FollowedLog(EventLog):
    """An event log with waiting readers.

    Writers call `append` or `append_last`, then `wake`. Each reader calls `follow`.

    Args:
        first: See EventLog.
        bytes_max: See EventLog.
        drops_taken: See EventLog.
    """

    def __init__(self, *, first: int, bytes_max: int, drops_taken: bool) -> None:
        super().__init__(first=first, bytes_max=bytes_max, drops_taken=drops_taken)
        self._more = trio.lowlevel.ParkingLot()
        self._taken_from = trio.lowlevel.ParkingLot()

    def wake(self) -> None:
        """Wake the readers after events were appended or the log has ended."""
        self._more.unpark_all()

    async def follow(self, after: int, send: Send, *, silent_seconds_max: float) -> None:
        """Send the events after the event with number `after`, until the log has ended.

        Args:
            after: Number of the last event that the reader has.
            send: Sends bytes to the reader.
            silent_seconds_max: After each silence of this length, a comment is sent, so that proxies keep the
                connection.
        """
        while True:
            # If this task was woken and cancelled at once, it must not take events. They would count as taken, and the
            # next reader needs them.
            await trio.lowlevel.checkpoint_if_cancelled()
            piece, after = self.take(after, PIECE_BYTES_MAX)
            if piece:
                self._taken_from.unpark_all()
                await send(piece)
            elif self.is_ended:
                return
            else:
                with trio.move_on_after(silent_seconds_max):
                    await self._more.park()
                    continue
                await send(KEEP_ALIVE)

    async def wait_until_taken(self) -> None:
        """Return when a reader has taken events, or `reader_left` was called."""
        await self._taken_from.park()

    def reader_left(self) -> None:
        """Wake the tasks in wait_until_taken: no reader is left."""
        self._taken_from.unpark_all()
