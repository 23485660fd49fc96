"""A router core that measures the time of its own calls, which is the cost of its decisions without sockets."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from trioserve.contracts.endpoint import EndpointId, EndpointLoad, RoutedRequest
from trioserve.router.core import RouterCore
from trioserve.router.ticket import Ticket, TicketState

__all__ = ["CallTimes", "TimedCore"]

INTERRUPTED_NS = 1_000_000  # limit for calls that take about ten microseconds


class CallTimes:
    """Nanoseconds of the calls of all cores that share this object.

    Only calls from begins_at on and before ends_at count. A call that takes INTERRUPTED_NS is left out, since the
    processor did something else meanwhile. The thread's CPU clock would not have that problem, but reading it takes a
    third of the measured time.

    Attributes:
        begins_at: first time that counts.
        ends_at: time from which calls no longer count.
        choices: calls of enter with a request that got a lease at once.
        reports: calls of note_load, which may grant leases to waiting requests.
        others: all other calls.
    """

    def __init__(self) -> None:
        self.begins_at = -math.inf
        self.ends_at = math.inf
        self.choices = array("q")
        self.reports = array("q")
        self.others = array("q")

    @property
    def seconds(self) -> float:
        """Sum of all calls in seconds."""
        return (sum(self.choices) + sum(self.reports) + sum(self.others)) / 1e9


class TimedCore(RouterCore):
    """A RouterCore that measures its calls. The time of callbacks inside of a call is not counted.

    Args:
        *settings: positional arguments of RouterCore.
        times: receives the measurements.
        on_change: callback of RouterCore.
        **more: other arguments of RouterCore.
    """

    def __init__(self, *settings: Any, times: CallTimes, on_change: Callable[[Ticket], None], **more: Any) -> None:
        self._times = times
        self._outside_ns = 0

        def timed_on_change(ticket: Ticket) -> None:
            began = perf_counter_ns()
            on_change(ticket)
            self._outside_ns += perf_counter_ns() - began

        super().__init__(*settings, on_change=timed_on_change, **more)

    def enter(self, request: RoutedRequest, now: float) -> Ticket:
        began = perf_counter_ns() - self._outside_ns
        ticket = super().enter(request, now)
        is_choice = ticket.state is TicketState.LEASED
        self._note(self._times.choices if is_choice else self._times.others, began, now)
        return ticket

    def first_token(self, ticket: Ticket, now: float, *, can_resume: bool = False) -> None:
        began = perf_counter_ns() - self._outside_ns
        super().first_token(ticket, now, can_resume=can_resume)
        self._note(self._times.others, began, now)

    def leave(self, ticket: Ticket, now: float) -> None:
        began = perf_counter_ns() - self._outside_ns
        super().leave(ticket, now)
        self._note(self._times.others, began, now)

    def note_load(self, id: EndpointId, load: EndpointLoad, now: float, *, sent_when_asked: int) -> None:
        began = perf_counter_ns() - self._outside_ns
        super().note_load(id, load, now, sent_when_asked=sent_when_asked)
        self._note(self._times.reports, began, now)

    def set_lease_share(self, id: EndpointId, share: int, now: float) -> None:
        began = perf_counter_ns() - self._outside_ns
        super().set_lease_share(id, share, now)
        self._note(self._times.others, began, now)

    def next_tick(self, now: float) -> float:
        began = perf_counter_ns() - self._outside_ns
        moment = super().next_tick(now)
        self._note(self._times.others, began, now)
        return moment

    def tick(self, now: float) -> None:
        began = perf_counter_ns() - self._outside_ns
        super().tick(now)
        self._note(self._times.others, began, now)

    def _note(self, samples: array[int], began: int, now: float) -> None:
        took = perf_counter_ns() - self._outside_ns - began
        if took < INTERRUPTED_NS and self._times.begins_at <= now < self._times.ends_at:
            samples.append(took)
