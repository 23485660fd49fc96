"""Limits retries to a share of the requests, plus a minimum rate."""

from __future__ import annotations

import math

__all__ = ["RetryBudget"]

BURST_SECONDS = 10.0  # unused retries of this many seconds are saved
ROUNDING = 1e-9  # tolerance for float sums: without it, no retry might be available at the time that `next_at` returned


class RetryBudget:
    """A token bucket of retries.

    Args:
        share_max: retries that each request adds to the budget, for example 0.1.
        per_second_min: retries that each second adds to the budget.
        burst_seconds: capacity of the budget, in seconds of `per_second_min`. At least one retry fits.
    """

    def __init__(self, share_max: float, per_second_min: float, *, burst_seconds: float = BURST_SECONDS) -> None:
        self._share_max = share_max
        self._per_second = per_second_min
        self._tries_max = max(1.0, per_second_min * burst_seconds) if share_max or per_second_min else 0.0
        self._tries = self._tries_max
        self._filled_at: float | None = None

    def note_request(self) -> None:
        self._tries = min(self._tries_max, self._tries + self._share_max)

    def take(self, now: float) -> bool:
        """Use one retry of the budget if one is left.

        Args:
            now: time in seconds.

        Returns:
            True if the retry is allowed.
        """
        if not self.has_one(now):
            return False
        self._tries = max(0.0, self._tries - 1)
        return True

    def spend(self, now: float) -> None:
        """Use one retry of the budget even if none is left. The budget does not go below 0.

        Args:
            now: time in seconds.
        """
        self.has_one(now)
        self._tries = max(0.0, self._tries - 1)

    def has_one(self, now: float) -> bool:
        """Return whether a retry is left.

        Args:
            now: time in seconds.
        """
        if self._filled_at is not None:
            self._tries = min(self._tries_max, self._tries + (now - self._filled_at) * self._per_second)
        self._filled_at = now
        return self._tries >= 1 - ROUNDING

    def next_at(self, now: float) -> float:
        """Return when the next retry is available.

        Args:
            now: time in seconds.

        Returns:
            The time in seconds, or math.inf if a retry is available now or if time alone adds none.
        """
        if self.has_one(now) or not self._per_second:
            return math.inf
        return max(now + (1 - self._tries) / self._per_second, math.nextafter(now, math.inf))
