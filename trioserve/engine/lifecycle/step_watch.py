"""Watches how long the step in flight has run, and how long the engine has made no progress.

An engine can hang while its event loop still runs, if the GPU hangs or the compute thread waits forever. A running
step cannot be ended from outside. So the watch only reports the hang: the engine becomes unready, and routers send
requests to other endpoints until the step ends.
"""

from __future__ import annotations

import logging
import math
from collections import deque

import trio

__all__ = ["StepWatch"]

logger = logging.getLogger(__name__)

STEP_SECONDS_MAX = 60.0  # Far more than a small model needs on a slow machine, and far less than clients wait.
LONGEST_STEPS_MAX = 10.0  # Multiple of the longest step so far. The times of healthy steps differ by a smaller factor.
HANGS_AFTER = 5.0  # Multiple of the allowed age. An older step will not end, and only a new process helps.


class StepWatch:
    """Compares the time that the step in flight has run with a limit.

    A step that exceeded the limit is recorded as a step of exactly the limit. So a slow machine gets a higher limit
    after one long step, but one hang of an hour does not raise the limit to ten hours.

    Args:
        seconds_max: longest time in seconds that a step may run. None: 60 s or ten times the longest step so far,
            whichever is larger. 0: no limit.
    """

    def __init__(self, seconds_max: float | None = None) -> None:
        self._fixed_seconds_max = seconds_max
        self._longest_seconds = 0.0
        self._handed_over_at: deque[float] = deque()  # Submission times of the plans in flight, the oldest first.
        self._ended_at = -math.inf
        self._is_logged = False

    def begin(self, now: float) -> None:
        """Note that a plan is submitted. Another plan may still be in flight.

        Args:
            now: current time.
        """
        self._handed_over_at.append(now)

    def end(self, now: float) -> None:
        """Note that the step of the oldest plan in flight has ended.

        Args:
            now: current time.
        """
        seconds = now - max(self._handed_over_at.popleft(), self._ended_at)
        self._ended_at = now
        self._is_logged = False
        if seconds <= self._longest_seconds:
            # Nearly every step ends here. The limit is larger than the longest step, so the step was in time.
            return
        seconds_max = self.seconds_max
        self._longest_seconds = max(self._longest_seconds, min(seconds, seconds_max))
        if seconds > seconds_max:
            logger.warning("a step ended late seconds=%.1f allowed=%g", seconds, seconds_max)

    def forget(self, now: float) -> None:
        """Forget the plans in flight, because their results will never arrive.

        Args:
            now: current time.
        """
        self._handed_over_at.clear()
        self._ended_at = now
        self._is_logged = False

    def note_unblocked(self, now: float) -> None:
        """Note that steps were blocked on purpose until now. The blocked time does not count as lack of progress.

        Args:
            now: current time.
        """
        if not self._handed_over_at:
            self._ended_at = now

    @property
    def seconds_max(self) -> float:
        """Highest allowed age of the step in flight, in seconds. math.inf: no limit."""
        if self._fixed_seconds_max is None:
            return max(STEP_SECONDS_MAX, LONGEST_STEPS_MAX * self._longest_seconds)
        return self._fixed_seconds_max or math.inf

    def age_seconds(self, now: float) -> float:
        """Return how long the step in flight has run. A step that was planned ahead begins when the previous step ends.

        Args:
            now: current time.

        Returns:
            Seconds. 0 if no step is in flight.
        """
        return now - max(self._handed_over_at[0], self._ended_at) if self._handed_over_at else 0.0

    def idle_seconds(self, now: float, waiting_since: float | None) -> float:
        """Return how long requests have waited since the last step ended.

        Args:
            now: current time.
            waiting_since: time at which the oldest unfinished request entered. None: there is no such request.

        Returns:
            Seconds. 0 if no request waits or runs.
        """
        return 0.0 if waiting_since is None else now - max(waiting_since, self._ended_at)

    def overdue(self) -> str | None:
        """Return a sentence that describes the step in flight if it has run too long. Otherwise return None."""
        seconds, seconds_max = self.age_seconds(trio.current_time()), self.seconds_max
        if seconds <= seconds_max:
            return None
        if not self._is_logged:
            self._is_logged = True
            logger.warning("the step in flight is overdue seconds=%.1f allowed=%g", seconds, seconds_max)
        return f"the step in flight is {seconds:.1f} s old, and {seconds_max:g} s are allowed"

    def hangs(self) -> bool:
        """Return True if the step in flight is so old that it will probably never end."""
        return self.age_seconds(trio.current_time()) > HANGS_AFTER * self.seconds_max
