"""What it means that steps are in flight: who waits for them, and who has ended while one still reads its blocks.

Without overlap one step is in flight, or none. With it there may be a second one, planned ahead while the first is
computed, as if every request of the first went on; or, with steps_apart, with none of its requests, so that what is
said here of two steps that have the same one does not come to pass. They come back in the order in which they were
planned.

A request counts the steps in flight that read and write its blocks (steps_in_flight), and keeps its blocks until the
last of them has come back:

| it                                        | is then                                | its blocks go back          |
|-------------------------------------------|----------------------------------------|-----------------------------|
| is aborted                                | marked: nothing of it is told any more | in the update of the last   |
| ends by what a step brought, in that one  | told, in the update of that step       | in that update              |
| the same, and is in the step behind it    | told, and ENDED: its token is surplus  | in the update of the latter |
"""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.step import IsAbandoned
from trioserve.core.request_state import RequestLife

__all__ = ["STEPS_IN_FLIGHT_MAX", "StepsInFlight"]

STEPS_IN_FLIGHT_MAX = 2  # a third would be planned on two tokens that nobody knows


class Numbered(Protocol):
    @property
    def step_index(self) -> int: ...


Plan = TypeVar("Plan", bound=Numbered)
Life = TypeVar("Life", bound=RequestLife[Any])


class _Flight(Generic[Plan, Life]):
    """A plan that is out. lives: its requests, in the plan's order. Those are waited for that have neither been aborted
    nor ended."""

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
    """The plans that are out, oldest first. ended: requests that were told to have ended, and why, whose blocks the
    step in flight still reads."""

    def __init__(self) -> None:
        self._flights: dict[int, _Flight[Plan, Life]] = {}  # by the index of the step
        self.ended: dict[RequestId, tuple[Life, FinishReason]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def last(self) -> Plan:
        """The plan that was made last; one must be out."""
        return next(reversed(self._flights.values())).plan

    def begin(self, plan: Plan, lives: list[Life]) -> None:
        """lives: its requests, in the plan's order, which count it from now on."""
        for live in lives:
            live.steps_in_flight += 1
        self._flights[plan.step_index] = _Flight(plan, lives)

    def end(self, plan: Plan) -> list[Life]:
        """The oldest has come back. Its requests, in the plan's order, which still count it."""
        flight = self._flights.get(plan.step_index)
        assert flight is not None, "this plan is not the one in flight"
        assert flight.plan is plan, "this plan is not the one in flight"
        assert next(iter(self._flights)) == plan.step_index, "this plan is not the oldest in flight"
        del self._flights[plan.step_index]
        return flight.lives

    def is_abandoned(self, plan: Plan) -> bool:
        """Whether the plan is out, and nobody waits for it."""
        flight = self._flights.get(plan.step_index)
        return flight is not None and flight.is_abandoned()

    def abandonment(self, plan: Plan) -> IsAbandoned:
        """Of a plan that is out."""
        return self._flights[plan.step_index].is_abandoned

    def leave(self, live: Life) -> None:
        """Nobody waits for this request any more, in whichever steps it is."""
        is_in_all = live.steps_in_flight == len(self._flights)
        for flight in self._flights.values():
            if is_in_all or flight.has(live):
                flight.is_abandoned.leave()

    def end_early(self, live: Life, reason: FinishReason) -> None:
        """It has ended, and the step in flight has it, too: what that one brings of it is surplus."""
        assert live.steps_in_flight == len(self._flights) == 1
        self.leave(live)
        self.ended[live.request.id] = live, reason

    def take_ended(self) -> list[tuple[Life, FinishReason]]:
        """To be asked when a step has come back: whoever ended in the one before, and was in this one, too."""
        ended = list(self.ended.values())
        self.ended.clear()
        return ended
