"""How long until there is room again, judged by how fast requests have ended lately. Answers 'retry after'."""

from __future__ import annotations

from collections import deque

__all__ = ["DrainRate"]

ENDINGS_MAX = 64  # enough to be steady, few enough to follow a change of load
RETRY_SECONDS_MIN = 1.0
RETRY_SECONDS_MAX = 60.0  # beyond a minute the guess is worth nothing
RETRY_SECONDS_UNKNOWN = 5.0  # nothing has ended yet


class DrainRate:
    """Times are seconds of one monotonic clock. Time in which nothing runs says nothing of how fast requests end."""

    def __init__(self) -> None:
        self._ended_at: deque[float] = deque(maxlen=ENDINGS_MAX)  # in seconds in which something ran
        self._idle_seconds = 0.0
        self._idle_since: float | None = None

    def note(self, now: float) -> None:
        """A request has ended."""
        self._ended_at.append(now - self._idle_seconds)

    def note_idle(self, now: float) -> None:
        """Nothing runs any more."""
        self._idle_since = now

    def note_begin(self, now: float) -> None:
        """Something runs."""
        if self._idle_since is not None:
            self._idle_seconds += now - self._idle_since
            self._idle_since = None

    def seconds_for(self, count: int, now: float) -> float:
        """After how many seconds `count` more requests will have ended, at the rate of the last ones."""
        if len(self._ended_at) < 2:
            return RETRY_SECONDS_UNKNOWN
        seconds_each = (now - self._idle_seconds - self._ended_at[0]) / len(self._ended_at)
        return min(RETRY_SECONDS_MAX, max(RETRY_SECONDS_MIN, count * seconds_each))
