"""A token bucket that limits the rate of events. The caller passes the time."""

from __future__ import annotations

__all__ = ["RateBucket"]


class RateBucket:
    """A token bucket.

    Args:
        per_second: events per second in the long run.
        burst: number of events that may occur at once.
        now: current time, in monotonic seconds.
    """

    __slots__ = ("_burst", "_left", "_per_second", "_seen_at")

    def __init__(self, *, per_second: float, burst: float, now: float) -> None:
        self._per_second = per_second
        self._burst = burst
        self._left = float(burst)
        self._seen_at = now

    def take(self, now: float, amount: float = 1.0) -> bool:
        """Count events, and return whether the limit allows them.

        Args:
            now: current time, in monotonic seconds.
            amount: number of events, or their cost.

        Returns:
            False if the limit is exceeded. Then nothing is counted.
        """
        self._left = min(self._burst, self._left + (now - self._seen_at) * self._per_second)
        self._seen_at = now
        if self._left < amount:
            return False
        self._left -= amount
        return True

    def give(self, count: int) -> None:
        """Allow further events, up to the burst.

        Args:
            count: number of events.
        """
        self._left = min(self._burst, self._left + count)
