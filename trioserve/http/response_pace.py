"""The deadline of a response, which the client must read at a minimum rate. No I/O."""

from __future__ import annotations

from trioserve.http.limits import FrontendLimits

__all__ = ["ResponsePace"]


class ResponsePace:
    """The deadline for one client to read bytes, which exists only while bytes wait for the client.

    Each byte that the client reads moves the deadline by the time that the minimum rate allows for one byte, to at most
    stall_seconds_max from now. So a client fails if it reads nothing for stall_seconds_max, or only a byte now and
    then. While no bytes wait, the client regains one second of its time per second. So a client that reads a slow
    stream is never late, and a client that is late with each event does not get the full time again for the next event.

    Args:
        limits: contains the minimum rate and stall_seconds_max.
        now: current time, in Trio's seconds.

    Attributes:
        deadline: time at which the client fails, unless it reads more before that time. Valid while `is_running`.
        is_running: True while bytes wait for the client.
    """

    __slots__ = ("_limits", "_progress_at", "_slack_seconds", "_stopped_at", "deadline", "is_running")

    def __init__(self, limits: FrontendLimits, *, now: float) -> None:
        self._limits = limits
        self._slack_seconds = limits.stall_seconds_max
        self._stopped_at = self._progress_at = self.deadline = now
        self.is_running = False

    def start(self, now: float) -> float:
        """Start the deadline if no bytes were waiting before.

        Args:
            now: current time.

        Returns:
            The deadline.
        """
        if not self.is_running:
            self.is_running = True
            self._progress_at = now
            slack_seconds = self._slack_seconds + now - self._stopped_at
            self.deadline = now + min(slack_seconds, self._limits.stall_seconds_max)
        return self.deadline

    def advance(self, byte_count: int, now: float) -> float:
        """Move the deadline after the client read bytes, while more bytes wait.

        Args:
            byte_count: number of bytes that the client read.
            now: current time.

        Returns:
            The new deadline.
        """
        self._progress_at = now
        earned = self.deadline + byte_count / self._limits.response_bytes_per_second_min
        self.deadline = min(earned, now + self._limits.stall_seconds_max)
        return self.deadline

    def stop(self, byte_count: int, now: float) -> None:
        """Stop the deadline after the client read the last waiting bytes.

        Args:
            byte_count: number of bytes that the client read.
            now: current time.
        """
        self._slack_seconds = self.advance(byte_count, now) - now
        self._stopped_at = now
        self.is_running = False

    @property
    def saw_progress(self) -> bool:
        """True if the client read some bytes since the wait started, but too few. Valid after the deadline."""
        return self.deadline - self._progress_at < self._limits.stall_seconds_max
