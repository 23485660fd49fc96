"""How many requests may be tried again: a share of those that came, and a few in any case."""

from __future__ import annotations

__all__ = ["RetryBudget"]

BURST_SECONDS = 10.0  # for so long unused tries are saved up


class RetryBudget:
    """A token bucket: every request fills in `share_max` of a try, every second `per_second_min` tries."""

    def __init__(self, share_max: float, per_second_min: float) -> None:
        self._share_max = share_max
        self._per_second = per_second_min
        self._tries_max = max(1.0, per_second_min * BURST_SECONDS) if share_max or per_second_min else 0.0
        self._tries = self._tries_max
        self._filled_at: float | None = None

    def note_request(self) -> None:
        self._tries = min(self._tries_max, self._tries + self._share_max)

    def take(self, now: float) -> bool:
        """Whether one more try is allowed; it counts as made."""
        if self._filled_at is not None:
            self._tries = min(self._tries_max, self._tries + (now - self._filled_at) * self._per_second)
        self._filled_at = now
        if self._tries < 1:
            return False
        self._tries -= 1
        return True
