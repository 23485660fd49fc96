"""Steps that overlap: while one is computed the next is planned and handed over, so that the compute thread goes from
one forward pass to the next without waiting for this one.

What is left between two forward passes is what the next cannot do without: the tokens of the one before. Taking its
result, delivering it and planning the step after next happen while the next one is computed. What the core makes of it
is said in core/steps_in_flight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import trio

from trioserve.engine.shell.step_gate import StepGate
from trioserve.engine.shell.stepped_core import AnyPlan, NotesSteps, RunStep, StepDelivery, SteppedCore

__all__ = ["OverlappedSteps"]

Plan = TypeVar("Plan", bound=AnyPlan)
Result = TypeVar("Result")
Event = TypeVar("Event")


class _StepInFlight(Generic[Plan, Result]):
    """A plan that was handed over. at: when. schedule_at: when its planning began."""

    __slots__ = ("at", "plan", "result", "schedule_at")

    def __init__(self, plan: Plan, result: Coroutine[Any, Any, Result | None], schedule_at: float) -> None:
        self.plan = plan
        self.result = result
        self.schedule_at = schedule_at
        self.at = trio.current_time()


class OverlappedSteps(Generic[Plan, Result, Event]):
    """after_step: called when a step was delivered. step_times: told where the time of each went. gate: while it is
    closed nothing is planned behind the step in flight."""

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
        """Compute this plan, and whatever can be planned behind it, and behind that, until nothing can; the plan is the
        core's, and told of. schedule_at: when its planning began. When cancelled, no further step is planned, and those
        in flight are waited for: returns then, too. Whatever a step raises rises here, when no step is in flight."""
        ended_at = -math.inf
        out = [self._hand_over(plan, schedule_at)]
        try:
            while out:
                out += self._hand_over_behind()
                step = out.pop(0)
                result = await step.result
                now = trio.current_time()
                self._take(step, result, max(step.at, ended_at), now)
                ended_at = now
        except BaseException:
            for step in out:
                await step.result  # its blocks are being written
            raise

    def _hand_over(self, plan: Plan, schedule_at: float) -> _StepInFlight[Plan, Result]:
        return _StepInFlight(plan, self._run_step(plan, self._core.abandonment(plan)), schedule_at)

    def _hand_over_behind(self) -> list[_StepInFlight[Plan, Result]]:
        now = trio.current_time()
        self._delivery.on_ended([*self._core.progress(now), *self._core.expire(now)])
        if not self._gate.is_open or trio.current_effective_deadline() == -math.inf:
            return []  # the one in flight is the last
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
