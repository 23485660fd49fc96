"""The step loop: schedule a step, compute it, update the core, and deliver the results. The update processes aborts
first.

The forward pass runs in another thread. This task waits meanwhile, so the event loop stays responsive and delivers
aborts. When the loop is cancelled, it waits for the step in flight, because that step uses the blocks.

With overlapping steps, the next step is planned and submitted while the current one is computed. So the compute thread
starts the next forward pass without waiting for the event loop. Between two forward passes, only the new tokens are
copied, because the next step needs them. The loop then processes and delivers the result, and plans another step, while
the next step is computed. core/steps_in_flight.py describes how the core plans ahead.

`SteppedCore`, `StepDelivery` and `StepRunnerOf` are the interfaces of the loop: the core that plans steps, the delivery
of their results, and the executor.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

import trio

from trioserve.contracts.ids import RequestId
from trioserve.contracts.step import IsAbandoned, LaunchingExecutor, StepPlan, StepResult
from trioserve.core.steps_in_flight import StepsInFlight
from trioserve.engine.lifecycle.pausing import StepGate
from trioserve.trio_tools.worker_thread import WorkerThread

__all__ = [
    "AnyPlan",
    "ComputesPlans",
    "EngineLoop",
    "LaunchedSteps",
    "NotesSteps",
    "OverlappedSteps",
    "RunStep",
    "StepDelivery",
    "StepRunner",
    "StepRunnerOf",
    "SteppedCore",
    "ThreadedExecutor",
    "WhenIdle",
]


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
Result = TypeVar("Result")
Event = TypeVar("Event")
PlanIn = TypeVar("PlanIn", bound=AnyPlan, contravariant=True)
EventIn = TypeVar("EventIn", contravariant=True)
ResultIn = TypeVar("ResultIn", contravariant=True)
ResultOut = TypeVar("ResultOut", covariant=True)


class SteppedCore(Protocol[Plan, ResultIn, Event]):
    """The interface of a core for the step loop. `EngineCore` and `IterativeCore` document the methods."""

    @property
    def flights(self) -> StepsInFlight[Plan, Any]: ...

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

    def drop_plan(self, plan: Plan, now: float) -> list[Event]: ...

    def update_from_output(self, plan: Plan, result: ResultIn, now: float) -> list[Event]: ...


class StepDelivery(Protocol[PlanIn, Event]):
    """Delivers the results of steps to the requests. All methods are synchronous."""

    def on_plan(self, plan: PlanIn) -> None:
        """Note that a plan is being submitted."""

    def on_events(self, events: list[Event], step_seconds: float) -> None:
        """Deliver the events of a step, which belongs to the oldest plan in flight.

        Args:
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


# Readers run in one scheduler pass of Trio, and the flusher writes in the next. Trio promises no order within a pass.
READER_TURNS = 3


WhenIdle = Callable[[], Coroutine[Any, Any, bool]]


class StepRunner(StepRunnerOf[StepPlan, StepResult], Protocol):
    """Computes the plans of `EngineCore`."""


class ThreadedExecutor(Generic[Plan, Result]):
    """Runs an executor's steps in the compute thread.

    Args:
        executor: computes the plans.
        thread: the compute thread.
        takes_cpu: True to begin a step on the CPU where the event loop runs. Use it for steps that need every CPU and
            do not overlap.
    """

    def __init__(self, executor: ComputesPlans[Plan, Result], thread: WorkerThread, *, takes_cpu: bool = False) -> None:
        self._executor = executor
        self._thread = thread
        self._takes_cpu = takes_cpu
        self._is_broken = False

    def run_step(self, plan: Plan, is_abandoned: IsAbandoned) -> Coroutine[Any, Any, Result | None]:
        return self._thread.begin(self._execute, plan, is_abandoned, here=self._takes_cpu)

    def _execute(self, plan: Plan, is_abandoned: IsAbandoned) -> Result | None:
        if self._is_broken:
            return None
        try:
            return self._executor.execute(plan, is_abandoned)
        except BaseException:
            self._is_broken = True
            raise


class EngineLoop(Generic[Plan, Result, Event]):
    """Runs the steps of an engine until it is cancelled.

    Args:
        core: plans the steps.
        steps: computes the plans.
        delivery: delivers the results of the steps.
        readers_first: True to let readers write a step's results before the next step begins. Use it for steps that
            also need the CPU of the event loop. Otherwise a reader delays one thread of the step, and the other threads
            wait for that thread. Overlapping steps ignore it.
        when_idle: called repeatedly while there is nothing to compute, until it returns False. Each call delays new
            work, so a call must be short. None: nothing is called.
        after_step: called after the results of a step are delivered.
        step_times: receives the times of each step. None: no times are recorded.
        gate: prevents further steps while it is closed. Connector events and deadlines are still processed.
    """

    def __init__(
        self,
        core: SteppedCore[Plan, Result, Event],
        steps: StepRunnerOf[Plan, Result],
        delivery: StepDelivery[Plan, Event],
        *,
        readers_first: bool = False,
        when_idle: WhenIdle | None = None,
        after_step: Callable[[], None] = lambda: None,
        step_times: NotesSteps[Plan] | None = None,
        gate: StepGate | None = None,
    ) -> None:
        self._step_times = step_times
        self._gate = gate = gate or StepGate()
        self._when_idle = when_idle
        self._after_step = after_step
        self._reader_turns = READER_TURNS if readers_first else 0
        self._core = core
        self._steps = steps
        self._delivery = delivery
        self._overlapped = (
            OverlappedSteps(core, steps.run_step, delivery, after_step, step_times, gate) if core.plans_ahead else None
        )
        self._work_arrived = trio.Event()
        self._is_woken = False

    def wake(self) -> None:
        """Note that there may be new work. This is cheap while steps run."""
        self._is_woken = True
        self._work_arrived.set()

    async def run(self) -> None:
        """Run until cancelled. Raise the error of a step, because it is a fault of the engine."""
        checkpoint: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint_if_cancelled
        while True:
            await checkpoint()
            now = trio.current_time()
            self._is_woken = False
            if self._core.has_connector:
                self._delivery.on_ended([*self._core.progress(now), *self._core.expire(now)])
            plan = self._core.schedule(now) if self._gate.is_open else None
            if plan is None:
                await self._wait_for_work()
                continue
            self._gate.is_stepping = True  # One call covers all overlapping steps.
            try:
                self._delivery.on_plan(plan)
                if self._overlapped is not None:
                    await self._overlapped.run(plan, now)
                    continue
                started_at = trio.current_time()
                result = await self._steps.run_step(plan, self._core.flights.abandonment(plan))
                computed_at = trio.current_time()
                if result is None:
                    events = self._core.drop_plan(plan, computed_at)
                else:
                    events = self._core.update_from_output(plan, result, computed_at)
                updated_at = trio.current_time()
                self._delivery.on_events(events, updated_at - started_at)
                self._after_step()
                if self._step_times is not None:
                    self._step_times.note(
                        plan,
                        schedule_at=now,
                        planned_at=started_at,
                        forward_at=started_at,
                        computed_at=computed_at,
                        updated_at=updated_at,
                        delivered_at=trio.current_time(),
                        is_dropped=result is None,
                    )
            finally:
                self._gate.end_steps()
            for _ in range(self._reader_turns):
                await trio.lowlevel.checkpoint()

    async def _wait_for_work(self) -> None:
        """Wait until there may be new work, or a deadline of the core has passed."""
        if self._is_woken:  # The connector reported new events while the core processed its earlier events.
            await trio.lowlevel.checkpoint()
        elif self._when_idle is not None:
            if not await self._when_idle():
                self._when_idle = None
        else:
            self._work_arrived = trio.Event()
            deadline = self._core.next_deadline()
            with trio.move_on_at(math.inf if deadline is None else deadline):
                await self._work_arrived.wait()


class _StepInFlight(Generic[Plan, Result]):
    """A plan that was submitted, and whose result is not processed yet.

    Attributes:
        at: time of the submission.
        plan: the plan.
        result: awaitable that returns the result of the step.
        schedule_at: time at which the planning of the step began.
    """

    __slots__ = ("at", "plan", "result", "schedule_at")

    def __init__(self, plan: Plan, result: Coroutine[Any, Any, Result | None], schedule_at: float) -> None:
        self.plan = plan
        self.result = result
        self.schedule_at = schedule_at
        self.at = trio.current_time()


class OverlappedSteps(Generic[Plan, Result, Event]):
    """Runs steps that overlap.

    Args:
        core: plans the steps.
        run_step: computes the plans.
        delivery: delivers the results of the steps.
        after_step: called after the results of a step are delivered.
        step_times: receives the times of each step. None: no times are recorded.
        gate: prevents further plans while it is closed.
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
        """Compute a plan, and all later plans that can be made ahead. Return when no further plan can be made ahead.

        When cancelled, this function plans no further step, waits for the steps in flight, and returns. If a step
        raises an error, the function waits for the steps in flight, and then raises that error.

        Args:
            plan: the first plan. It was made by the core, and reported to the delivery.
            schedule_at: time at which the planning of the first step began.
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
                await step.result  # Wait for the steps in flight, because they still write to their blocks.
            raise

    def _hand_over(self, plan: Plan, schedule_at: float) -> _StepInFlight[Plan, Result]:
        return _StepInFlight(plan, self._run_step(plan, self._core.flights.abandonment(plan)), schedule_at)

    def _hand_over_ahead(self) -> list[_StepInFlight[Plan, Result]]:
        now = trio.current_time()
        if self._core.has_connector:
            self._delivery.on_ended([*self._core.progress(now), *self._core.expire(now)])
        if not self._gate.is_open or trio.current_effective_deadline() == -math.inf:
            return []  # No further step is planned after the step in flight.
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


Finish = Callable[[], StepResult | None]


class LaunchedSteps:
    """A `StepRunner` that launches and finishes each step in two separate jobs of the compute thread.

    A later step is launched before an earlier step is finished.

    Args:
        executor: launches steps on the device.
        thread: the compute thread.
    """

    def __init__(self, executor: LaunchingExecutor, thread: WorkerThread) -> None:
        self._executor = executor
        self._thread = thread
        # A failed launch does not affect the earlier steps. After a failed finish, no later step can be finished.
        self._is_broken = False
        self._is_over = False

    def run_step(self, plan: StepPlan, is_abandoned: IsAbandoned) -> Coroutine[Any, Any, StepResult | None]:
        return self._result(self._thread.begin(self._launch, plan, is_abandoned))

    async def _result(self, launched: Coroutine[Any, Any, Finish]) -> StepResult | None:
        finish = await launched
        return await self._thread.run(self._finish, finish)

    def _launch(self, plan: StepPlan, is_abandoned: IsAbandoned) -> Finish:
        if self._is_broken:
            return _nothing
        try:
            return self._executor.launch(plan, is_abandoned)
        except BaseException:
            self._is_broken = True
            raise

    def _finish(self, finish: Finish) -> StepResult | None:
        if self._is_over:
            return None
        try:
            return finish()
        except BaseException:
            self._is_broken = self._is_over = True
            raise


def _nothing() -> None:
    return None
