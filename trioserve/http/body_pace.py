"""The deadline of a request body, which must keep a minimum rate and arrive within a total time. No I/O."""

from __future__ import annotations

from trioserve.http.limits import FrontendLimits

__all__ = ["BodyPace"]


class BodyPace:
    """The deadline of one body, which moves as bytes arrive.

    Each byte moves the deadline by the time that the minimum rate allows for one byte, to at most body_wait_seconds_max
    from now. So a sender that is slow but keeps the rate is not interrupted. A sender cannot avoid the deadline with a
    byte now and then, and many bytes at the start do not allow a long silence later. No byte moves the deadline beyond
    body_seconds_max after the first wait.

    Args:
        limits: contains the minimum rate and the times.
        now: time of the first wait for the body, in Trio's seconds.

    Attributes:
        deadline: time at which the body fails, unless more bytes arrive before that time.
    """

    __slots__ = ("_ends_at", "_limits", "deadline")

    def __init__(self, limits: FrontendLimits, *, now: float) -> None:
        self._limits = limits
        self._ends_at = now + limits.body_seconds_max
        self.deadline = min(now + limits.body_wait_seconds_max, self._ends_at)

    def arrived(self, byte_count: int, *, now: float) -> float:
        """Move the deadline after bytes arrived.

        Args:
            byte_count: number of bytes that arrived.
            now: current time.

        Returns:
            The new deadline.
        """
        earned = self.deadline + byte_count / self._limits.body_bytes_per_second_min
        self.deadline = min(earned, now + self._limits.body_wait_seconds_max, self._ends_at)
        return self.deadline

    @property
    def timeout_message(self) -> str:
        """The error message for the client after the deadline has passed."""
        if self.deadline == self._ends_at:
            return (
                f"the request body did not arrive in time: all of it may take {self._limits.body_seconds_max:g} "
                "seconds (--body-timeout): send a smaller body, or over a faster link"
            )
        return (
            f"the request body did not arrive in time: it may fall behind {self._limits.body_bytes_per_second_min} "
            f"bytes per second by at most {self._limits.body_wait_seconds_max:g} seconds"
        )
