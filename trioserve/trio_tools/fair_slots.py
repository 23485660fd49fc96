"""Limits how many jobs of one kind run at the same time, and divides these slots fairly among API keys. It is used for
work outside of the request queue, such as tokenizing in threads.

A waiting key gets a slot after at most one job of each other waiting key, no matter how many jobs the other keys
have. The method is start-time fair queueing (Goyal, Vin and Cheng, 1996), as in router/queues.py. All jobs count
equally, because the jobs of one kind take similar time. Jobs of one key keep their order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import trio

from trioserve.contracts.errors import Overloaded

__all__ = ["STAGE_FULL", "WAITING_OF_ONE_MAX", "FairSlots"]

# Maximum number of waiting jobs of one key. A batch has fewer requests, so only floods are refused.
WAITING_OF_ONE_MAX = 1024
STAGE_FULL = "stage_full"
"""Reason of a refusal when a key has too many jobs waiting for one stage."""
# Maximum number of idle keys whose turns are remembered. A key whose turn is forgotten gains at most one turn.
KEYS_KEPT_MAX = 1024
RECENT_SHARE = 0.2  # weight of the latest job in the moving average of durations

T = TypeVar("T")


class FairSlots:
    """A fair limit on running jobs: `async with places.place(key): ...`, or `await places.call(function, key=key)` for
    a thread.

    A caller that is cancelled while it waits returns at once, and does not delay other callers.

    Args:
        count: Number of jobs that may run at the same time.
        what: Plural noun for the jobs, for the error message of Overloaded.
        waiting_of_one_max: Maximum number of waiting jobs of one key.
    """

    def __init__(self, count: int, *, what: str, waiting_of_one_max: int = WAITING_OF_ONE_MAX) -> None:
        self._count = count
        self._free_count = count
        self._what = what
        self._waiting_of_one_max = waiting_of_one_max
        self._waiting: dict[str | None, OrderedDict[trio.Event, None]] = {}
        self._turns: dict[str | None, int] = {}  # next turn of each key. The lowest turn is served first.
        self._now = 0  # the latest turn that was served
        self._job_seconds = 0.0  # moving average of the duration of jobs
        self._threads = trio.CapacityLimiter(count)  # A thread of a cancelled caller counts until the thread ends.

    @property
    def waiting_count(self) -> int:
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def place(self, key: str | None) -> AsyncIterator[None]:
        """Wait for a slot, and keep it while the scope is open.

        Args:
            key: API key whose job this is, or None if clients are not distinguished.

        Raises:
            Overloaded: too many jobs of this key already wait.
        """
        if self._free_count:
            if self._free_count == self._count:  # No job runs or waits, so earlier turns do not matter.
                self._turns.clear()
            self._free_count -= 1
            self._serve(key)
        else:
            await self._wait(key)
        began_at = trio.current_time()
        try:
            yield
        finally:
            self._job_seconds += RECENT_SHARE * (trio.current_time() - began_at - self._job_seconds)
            self._pass_on()

    async def call(self, function: Callable[[], T], *, key: str | None) -> T:
        """Wait for a slot, then call a function in a Trio thread. If the caller is cancelled, it returns at once.

        Args:
            function: Function to call. It must not use state of the event loop.
            key: API key whose job this is, or None if clients are not distinguished.

        Raises:
            Overloaded: too many jobs of this key already wait.
        """
        async with self.place(key):
            return await trio.to_thread.run_sync(function, limiter=self._threads, abandon_on_cancel=True)

    async def _wait(self, key: str | None) -> None:
        events = self._waiting.get(key)
        if events is None:
            events = self._waiting[key] = OrderedDict()
            self._turns[key] = max(self._turns.get(key, 0), self._now)
        elif len(events) >= self._waiting_of_one_max:
            raise self._refusal(len(events))
        granted = trio.Event()
        events[granted] = None
        has_place = False
        try:
            await granted.wait()
            has_place = True
        finally:
            if not has_place:
                self._leave(key, granted)

    def _leave(self, key: str | None, granted: trio.Event) -> None:
        if granted.is_set():  # The caller got a slot after it was cancelled, so the slot is free again.
            self._pass_on()
            return
        events = self._waiting[key]
        del events[granted]
        if not events:
            del self._waiting[key]

    def _pass_on(self) -> None:
        """Give a free slot to the next waiting key, or count the slot as free."""
        if not self._waiting:
            self._free_count += 1
            return
        key = min(self._waiting, key=self._turns.__getitem__)
        events = self._waiting[key]
        granted, _ = events.popitem(last=False)
        if not events:
            del self._waiting[key]
        self._serve(key)
        granted.set()

    def _serve(self, key: str | None) -> None:
        """Update the turn of a key that gets a slot."""
        self._now = max(self._turns.get(key, 0), self._now)
        self._turns[key] = self._now + 1
        if len(self._turns) > KEYS_KEPT_MAX + len(self._waiting):
            self._turns = {waiting: self._turns[waiting] for waiting in self._waiting}

    def _refusal(self, waiting_count: int) -> Overloaded:
        seconds = max(1.0, self._job_seconds * waiting_count / self._count)
        return Overloaded(
            f"{waiting_count} {self._what} of this key wait already, at most {self._waiting_of_one_max} may: try again "
            f"in {seconds:.0f} s",
            reason=STAGE_FULL,
            retry_after_seconds=seconds,
        )
