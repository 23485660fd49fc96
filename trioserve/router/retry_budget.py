"""Limits retries to a share of the requests, plus a minimum rate."""

from __future__ import annotations

import math

__all__ = ["RetryBudget"]

BURST_SECONDS = 10.0  # unused tries of this time are saved up
ROUNDING = 1e-9  # tolerance for float sums: without it, no try might be left at the time that `next_at` returned


class RetryBudget:
    """A token bucket of retries.

    Args:
        share_max: tries that each request adds.
        per_second_min: tries that each second adds.
        burst_seconds: capacity, in seconds of `per_second_min`. At least one try.
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
        """Use one try if one is left.

        Args:
            now: time in seconds.

        Returns:
            True if the try is allowed.
        """
        if not self.has_one(now):
            return False
        self._tries = max(0.0, self._tries - 1)
        return True

    def spend(self, now: float) -> None:
        """Use one try even if none is left. The budget does not go below 0.

        Args:
            now: time in seconds.
        """
        self.has_one(now)
        self._tries = max(0.0, self._tries - 1)

    def has_one(self, now: float) -> bool:
        """Return whether a try is left.

        Args:
            now: time in seconds.
        """
        if self._filled_at is not None:
            self._tries = min(self._tries_max, self._tries + (now - self._filled_at) * self._per_second)
        self._filled_at = now
        return self._tries >= 1 - ROUNDING

    def next_at(self, now: float) -> float:
        """Return when the next try is available.

        Args:
            now: time in seconds.

        Returns:
            The time in seconds. math.inf if one is available now, or if time alone adds none.
        """
        if self.has_one(now) or not self._per_second:
            return math.inf
        return max(now + (1 - self._tries) / self._per_second, math.nextafter(now, math.inf))
