"""Estimates when a refused request should try again, from how fast requests ended recently. Used for the `Retry-After`
header.
"""

from __future__ import annotations

from collections import deque

__all__ = ["DrainRate"]

ENDINGS_MAX = 64  # enough for a steady estimate, few enough to follow a change of load
RETRY_SECONDS_MIN = 1.0
RETRY_SECONDS_MAX = 60.0  # an estimate beyond a minute is too inaccurate to be useful
RETRY_SECONDS_UNKNOWN = 5.0  # used if no request has ended yet


class DrainRate:
    """The rate at which requests end, not counting the time in which no request runs.

    Times are seconds of one monotonic clock.
    """

    def __init__(self) -> None:
        self._ended_at: deque[float] = deque(maxlen=ENDINGS_MAX)  # in seconds of busy time
        self._idle_seconds = 0.0
        self._idle_since: float | None = None

    def note(self, now: float) -> None:
        """Record that a request ended.

        Args:
            now: time in seconds.
        """
        self._ended_at.append(now - self._idle_seconds)

    def note_idle(self, now: float) -> None:
        """Record that no request runs any more.

        Args:
            now: time in seconds.
        """
        self._idle_since = now

    def note_begin(self, now: float) -> None:
        """Record that a request starts.

        Args:
            now: time in seconds.
        """
        if self._idle_since is not None:
            self._idle_seconds += now - self._idle_since
            self._idle_since = None

    def seconds_for(self, count: int, now: float) -> float:
        """Estimate the seconds until more requests have ended, at the rate of the last requests.

        Args:
            count: number of requests that have to end.
            now: time in seconds.

        Returns:
            1 to 60 seconds. 5 seconds if fewer than two requests have ended.
        """
        if len(self._ended_at) < 2:
            return RETRY_SECONDS_UNKNOWN
        seconds_each = (now - self._idle_seconds - self._ended_at[0]) / len(self._ended_at)
        return min(RETRY_SECONDS_MAX, max(RETRY_SECONDS_MIN, count * seconds_each))
