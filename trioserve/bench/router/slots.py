"""Who runs and who waits at a fake endpoint that has so many slots, and how long its queue was. Told the time."""

from __future__ import annotations

import heapq
import math
from collections import deque

__all__ = ["Depth", "Slots"]


class Depth:
    """How many waited, over time: the most, and the mean weighted by how long it was so. Times are seconds and never
    go back."""

    def __init__(self, now: float) -> None:
        self.most = 0
        self._began_at = self._changed_at = now
        self._count = 0
        self._area = 0.0  # requests times seconds

    def note(self, count: int, now: float) -> None:
        """From now on so many wait."""
        self._area += self._count * (now - self._changed_at)
        self._count = count
        self._changed_at = now
        self.most = max(self.most, count)

    def mean(self, now: float) -> float:
        seconds = now - self._began_at
        return (self._area + self._count * (now - self._changed_at)) / seconds if seconds > 0 else float(self._count)


class Slots:
    """First come, first served: each takes a slot for service_seconds, or waits for one.

    Keys are the caller's names of its requests. A slot that became free was free from the moment the service ended, and
    whoever waited had it from then on, however late that is noticed: the capacity is slots_max / service_seconds.
    """

    def __init__(self, slots_max: int, service_seconds: float, now: float) -> None:
        self._slots_max = slots_max
        self._service_seconds = service_seconds
        self._waiting: deque[int] = deque()
        self._running: dict[int, float] = {}  # until when
        self._ends: list[tuple[float, int]] = []  # those who left are skipped
        self.depth = Depth(now)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def next_end(self) -> float:
        """When the next service is over; math.inf if nobody runs."""
        while self._ends and self._running.get(self._ends[0][1]) != self._ends[0][0]:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else math.inf

    def enter(self, key: int, now: float) -> None:
        """To be called after `ended` of the same moment."""
        if self.running < self._slots_max:
            self._run(key, now)
        else:
            self._waiting.append(key)
            self.depth.note(self.waiting, now)

    def leave(self, key: int, now: float) -> None:
        """Its client has gone. Nothing to do when it has ended."""
        if self._running.pop(key, None) is not None:
            self._start_next(now)
        elif key in self._waiting:
            self._waiting.remove(key)
            self.depth.note(self.waiting, now)

    def ended(self, now: float) -> list[int]:
        """Whose service is over by now, in order; their slots are taken by those who waited."""
        keys = []
        while self.next_end <= now:
            end, key = heapq.heappop(self._ends)
            del self._running[key]
            keys.append(key)
            self._start_next(end)
        return keys

    def measure_depth_anew(self, now: float) -> None:
        self.depth = Depth(now)
        self.depth.note(self.waiting, now)

    def _start_next(self, now: float) -> None:
        if self._waiting:
            self._run(self._waiting.popleft(), now)
            self.depth.note(self.waiting, now)

    def _run(self, key: int, now: float) -> None:
        self._running[key] = now + self._service_seconds
        heapq.heappush(self._ends, (now + self._service_seconds, key))
