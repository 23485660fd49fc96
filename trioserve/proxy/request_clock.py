"""The deadlines of one request on its way through the router, wherever it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from trioserve.api.error_responses import deadline_refusal
from trioserve.contracts.deadlines import NO_DEADLINES, Deadline, Deadlines, passed_message

__all__ = ["RequestClock"]


class RequestClock:
    """The deadlines of one request, from its arrival at the router on. grace_seconds: for so long its endpoint, which
    goes by the same deadlines, may say how it ended. limits: which have shortened the deadlines."""

    def __init__(
        self, deadlines: Deadlines, now: float, *, grace_seconds: float = 0.0, limits: Deadlines = NO_DEADLINES
    ) -> None:
        self._limits = limits
        self._grace_seconds = grace_seconds
        self._deadlines = deadlines
        self._moments: dict[Deadline, float] = {}
        if deadlines is not NO_DEADLINES:
            for deadline in Deadline:
                seconds = deadlines.seconds(deadline)
                if seconds is not None:
                    self._moments[deadline] = now + seconds
        self._scope = trio.CancelScope()
        self._first_token_is_due = deadlines.ttft_timeout is not None
        self._has_token = False

    def at(self, deadline: Deadline) -> float:
        return self._moments.get(deadline, math.inf)

    def first(self) -> tuple[Deadline, float]:
        """Which of them passes first for one that waits in the queue, and when."""
        return min(self._moments.items(), key=lambda entry: entry[1], default=(Deadline.QUEUE, math.inf))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Raises Refusal when the time to the first token or to the end has passed."""
        if not self._moments:  # as most requests have it: a scope would be for nothing
            yield
            return
        self._scope.deadline = min(self.at(Deadline.FIRST_TOKEN), self.at(Deadline.TOTAL)) + self._grace_seconds
        with self._scope:
            yield
        if self._scope.cancelled_caught:
            passed = Deadline.TOTAL
            if self._first_token_is_due and self.at(Deadline.FIRST_TOKEN) <= self.at(Deadline.TOTAL):
                passed = Deadline.FIRST_TOKEN
            seconds = self._deadlines.seconds(passed)
            raise deadline_refusal(passed, passed_message(passed, seconds or 0.0, self._limits))

    def stop_first_token(self) -> None:
        self._has_token = True
        if self._first_token_is_due:
            self._first_token_is_due = False
            self._scope.deadline = self.at(Deadline.TOTAL) + self._grace_seconds

    def note_served(self, seconds: float) -> None:
        """So long of the time in which it should have left the queue it was served, and waits again for the rest."""
        if Deadline.QUEUE in self._moments:
            self._moments[Deadline.QUEUE] += seconds

    def left(self) -> dict[str, object]:
        """The body's deadline fields for an endpoint: what is left of them now."""
        if not self._moments:
            return {}
        now = trio.current_time()
        return {
            deadline.value: max(0.001, moment - now)
            for deadline, moment in self._moments.items()
            if deadline is Deadline.TOTAL or not self._has_token
        }

    @property
    def passed(self) -> tuple[str, ...]:
        """Fields that say nothing any more, since the time for which they were is over."""
        return (Deadline.QUEUE.value, Deadline.FIRST_TOKEN.value) if self._has_token else ()
