"""Deadlines of a request, and time limits of stopping a service. Their ranges are checked only here."""

from __future__ import annotations

import enum
import math

import msgspec

from trioserve.contracts.arguments import to_float
from trioserve.contracts.errors import InvalidRequest, StartupError

__all__ = ["DEADLINE_SECONDS_MAX", "Deadline", "Deadlines", "NO_DEADLINES", "StoppingSettings", "passed_message"]

DEADLINE_SECONDS_MAX = 7 * 24 * 3600.0  # A request that may take longer than this limit must set no deadline.


class Deadline(enum.Enum):
    """One of a request's three deadlines. The value is its name in the API, and the reason that clients get."""

    QUEUE = "queue_timeout"  # QUEUE is the time until the request begins to run.
    FIRST_TOKEN = "ttft_timeout"  # FIRST_TOKEN is the time until the request's first token is sampled.
    TOTAL = "timeout"  # TOTAL is the time until the response is complete.


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that a request may take, from the moment it enters the server.

    Attributes:
        queue_timeout: Seconds until the request begins to run. None means no deadline. None has the same meaning in the
            next two fields.
        ttft_timeout: Seconds until the first token.
        timeout: Seconds until the response is complete.

    Raises:
        InvalidRequest: a value is not a number, or not above 0 and at most DEADLINE_SECONDS_MAX. The message names the
            field.
    """

    queue_timeout: float | None = None
    ttft_timeout: float | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        for deadline in Deadline:
            asked = self.seconds(deadline)
            if asked is None:
                continue
            seconds = to_float(deadline.value, asked, "a number of seconds (float), or None")
            if seconds is not asked:
                msgspec.structs.force_setattr(self, deadline.value, seconds)
            if not (math.isfinite(seconds) and 0 < seconds <= DEADLINE_SECONDS_MAX):
                raise InvalidRequest(
                    f"{deadline.value} is {seconds} seconds, allowed is above 0 and at most {DEADLINE_SECONDS_MAX:g}",
                    param=deadline.value,
                )

    def seconds(self, deadline: Deadline) -> float | None:
        value: float | None = getattr(self, deadline.value)
        return value

    def within(self, defaults: Deadlines, limits: Deadlines) -> Deadlines:
        """Return these deadlines with defaults filled in, and cut to the limits.

        Args:
            defaults: Values for the deadlines that the request did not set.
            limits: Largest allowed values. A request without a deadline gets the limit.
        """
        if self == defaults == limits == NO_DEADLINES:
            return self
        values: dict[str, float | None] = {}
        for deadline in Deadline:
            asked = self.seconds(deadline)
            candidates = [defaults.seconds(deadline) if asked is None else asked, limits.seconds(deadline)]
            values[deadline.value] = min((value for value in candidates if value is not None), default=None)
        return Deadlines(**values)


NO_DEADLINES = Deadlines()

_LIMIT_OPTIONS = {
    Deadline.QUEUE: "--max-queue-timeout",
    Deadline.FIRST_TOKEN: "--max-ttft-timeout",
    Deadline.TOTAL: "--max-request-timeout",
}


def passed_message(deadline: Deadline, seconds: float, limits: Deadlines) -> str:
    """Return the message for a client whose deadline has passed.

    Args:
        deadline: The deadline that passed.
        seconds: Length of the deadline in seconds.
        limits: Largest deadlines that the server allows. If such a limit set this deadline, the message names the
            server option.
    """
    message = f"the request's {deadline.value} of {seconds:g} s has passed"
    limit = limits.seconds(deadline)
    if limit is None or seconds < limit:
        return message
    return f"{message}, and that is the longest that this server allows ({_LIMIT_OPTIONS[deadline]})"


STOPPING_SECONDS_MAX = 86_400  # one day; a larger value probably has the wrong unit


class StoppingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits for the phases in which a service stops.

    Attributes:
        drain_seconds_max: Longest time for running requests to finish after the command to stop.
        drain_delay_seconds: Minimum time for which the server still answers after SIGTERM, so that load balancers and
            people can see that it drains. At most drain_seconds_max. Not applied after SIGINT, which a waiting person
            sends.
        grace_seconds_max: Longest time for clients to read the end of their responses, after the drain or a fault.
            After this time, every task is cancelled.

    Raises:
        StartupError: a value is out of range.
    """

    drain_seconds_max: float = 30.0
    drain_delay_seconds: float = 2.0
    grace_seconds_max: float = 2.0

    def __post_init__(self) -> None:
        for name in ("drain_seconds_max", "drain_delay_seconds", "grace_seconds_max"):
            value = getattr(self, name)
            if not 0 <= value <= STOPPING_SECONDS_MAX:
                raise StartupError(f"{name} is {value}, it must be 0 to {STOPPING_SECONDS_MAX} seconds")
