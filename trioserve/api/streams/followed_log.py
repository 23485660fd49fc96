"""An event log and those who wait for what comes next: the Trio shell of EventLog."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from trioserve.api.sse import KEEP_ALIVE
from trioserve.api.streams.event_log import EventLog

__all__ = ["FollowedLog"]

PIECE_BYTES_MAX = 65_536  # of one write to a reader

Send = Callable[[bytes], Awaitable[None]]


class FollowedLog(EventLog):
    """Writers call `append` and the like, then `wake`. Readers `follow`, each at its own pace."""

    def __init__(self, *, first: int, bytes_max: int, drops_taken: bool) -> None:
        super().__init__(first=first, bytes_max=bytes_max, drops_taken=drops_taken)
        self._more = trio.lowlevel.ParkingLot()
        self._taken_from = trio.lowlevel.ParkingLot()

    def wake(self) -> None:
        """There is something new: events, or the end."""
        self._more.unpark_all()

    async def follow(self, after: int, send: Send, *, silent_seconds_max: float) -> None:
        """Send the events behind the one with the number `after`, until the log has ended.

        A comment follows each silence of silent_seconds_max, so that proxies keep the connection.
        """
        while True:
            # Who was woken and cancelled at once takes nothing: it would count as taken, and the next one wants it.
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
        """Returns when a reader has taken something, or `let_go` was called."""
        await self._taken_from.park()

    def let_go(self) -> None:
        """Nobody reads any more: who waits for a reader waits in vain."""
        self._taken_from.unpark_all()
