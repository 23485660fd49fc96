"""How many requests may be tried again: a share of those that came, and a few in any case."""

from __future__ import annotations

import math

__all__ = ["RetryBudget"]

BURST_SECONDS = 10.0  # for so long unused tries are saved up
ROUNDING = 1e-9  # of a sum of shares and seconds; without it the moment of the next try would never quite come


class RetryBudget:
    """A token bucket: every request fills in `share_max` of a try, every second `per_second_min` tries."""

    def __init__(self, share_max: float, per_second_min: float, *, burst_seconds: float = BURST_SECONDS) -> None:
        self._share_max = share_max
        self._per_second = per_second_min
        self._tries_max = max(1.0, per_second_min * burst_seconds) if share_max or per_second_min else 0.0
        self._tries = self._tries_max
        self._filled_at: float | None = None

    def note_request(self) -> None:
        self._tries = min(self._tries_max, self._tries + self._share_max)

    def take(self, now: float) -> bool:
        """Whether one more try is allowed; it counts as made."""
        if not self.has_one(now):
            return False
        self._tries = max(0.0, self._tries - 1)
        return True

    def spend(self, now: float) -> None:
        """One more try is made, allowed or not; the others have so much less."""
        self.has_one(now)
        self._tries = max(0.0, self._tries - 1)

    def has_one(self, now: float) -> bool:
        """Whether one more try would be allowed."""
        if self._filled_at is not None:
            self._tries = min(self._tries_max, self._tries + (now - self._filled_at) * self._per_second)
        self._filled_at = now
        return self._tries >= 1 - ROUNDING

    def next_at(self, now: float) -> float:
        """When one more try will be allowed that is not now; math.inf if time does not bring it."""
        if self.has_one(now) or not self._per_second:
            return math.inf
        return max(now + (1 - self._tries) / self._per_second, math.nextafter(now, math.inf))
