"""How long a body may take: as long as it keeps a pace, and no longer. Told the time; waits for nothing itself."""

from __future__ import annotations

from trioserve.http.limits import FrontendLimits

__all__ = ["BodyPace"]


class BodyPace:
    """One body's patience. deadline: when it ends, unless more arrives before.

    Every byte moves it on by what a byte may take, and none moves it further than body_wait_seconds_max from now: so
    whoever sends slowly, but at the pace, is never cut off, a byte now and then is worth nothing, and a rush at the
    beginning buys no long silence.
    """

    __slots__ = ("_limits", "deadline")

    def __init__(self, limits: FrontendLimits, *, now: float) -> None:
        self._limits = limits
        self.deadline = now + limits.body_wait_seconds_max

    def arrived(self, byte_count: int, *, now: float) -> float:
        """So many bytes of the body came. Returns the new deadline."""
        earned = self.deadline + byte_count / self._limits.body_bytes_per_second_min
        self.deadline = min(earned, now + self._limits.body_wait_seconds_max)
        return self.deadline

    @property
    def lost(self) -> str:
        """For the client whose patience has ended."""
        return (
            f"the request body did not arrive in time: it may fall behind {self._limits.body_bytes_per_second_min} "
            f"bytes per second by at most {self._limits.body_wait_seconds_max:g} seconds"
        )
