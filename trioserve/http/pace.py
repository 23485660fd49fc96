"""Deadlines of a request body and of a response, which move with each byte, and a rate limit. No I/O."""

from __future__ import annotations

from trioserve.http.limits import FrontendLimits

__all__ = ["BodyPace", "RateBucket", "ResponsePace"]


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


class RateBucket:
    """A token bucket.

    Args:
        per_second: events per second in the long run.
        burst: number of events that may occur at once.
        now: current time, in monotonic seconds.
    """

    __slots__ = ("_burst", "_left", "_per_second", "_seen_at")

    def __init__(self, *, per_second: float, burst: float, now: float) -> None:
        self._per_second = per_second
        self._burst = burst
        self._left = float(burst)
        self._seen_at = now

    def take(self, now: float, amount: float = 1.0) -> bool:
        """Count events, and return whether the limit allows them.

        Args:
            now: current time, in monotonic seconds.
            amount: number of events, or their cost.

        Returns:
            False if the limit is exceeded. Then nothing is counted.
        """
        self._left = min(self._burst, self._left + (now - self._seen_at) * self._per_second)
        self._seen_at = now
        if self._left < amount:
            return False
        self._left -= amount
        return True

    def allow(self, count: int) -> None:
        """Allow further events, up to the burst.

        Args:
            count: number of events.
        """
        self._left = min(self._burst, self._left + count)
