"""Slots and queue of a fake endpoint. The time is an argument."""

from __future__ import annotations

import heapq
import math
from collections import deque

__all__ = ["Depth", "Slots"]


class Depth:
    """Length of a queue over time: the maximum, and the mean weighted by time. Times are seconds and never decrease.

    Args:
        now: start time.
    """

    def __init__(self, now: float) -> None:
        self.most = 0
        self._began_at = self._changed_at = now
        self._count = 0
        self._area = 0.0  # requests times seconds

    def note(self, count: int, now: float) -> None:
        """Note that the queue has a new length from now on.

        Args:
            count: the length.
            now: the time.
        """
        self._area += self._count * (now - self._changed_at)
        self._count = count
        self._changed_at = now
        self.most = max(self.most, count)

    def mean(self, now: float) -> float:
        seconds = now - self._began_at
        return (self._area + self._count * (now - self._changed_at)) / seconds if seconds > 0 else float(self._count)


class Slots:
    """Slots that requests use in order of arrival, each for `service_seconds`. Further requests wait.

    A slot is free from the moment at which its service ends, and the next waiting request has it from that moment, even
    if the end is processed later. So the capacity is slots_max / service_seconds.

    Args:
        slots_max: number of slots.
        service_seconds: service time of each request.
        now: start time.
    """

    def __init__(self, slots_max: int, service_seconds: float, now: float) -> None:
        self._slots_max = slots_max
        self._service_seconds = service_seconds
        self._waiting: deque[int] = deque()
        self._running: dict[int, float] = {}  # end of the service by key
        self._ends: list[tuple[float, int]] = []  # Entries of requests that left are skipped.
        self.depth = Depth(now)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def next_end(self) -> float:
        """Time at which the next service ends. math.inf if no request runs."""
        while self._ends and self._running.get(self._ends[0][1]) != self._ends[0][0]:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else math.inf

    def enter(self, key: int, now: float) -> None:
        """Give a request a slot, or put it into the queue. Call `ended` with this time first.

        Args:
            key: number of the request.
            now: the time.
        """
        if self.running < self._slots_max:
            self._run(key, now)
        else:
            self._waiting.append(key)
            self.depth.note(self.waiting, now)

    def leave(self, key: int, now: float) -> None:
        """Remove a request whose client has left. Requests that have ended are ignored.

        Args:
            key: number of the request.
            now: the time.
        """
        if self._running.pop(key, None) is not None:
            self._start_next(now)
        elif key in self._waiting:
            self._waiting.remove(key)
            self.depth.note(self.waiting, now)

    def ended(self, now: float) -> list[int]:
        """Return the keys of the requests whose service has ended, in order. Waiting requests take their slots.

        Args:
            now: the time.
        """
        keys = []
        while self.next_end <= now:
            end, key = heapq.heappop(self._ends)
            del self._running[key]
            keys.append(key)
            self._start_next(end)
        return keys

    def measure_depth_again(self, now: float) -> None:
        self.depth = Depth(now)
        self.depth.note(self.waiting, now)

    def _start_next(self, now: float) -> None:
        if self._waiting:
            self._run(self._waiting.popleft(), now)
            self.depth.note(self.waiting, now)

    def _run(self, key: int, now: float) -> None:
        self._running[key] = now + self._service_seconds
        heapq.heappush(self._ends, (now + self._service_seconds, key))
