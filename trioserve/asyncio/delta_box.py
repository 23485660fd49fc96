"""What the Trio thread has for the reader of one request: joined deltas of each choice, however slow the reader is.
Being cancelled while reading loses nothing."""

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
    """put and close in one thread; get and leave in asyncio tasks, of any loop. merge: two deltas of one choice that
    follow each other, as one."""

    def __init__(self, merge: Callable[[DeltaT, DeltaT], DeltaT]) -> None:
        self._merge = merge
        self._lock = threading.Lock()
        self._pending: dict[int, list[DeltaT]] = {}  # of each choice, see hold_unread
        self._end: BaseException | None = None  # raised behind what is pending
        self._is_left = False
        self._waiters = Waiters()

    def put(self, delta: DeltaT) -> bool:
        """False: the loop of its reader was closed while it waited, and nobody will read any more."""
        with self._lock:
            hold_unread(self._pending.setdefault(delta.index, []), delta, self._merge)
        return self._waiters.wake()

    def close(self, error: BaseException) -> None:
        """Nothing comes any more. error: what readers get behind the last delta."""
        with self._lock:
            self._end = self._end or error
        self._waiters.wake()

    def leave(self, error: BaseException) -> None:
        """The scope is over: readers get the error, and nothing else."""
        with self._lock:
            self._end = error
            self._is_left = True
        self._waiters.wake()

    async def get(self) -> DeltaT:
        """Raises what it was closed with."""
        waiter = self._waiters.add()
        if self._has_something():
            await asyncio.sleep(0)  # where the engine is faster than the reader, others have their turn
        while True:
            with self._lock:
                if self._pending and not self._is_left:
                    index, held = next(iter(self._pending.items()))
                    delta = take_unread(held, self._merge)
                    del self._pending[index]
                    if held:
                        self._pending[index] = held  # behind the other choices
                    return delta
                if self._end is not None:
                    raise self._end
            await waiter
            waiter = self._waiters.add()

    def unread(self) -> tuple[DeltaT, ...]:
        with self._lock:
            return tuple(delta for held in self._pending.values() for delta in held)

    def _has_something(self) -> bool:
        return bool(self._pending) or self._end is not None
