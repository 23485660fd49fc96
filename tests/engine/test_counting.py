"""Tests that each request, token and abort is counted once, whatever happens to the request."""

from __future__ import annotations

import pytest
import trio

from trioserve.contracts.errors import Overloaded
from trioserve.contracts.events import FinishReason
from trioserve.contracts.sampling import SamplingParams
from trioserve.router.queues import DrainRate
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.testing.invariants import check_idle


def count(fake: FakeEngine, name: str, *labels: str) -> float:
    """Return a counter's value, or the number of observations of a histogram."""
    lines = fake.metrics.expose().decode().splitlines()
    start = f"trioserve:{name}{{"
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(start) and all(f'"{label}"' in line for label in labels)
    )


async def ask(fake: FakeEngine, prompt: str, *, at: float = 0.0, **sampling: object) -> None:
    await trio.sleep_until(at)
    async with fake.generate(prompt, SamplingParams(ignore_eos=True, **sampling)) as stream:
        async for _ in stream:
            pass


async def test_prompt_preempted_before_its_first_token_is_counted_once(autojump_clock):
    async with open_fake_engine(
        step_seconds=0.01, block_count=16, block_size=4, max_model_len=64, max_num_batched_tokens=8
    ) as fake:
        preempted_in_prefill = []
        on_plan = fake._delivery.on_plan

        def watch(plan) -> None:
            preempted_in_prefill.extend(
                name for name in plan.preempted if fake._delivery._choices[name].first_token_at is None
            )
            on_plan(plan)

        fake._delivery.on_plan = watch
        async with trio.open_nursery() as nursery:
            for letter in "abc":
                nursery.start_soon(lambda letter=letter: ask(fake, letter * 7, max_tokens=25))
            nursery.start_soon(lambda: ask(fake, "z" * 24, at=0.055, max_tokens=5))
        assert preempted_in_prefill
        assert count(fake, "prompt_tokens_total") == 3 * 7 + 24
        assert count(fake, "request_queue_time_seconds_count") == 4
        assert count(fake, "time_to_first_token_seconds_count") == 4
        assert count(fake, "generation_tokens_total") == 3 * 25 + 5
        assert count(fake, "inter_token_latency_seconds_count") == 3 * 24 + 4
        assert count(fake, "request_success_total", "length") == 4
        assert count(fake, "e2e_request_latency_seconds_count") == 4
        assert count(fake, "num_preemptions_total") >= 1
        assert count(fake, "aborts_total") == 0


async def test_abort_and_later_leaving_count_as_one_abort(autojump_clock):
    async with open_fake_engine() as fake:
        fake.steps.hold()
        async with fake.generate("prompt", request_id="mine"):
            await fake.steps.entered()
            await trio.sleep(1)
            fake.abort(["mine"])
            await trio.sleep(2)
        await trio.sleep(4)
        fake.steps.release()
        await trio.testing.wait_all_tasks_blocked()
        assert count(fake, "aborts_total") == count(fake, "aborts_total", "prefill") == 1
        assert count(fake, "cancel_to_free_seconds_count") == 1
        # The time is counted from the abort, not from the moment at which the reader leaves.
        assert count(fake, "cancel_to_free_seconds_sum") == pytest.approx(6.0)
        assert count(fake, "request_success_total") == count(fake, "request_success_total", "abort") == 1
        assert count(fake, "generation_tokens_total") == 0
        assert count(fake, "e2e_request_latency_seconds_count") == 0
        assert fake._delivery._cancelled == {}
        assert count(fake, "cancel_to_free_steps_sum") == 1  # Wait until the step in flight has ended.


async def test_abort_between_steps_frees_blocks_after_zero_steps(autojump_clock):
    async with open_fake_engine(max_num_seqs=1) as fake:
        fake.steps.hold()
        async with fake.generate("running"), fake.generate("queued", request_id="mine"):
            await fake.steps.entered()
            assert (count(fake, "live_requests"), count(fake, "num_requests_waiting")) == (2, 1)
            fake.abort(["mine"])
            assert count(fake, "cancel_to_free_steps_count", "queued") == 1
            assert count(fake, "cancel_to_free_steps_sum", "queued") == 0
            assert count(fake, "live_requests") == 2  # The reader has not left its stream yet.
            fake.steps.release()
        assert count(fake, "live_requests") == 0


async def test_every_task_of_the_program_is_counted(autojump_clock):
    async with open_fake_engine() as fake, trio.open_nursery() as nursery:
        before = count(fake, "tasks")
        nursery.start_soon(trio.sleep_forever)
        assert count(fake, "tasks") == before + 1
        nursery.cancel_scope.cancel()
        check_idle(fake.core)


async def test_abort_counts_only_the_choices_that_still_run(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with fake.generate("prompt", SamplingParams(n=3, max_tokens=20), request_id="mine") as stream:
            fake.executor.errors[stream._request.choices[1].sequence_id] = "bad luck"
            await trio.sleep(0.055)
            fake.abort(["mine"])
            last = {delta.index: delta.finish_reason async for delta in stream}
        assert last == {0: FinishReason.ABORT, 1: FinishReason.ERROR, 2: FinishReason.ABORT}
        await trio.sleep(0.02)
        assert count(fake, "aborts_total") == count(fake, "aborts_total", "decode") == 2
        assert count(fake, "request_success_total", "error") == 1
        assert count(fake, "request_success_total", "abort") == 2
        assert len(fake._delivery) == 0
        check_idle(fake.core)


async def test_stop_string_in_the_last_token_is_counted_as_a_stop(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake:
        shown: list[str] = []
        token_count = 0
        async with fake.generate("prompt", SamplingParams(max_tokens=40, temperature=0)) as stream:
            async for delta in stream:
                token_count += len(delta.token_ids)
                if len(delta.text) == 1 and delta.text.isascii() and delta.text not in "".join(shown):
                    stop = delta.text
                    break
                shown.append(delta.text)
        sampling = SamplingParams(max_tokens=token_count, temperature=0, stop=(stop,))
        async with fake.generate("prompt", sampling) as stream:
            deltas = [delta async for delta in stream]
        assert deltas[-1].finish_reason is FinishReason.STOP
        assert deltas[-1].stop_reason == stop
        assert count(fake, "request_success_total", "stop") == 1
        assert count(fake, "request_success_total", "length") == 0
        check_idle(fake.core)


async def test_text_error_with_the_last_token_is_counted_as_an_error(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with fake.generate("prompt", SamplingParams(max_tokens=1)) as stream:

            def broken(*_arguments: object) -> None:
                raise ValueError("no such token")

            stream._request.choices[0].output.feed = broken  # type: ignore[assignment,method-assign]
            assert [delta.finish_reason async for delta in stream] == [FinishReason.ERROR]
        assert count(fake, "request_success_total", "error") == 1
        assert count(fake, "request_success_total", "length") == 0


async def test_latencies_are_measured_by_trios_clock(autojump_clock):
    async with open_fake_engine(step_seconds=0.5) as fake:
        await ask(fake, "prompt", at=10, max_tokens=4)
        assert count(fake, "time_to_first_token_seconds_sum") == pytest.approx(0.5)
        assert count(fake, "inter_token_latency_seconds_sum") == pytest.approx(1.5)
        assert count(fake, "e2e_request_latency_seconds_sum") == pytest.approx(2.0)
        assert count(fake, "step_seconds_sum") == pytest.approx(2.0)


async def test_prompt_without_output_counts_as_finished_by_length(autojump_clock):
    async with open_fake_engine() as fake:
        await ask(fake, "prompt", max_tokens=0)
        assert count(fake, "request_success_total") == count(fake, "request_success_total", "length") == 1


async def test_each_refusal_of_a_drain_is_counted(autojump_clock):
    async with open_fake_engine(step_seconds=0.01, max_num_seqs=1) as fake:
        async with (
            fake.generate("runs", SamplingParams(max_tokens=5)) as running,
            fake.generate("waits"),
            fake.generate("waits, too", SamplingParams(n=2)),
        ):
            await trio.sleep(0.015)
            fake.drain()
            fake.drain()
            assert count(fake, "requests_rejected_total", "draining") == 2
            assert count(fake, "num_requests_waiting") == 0
            assert count(fake, "num_requests_running") == 1
            assert [delta.finish_reason async for delta in running][-1] is FinishReason.LENGTH
        assert count(fake, "aborts_total", "queued") == 3
        assert count(fake, "kv_blocks", "used") == 0
        check_idle(fake.core)


async def test_prefix_hits_are_counted_once_however_often_they_are_read(autojump_clock):
    async with open_fake_engine() as fake:
        for _ in range(2):
            await ask(fake, "x" * 12, max_tokens=1)
            count(fake, "kv_blocks")
        assert count(fake, "prefix_cache_queries_total") == 24
        assert count(fake, "prefix_cache_hits_total") == 8


def test_retry_delay_follows_from_the_rate_of_ended_requests():
    rate = DrainRate()
    assert rate.seconds_for(1, 100.0) == 5.0
    rate.note(100.0)
    assert rate.seconds_for(1, 100.0) == 5.0
    for second in range(2, 20, 2):
        rate.note(100.0 + second)
    assert rate.seconds_for(1, 120.0) == pytest.approx(2.0)
    assert rate.seconds_for(4, 120.0) == pytest.approx(8.0)
    assert rate.seconds_for(1000, 120.0) == 60.0
    for _ in range(64):
        rate.note(120.0)
    assert rate.seconds_for(1, 120.0) == 1.0
    assert rate.seconds_for(64, 184.0) == 60.0  # Only the last 64 ends count, and all of them were 64 s ago.
    assert rate.seconds_for(32, 184.0) == pytest.approx(32.0)


async def test_idle_time_of_an_engine_does_not_raise_the_retry_delay(autojump_clock):
    async with open_fake_engine(step_seconds=0.01, max_num_seqs=1, max_queued_requests=0) as fake:
        for _ in range(3):
            await ask(fake, "prompt", max_tokens=2)
        await trio.sleep(3600)
        async with fake.generate("a"):
            with pytest.raises(Overloaded) as refused:
                await ask(fake, "b", max_tokens=2)
    assert refused.value.retry_after_seconds == 1.0  # This is the smallest delay.


async def test_new_engine_is_not_asleep(autojump_clock):
    async with open_fake_engine() as fake:
        states = ("awake", "weights_offloaded", "discard_all")
        assert [count(fake, "engine_sleep_state", state) for state in states] == [1, 0, 0]
