"""Tracks the steps in flight and their requests, including requests that end while a later step still reads their
blocks.

Without overlap, at most one step is in flight. With overlap, a second step may be planned while the first step is
computed, as if every request of the first step continued. With steps_apart, the second step has no requests of the
first step, so the last row of the table never happens. Steps return in the order in which they were planned.

Each request counts the steps in flight that read or write its blocks (steps_in_flight). The request keeps its blocks
until the last of these steps has returned:

| event                            | effect on the request                         | its blocks are freed when      |
|----------------------------------|-----------------------------------------------|--------------------------------|
| it is aborted                    | it is marked and gets no more tokens          | its last step returns          |
| a token ends it, and it is not   | its end is reported                           | the step of that token returns |
| in the next step                 |                                               |                                |
| a token ends it, but it is also  | its end is reported, its state becomes ENDED, | the next step returns          |
| in the next step                 | and its token of the next step is dropped     |                                |

RequestTable has the unfinished requests, and the ids of recently finished requests. It handles aborts. An abort is
allowed at any moment. If no step in flight reads the request's blocks or slot, the request ends at once. Otherwise the
request is marked, and ends when the last of these steps has returned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from trioserve.contracts.events import AbortOutcome, AbortResult, FinishReason, RequestFinished
from trioserve.contracts.ids import RequestId
from trioserve.contracts.step import IsAbandoned, ScheduledChunk, StepPlan, StepResult
from trioserve.core.request_state import LiveRequest, RequestLife

__all__ = ["RequestTable", "STEPS_IN_FLIGHT_MAX", "StepsInFlight", "lacking_ids", "without_ended"]


STEPS_IN_FLIGHT_MAX = 2  # A third step would need two unknown tokens per request.


class Numbered(Protocol):
    @property
    def step_index(self) -> int: ...


Plan = TypeVar("Plan", bound=Numbered)
Life = TypeVar("Life", bound=RequestLife[Any])


class _Flight(Generic[Plan, Life]):
    """A plan in flight.

    Args:
        lives: the plan's requests, in the order of its chunks.

    Attributes:
        is_abandoned: becomes True when all requests of the plan were aborted or have ended.
    """

    __slots__ = ("_ids", "is_abandoned", "lives", "plan")

    def __init__(self, plan: Plan, lives: list[Life]) -> None:
        self.plan = plan
        self.lives = lives
        self.is_abandoned = IsAbandoned(len(lives))
        self._ids: frozenset[RequestId] | None = None

    def has(self, live: Life) -> bool:
        if self._ids is None:
            self._ids = frozenset(other.request.id for other in self.lives)
        return live.request.id in self._ids


class StepsInFlight(Generic[Plan, Life]):
    """The plans in flight. The oldest plan comes first.

    Attributes:
        ended: requests that were reported as ended while a step in flight still reads their blocks. Each is mapped to
            its finish reason.
    """

    def __init__(self) -> None:
        self._flights: dict[int, _Flight[Plan, Life]] = {}  # The key is the step index.
        self.ended: dict[RequestId, tuple[Life, FinishReason]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def last(self) -> Plan:
        """Return the newest plan. The caller must check that a plan is in flight."""
        return next(reversed(self._flights.values())).plan

    def begin(self, plan: Plan, lives: list[Life]) -> None:
        """Add a plan, and count it for each of its requests.

        Args:
            plan: the new plan.
            lives: the plan's requests, in the order of its chunks.
        """
        for live in lives:
            live.steps_in_flight += 1
        self._flights[plan.step_index] = _Flight(plan, lives)

    def end(self, plan: Plan) -> list[Life]:
        """Remove the oldest plan, because its step has returned.

        Args:
            plan: the oldest plan in flight.

        Returns:
            The plan's requests, in the order of its chunks. The caller must lower their steps_in_flight.
        """
        flight = self._flights.get(plan.step_index)
        assert flight is not None, "this plan is not the one in flight"
        assert flight.plan is plan, "this plan is not the one in flight"
        assert next(iter(self._flights)) == plan.step_index, "this plan is not the oldest in flight"
        del self._flights[plan.step_index]
        return flight.lives

    def is_abandoned(self, plan: Plan) -> bool:
        """Return True if the plan is in flight and all of its requests were aborted or have ended.

        Args:
            plan: any plan.
        """
        flight = self._flights.get(plan.step_index)
        return flight is not None and flight.is_abandoned()

    def abandonment(self, plan: Plan) -> IsAbandoned:
        """Return a function that returns True once a plan is abandoned.

        Args:
            plan: a plan in flight.
        """
        return self._flights[plan.step_index].is_abandoned

    def leave(self, live: Life) -> None:
        """Note that a request does not need the results of its steps in flight any more.

        Args:
            live: a request that was aborted or has ended.
        """
        is_in_all = live.steps_in_flight == len(self._flights)
        for flight in self._flights.values():
            if is_in_all or flight.has(live):
                flight.is_abandoned.leave()

    def end_early(self, live: Life, reason: FinishReason) -> None:
        """Record a request that ended while a later step still computes it. The token from the later step is discarded.

        Args:
            live: the request.
            reason: the finish reason.
        """
        assert live.steps_in_flight == len(self._flights) == 1
        self.leave(live)
        self.ended[live.request.id] = live, reason

    def pop_ended(self) -> list[tuple[Life, FinishReason]]:
        """Return the ended requests, and clear the record.

        Call this when a step has returned. That step was the last one that read the blocks of these requests.
        """
        ended = list(self.ended.values())
        self.ended.clear()
        return ended


def without_ended(
    plan: StepPlan, result: StepResult, lives: Sequence[LiveRequest]
) -> tuple[tuple[ScheduledChunk, ...], tuple[int | None, ...]]:
    """Remove the chunks of requests that ended or failed in the previous step from a plan that was made ahead.

    Args:
        result: the result of the plan.
        lives: requests of the plan that have not ended, in the plan's order.

    Returns:
        The remaining chunks, and the token that was sampled for each of them.
    """
    if len(lives) == len(plan.chunks):
        return plan.chunks, result.token_ids
    left_ids = {live.request.id for live in lives}
    indexes = [index for index, chunk in enumerate(plan.chunks) if chunk.request.id in left_ids]
    return tuple(plan.chunks[index] for index in indexes), tuple(result.token_ids[index] for index in indexes)


def lacking_ids(chunks: Sequence[ScheduledChunk], lives: Sequence[LiveRequest]) -> set[RequestId]:
    """Return the requests whose chunks must not count as computed.

    There are two reasons. The tokens before the chunk were not computed, because the previous step had no result for
    the request. Or the chunk's last token is unknown, because the request was aborted in the previous step.

    Args:
        chunks: chunks of a plan that was made ahead.
        lives: the request of each chunk.
    """
    lacking = set()
    for chunk, live in zip(chunks, lives, strict=True):
        if chunk.start != live.computed_count or chunk.start + chunk.count > len(live.tokens):
            lacking.add(chunk.request.id)
    return lacking


# Number of finished ids that are remembered, so that a late abort reports "already finished" and not "unknown".
FINISHED_IDS_MAX = 10_000


class RequestTable(Generic[Life]):
    """Unfinished requests by id.

    Args:
        flights: the steps in flight.
        finish: ends a request that no step reads. It must release the request's blocks or slot, and call forget().
        on_late_abort: called when an abort names an id that is not live.
    """

    def __init__(
        self,
        flights: StepsInFlight[Any, Life],
        finish: Callable[[Life, FinishReason, float], RequestFinished],
        on_late_abort: Callable[[RequestId, FinishReason], None] = lambda request_id, reason: None,
    ) -> None:
        self._flights = flights
        self._finish = finish
        self._on_late_abort = on_late_abort
        self._live: dict[RequestId, Life] = {}
        self._finished_ids: OrderedDict[RequestId, None] = OrderedDict()
        self.arrivals_total = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._live

    def __getitem__(self, request_id: RequestId) -> Life:
        return self._live[request_id]

    def get(self, request_id: RequestId) -> Life | None:
        return self._live.get(request_id)

    def values(self) -> Iterable[Life]:
        """Return the requests in order of arrival."""
        return self._live.values()

    def add(self, live: Life) -> None:
        """Add a new request.

        Args:
            live: the new request. Its arrival_index must be arrivals_total.
        """
        assert live.arrival_index == self.arrivals_total
        self.arrivals_total += 1
        self._live[live.request.id] = live

    def abort(self, request_ids: Iterable[RequestId], reason: FinishReason, now: float) -> dict[RequestId, AbortResult]:
        """End requests in any state.

        Args:
            request_ids: ids to abort. Unknown ids and ids of finished requests are allowed.
            reason: reported as the finish reason. If a request is aborted several times, the first reason is reported.
            now: time in seconds.

        Returns:
            The outcome for each id.
        """
        results = {}
        for request_id in dict.fromkeys(request_ids):
            live = self._live.get(request_id)
            if live is None:
                known = request_id in self._finished_ids
                self._on_late_abort(request_id, reason)
                results[request_id] = AbortResult(AbortOutcome.ALREADY_FINISHED if known else AbortOutcome.UNKNOWN)
            elif live.steps_in_flight:
                # Only mark the request, because a step in flight still reads its blocks or slot.
                # The update of that step ends the request.
                if live.abort_reason is None:
                    live.abort_reason = reason
                    self._flights.leave(live)
                results[request_id] = AbortResult(AbortOutcome.ABORTED)
            else:
                results[request_id] = AbortResult(AbortOutcome.ABORTED, self._finish(live, reason, now))
        return results

    def drop(self, lives: Sequence[Life], now: float) -> list[RequestFinished]:
        """End the requests of an abandoned step that has ended without a result.

        Args:
            lives: requests of the step. All were aborted.
            now: time in seconds.

        Returns:
            The end of each request that is in no other step in flight.
        """
        events = []
        for live in lives:
            live.steps_in_flight -= 1
            assert live.abort_reason is not None
            if live.steps_in_flight == 0:
                events.append(self._finish(live, live.abort_reason, now))
        return events

    def forget(self, request_id: RequestId) -> None:
        """Remove a finished request. Its id is remembered for some time."""
        del self._live[request_id]
        self._finished_ids[request_id] = None
        if len(self._finished_ids) > FINISHED_IDS_MAX:
            self._finished_ids.popitem(last=False)
