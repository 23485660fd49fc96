"""Passes the deltas of one request from the Trio thread to its asyncio readers.

Unread deltas of a choice are merged, so slow readers need only bounded memory. Cancelling a read loses no delta.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from trioserve.asyncio.thread_event import Waiters
from trioserve.contracts.output import AnyDelta, hold_unread, take_unread

__all__ = ["DeltaBox"]


DeltaT = TypeVar("DeltaT", bound=AnyDelta)


class DeltaBox(Generic[DeltaT]):
    """A mailbox of deltas. One thread calls `put` and `close`. Asyncio tasks of any loop call `get` and `leave`.

    Args:
        merge: joins two consecutive deltas of one choice.
    """

    def __init__(self, merge: Callable[[DeltaT, DeltaT], DeltaT]) -> None:
        self._merge = merge
        self._lock = threading.Lock()
        self._pending: dict[int, list[DeltaT]] = {}  # unread deltas by choice, see hold_unread
        self._end: BaseException | None = None  # the error to raise after the pending deltas
        self._is_left = False
        self._waiters = Waiters()

    def put(self, delta: DeltaT) -> bool:
        """Add a delta.

        Args:
            delta: the delta.

        Returns:
            False if the loop of a waiting reader was closed, so that nothing will be read any more.
        """
        with self._lock:
            hold_unread(self._pending.setdefault(delta.index, []), delta, self._merge)
        return self._waiters.wake()

    def close(self, error: BaseException) -> None:
        """Add no more deltas.

        Args:
            error: error that `get` raises after the last delta. If `close` is called again, the first error is kept.
        """
        with self._lock:
            self._end = self._end or error
        self._waiters.wake()

    def leave(self, error: BaseException) -> None:
        """Record that the request's scope was left. Readers then get only the error, and no pending deltas.

        Args:
            error: error that `get` raises.
        """
        with self._lock:
            self._end = error
            self._is_left = True
        self._waiters.wake()

    async def get(self) -> DeltaT:
        """Return the next delta, or raise the error that was given to `close` or `leave`."""
        waiter = self._waiters.add()
        if self._has_something():
            await asyncio.sleep(0)  # if the engine is faster than the reader, this lets other tasks run
        while True:
            with self._lock:
                if self._pending and not self._is_left:
                    index, held = next(iter(self._pending.items()))
                    delta = take_unread(held, self._merge)
                    del self._pending[index]
                    if held:
                        self._pending[index] = held  # move this choice after the other choices
                    return delta
                if self._end is not None:
                    raise self._end
            await waiter
            waiter = self._waiters.add()

    def unread(self) -> tuple[DeltaT, ...]:
        """Return the deltas that no reader has taken."""
        with self._lock:
            return tuple(delta for held in self._pending.values() for delta in held)

    def _has_something(self) -> bool:
        return bool(self._pending) or self._end is not None
