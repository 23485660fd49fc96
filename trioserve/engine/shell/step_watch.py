"""How old the step in flight is, whether that is too old, and for how long nothing has come of what is waited for.

An event loop that turns is alive, and may still bring nothing: the GPU hangs, or the compute thread waits for ever. No
step can be ended from outside, so all that can be done is to say so: whoever asks is told, and takes its requests to
another server until the step ends.
"""

from __future__ import annotations

import logging
import math
from collections import deque

import trio

__all__ = ["StepWatch"]

logger = logging.getLogger(__name__)

STEP_SECONDS_MAX = 60.0  # far more than a step of a small model takes on a slow machine, far less than a client waits
LONGEST_STEPS_MAX = 10.0  # times the longest step so far: honest steps differ by less (a prompt in chunks, a decode)
HANGS_AFTER = 5.0  # times what a step may take: so long nobody comes back, and only a new process helps


class StepWatch:
    """seconds_max: how old a step may get. None: 60 s, or ten times the longest step so far, if that is more. 0: as old
    as it likes.

    A step that took longer than it may counts as one that took as long as it may: a slow machine is believed after its
    first long step, and one that once hung for an hour is not given ten hours the next time.
    """

    def __init__(self, seconds_max: float | None = None) -> None:
        self._fixed_seconds_max = seconds_max
        self._longest_seconds = 0.0
        self._handed_over_at: deque[float] = deque()  # the plans in flight, the oldest first
        self._ended_at = -math.inf
        self._is_told = False

    def begin(self, now: float) -> None:
        """A plan is handed over, perhaps behind another one."""
        self._handed_over_at.append(now)

    def end(self, now: float) -> None:
        """The oldest plan in flight came back."""
        seconds, seconds_max = self.age_seconds(now), self.seconds_max
        self._handed_over_at.popleft()
        self._ended_at = now
        self._longest_seconds = max(self._longest_seconds, min(seconds, seconds_max))
        if seconds > seconds_max:
            logger.warning("a step ended late seconds=%.1f allowed=%g", seconds, seconds_max)
        self._is_told = False

    def forget(self, now: float) -> None:
        """The plans in flight do not come back."""
        self._handed_over_at.clear()
        self._ended_at = now
        self._is_told = False

    def note_going_on(self, now: float) -> None:
        """Steps were held up until now, on purpose: for that time nobody has waited in vain."""
        if not self._handed_over_at:
            self._ended_at = now

    @property
    def seconds_max(self) -> float:
        """How old the step in flight may get; math.inf: as old as it likes."""
        if self._fixed_seconds_max is None:
            return max(STEP_SECONDS_MAX, LONGEST_STEPS_MAX * self._longest_seconds)
        return self._fixed_seconds_max or math.inf

    def age_seconds(self, now: float) -> float:
        """Of the step that is computed; 0 if none is. One that was planned ahead begins when that before it ends."""
        return now - max(self._handed_over_at[0], self._ended_at) if self._handed_over_at else 0.0

    def idle_seconds(self, now: float, waiting_since: float | None) -> float:
        """For how long somebody has waited since the last step ended; 0 if nobody does. waiting_since: when the first
        of those that wait or run has come."""
        return 0.0 if waiting_since is None else now - max(waiting_since, self._ended_at)

    def overdue(self) -> str | None:
        """That the step in flight is older than it may get, in a sentence; None if it is not."""
        seconds, seconds_max = self.age_seconds(trio.current_time()), self.seconds_max
        if seconds <= seconds_max:
            return None
        if not self._is_told:
            self._is_told = True
            logger.warning("the step in flight is overdue seconds=%.1f allowed=%g", seconds, seconds_max)
        return f"the step in flight is {seconds:.1f} s old, and {seconds_max:g} s are allowed"

    def hangs(self) -> bool:
        """Whether the step in flight is so old that nobody should wait for its end."""
        return self.age_seconds(trio.current_time()) > HANGS_AFTER * self.seconds_max
