"""Watches the age of the step in flight, and for how long the engine has made no progress.

An engine can hang while its event loop runs: the GPU hangs, or the compute thread waits for ever. A step cannot be
ended from outside. So the watch only reports: the engine becomes unready, and routers send requests elsewhere until the
step ends.
"""

from __future__ import annotations

import logging
import math
from collections import deque

import trio

__all__ = ["StepWatch"]

logger = logging.getLogger(__name__)

STEP_SECONDS_MAX = 60.0  # far more than a small model needs on a slow machine, far less than clients wait
LONGEST_STEPS_MAX = 10.0  # times the longest step so far. Healthy steps (a prompt chunk, a decode) differ by less.
HANGS_AFTER = 5.0  # times the allowed age. After that the step will not end, and only a new process helps.


class StepWatch:
    """Compares the age of the step in flight with a limit.

    A step above the limit counts as a step of exactly the limit. So after one long step a slow machine gets a higher
    limit, but one hang of an hour does not raise the limit to ten hours.

    Args:
        seconds_max: highest allowed age in seconds. None: 60 s or ten times the longest step so far, the larger of
            both. 0: no limit.
    """

    def __init__(self, seconds_max: float | None = None) -> None:
        self._fixed_seconds_max = seconds_max
        self._longest_seconds = 0.0
        self._handed_over_at: deque[float] = deque()  # submission times of the plans in flight, the oldest first
        self._ended_at = -math.inf
        self._is_logged = False

    def begin(self, now: float) -> None:
        """Note that a plan is handed over, perhaps while another one is in flight.

        Args:
            now: current time.
        """
        self._handed_over_at.append(now)

    def end(self, now: float) -> None:
        """Note that the oldest plan in flight has ended.

        Args:
            now: current time.
        """
        seconds = now - max(self._handed_over_at.popleft(), self._ended_at)
        self._ended_at = now
        self._is_logged = False
        if seconds <= self._longest_seconds:
            return  # no limit is smaller than a step that has ended, as nearly every step
        seconds_max = self.seconds_max
        self._longest_seconds = max(self._longest_seconds, min(seconds, seconds_max))
        if seconds > seconds_max:
            logger.warning("a step ended late seconds=%.1f allowed=%g", seconds, seconds_max)

    def forget(self, now: float) -> None:
        """Forget the plans in flight, because their results will never come.

        Args:
            now: current time.
        """
        self._handed_over_at.clear()
        self._ended_at = now
        self._is_logged = False

    def note_unblocked(self, now: float) -> None:
        """Note that steps were blocked on purpose until now. This time does not count as lack of progress.

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
        """Return the age of the step that is being computed. A step that was planned ahead begins when the step before
        it ends.

        Args:
            now: current time.

        Returns:
            Seconds. 0 if no step is in flight.
        """
        return now - max(self._handed_over_at[0], self._ended_at) if self._handed_over_at else 0.0

    def idle_seconds(self, now: float, waiting_since: float | None) -> float:
        """Return for how long requests have waited since the last step ended.

        Args:
            now: current time.
            waiting_since: when the oldest unfinished request entered. None: there is none.

        Returns:
            Seconds. 0 if no request waits or runs.
        """
        return 0.0 if waiting_since is None else now - max(waiting_since, self._ended_at)

    def overdue(self) -> str | None:
        """Return a sentence if the step in flight is older than allowed, or None if it is not."""
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
