"""Protocols for the step loop: the core that plans steps, the delivery of their results, and the executor."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from trioserve.contracts.ids import RequestId
from trioserve.contracts.step import IsAbandoned

__all__ = ["AnyPlan", "ComputesPlans", "NotesSteps", "RunStep", "StepDelivery", "StepRunnerOf", "SteppedCore"]


class AnyPlan(Protocol):
    """The plan of one step.

    Attributes:
        step_index: number of the step, from 0.
        admitted: requests that get their memory with this plan.
        preempted: requests that lose their memory with this plan.
    """

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
    """The interface of a core for the step loop. `EngineCore` and `IterativeCore` document the methods."""

    @property
    def plans_ahead(self) -> bool:
        """True if `schedule_ahead` may return plans for later steps."""
        ...

    @property
    def has_connector(self) -> bool:
        """True if a connector moves blocks between engines, so that `progress` and `expire` may return events."""
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
    """Delivers the results of steps to the requests. All methods are synchronous."""

    def on_plan(self, plan: PlanIn) -> None:
        """Note that a plan is being submitted.

        Args:
            plan: the plan.
        """

    def on_events(self, events: list[Event], step_seconds: float) -> None:
        """Deliver the events of a step, which belongs to the oldest plan in flight.

        Args:
            events: the events.
            step_seconds: duration of the step.
        """

    def on_ended(self, events: list[Event]) -> None:
        """Deliver events that happened between two steps. Called before each step of a core with a connector.

        Args:
            events: the events. May be empty.
        """


class StepRunnerOf(Protocol[PlanIn, ResultOut]):
    """The interface of an executor for the event loop."""

    def run_step(self, plan: PlanIn, is_abandoned: IsAbandoned) -> Coroutine[Any, Any, ResultOut | None]:
        """Submit a plan. It is computed after all plans that were submitted earlier.

        The caller must await every result, in the order of the plans. The computation begins when the result is
        awaited, or earlier. The await cannot be cancelled. It returns the result, or None if `is_abandoned` returned
        True.

        Args:
            plan: the plan.
            is_abandoned: returns True if the rest of the step need not be computed.

        Returns:
            An awaitable that returns the result.

        Raises:
            Exception: the error of the executor, raised by the await. Plans that were submitted later are then not
                computed, and their results are None.
        """
        ...


class ComputesPlans(Protocol[PlanIn, ResultOut]):
    """An executor for any type of plan."""

    def execute(self, plan: PlanIn, is_abandoned: IsAbandoned) -> ResultOut | None: ...


class RunStep(Protocol[PlanIn, ResultOut]):
    """The function `StepRunnerOf.run_step`: submits a plan at once, and returns an awaitable of the result."""

    def __call__(self, plan: PlanIn, is_abandoned: IsAbandoned, /) -> Coroutine[Any, Any, ResultOut | None]: ...


class NotesSteps(Protocol[PlanIn]):
    """Receives the times of each step. `StepTimes` implements it."""

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
