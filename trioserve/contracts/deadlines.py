"""How long a request may wait, and for what. The ranges are checked here and nowhere else."""

from __future__ import annotations

import enum
import math

import msgspec

from trioserve.contracts.arguments import to_float
from trioserve.contracts.errors import InvalidRequest

__all__ = ["DEADLINE_SECONDS_MAX", "NO_DEADLINES", "Deadline", "Deadlines", "passed_message"]

DEADLINE_SECONDS_MAX = 7 * 24 * 3600.0  # a request that may take longer has no deadline


class Deadline(enum.Enum):
    """Which of a request's deadlines. The value is its name in the API, and the reason that clients are told."""

    QUEUE = "queue_timeout"  # until it begins to run
    FIRST_TOKEN = "ttft_timeout"  # until it has a token
    TOTAL = "timeout"  # until its response is complete


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from the moment a request is entered; None is no deadline.

    Raises InvalidRequest, naming the field, for a value that is no number, or not above 0 and at most
    DEADLINE_SECONDS_MAX.
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
        """These, where a request has none the default, and none beyond the limit."""
        if self == defaults == limits == NO_DEADLINES:
            return self
        values: dict[str, float | None] = {}
        for deadline in Deadline:
            asked = self.seconds(deadline)
            candidates = [defaults.seconds(deadline) if asked is None else asked, limits.seconds(deadline)]
            values[deadline.value] = min((value for value in candidates if value is not None), default=None)
        return Deadlines(**values)


NO_DEADLINES = Deadlines()
"""What most requests have."""

_LIMIT_OPTIONS = {
    Deadline.QUEUE: "--max-queue-timeout",
    Deadline.FIRST_TOKEN: "--max-ttft-timeout",
    Deadline.TOTAL: "--max-request-timeout",
}


def passed_message(deadline: Deadline, seconds: float, limits: Deadlines) -> str:
    """What a client is told of a deadline that has passed.

    Args:
        deadline: Which one.
        seconds: How long the request had.
        limits: The longest that any request may have, which shorten what a request asks for.
    """
    message = f"the request's {deadline.value} of {seconds:g} s has passed"
    limit = limits.seconds(deadline)
    if limit is None or seconds < limit:
        return message
    return f"{message}, and that is the longest that this server allows ({_LIMIT_OPTIONS[deadline]})"
