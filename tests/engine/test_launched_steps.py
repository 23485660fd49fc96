"""Tests of steps on a device with its own queue. Each step is launched before the previous one is awaited, and all
launched steps are finished.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import trio

from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import IsAbandoned, StepPlan, StepResult, never_abandoned
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.engine.lifecycle.engine_loop import EngineLoop, LaunchedSteps
from trioserve.testing.fake_executor import FakeExecutor
from trioserve.testing.invariants import check_idle
from trioserve.trio_tools.worker_thread import WorkerThread

Finish = Callable[[], StepResult | None]


class Device(FakeExecutor):
    """A device that records its launched and finished steps. `breaks` is the (action, step) pair that raises an
    error.
    """

    def __init__(self, *, breaks: tuple[str, int] | None = None) -> None:
        super().__init__(block_count=16, block_size=4)
        self.done: list[tuple[str, int]] = []
        self._breaks = breaks

    def launch(self, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned) -> Finish:
        self._note("launch", plan)

        def finish() -> StepResult | None:
            self._note("finish", plan)
            return self.execute(plan)

        return finish

    def _note(self, what: str, plan: StepPlan) -> None:
        assert threading.current_thread().name == "trioserve-compute"
        self.done.append((what, plan.step_index))
        if (what, plan.step_index) == self._breaks:
            raise RuntimeError(f"cannot {what}")


class Reader:
    """A StepDelivery that records the step numbers of events. It sets `enough` after a given number of steps."""

    def __init__(self, enough: int) -> None:
        self.told: list[int] = []
        self.enough = trio.Event()
        self._enough = enough

    def on_plan(self, plan: StepPlan) -> None:
        pass

    def on_ended(self, events: list[object]) -> None:
        assert not events

    def on_events(self, events: list[object], step_seconds: float) -> None:
        self.told.append(len(events))
        if len(self.told) == self._enough:
            self.enough.set()


def make_core(output_tokens_max: int) -> EngineCore:
    core = EngineCore(CoreSettings(block_count=16, block_size=4, context_tokens_max=64, overlap_steps=True))
    core.add(
        EngineRequest(
            id=RequestId("a"),
            prompt_token_ids=(1, 2, 3),
            sampling=SamplingParams(temperature=0.0),
            output_tokens_max=output_tokens_max,
            stop_token_ids=frozenset(),
            seed=0,
        )
    )
    return core


async def test_step_is_launched_before_the_previous_one_is_awaited():
    device, core, reader = Device(), make_core(4), Reader(4)
    async with WorkerThread("compute") as thread, trio.open_nursery() as nursery:
        nursery.start_soon(EngineLoop(core, LaunchedSteps(device, thread), reader).run)
        with trio.fail_after(10):
            await reader.enough.wait()
        nursery.cancel_scope.cancel()
    order = [("launch", 0)]
    for step in range(1, 4):
        order += [("launch", step), ("finish", step - 1)]
    assert device.done == [*order, ("finish", 3)]
    check_idle(core)


async def test_cancelled_step_loop_waits_for_all_launched_steps():
    core, reader = make_core(50), Reader(3)
    device = Device()
    async with WorkerThread("compute") as thread, trio.open_nursery() as nursery:
        nursery.start_soon(EngineLoop(core, LaunchedSteps(device, thread), reader).run)
        with trio.fail_after(10):
            await reader.enough.wait()
        nursery.cancel_scope.cancel()
    launched = [step for what, step in device.done if what == "launch"]
    assert launched == [step for what, step in device.done if what == "finish"]
    assert launched == list(range(len(launched)))
    assert len(launched) < 50
    assert not core.flights


@pytest.mark.parametrize("what", ("launch", "finish"))
async def test_failed_step_keeps_earlier_results_and_stops_later_steps(what):
    device, core, reader = Device(breaks=(what, 2)), make_core(50), Reader(50)
    async with WorkerThread("compute") as thread:
        with pytest.raises(RuntimeError, match=f"cannot {what}"):
            await EngineLoop(core, LaunchedSteps(device, thread), reader).run()
    assert len(reader.told) == 2
    assert ("finish", 1) in device.done
    # After a failed finish, later launched steps are not finished, because the state of the device is unknown.
    assert device.done[-1] == (("finish", 1) if what == "launch" else ("finish", 2))
    assert max(step for _, step in device.done) == (2 if what == "launch" else 3)


@pytest.mark.parametrize("breaks", ("launch", "finish"))
async def test_plan_after_a_failed_step_has_no_result(breaks):
    device = Device(breaks=(breaks, 0))
    async with WorkerThread("compute") as thread:
        steps = LaunchedSteps(device, thread)
        responses = [steps.run_step(StepPlan(index, (), 0), never_abandoned) for index in range(2)]
        with pytest.raises(RuntimeError, match=f"cannot {breaks}"):
            await responses[0]
        assert await responses[1] is None
        assert await steps.run_step(StepPlan(2, (), 0), never_abandoned) is None
    assert ("finish", 1) not in device.done
    assert ("launch", 2) not in device.done
