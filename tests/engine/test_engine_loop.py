"""Tests that the step loop sleeps until there is work, and wakes up for deadlines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from trioserve.contracts.events import EngineEvent, FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import TransferEvent
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import IsAbandoned, StepPlan, StepResult
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.engine.lifecycle.engine_loop import EngineLoop
from trioserve.testing.fake_executor import FakeExecutor
from trioserve.testing.invariants import check_idle
from trioserve.testing.scripted_connector import FakeConnector
from trioserve.testing.stepped_by_hand import ControlledSteps

A = RequestId("a")


class Stage:
    """A step loop around a core whose connector loads 8 tokens of every prompt, and holds the requests in `holds`."""

    def __init__(self, **settings: object) -> None:
        executor = FakeExecutor(block_count=16, block_size=4)
        self.holds: set[str] = set()
        self.connector = FakeConnector(
            executor,
            matched_count=lambda request, computed_count: max(0, 8 - computed_count),
            holds=lambda request, reason: request.id in self.holds,
        )
        self.core = EngineCore(
            CoreSettings(block_count=16, block_size=4, context_tokens_max=64, **settings), connector=self.connector
        )
        self.events: list[tuple[float, EngineEvent]] = []
        self.steps = ControlledSteps(executor)
        self.loop = EngineLoop(self.core, self.steps, self)

    def add(self, prompt_count: int = 12, output_tokens: int = 1) -> None:
        self.core.add(
            EngineRequest(
                id=A,
                prompt_token_ids=tuple(range(prompt_count)),
                sampling=SamplingParams(temperature=0.0),
                output_tokens_max=output_tokens,
                stop_token_ids=frozenset(),
                seed=0,
            )
        )
        self.loop.wake()

    def report(self, event: TransferEvent) -> None:
        """Report an event of the connector. Tests may call this at any time, even during a step."""
        self.on_ended(self.core.on_transfer(event, trio.current_time()))
        self.loop.wake()

    # --- implements StepDelivery ---

    def on_plan(self, plan: StepPlan) -> None:
        pass

    def on_events(self, events: list[EngineEvent], step_seconds: float) -> None:
        self.on_ended(events)

    def on_ended(self, events: list[EngineEvent]) -> None:
        self.events += [(trio.current_time(), event) for event in events]


@asynccontextmanager
async def running(stage: Stage) -> AsyncIterator[float]:
    """Run the loop, and yield the time at which it began."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.loop.run)
        await trio.testing.wait_all_tasks_blocked()
        yield trio.current_time()
        nursery.cancel_scope.cancel()
    check_idle(stage.core)
    stage.connector.check()


async def test_kv_load_without_report_ends_at_its_deadline(autojump_clock):
    """Scenario S03 of tests/README.md: the load never ends, so its deadline ends it."""
    stage = Stage(remote_kv_seconds_max=5.0, hold_seconds_max=3.0)
    async with running(stage) as begun_at:
        stage.add()
        await trio.sleep(4.9)
        assert not stage.events
        await trio.sleep(0.2)
        assert [(at - begun_at, event.request_id) for at, event in stage.events][-1] == (5.0, A)
        assert stage.core.stats().blocks_held == 3
        await trio.sleep(3.0)
        assert stage.core.stats().blocks_held == 0


async def test_request_that_requires_loaded_kv_ends_without_a_step(autojump_clock):
    stage = Stage(remote_kv_seconds_max=5.0, load_failure_policy="fail")
    async with running(stage) as begun_at:
        stage.add()
        await trio.sleep(6.0)
        ((ended_at, event),) = stage.events
        assert (ended_at - begun_at, event.reason) == (5.0, FinishReason.ERROR)
        await trio.sleep(10.0)


async def test_kv_that_arrives_wakes_the_step_loop(autojump_clock):
    stage = Stage()
    async with running(stage) as begun_at:
        stage.add()
        await trio.sleep(2.0)
        stage.report(stage.connector.loaded(A))
        await trio.sleep(0.5)
        assert stage.events[-1][0] - begun_at == 2.0
        assert stage.events[-1][1].reason is FinishReason.LENGTH


async def test_failed_kv_load_is_reported_at_once(autojump_clock):
    stage = Stage(load_failure_policy="fail")
    async with running(stage):
        stage.add()
        await trio.sleep(2.0)
        stage.report(stage.connector.load_failed(A))
        assert [event.reason for _, event in stage.events] == [FinishReason.ERROR]


async def test_unreleased_kv_hold_ends_at_its_deadline_in_an_idle_engine(autojump_clock):
    stage = Stage(hold_seconds_max=3.0)
    stage.holds = {A}
    async with running(stage):
        stage.add(8)
        await trio.sleep(0.1)
        stage.report(stage.connector.loaded(A))
        await trio.sleep(2.8)
        assert stage.core.stats().blocks_held == 2
        await trio.sleep(0.3)
        assert stage.core.stats().blocks_held == 0


class IdleStage(Stage):
    """A step loop with three calls of `when_idle`. The test decides when each call ends."""

    def __init__(self) -> None:
        super().__init__()
        # The connector loads no KV.
        self.core = EngineCore(CoreSettings(block_count=16, block_size=4, context_tokens_max=64))
        self.began = 0
        self.may_end = trio.Semaphore(0)
        self.loop = EngineLoop(self.core, self.steps, self, when_idle=self.do)

    async def do(self) -> bool:
        self.began += 1
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 3600):
            await self.may_end.acquire()
        return self.began < 3


async def test_idle_work_runs_one_by_one_and_never_during_a_step(autojump_clock):
    stage = IdleStage()
    async with running(stage):
        assert stage.began == 1
        stage.steps.hold()
        stage.add(prompt_count=4, output_tokens=2)
        await trio.testing.wait_all_tasks_blocked()
        assert not stage.steps.is_held  # The running call of `when_idle` ends first.
        stage.may_end.release()
        await trio.testing.wait_all_tasks_blocked()
        assert stage.steps.is_held
        assert stage.began == 1  # The step runs before the next call of `when_idle`.
        stage.steps.release()
        await trio.testing.wait_all_tasks_blocked()
        assert stage.steps.step_count == 2
        assert stage.began == 2
        for _ in range(3):
            stage.may_end.release()
        await trio.testing.wait_all_tasks_blocked()
        assert stage.began == 3  # The third call has returned False, so it is not called again.
        stage.add(prompt_count=4)
        await trio.testing.wait_all_tasks_blocked()
        assert stage.began == 3


async def test_cancelled_step_loop_waits_for_idle_work(autojump_clock):
    stage = IdleStage()

    async def release_later() -> None:
        await trio.sleep(5)
        stage.may_end.release()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(release_later)
        async with running(stage) as began_at:
            pass
        assert trio.current_time() == began_at + 5
    assert stage.began == 1


class WrittenStage(Stage):
    """A step loop whose events pass through two tasks before they are written: a reader and a flusher."""

    def __init__(self, *, readers_first: bool) -> None:
        super().__init__()
        # The connector loads no KV.
        self.core = EngineCore(CoreSettings(block_count=16, block_size=4, context_tokens_max=64))
        self.written_before_steps: list[int] = []
        self.written = 0
        self.to_reader, self.reader = trio.open_memory_channel[None](16)
        self.to_flusher, self.flusher = trio.open_memory_channel[None](16)
        self.loop = EngineLoop(self.core, self, self, readers_first=readers_first)

    async def run_reader(self) -> None:
        async for _ in self.reader:
            self.to_flusher.send_nowait(None)

    async def run_flusher(self) -> None:
        async for _ in self.flusher:
            self.written += 1

    def on_events(self, events: list[EngineEvent], step_seconds: float) -> None:
        super().on_events(events, step_seconds)
        self.to_reader.send_nowait(None)

    # --- implements StepRunner ---

    def run_step(self, plan: StepPlan, is_abandoned: IsAbandoned) -> Coroutine[Any, Any, StepResult | None]:
        self.written_before_steps.append(self.written)
        return self.steps.run_step(plan, is_abandoned)


@pytest.mark.parametrize("readers_first", (True, False))
async def test_stream_readers_run_before_or_during_the_next_step(readers_first: bool, autojump_clock):
    stage = WrittenStage(readers_first=readers_first)
    async with running(stage), trio.open_nursery() as nursery:
        nursery.start_soon(stage.run_reader)
        nursery.start_soon(stage.run_flusher)
        stage.add(prompt_count=4, output_tokens=5)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert stage.written == 5
    if readers_first:
        assert stage.written_before_steps == [0, 1, 2, 3, 4]
    else:
        assert stage.written_before_steps[:2] == [0, 0]
