"""How slowly a client may take a response: like bodies, responses have a pace. Told the time; waits for nothing."""

from __future__ import annotations

from trioserve.http.limits import FrontendLimits

__all__ = ["ResponsePace"]


class ResponsePace:
    """One client's patience, which runs while something waits for it and at no other time.

    Every byte that the client takes moves the deadline on by what a byte may take, and none moves it further than
    stall_seconds_max from now: so whoever takes nothing for so long is given up, and so is whoever takes a byte now
    and then. While nothing waits, patience comes back as fast as it went: a reader of a slow stream is always on time,
    and a wait for each event does not begin anew with each.
    """

    __slots__ = ("_limits", "_progress_at", "_slack_seconds", "_stopped_at", "deadline", "is_running")

    def __init__(self, limits: FrontendLimits, *, now: float) -> None:
        self._limits = limits
        self._slack_seconds = limits.stall_seconds_max
        self._stopped_at = self._progress_at = self.deadline = now
        self.is_running = False

    def run(self, now: float) -> float:
        """Something waits for the client, from now on if it did not before. Returns when its patience ends."""
        if not self.is_running:
            self.is_running = True
            self._progress_at = now
            slack_seconds = self._slack_seconds + now - self._stopped_at
            self.deadline = now + min(slack_seconds, self._limits.stall_seconds_max)
        return self.deadline

    def taken(self, byte_count: int, now: float) -> float:
        """The client took so many bytes, and others wait. Returns the new deadline."""
        self._progress_at = now
        earned = self.deadline + byte_count / self._limits.response_bytes_per_second_min
        self.deadline = min(earned, now + self._limits.stall_seconds_max)
        return self.deadline

    def stop(self, byte_count: int, now: float) -> None:
        """The client took so many bytes, and nothing is left for it."""
        self._slack_seconds = self.taken(byte_count, now) - now
        self._stopped_at = now
        self.is_running = False

    @property
    def saw_progress(self) -> bool:
        """When patience has ended: whether the client took something, but too little."""
        return self.deadline - self._progress_at < self._limits.stall_seconds_max
