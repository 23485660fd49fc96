"""Tests of overlapping steps. Responses equal those of separate steps, and every end or fault waits for both steps in
flight.
"""

from __future__ import annotations

import random
import re
import threading
from typing import ClassVar

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.errors import Draining, EngineFault
from trioserve.contracts.events import EngineEvent, FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import IsAbandoned, StepPlan, StepResult, never_abandoned
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.engine.lifecycle.engine_loop import EngineLoop, ThreadedExecutor
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.testing.fake_executor import FakeExecutor
from trioserve.testing.invariants import check_idle
from trioserve.testing.stepped_by_hand import ControlledSteps
from trioserve.trio_tools.worker_thread import WorkerThread

TEXT = "one two three four five six seven"
LONG = SamplingParams(max_tokens=60, temperature=0)


def value(fake: FakeEngine, name: str) -> float:
    lines = fake.metrics.expose().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


async def read(fake: FakeEngine, prompt: str, sampling: SamplingParams) -> list[tuple[object, ...]]:
    """Return the text, tokens and finish reason that a reader gets of each choice."""
    texts, token_ids = [""] * sampling.n, [[] for _ in range(sampling.n)]
    ends: list[object] = [None] * sampling.n
    async with fake.generate(prompt, sampling) as stream:
        async for delta in stream:
            texts[delta.index] += delta.text
            token_ids[delta.index] += delta.token_ids
            ends[delta.index] = ends[delta.index] or delta.finish_reason
    return list(zip(texts, token_ids, ends, strict=True))


def core_with_a_request(*, output_tokens_max: int) -> EngineCore:
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


class Nobody:
    """A StepDelivery that ignores all results."""

    def on_plan(self, plan: StepPlan) -> None:
        pass

    def on_ended(self, events: list[EngineEvent]) -> None:
        assert not events

    def on_events(self, events: list[EngineEvent], step_seconds: float) -> None:
        pass


@pytest.mark.parametrize("step_seconds", [0.0, 0.01])
async def test_overlapping_steps_give_equal_responses(step_seconds, autojump_clock):
    asked = [
        (f"prompt {index}" * (index % 4 + 1), SamplingParams(max_tokens=count, seed=index, n=index % 2 + 1, stop=stop))
        for index, (count, stop) in enumerate(
            [(1, ()), (2, ()), (20, ()), (9, ()), (60, ("e",)), (60, ("\x01", "a")), (30, ()), (60, ("t",))]
        )
    ]
    responses: dict[bool, list[object]] = {}
    for overlap_steps in (False, True):
        got: list[object] = [None] * len(asked)

        async def ask(fake, index, got):
            await trio.sleep(0.003 * index)
            got[index] = await read(fake, *asked[index])

        async with open_fake_engine(overlap_steps=overlap_steps, step_seconds=step_seconds, block_count=48) as fake:
            async with trio.open_nursery() as nursery:
                for index in range(len(asked)):
                    nursery.start_soon(ask, fake, index, got)
            await trio.sleep(1)
            fake.assert_all_free()
        responses[overlap_steps] = got
    assert responses[True] == responses[False]


async def test_next_step_is_handed_over_before_the_last_result_is_processed():
    begun = threading.Event()
    taken: list[bool] = []
    all_taken = trio.Event()

    class Watched(FakeExecutor):
        def execute(self, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned) -> StepResult | None:
            if plan.step_index == 1:
                begun.set()
            return super().execute(plan, is_abandoned)

    class Taken(Nobody):
        def on_events(self, events: list[EngineEvent], step_seconds: float) -> None:
            # This call blocks the event loop, so the loop cannot help to start the next step.
            taken.append(begun.wait(10))
            if len(taken) == 3:
                all_taken.set()

    core = core_with_a_request(output_tokens_max=3)
    async with WorkerThread("compute") as thread, trio.open_nursery() as nursery:
        loop = EngineLoop(core, ThreadedExecutor(Watched(block_count=16, block_size=4), thread), Taken())
        nursery.start_soon(loop.run)
        with trio.fail_after(20):
            await all_taken.wait()
        nursery.cancel_scope.cancel()
    assert taken == [True] * 3
    check_idle(core)


async def test_request_that_leaves_keeps_its_blocks_until_both_steps_have_ended(autojump_clock):
    async with open_fake_engine(overlap_steps=True, step_seconds=1) as fake:
        async with fake.generate("leaves", LONG, request_id="leaves"):
            await trio.sleep(2.5)
            assert len(fake.core.flights) == 2
        await trio.sleep(1)  # The first of the two steps has ended.
        assert fake.stats().blocks_used > 0
        await trio.sleep(0.4)
        assert fake.stats().blocks_used > 0
        await trio.sleep(0.2)
        fake.assert_all_free()
        assert value(fake, "trioserve:aborts_total") == 1
        assert value(fake, "trioserve:cancel_to_free_steps_sum") == 2


async def test_aborted_reader_gets_its_last_delta_at_once_and_no_further_token(autojump_clock):
    async with open_fake_engine(overlap_steps=True, step_seconds=1) as fake:
        async with fake.generate("aborted", LONG, request_id="aborted") as stream:
            await trio.sleep(2.5)
            fake.abort(["aborted"])
            deltas = [delta async for delta in stream]
            assert trio.current_time() == pytest.approx(2.5)
            assert deltas[-1].finish_reason is FinishReason.ABORT
            assert sum(len(delta.token_ids) for delta in deltas) == 2
            await trio.sleep(5)
            assert stream.completion_token_count == 2
        fake.assert_all_free()


async def test_token_computed_after_a_stop_string_is_dropped(autojump_clock):
    async with open_fake_engine(overlap_steps=True, step_seconds=1, response=TEXT) as fake:
        async with fake.generate("say", SamplingParams(stop=("three",), temperature=0)) as stream:
            deltas = [delta async for delta in stream]
            count = len("one two three")
            assert trio.current_time() == count
            assert "".join(delta.text for delta in deltas) == "one two "
            assert deltas[-1].finish_reason is FinishReason.STOP
            assert stream.completion_token_count == count == value(fake, "trioserve:generation_tokens_total")
            assert fake.stats().blocks_used > 0  # A step that was planned ahead still computes the choice.
        await trio.sleep(1.1)
        fake.assert_all_free()
        assert fake.executor.plans == count + 1
        assert value(fake, "trioserve:aborts_total") == 0
        assert value(fake, "trioserve:request_success_total") == 1


async def test_end_token_is_delivered_with_its_own_step(autojump_clock):
    async with open_fake_engine(overlap_steps=True, step_seconds=1, response=TEXT) as fake:
        (response,) = await read(fake, "say", SamplingParams(temperature=0))
        assert (response[0], response[2]) == (TEXT, FinishReason.STOP)
        assert trio.current_time() == len(TEXT) + 1
        await trio.sleep(1.1)
        fake.assert_all_free()
        assert fake.executor.plans == len(TEXT) + 2


async def test_response_of_known_length_has_no_extra_step(autojump_clock):
    async with open_fake_engine(overlap_steps=True, step_seconds=1) as fake:
        await read(fake, "say", SamplingParams(max_tokens=5))
        assert fake.executor.plans == 5
        fake.assert_all_free()


async def test_failed_request_does_not_end_other_requests(autojump_clock):
    async with open_fake_engine(overlap_steps=True, step_seconds=1) as fake:
        expected: list[object] = []

        async def proceed() -> None:
            expected.extend(await read(fake, "goes on", SamplingParams(max_tokens=9, temperature=0)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(proceed)
            async with fake.generate("fails", LONG, request_id="fails") as stream:
                await trio.sleep(2.5)
                fake.fail_request("fails", "it is broken")
                deltas = [delta async for delta in stream]
                assert (deltas[-1].finish_reason, deltas[-1].message) == (FinishReason.ERROR, "it is broken")
        assert expected[0][2] is FinishReason.LENGTH
        await trio.sleep(2)
        fake.assert_all_free()


async def test_cancelled_step_loop_waits_for_both_overlapping_steps(autojump_clock):
    with trio.CancelScope() as scope:
        async with open_fake_engine(overlap_steps=True, step_seconds=1) as fake, fake.generate("prompt", LONG):
            await trio.sleep(2.5)
            assert len(fake.core.flights) == 2
            scope.cancel()
            await trio.sleep_forever()
    assert trio.current_time() == pytest.approx(4)
    check_idle(fake.core)


async def test_cancelled_step_loop_plans_no_further_step(autojump_clock):
    core = core_with_a_request(output_tokens_max=60)
    steps = ControlledSteps(FakeExecutor(block_count=16, block_size=4), seconds=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(EngineLoop(core, steps, Nobody()).run)
        await trio.sleep(2.5)
        nursery.cancel_scope.cancel()
    assert trio.current_time() == pytest.approx(4)
    assert steps.step_count == core.stats().steps_total == 4
    assert not core.flights


async def test_failed_step_stops_later_steps_and_every_reader_gets_the_fault(autojump_clock):
    told = []
    with pytest.raises(EngineFault, match="broken"):
        async with open_fake_engine(overlap_steps=True, step_seconds=1) as fake, trio.open_nursery() as nursery:
            fake.on_fault = trio.sleep_forever

            async def ask(prompt: str) -> None:
                with pytest.raises(EngineFault, match="broken"):
                    await read(fake, prompt, LONG)
                told.append(prompt)

            nursery.start_soon(ask, "a")
            nursery.start_soon(ask, "b")
            await trio.sleep(2.5)
            plans = fake.executor.plans
            fake.break_next_step(RuntimeError("broken"))
            await trio.sleep_forever()
    assert sorted(told) == ["a", "b"]
    assert fake.executor.plans == plans
    assert fake.steps.plan is None


async def test_error_between_steps_waits_for_the_step_in_flight(autojump_clock):
    with pytest.raises(EngineFault, match="no such thing"):
        async with open_fake_engine(overlap_steps=True, step_seconds=1) as fake, fake.generate("prompt", LONG):
            await trio.sleep(2.5)

            def update(plan, result, now):
                raise RuntimeError("no such thing")

            fake.core.update_from_output = update
            await trio.sleep_forever()
    assert fake.executor.plans == 4
    assert fake.steps.plan is None


async def test_thread_computes_no_step_after_a_step_that_raised():
    computed = []

    class Breaking:
        def execute(self, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned) -> StepResult | None:
            computed.append(plan.step_index)
            raise RuntimeError("broken")

    async with WorkerThread("compute") as thread:
        steps = ThreadedExecutor(Breaking(), thread)
        first, second = (steps.run_step(StepPlan(index, (), 0), never_abandoned) for index in range(2))
        with pytest.raises(RuntimeError, match="broken"):
            await first
        assert await second is None
    assert computed == [0]


async def test_drain_lets_running_requests_finish_with_overlapping_steps(autojump_clock):
    async with open_fake_engine(overlap_steps=True, step_seconds=1, max_num_seqs=1) as fake:
        ends: dict[str, object] = {}

        async def ask(prompt: str) -> None:
            try:
                ends[prompt] = (await read(fake, prompt, SamplingParams(max_tokens=6)))[0][2]
            except Draining:
                ends[prompt] = Draining

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "runs")
            await trio.sleep(0.5)
            nursery.start_soon(ask, "waits")
            await trio.sleep(2)
            fake.drain()
            await fake.wait_until_idle()
        assert ends == {"runs": FinishReason.LENGTH, "waits": Draining}
        fake.assert_all_free()


async def test_pause_plans_no_step_ahead(autojump_clock):
    async with open_fake_engine(overlap_steps=True, step_seconds=1, paused=True) as fake, fake.generate("a", LONG):
        for _ in range(3):
            assert not (await fake.step()).is_ahead
        await wait_all_tasks_blocked()
        assert not fake.core.flights
        fake.resume()
        await trio.sleep(2.5)
        assert len(fake.core.flights) == 2


async def test_overlapping_step_time_begins_at_the_end_of_the_previous_step(autojump_clock):
    async with open_fake_engine(overlap_steps=True, step_seconds=1) as fake:
        await read(fake, "say", SamplingParams(max_tokens=8))
        assert value(fake, "trioserve:step_seconds_count") == 8
        assert value(fake, "trioserve:step_seconds_sum") == pytest.approx(8)


def gpu_seconds(plan: StepPlan) -> float:
    """Return the seconds of a step as for 8 billion weights on a large GPU: a fixed time, and a time per token."""
    return 0.005 + 0.00002 * plan.token_count


class PlanRecorder(FakeExecutor):
    """Records the plans that it executes."""

    executed: ClassVar[list[StepPlan]] = []

    def execute(self, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned) -> StepResult | None:
        PlanRecorder.executed.append(plan)
        return super().execute(plan, is_abandoned)


async def test_clients_leave_a_simulated_gpu_within_two_steps_and_it_never_idles(autojump_clock):
    """Half of the streams leave at random times. The device computes without a gap while any stream is left."""
    PlanRecorder.executed = []
    chance = random.Random(5)

    async def leave(fake: FakeEngine, prompt: str, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await read(fake, prompt, LONG)

    options = {"max_num_seqs": 24, "max_queued_requests": 48, "step_cost": gpu_seconds, "new_executor": PlanRecorder}
    async with open_fake_engine(overlap_steps=True, **options) as fake:
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for index in range(24):
                nursery.start_soon(read, fake, f"stays {index}", LONG)
                nursery.start_soon(leave, fake, f"leaves {index} " * 9, chance.uniform(0.0, 0.3))
        ended = trio.current_time()
        await trio.sleep(1)
        fake.assert_all_free()
        busy = sum(gpu_seconds(plan) for plan in PlanRecorder.executed)
        # The last stream ends one step before the step that was planned ahead.
        assert 0 <= busy - (ended - began) < gpu_seconds(PlanRecorder.executed[-1]) + 1e-6
        aborts = value(fake, "trioserve:aborts_total")
        assert 10 < aborts <= 24
        freed = fake.metrics.expose().decode()
        within_two = re.findall(r'^trioserve:cancel_to_free_steps_bucket\{.*le="2.0".*\} (.+)$', freed, re.MULTILINE)
        assert sum(map(float, within_two)) == value(fake, "trioserve:cancel_to_free_steps_count") >= aborts - 1


async def test_fixed_time_of_a_step_does_not_reduce_the_chunks_of_a_prompt_beside_streams(autojump_clock):
    """The fixed time of a step is not counted as time of tokens. Otherwise, chunks would have the smallest size."""
    PlanRecorder.executed = []
    options = {
        "step_cost": gpu_seconds,
        "new_executor": PlanRecorder,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2_048,
        "wide_prompt_stretch": 3.0,
    }
    async with open_fake_engine(overlap_steps=True, **options) as fake, trio.open_nursery() as nursery:
        for index in range(8):
            nursery.start_soon(read, fake, f"stream {index}", SamplingParams(max_tokens=150, ignore_eos=True))
        await trio.sleep(0.3)
        first = len(PlanRecorder.executed)
        await read(fake, "x" * 2_000, SamplingParams(max_tokens=1))
        steps = PlanRecorder.executed[first:]
        nursery.cancel_scope.cancel()
    chunks = [chunk.count for plan in steps for chunk in plan.chunks if chunk.count > 1]
    assert sum(chunks) == 2_000
    assert len(chunks) <= 20, "chunks of the smallest size would be 63"
    assert max(map(gpu_seconds, steps)) < 4 * gpu_seconds(StepPlan(0, (), 8))
