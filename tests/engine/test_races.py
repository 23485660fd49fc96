"""Tests of two events at the same time: a delta and a cancel, a fault and a reader, a drain and a prompt in
preparation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.admission.text_threads import TextThreads
from trioserve.contracts.errors import AlreadyEnded, Draining, EngineFault, Overloaded
from trioserve.contracts.events import AbortOutcome, FinishReason
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.engine import Engine
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing.invariants import check_idle
from trioserve.trio_tools.worker_thread import WorkerThread

LONG_PROMPT = "long " * 500
LONG: dict[str, Any] = {"max_model_len": 4096, "block_count": 2048, "new_text_threads": TextThreads}


class HeldTokenizing:
    """A tokenizer that keeps long prompts in the text thread until release(). It needs a real thread, and so the real
    clock.
    """

    def __init__(self, engine: Engine) -> None:
        self.begun = trio.Event()
        self._proceed = threading.Event()
        token = trio.lowlevel.current_trio_token()

        def encode(*_arguments: object, **_keywords: object) -> list[int]:
            token.run_sync_soon(self.begun.set)
            self._proceed.wait(10)
            return [1]

        engine.tokenizer.encode = encode  # type: ignore[method-assign]

    def release(self) -> None:
        self._proceed.set()


async def refused_draining(engine: Engine) -> None:
    with pytest.raises(Draining):
        async with engine.generate(LONG_PROMPT):
            pytest.fail("was entered")


async def test_no_delta_is_lost_when_a_reader_is_cancelled_again_and_again(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake:
        responses = []
        for patience in (1000, 0.01, 0.003):
            token_ids: list[int] = []
            reason = None
            async with fake.generate("prompt", SamplingParams(max_tokens=30, temperature=0)) as stream:
                while reason is None:
                    # With 0.01, the deadline and the delta come at the same moment.
                    with trio.move_on_after(patience):
                        delta = await anext(stream)
                        token_ids += delta.token_ids
                        reason = delta.finish_reason
            responses.append(token_ids)
        assert len(responses[0]) == 30
        assert responses[0] == responses[1] == responses[2]


async def test_two_tasks_may_read_one_stream(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake:
        token_ids: list[int] = []
        async with fake.generate("prompt", SamplingParams(max_tokens=30)) as stream:

            async def read() -> None:
                async for delta in stream:
                    token_ids.extend(delta.token_ids)

            with trio.fail_after(10):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(read)
                    nursery.start_soon(read)
        assert len(token_ids) == 30


async def test_two_tasks_may_wait_until_the_engine_is_idle(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake:
        with trio.fail_after(10):
            async with (
                trio.open_nursery() as nursery,
                fake.generate("prompt", SamplingParams(max_tokens=2)),
            ):
                nursery.start_soon(fake.wait_until_idle)
                nursery.start_soon(fake.wait_until_idle)
                await trio.sleep(1)


async def test_a_response_that_was_complete_before_the_fault_is_read_to_its_end(autojump_clock):
    with pytest.raises(EngineFault):
        async with open_fake_engine(step_seconds=0.01) as fake:
            fake.on_fault = trio.sleep_forever
            async with (
                fake.generate("done", SamplingParams(max_tokens=2)) as done,
                fake.generate("runs", SamplingParams(max_tokens=100)) as runs,
            ):
                await trio.sleep(0.055)
                fake.steps.fault = RuntimeError("broken")
                await trio.sleep(0.1)
                assert [delta.finish_reason async for delta in done] == [FinishReason.LENGTH]
                await anext(runs)
                with pytest.raises(EngineFault):
                    await anext(runs)
                with pytest.raises(EngineFault):
                    async with fake.generate("late"):
                        pytest.fail("was entered")
            await trio.sleep_forever()


async def test_a_fault_reaches_a_reader_whose_prompt_is_being_prepared_at_once():
    told = trio.Event()
    with pytest.raises(EngineFault, match="broken"):
        async with open_fake_engine(**LONG) as fake, trio.open_nursery() as nursery:
            held = HeldTokenizing(fake)

            async def pass_on_fault() -> None:
                await told.wait()  # The fault does not wait until the prompt is prepared.
                held.release()

            fake.on_fault = pass_on_fault

            async def ask() -> None:
                async with fake.generate(LONG_PROMPT) as stream:
                    with pytest.raises(EngineFault, match="broken"):
                        await anext(stream)
                told.set()

            nursery.start_soon(ask)
            await held.begun.wait()
            fake.steps.fault = RuntimeError("broken")
            async with fake.generate([1, 2], SamplingParams(max_tokens=2)):
                await trio.sleep_forever()
    assert told.is_set()


async def test_a_prompt_that_was_being_prepared_when_draining_began_is_refused():
    async with open_fake_engine(**LONG) as fake, trio.open_nursery() as nursery:
        held = HeldTokenizing(fake)
        nursery.start_soon(refused_draining, fake)
        await held.begun.wait()
        fake.drain()
        held.release()
        await fake.wait_until_idle()
        assert fake.metrics.requests_rejected_total.labels("draining")._value.get() == 1
        check_idle(fake.core)


async def test_request_in_preparation_gets_a_last_delta_when_the_engine_closes():
    deltas = []
    async with trio.open_nursery() as readers, open_fake_engine(**LONG) as fake:
        held = HeldTokenizing(fake)

        async def ask() -> None:
            async with fake.generate(LONG_PROMPT) as stream:
                deltas.extend([delta async for delta in stream])
            held.release()

        readers.start_soon(ask)
        await held.begun.wait()
    assert [(delta.finish_reason, delta.message) for delta in deltas] == [(FinishReason.ABORT, "the engine was closed")]
    assert fake.live_requests() == []


async def test_closed_engine_refuses_requests_at_once():
    async with open_fake_engine(new_text_threads=TextThreads) as fake:
        pass
    await refused_draining(fake)
    with pytest.raises(AlreadyEnded, match="trioserve-text has ended"):
        await fake.encode(LONG_PROMPT)
    assert await fake.encode("short") == list(b"short")


async def test_text_thread_finishes_queued_jobs_and_refuses_later_jobs():
    proceed = threading.Event()
    done: list[object] = []

    async def ask(ask_it: Callable[..., object], thread: WorkerThread) -> None:
        try:
            done.append(await ask_it(lambda: "answer"))
        except AlreadyEnded:
            done.append("refused")

    async with trio.open_nursery() as nursery, WorkerThread("test") as thread:
        nursery.start_soon(thread.run, proceed.wait, 10)
        await wait_all_tasks_blocked()
        nursery.start_soon(ask, thread.run_cancellable, thread)
        await wait_all_tasks_blocked()

        async def ask_late() -> None:
            await wait_all_tasks_blocked()
            await ask(thread.run_cancellable, thread)
            await ask(thread.run, thread)
            proceed.set()

        nursery.start_soon(ask_late)
    assert done == ["refused", "refused", "answer"]


async def test_closing_waits_for_the_step_in_flight_even_when_cancelled(autojump_clock):
    """Scenario S36 of tests/README.md: the weights stay loaded as long as a step reads them."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery, open_fake_engine() as fake:
            fake.steps.hold()
            async with fake.generate("prompt", SamplingParams(max_tokens=5)):
                await fake.steps.entered()

                async def release_later() -> None:
                    with trio.CancelScope(shield=True):
                        await trio.sleep(3)
                        assert fake._is_running
                        assert fake.core.stats().blocks_used > 0
                        fake.steps.release()

                nursery.start_soon(release_later)
                await trio.sleep(1)
                scope.cancel()
    assert scope.cancelled_caught
    assert trio.current_time() >= 3
    check_idle(fake.core)


async def test_aborted_request_of_a_failing_step_ends_as_aborted(autojump_clock):
    with pytest.raises(EngineFault):
        async with open_fake_engine() as fake:
            fake.steps.hold()
            async with (
                fake.generate("aborted", request_id="aborted") as aborted,
                fake.generate("not", SamplingParams(max_tokens=5)) as other,
            ):
                await fake.steps.entered()
                assert fake.abort(["aborted"]) == {"aborted": AbortOutcome.ABORTED}
                fake.steps.fault = RuntimeError("broken")
                fake.on_fault = trio.sleep_forever
                fake.steps.release()
                with pytest.raises(EngineFault):
                    await anext(other)
                assert [delta.finish_reason async for delta in aborted] == [FinishReason.ABORT]
            await trio.sleep_forever()


async def test_owner_error_and_fault_of_the_last_step_are_raised_together(autojump_clock):
    with pytest.raises(BaseExceptionGroup) as caught:
        async with open_fake_engine(step_seconds=0.01) as fake, fake.generate("prompt"):
            await trio.sleep(0.005)
            fake.steps.fault = RuntimeError("broken")
            raise KeyError("mine")
    assert sorted(type(error).__name__ for error in caught.value.exceptions) == ["EngineFault", "KeyError"]


async def test_fault_of_one_engine_does_not_affect_another(autojump_clock):
    """Scenario S30 of tests/README.md, for two engines in one process."""
    async with open_fake_engine(step_seconds=0.01) as first:
        async with first.generate("prompt", SamplingParams(max_tokens=20)) as stream:
            with pytest.raises(EngineFault):
                async with open_fake_engine(step_seconds=0.01) as second:
                    second.steps.fault = RuntimeError("broken")
                    async with second.generate("prompt") as other:
                        await anext(other)
            assert [delta.finish_reason async for delta in stream][-1] is FinishReason.LENGTH
        assert first.ready
        assert not second.ready
        check_idle(first.core)
        assert second.metrics.request_success_total.labels("length")._value.get() == 0


def test_ctrl_c_inside_the_engine_scope_ends_the_engine():
    opened = []

    async def main() -> None:
        async with (
            open_fake_engine(block_count=512, max_model_len=2048, new_text_threads=TextThreads) as fake,
            fake.generate("prompt", SamplingParams(max_tokens=2000)) as stream,
        ):
            opened.append(fake)
            await anext(stream)
            raise KeyboardInterrupt

    threads_before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        trio.run(main)
    assert not set(threading.enumerate()) - threads_before
    check_idle(opened[0].core)


async def test_prompts_in_preparation_count_against_the_queue():
    """Scenario S14 of tests/README.md: a request counts before its prompt is tokenized."""
    async with (
        open_fake_engine(
            max_num_seqs=1,
            max_queued_requests=2,
            max_model_len=512,
            block_count=128,
            new_text_threads=TextThreads,
        ) as fake,
        trio.open_nursery() as nursery,
    ):
        held = HeldTokenizing(fake)

        async def ask() -> None:
            async with fake.generate(LONG_PROMPT, SamplingParams(n=2)):
                pass

        nursery.start_soon(ask)
        await held.begun.wait()
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(Overloaded, match="1 requests wait for the model, the limit is 1"):
            async with fake.generate("prompt"):
                pytest.fail("was entered")
        assert 'num_requests_waiting{engine="0",model_name="fake"} 4.0' in fake.metrics.expose().decode()
        held.release()


async def test_drain_lets_a_request_with_one_running_choice_continue(autojump_clock):
    async with open_fake_engine(step_seconds=0.01, max_num_seqs=1) as fake:
        async with fake.generate("prompt", SamplingParams(n=2, max_tokens=5)) as stream:
            await trio.sleep(0.015)
            assert fake.core.stats().waiting_count == 1
            fake.drain()
            last = {delta.index: delta.finish_reason async for delta in stream}
        assert last == {0: FinishReason.LENGTH, 1: FinishReason.LENGTH}
