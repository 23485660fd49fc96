"""What it means that steps are in flight: who waits for them, and who has ended while one still reads its blocks.

Without overlap one step is in flight, or none. With it there may be a second one, planned ahead while the first is
computed, as if every request of the first went on. They come back in the order in which they were planned.

A request counts the steps in flight that read and write its blocks (steps_in_flight), and keeps its blocks until the
last of them has come back:

| it                                        | is then                                | its blocks go back          |
|-------------------------------------------|----------------------------------------|-----------------------------|
| is aborted                                | marked: nothing of it is told any more | in the update of the last   |
| ends by what a step brought, in that one  | told, in the update of that step       | in that update              |
| the same, and is in the step behind it    | told, and ENDED: its token is surplus  | in the update of the latter |
"""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.step import IsAbandoned, ScheduledChunk, StepPlan, StepResult
from trioserve.core.live_request import LiveRequest

__all__ = ["STEPS_IN_FLIGHT_MAX", "StepsInFlight", "lacking_ids", "without_ended"]

STEPS_IN_FLIGHT_MAX = 2  # a third would be planned on two tokens that nobody knows


class _Flight:
    """A plan that is out. lives: its requests, in the plan's order. Those are waited for that have neither been aborted
    nor ended."""

    __slots__ = ("_ids", "is_abandoned", "lives", "plan")

    def __init__(self, plan: StepPlan, lives: list[LiveRequest]) -> None:
        self.plan = plan
        self.lives = lives
        self.is_abandoned = IsAbandoned(len(lives))
        self._ids: frozenset[RequestId] | None = None

    def has(self, live: LiveRequest) -> bool:
        if self._ids is None:
            self._ids = frozenset(other.request.id for other in self.lives)
        return live.request.id in self._ids


class StepsInFlight:
    """The plans that are out, oldest first. ended: requests that were told to have ended, and why, whose blocks the
    step in flight still reads."""

    def __init__(self) -> None:
        self._flights: dict[int, _Flight] = {}  # by the index of the step
        self.ended: dict[RequestId, tuple[LiveRequest, FinishReason]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def last(self) -> StepPlan:
        """The plan that was made last; one must be out."""
        return next(reversed(self._flights.values())).plan

    def begin(self, plan: StepPlan, lives: list[LiveRequest]) -> None:
        """lives: its requests, in the plan's order, which count it already."""
        self._flights[plan.step_index] = _Flight(plan, lives)

    def end(self, plan: StepPlan) -> list[LiveRequest]:
        """The oldest has come back. Its requests, in the plan's order, which still count it."""
        flight = self._flights.get(plan.step_index)
        assert flight is not None, "this plan is not the one in flight"
        assert flight.plan is plan, "this plan is not the one in flight"
        assert next(iter(self._flights)) == plan.step_index, "this plan is not the oldest in flight"
        del self._flights[plan.step_index]
        return flight.lives

    def is_abandoned(self, plan: StepPlan) -> bool:
        """Whether the plan is out, and nobody waits for it."""
        flight = self._flights.get(plan.step_index)
        return flight is not None and flight.is_abandoned()

    def abandonment(self, plan: StepPlan) -> IsAbandoned:
        """Of a plan that is out."""
        return self._flights[plan.step_index].is_abandoned

    def leave(self, live: LiveRequest) -> None:
        """Nobody waits for this request any more, in whichever steps it is."""
        is_in_all = live.steps_in_flight == len(self._flights)
        for flight in self._flights.values():
            if is_in_all or flight.has(live):
                flight.is_abandoned.leave()

    def end_early(self, live: LiveRequest, reason: FinishReason) -> None:
        """It has ended, and the step in flight has it, too: what that one brings of it is surplus."""
        assert live.steps_in_flight == len(self._flights) == 1
        self.leave(live)
        self.ended[live.request.id] = live, reason

    def take_ended(self) -> list[tuple[LiveRequest, FinishReason]]:
        """To be asked when a step has come back: whoever ended in the one before, and was in this one, too."""
        ended = list(self.ended.values())
        self.ended.clear()
        return ended


def without_ended(
    plan: StepPlan, result: StepResult, lives: Sequence[LiveRequest]
) -> tuple[tuple[ScheduledChunk, ...], tuple[int | None, ...]]:
    """Chunks and tokens of a plan that was made ahead, without those that are surplus. lives: who is left."""
    if len(lives) == len(plan.chunks):
        return plan.chunks, result.token_ids
    left_ids = {live.request.id for live in lives}
    indexes = [index for index, chunk in enumerate(plan.chunks) if chunk.request.id in left_ids]
    return tuple(plan.chunks[index] for index in indexes), tuple(result.token_ids[index] for index in indexes)


def lacking_ids(chunks: Sequence[ScheduledChunk], lives: Sequence[LiveRequest]) -> set[RequestId]:
    """Requests of a plan made ahead whose chunks count for nothing: what stands before them was not computed, since the
    step before had no result for them, or their token is not known, since they were aborted by then."""
    lacking = set()
    for chunk, live in zip(chunks, lives, strict=True):
        if chunk.start != live.computed_count or chunk.start + chunk.count > len(live.tokens):
            lacking.add(chunk.request.id)
    return lacking
