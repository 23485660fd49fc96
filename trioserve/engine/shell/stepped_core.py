"""What is needed of a core to take its steps, and of what delivers them, whatever it is that they compute."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from trioserve.contracts.ids import RequestId
from trioserve.contracts.step import IsAbandoned

__all__ = ["AnyPlan", "ComputesPlans", "NotesSteps", "RunStep", "StepDelivery", "StepRunnerOf", "SteppedCore"]


class AnyPlan(Protocol):
    """step_index: counts from 0. admitted, preempted: requests that got what they run with by this plan, or lost it."""

    @property
    def step_index(self) -> int: ...

    @property
    def admitted(self) -> tuple[RequestId, ...]: ...

    @property
    def preempted(self) -> tuple[RequestId, ...]: ...


Plan = TypeVar("Plan", bound=AnyPlan)
Event = TypeVar("Event")
PlanIn = TypeVar("PlanIn", bound=AnyPlan, contravariant=True)
EventIn = TypeVar("EventIn", contravariant=True)
ResultIn = TypeVar("ResultIn", contravariant=True)
ResultOut = TypeVar("ResultOut", covariant=True)


class SteppedCore(Protocol[Plan, ResultIn, Event]):
    """A core as the step loop drives it; for the meanings see EngineCore and IterativeCore."""

    @property
    def plans_ahead(self) -> bool:
        """Whether schedule_ahead may ever give a plan."""
        ...

    def progress(self, now: float) -> list[Event]: ...

    def expire(self, now: float) -> list[Event]: ...

    def next_deadline(self) -> float | None: ...

    def schedule(self, now: float) -> Plan | None: ...

    def schedule_ahead(self, now: float) -> Plan | None: ...

    def abandonment(self, plan: Plan) -> IsAbandoned: ...

    def drop_plan(self, plan: Plan, now: float) -> list[Event]: ...

    def update_from_output(self, plan: Plan, result: ResultIn, now: float) -> list[Event]: ...


class StepDelivery(Protocol[PlanIn, Event]):
    """Who brings what steps have brought to those who wait for it. Synchronous."""

    def on_plan(self, plan: PlanIn) -> None:
        """It is handed over now."""

    def on_events(self, events: list[Event], step_seconds: float) -> None:
        """The oldest plan that was handed over has come back, and this is what it brought."""

    def on_ended(self, events: list[Event]) -> None:
        """Before each step: what came to pass while none did."""


class StepRunnerOf(Protocol[PlanIn, ResultOut]):
    """An executor as seen from the event loop."""

    def run_step(self, plan: PlanIn, is_abandoned: IsAbandoned) -> Coroutine[Any, Any, ResultOut | None]:
        """Hand a plan over, to be computed after those that were handed over before, at the latest when it is awaited;
        which has to happen, in that order. That ends with the result, even when cancelled, or with None once
        is_abandoned has said so. Raises what the executor raises; whatever was handed over behind that is not computed,
        and its result is None."""
        ...


class ComputesPlans(Protocol[PlanIn, ResultOut]):
    """An executor, of whichever plans."""

    def execute(self, plan: PlanIn, is_abandoned: IsAbandoned) -> ResultOut | None: ...


class RunStep(Protocol[PlanIn, ResultOut]):
    """StepRunnerOf.run_step: hands a plan over at once, and is awaited for its result."""

    def __call__(self, plan: PlanIn, is_abandoned: IsAbandoned, /) -> Coroutine[Any, Any, ResultOut | None]: ...


class NotesSteps(Protocol[PlanIn]):
    """Is told where the time of each step went; see StepTimes."""

    def note(
        self,
        plan: PlanIn,
        *,
        schedule_at: float,
        planned_at: float,
        forward_at: float,
        computed_at: float,
        updated_at: float,
        delivered_at: float,
        is_dropped: bool,
    ) -> None: ...
