"""A step runner whose forward passes a test can hold open."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

import trio

from trioserve.contracts.step import IsAbandoned, never_abandoned
from trioserve.engine.lifecycle.stepped_core import AnyPlan, ComputesPlans

__all__ = ["ControlledSteps"]

Plan = TypeVar("Plan", bound=AnyPlan)
Result = TypeVar("Result")


class ControlledSteps(Generic[Plan, Result]):
    """A StepRunner that runs steps in the event loop, so that Trio's autojump clock does not advance during a step.

    Args:
        executor: computes the steps.
        seconds: seconds of each step, by the clock of the Trio program.

    Attributes:
        fault: exception that the next step raises. Steps that were submitted after that step are not computed.
        plan: plan of the step that runs now, or None.
        step_count: steps that have ended.
        handed_over_at: time at which the engine submitted the running step. With overlapping steps, that is before it
            began.
    """

    def __init__(self, executor: ComputesPlans[Plan, Result], *, seconds: float = 0.0) -> None:
        self.executor = executor
        self.seconds = seconds
        self.fault: Exception | None = None
        self.plan: Plan | None = None
        self.step_count = 0
        self.handed_over_at = 0.0
        self._is_broken = False
        self._gate: trio.Event | None = None
        self._begun = trio.Event()

    def hold(self) -> None:
        self._gate = trio.Event()
        self._begun = trio.Event()

    def release(self) -> None:
        assert self._gate is not None, "no step is held"
        self._gate.set()
        self._gate = None

    @property
    def is_held(self) -> bool:
        """True if a step has begun since hold()."""
        return self._gate is not None and self._begun.is_set()

    async def entered(self) -> Plan:
        """Wait until a step is held open, and return its plan."""
        await self._begun.wait()
        assert self.plan is not None
        return self.plan

    def run_step(self, plan: Plan, is_abandoned: IsAbandoned = never_abandoned) -> Coroutine[Any, Any, Result | None]:
        return self._run(plan, is_abandoned, trio.current_time())

    async def _run(self, plan: Plan, is_abandoned: IsAbandoned, handed_over_at: float) -> Result | None:
        if self._is_broken:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return None
        self.plan, self.handed_over_at = plan, handed_over_at
        self._begun.set()
        gate = self._gate
        # Like a real forward pass, the step cannot be cancelled. The deadline ends a test that forgot to release the
        # step.
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 3600):
            if gate is not None:
                await gate.wait()
            await trio.sleep(self.seconds)
        self.plan = None
        self.step_count += 1
        self._is_broken = True
        if self.fault is not None:
            raise self.fault
        result = self.executor.execute(plan, is_abandoned)
        self._is_broken = False
        return result
