"""When requests were sent, so that it can be told how many were sent by a moment that is not long ago."""

from __future__ import annotations

import bisect

__all__ = ["SentTimes"]

KEPT_SECONDS = 10.0  # a report is believed for two


class SentTimes:
    """Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._before = 0  # sent before the first of these

    def note(self, now: float) -> None:
        """One is sent now."""
        self._times.append(now)
        if len(self._times) > 64 and self._times[len(self._times) // 2] < now - KEPT_SECONDS:
            half = len(self._times) // 2
            self._before += half
            del self._times[:half]

    def count_at(self, moment: float) -> int:
        """How many were sent by then. What was sent longer ago than is kept counts as sent by then, unless the moment
        is longer ago as well: then it is unknown, and none of these are."""
        if self._before and self._times and moment < self._times[0]:
            return 0
        return self._before + bisect.bisect_right(self._times, moment)
