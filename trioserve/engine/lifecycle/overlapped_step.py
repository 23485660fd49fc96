"""Overlapping steps: the next step is planned and handed over while one is computed.

So the compute thread starts the next forward pass without waiting for the event loop. Between two forward passes only
the new tokens are passed on, because the next step needs them. The loop processes and delivers the result, and plans
the step after next, while the next step is computed. core/steps_in_flight.py describes how the core plans ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import trio

from trioserve.engine.lifecycle.step_gate import StepGate
from trioserve.engine.lifecycle.stepped_core import AnyPlan, NotesSteps, RunStep, StepDelivery, SteppedCore

__all__ = ["OverlappedSteps"]

Plan = TypeVar("Plan", bound=AnyPlan)
Result = TypeVar("Result")
Event = TypeVar("Event")


class _StepInFlight(Generic[Plan, Result]):
    """A plan that was handed over.

    Attributes:
        at: when it was handed over.
        plan: the plan.
        result: awaitable of the result.
        schedule_at: when its planning began.
    """

    __slots__ = ("at", "plan", "result", "schedule_at")

    def __init__(self, plan: Plan, result: Coroutine[Any, Any, Result | None], schedule_at: float) -> None:
        self.plan = plan
        self.result = result
        self.schedule_at = schedule_at
        self.at = trio.current_time()


class OverlappedSteps(Generic[Plan, Result, Event]):
    """Runs overlapping steps.

    Args:
        core: plans the steps.
        run_step: computes them.
        delivery: delivers their results.
        after_step: called after a step was delivered.
        step_times: receives the times of each step. None: no times are recorded.
        gate: while it is closed, no further step is planned.
    """

    def __init__(
        self,
        core: SteppedCore[Plan, Result, Event],
        run_step: RunStep[Plan, Result],
        delivery: StepDelivery[Plan, Event],
        after_step: Callable[[], None],
        step_times: NotesSteps[Plan] | None,
        gate: StepGate,
    ) -> None:
        self._core = core
        self._gate = gate
        self._step_times = step_times
        self._after_step = after_step
        self._run_step = run_step
        self._delivery = delivery

    async def run(self, plan: Plan, schedule_at: float) -> None:
        """Compute a plan and all plans that can be made ahead, until no further plan can be made.

        When cancelled, this function plans no further step, waits for the steps in flight, and returns. If a step
        raises, the error is raised after no step is in flight any more.

        Args:
            plan: the first plan, made by the core. The delivery was notified of it.
            schedule_at: when its planning began.
        """
        ended_at = -math.inf
        out = [self._hand_over(plan, schedule_at)]
        try:
            while out:
                out += self._hand_over_ahead()
                step = out.pop(0)
                result = await step.result
                now = trio.current_time()
                self._take(step, result, max(step.at, ended_at), now)
                ended_at = now
        except BaseException:
            for step in out:
                await step.result  # wait, because the steps still write to their blocks
            raise

    def _hand_over(self, plan: Plan, schedule_at: float) -> _StepInFlight[Plan, Result]:
        return _StepInFlight(plan, self._run_step(plan, self._core.abandonment(plan)), schedule_at)

    def _hand_over_ahead(self) -> list[_StepInFlight[Plan, Result]]:
        now = trio.current_time()
        self._delivery.on_ended([*self._core.progress(now), *self._core.expire(now)])
        if not self._gate.is_open or trio.current_effective_deadline() == -math.inf:
            return []  # the step in flight is the last one
        plan = self._core.schedule_ahead(now)
        if plan is None:
            return []
        self._delivery.on_plan(plan)
        return [self._hand_over(plan, now)]

    def _take(
        self, step: _StepInFlight[Plan, Result], result: Result | None, forward_at: float, computed_at: float
    ) -> None:
        if result is None:
            events = self._core.drop_plan(step.plan, computed_at)
        else:
            events = self._core.update_from_output(step.plan, result, computed_at)
        updated_at = trio.current_time()
        self._delivery.on_events(events, computed_at - forward_at)
        self._after_step()
        if self._step_times is not None:
            self._step_times.note(
                step.plan,
                schedule_at=step.schedule_at,
                planned_at=step.at,
                forward_at=forward_at,
                computed_at=computed_at,
                updated_at=updated_at,
                delivered_at=trio.current_time(),
                is_dropped=result is None,
            )
