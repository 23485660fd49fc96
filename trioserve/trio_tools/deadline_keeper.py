"""Timers that call functions at given times, all served by one task."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

import trio

from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["Alarm", "DeadlineKeeper"]

SPENT_ALARMS_MIN = 1000  # minimum number of cancelled alarms in the heap before the heap is rebuilt


class Alarm:
    """One callback that will be called at a given time.

    Attributes:
        at: Time on Trio's clock.
        ring: The callback. None after the callback was called or the alarm was cancelled.
    """

    __slots__ = ("_keeper", "at", "ring")

    def __init__(self, keeper: DeadlineKeeper, at: float, ring: Callable[[], None]) -> None:
        self._keeper = keeper
        self.at = at
        self.ring: Callable[[], None] | None = ring

    def cancel(self) -> None:
        if self.ring is not None:
            self.ring = None
            self._keeper.note_spent()


@uninterrupted
class DeadlineKeeper:
    """Set of alarms that one task serves.

    Cost:
        set() is O(log n), cancel() is O(1). Cancelled alarms are removed before they outnumber the active alarms.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Alarm]] = []
        self._numbers = itertools.count()
        self._spent_count = 0
        self._changed = trio.Event()

    def __len__(self) -> int:
        """Return the number of alarms that are neither called nor cancelled."""
        return len(self._heap) - self._spent_count

    def set(self, at: float, ring: Callable[[], None]) -> Alarm:
        """Call a function at a given time, or soon if the time has passed.

        Args:
            at: Time on Trio's clock.
            ring: The callback. It must not wait or raise.

        Returns:
            The alarm. It may be cancelled at any time, any number of times.
        """
        alarm = Alarm(self, at, ring)
        heapq.heappush(self._heap, (at, next(self._numbers), alarm))
        if self._heap[0][2] is alarm:
            self._changed.set()
        return alarm

    async def run(self) -> None:
        """Call the callback of each alarm at its time. Runs until cancelled."""
        while True:
            self._changed = trio.Event()
            with trio.move_on_at(self._ring_due()):
                await self._changed.wait()

    def note_spent(self) -> None:
        self._spent_count += 1
        if self._spent_count > max(SPENT_ALARMS_MIN, len(self._heap) // 2):
            self._heap = [entry for entry in self._heap if entry[2].ring is not None]
            heapq.heapify(self._heap)
            self._spent_count = 0

    def _ring_due(self) -> float:
        """Call the callbacks whose time has come. Return the time of the next alarm, or infinity."""
        now = trio.current_time()
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].ring is None):
            _at, _number, alarm = heapq.heappop(self._heap)
            if alarm.ring is None:
                self._spent_count -= 1
            else:
                ring, alarm.ring = alarm.ring, None
                ring()
        return self._heap[0][0] if self._heap else math.inf
