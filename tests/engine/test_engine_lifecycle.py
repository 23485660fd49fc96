"""Tests of the end of an engine: its owner closes it, it is drained, or it breaks."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import trio

from trioserve.admission.text_threads import TextThreads
from trioserve.contracts.errors import Draining, EngineFault
from trioserve.contracts.events import FinishReason
from trioserve.contracts.resume import Resume
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing.invariants import check_idle


async def test_closing_the_engine_ends_requests_and_leaves_no_task_or_thread(autojump_clock):
    tasks_before = trio.lowlevel.current_statistics().tasks_living
    threads_before = set(threading.enumerate())
    async with open_fake_engine(step_seconds=0.01, new_text_threads=TextThreads) as fake:
        async with fake.generate("prompt"):
            await trio.sleep(0.025)
        fake.generate("never entered")
    check_idle(fake.core)
    assert not fake.ready
    assert trio.lowlevel.current_statistics().tasks_living == tasks_before
    assert not set(threading.enumerate()) - threads_before


async def test_readers_of_a_closed_engine_get_a_last_delta(autojump_clock):
    reasons: list[object] = []
    async with trio.open_nursery() as readers, open_fake_engine(step_seconds=0.01) as fake:

        async def read() -> None:
            async with fake.generate("prompt", SamplingParams(max_tokens=100)) as stream:
                reasons.extend([delta.finish_reason async for delta in stream][-1:])

        readers.start_soon(read)
        await trio.sleep(0.025)
    assert reasons == [FinishReason.ABORT]
    check_idle(fake.core)


async def test_error_of_the_engines_owner_is_raised_unchanged(autojump_clock):
    with pytest.raises(KeyError, match="mine"):
        async with open_fake_engine():
            raise KeyError("mine")


async def test_step_fault_reaches_every_reader_and_the_owner(autojump_clock):
    told: list[str] = []
    with pytest.raises(EngineFault, match="a step of the engine failed: MemoryError: no more") as caught:
        async with open_fake_engine(step_seconds=0.01) as fake, trio.open_nursery() as readers:

            async def read(prompt: str) -> None:
                async with fake.generate(prompt, SamplingParams(max_tokens=100)) as stream:
                    try:
                        async for _ in stream:
                            pass
                    except EngineFault as fault:
                        told.append(str(fault))
                        raise

            for prompt in ("one", "two", "three"):
                readers.start_soon(read, prompt)
            await trio.sleep(0.025)
            fake.steps.fault = MemoryError("no more")
            await trio.sleep_forever()
    assert isinstance(caught.value.__cause__, MemoryError)
    assert len(told) == 3


async def test_fault_reaches_a_queued_request_that_resumes_an_ended_response(autojump_clock):
    resume = Resume(token_ids=((1, 2), (3, 4)), finished=(True, True))
    faults: list[str] = []
    with pytest.raises(EngineFault):
        async with open_fake_engine(step_seconds=0.01, max_num_seqs=2) as fake, trio.open_nursery() as nursery:

            async def read(prompt: str, params: SamplingParams, known: Resume | None = None) -> None:
                try:
                    async with fake.generate(prompt, params, resume=known) as stream:
                        async for _ in stream:
                            pass
                except EngineFault:
                    faults.append(prompt)

            for _ in range(12):  # There are so many requests that the next one gets no lease.
                nursery.start_soon(read, "other", SamplingParams(max_tokens=100))
            await trio.sleep(0.02)
            fake.on_fault = partial(trio.sleep, 0.1)  # Give the readers time to run.
            nursery.start_soon(read, "resumed", SamplingParams(n=2, max_tokens=2), resume)
            await trio.sleep(0.02)
            fake.steps.fault = RuntimeError("broken")
            await trio.sleep_forever()
    assert sorted(faults) == ["other"] * 12 + ["resumed"]


async def test_on_fault_callback_has_a_time_limit(autojump_clock):
    async def never_done() -> None:
        await trio.sleep_forever()

    started_at = trio.current_time()
    with pytest.raises(EngineFault):
        async with open_fake_engine() as fake:
            fake.on_fault = never_done
            fake.steps.fault = RuntimeError("broken")
            async with fake.generate("prompt") as stream:
                with pytest.raises(EngineFault):
                    await anext(stream)
            await trio.sleep_forever()
    assert trio.current_time() - started_at == pytest.approx(2.0)


async def test_drain_refuses_new_and_queued_requests_and_lets_running_ones_finish(autojump_clock):
    async with open_fake_engine(step_seconds=0.01, max_num_seqs=1) as fake:
        async with (
            fake.generate("runs", SamplingParams(max_tokens=10)) as running,
            fake.generate("waits", SamplingParams(max_tokens=10)) as queued,
        ):
            await trio.sleep(0.035)
            assert fake.ready
            fake.drain()
            assert not fake.ready
            with pytest.raises(Draining, match="the server is shutting down"):
                await anext(queued)
            with pytest.raises(Draining):
                async with fake.generate("late"):
                    pass
            assert [delta.finish_reason async for delta in running][-1] is FinishReason.LENGTH
        await fake.wait_until_idle()
        check_idle(fake.core)


async def test_wait_until_idle_waits_for_the_last_stream_to_be_left(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake, trio.open_nursery() as nursery:

        async def hold(seconds: float) -> None:
            async with fake.generate("prompt", SamplingParams(max_tokens=1)):
                await trio.sleep(seconds)

        started_at = trio.current_time()
        nursery.start_soon(hold, 3)
        nursery.start_soon(hold, 7)
        await trio.testing.wait_all_tasks_blocked()
        await fake.wait_until_idle()
        assert trio.current_time() - started_at == pytest.approx(7)
