"""Times at which requests were sent, to count the requests that were sent before a recent moment."""

from __future__ import annotations

import bisect

__all__ = ["SentTimes"]

KEPT_SECONDS = 10.0  # the router uses a load report for two seconds


class SentTimes:
    """The recent times, in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._before = 0  # requests that were sent before the first time in the deque

    def note(self, now: float) -> None:
        """Note that a request is sent.

        Args:
            now: Current time.
        """
        self._times.append(now)
        if len(self._times) > 64 and self._times[len(self._times) // 2] < now - KEPT_SECONDS:
            half = len(self._times) // 2
            self._before += half
            del self._times[:half]

    def count_at(self, moment: float) -> int:
        """Return the number of requests sent until a moment.

        Args:
            moment: A recent time. If the moment is earlier than all kept times, the count is unknown and 0 is returned.
        """
        if self._before and self._times and moment < self._times[0]:
            return 0
        return self._before + bisect.bisect_right(self._times, moment)
