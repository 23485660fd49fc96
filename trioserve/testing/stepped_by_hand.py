"""Control over an engine's steps: a test can run single steps, hold a forward pass open, or make a forward pass fail.

A paused core stops in `schedule`, where a step begins. So no step is running while the core is paused, and an abort
frees blocks at once, as between two steps of a running engine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, TypeVar

import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.guide import MaskMaker
from trioserve.contracts.ids import RequestId
from trioserve.contracts.image_generation import IterativePlan
from trioserve.contracts.kv_transfer import KVConnector
from trioserve.contracts.step import IsAbandoned, StepPlan, never_abandoned
from trioserve.core.engine import EngineCore
from trioserve.core.iterative_core import IterativeCore
from trioserve.core.settings import CoreSettings, IterativeSettings
from trioserve.engine.lifecycle.engine_loop import AnyPlan, ComputesPlans
from trioserve.engine.lifecycle.request_scope import RequestsById

__all__ = ["ControlledSteps", "GatedCore", "GatedImageCore", "GatedSteps", "InjectedFault", "ManualSteps"]

Plan = TypeVar("Plan", bound=AnyPlan)
Result = TypeVar("Result")


class ControlledSteps(Generic[Plan, Result]):
    """A StepRunner that runs steps in the event loop. So Trio's autojump clock does not advance during a step.

    Args:
        executor: computes the steps.
        seconds: seconds of each step, by the clock of the Trio program.
        cost: returns additional seconds of a step from its plan. None: every step takes the same time.

    Attributes:
        fault: exception that the next step raises. Steps that are submitted after that step are not computed.
        plan: plan of the running step, or None.
        step_count: number of steps that have ended.
        handed_over_at: time at which the engine submitted the running step. With overlapping steps, this is earlier
            than the begin of the step.
    """

    def __init__(
        self,
        executor: ComputesPlans[Plan, Result],
        *,
        seconds: float = 0.0,
        cost: Callable[[Plan], float] | None = None,
    ) -> None:
        self.executor = executor
        self.seconds = seconds
        self._cost = cost
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
        # A cancel cannot interrupt a real forward pass, so this wait is shielded. The deadline ends a test that did not
        # release the step.
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 3600):
            if gate is not None:
                await gate.wait()
            await trio.sleep(self.seconds + (0.0 if self._cost is None else self._cost(plan)))
        self.plan = None
        self.step_count += 1
        self._is_broken = True
        if self.fault is not None:
            raise self.fault
        result = self.executor.execute(plan, is_abandoned)
        self._is_broken = False
        return result


class GatedSteps:
    """A gate that a core passes before each step.

    Args:
        is_paused: if True, `schedule` returns no plan, except for one call after each `give_step`.
    """

    def __init__(self, *, is_paused: bool) -> None:
        self.is_paused = is_paused
        self._has_step = False
        self._asked = trio.Event()

    def may_schedule(self) -> bool:
        """Return True if the step loop may begin a step at this time."""
        self._asked.set()
        if self.is_paused and not self._has_step:
            return False
        self._has_step = False
        return True

    def give_step(self) -> None:
        self._has_step = True

    def take_back_step(self) -> None:
        self._has_step = False

    async def asked_again(self) -> None:
        """Wait until the step loop asks for a plan again.

        At that time, the previous step has ended and its results are delivered.
        """
        self._asked = trio.Event()
        await self._asked.wait()


class GatedCore(GatedSteps, EngineCore):
    """An EngineCore with a gate. A paused core plans no step before the previous step has ended."""

    def __init__(
        self,
        settings: CoreSettings,
        *,
        is_paused: bool,
        connector: KVConnector | None = None,
        mask_maker: MaskMaker | None = None,
    ) -> None:
        GatedSteps.__init__(self, is_paused=is_paused)
        EngineCore.__init__(self, settings, connector=connector, mask_maker=mask_maker)

    def schedule(self, now: float) -> StepPlan | None:
        return super().schedule(now) if self.may_schedule() else None

    def schedule_ahead(self, now: float) -> StepPlan | None:
        return None if self.is_paused else super().schedule_ahead(now)


class GatedImageCore(GatedSteps, IterativeCore):
    def __init__(self, settings: IterativeSettings, *, is_paused: bool) -> None:
        GatedSteps.__init__(self, is_paused=is_paused)
        IterativeCore.__init__(self, settings)

    def schedule(self, now: float) -> IterativePlan | None:
        return super().schedule(now) if self.may_schedule() else None


STEPS_IN_FLIGHT_MAX = 2


class InjectedFault(Exception):
    """Error that a test injects into an engine or a request."""


class FailsRequests(Protocol):
    """An executor that lets a test make requests fail.

    Attributes:
        errors: requests that fail in their next forward pass, each with the error text.
    """

    errors: dict[RequestId, str]


class ManualSteps(Generic[Plan]):
    """Mixin that lets a test control an engine's steps. It must be the first base class, before the engine.

    Attributes:
        core: the engine's core.
        steps: the engine's step runner.
        executor: the engine's executor.
        broken_openings: how many of the next restarts will fail.
    """

    core: GatedSteps
    steps: ControlledSteps[Plan, Any]
    executor: FailsRequests
    broken_openings = 0
    wake: Any  # The engine class defines this method.
    requests: RequestsById[Any]

    # --- control of steps ---

    def pause(self) -> None:
        """Begin no more steps. A running step continues."""
        self.core.is_paused = True

    def resume(self) -> None:
        """Let the engine step by itself again."""
        self.core.is_paused = False
        self.wake()

    async def step(self, count: int = 1) -> Plan | None:
        """Run one or more steps: schedule, forward pass, aborts, update, deliver. The engine must be paused.

        Before and after each step, this method waits until all other tasks are idle.

        Args:
            count: number of steps.

        Returns:
            Plan of the last step, or None if no request had work.
        """
        assert self.core.is_paused, "the engine is not paused: call pause(), or open it with paused=True"
        plan = None
        for _ in range(count):
            plan = await self._begin_held_step()
            if plan is None:
                break
            await self._end_held_step()
        return plan

    async def finish_step(self) -> None:
        """Wait until all running steps have ended, so that the resources of cancelled requests are free.

        Before and after the steps, this method waits until all other tasks are idle. It does not wait for a step that a
        test holds open.
        """
        await wait_all_tasks_blocked()
        for _ in range(STEPS_IN_FLIGHT_MAX):
            if self.steps.plan is None or self.steps.is_held:
                break
            await self.core.asked_again()
            await wait_all_tasks_blocked()

    @asynccontextmanager
    async def held_step(self) -> AsyncIterator[Plan]:
        """Begin the next step, and hold its forward pass open inside of the `async with`.

        Inside of the context, the step reads the blocks of its requests. At the end of the context, the forward pass
        runs, and the step continues as in step(). If the engine is not paused, the next step that begins is held.

        Raises:
            AssertionError: no step begins, because no request waits or runs.
        """
        plan = await self._begin_held_step()
        assert plan is not None, "no step begins: no request waits or runs"
        try:
            yield plan
        except BaseException:
            self.steps.release()
            raise
        await self._end_held_step()

    async def _begin_held_step(self) -> Plan | None:
        """Begin a step and hold it open. Return None, and hold no step, if no request has work."""
        await wait_all_tasks_blocked()
        self.steps.hold()
        if self.core.is_paused:
            self.core.give_step()
        try:
            self.wake()
            await wait_all_tasks_blocked()
            # An earlier step may still be running. Wait until it has ended.
            while self.steps.plan is not None and not self.steps.is_held:
                await self.core.asked_again()
                await wait_all_tasks_blocked()
            plan = self.steps.plan
        except BaseException:
            self._abandon_step()
            raise
        if plan is None:
            self._abandon_step()
        return plan

    def _abandon_step(self) -> None:
        self.core.take_back_step()
        self.steps.release()

    async def _end_held_step(self) -> None:
        self.steps.release()
        await self.core.asked_again()
        await wait_all_tasks_blocked()

    @property
    def step_seconds(self) -> float:
        """Seconds of one forward pass, by the clock of the Trio program. A change takes effect at the next step."""
        return self.steps.seconds

    @step_seconds.setter
    def step_seconds(self, seconds: float) -> None:
        self.steps.seconds = seconds

    # --- faults and failures ---

    def break_next_step(self, error: Exception | None = None) -> None:
        """Make the next forward pass raise. This is a fault of the engine, which then ends or restarts.

        Args:
            error: the exception. The default is an InjectedFault.
        """
        self.steps.fault = error or InjectedFault("a test broke the engine")

    def break_openings(self, count: int = 1) -> None:
        """Make the next restarts of the engine fail.

        Args:
            count: number of restarts.
        """
        self.broken_openings = count

    def fail_request(self, request_id: str, message: str = "a test made this request fail") -> None:
        """Make the next forward pass of all sequences of a request fail. Other requests are not affected.

        Args:
            request_id: id of a request that has not ended.
            message: error text for the client.
        """
        choices = [choice for request in self.requests.of(request_id) for choice in request.choices]
        live_ids = [choice.sequence_id for choice in choices if not choice.is_ended]
        assert live_ids, f"no request {request_id!r} is open. Open: {[request.id for request in self.requests]}"
        for sequence_id in live_ids:
            self.executor.errors[sequence_id] = message

    # --- requests ---

    @property
    def first_unfinished_id(self) -> str | None:
        """Id of the first request whose response has not ended, which may still wait in the queue. None if all requests
        have ended.
        """
        return next((request.id for request in self.requests if not request.is_finished), None)
