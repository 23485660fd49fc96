"""Deadlines of one request at the router, over all endpoints that it is sent to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from trioserve.api.error_responses import deadline_refusal
from trioserve.contracts.deadlines import NO_DEADLINES, Deadline, Deadlines, passed_message

__all__ = ["RequestClock"]


class RequestClock:
    """Deadlines of one request, counted from its arrival at the router.

    Args:
        deadlines: Time limits of the request.
        now: Arrival of the request, in seconds of Trio's clock.
        grace_seconds: Extra time before the router ends a running request. The endpoint has the same deadlines and can
            report the end in this time.
        limits: Server limits that have shortened the deadlines, for the error message.
    """

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
        """Return the deadline that passes first for a queued request, and its time."""
        return min(self._moments.items(), key=lambda entry: entry[1], default=(Deadline.QUEUE, math.inf))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Apply the deadlines to the block.

        Raises:
            Refusal: The deadline for the first token or for the whole request has passed.
        """
        if not self._moments:  # most requests have no deadlines and need no scope
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
        """Extend the queue deadline of a request that is queued again, by the time that an endpoint served it.

        Args:
            seconds: Time at the endpoint.
        """
        if Deadline.QUEUE in self._moments:
            self._moments[Deadline.QUEUE] += seconds

    def left(self) -> dict[str, object]:
        """Return the remaining times as deadline fields of a request body."""
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
        """Names of the deadline fields that no longer apply, because the first token has arrived."""
        return (Deadline.QUEUE.value, Deadline.FIRST_TOKEN.value) if self._has_token else ()
