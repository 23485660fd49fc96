"""Whether something happens too often: a token bucket, told the time by its caller."""

from __future__ import annotations

__all__ = ["RateBucket"]


class RateBucket:
    """Allows `burst` events at once and `per_second` of them in the long run."""

    __slots__ = ("_burst", "_left", "_per_second", "_seen_at")

    def __init__(self, *, per_second: float, burst: float, now: float) -> None:
        self._per_second = per_second
        self._burst = burst
        self._left = float(burst)
        self._seen_at = now

    def take(self, now: float, amount: float = 1.0) -> bool:
        """Count an event at `now` (monotonic seconds), or `amount` of them. False when that is too many."""
        self._left = min(self._burst, self._left + (now - self._seen_at) * self._per_second)
        self._seen_at = now
        if self._left < amount:
            return False
        self._left -= amount
        return True

    def give(self, count: int) -> None:
        """Allow `count` further events, never more than the burst at a time."""
        self._left = min(self._burst, self._left + count)
