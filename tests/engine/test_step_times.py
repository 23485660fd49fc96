"""Tests of the times of the last steps, and of the totals over all steps."""

from __future__ import annotations

import pytest
import trio

from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.lifecycle.step_times import STEPS_MAX, StepTimes
from trioserve.testing.fake_engine import open_fake_engine

PROMPT_TOKENS = 10


async def answer(fake, max_tokens: int) -> None:
    async with fake.generate("p" * PROMPT_TOKENS, SamplingParams(max_tokens=max_tokens)) as stream:
        async for _ in stream:
            pass


@pytest.mark.parametrize("overlap_steps", [False, True])
async def test_each_step_records_its_plan_and_its_times(overlap_steps, autojump_clock):
    async with open_fake_engine(step_seconds=2, overlap_steps=overlap_steps) as fake:
        await answer(fake, 3)
        steps = fake.step_times.latest()
        assert [step.step_index for step in steps] == [0, 1, 2]
        assert [(step.prefill_tokens, step.decode_tokens) for step in steps] == [(PROMPT_TOKENS, 0), (0, 1), (0, 1)]
        assert [step.sequence_count for step in steps] == [1, 1, 1]
        assert [step.admitted_count for step in steps] == [1, 0, 0]
        assert [step.is_ahead for step in steps] == [False, overlap_steps, overlap_steps]
        assert [step.forward_at for step in steps] == [0, 2, 4]
        assert [step.forward_seconds for step in steps] == [2, 2, 2]
        assert [step.schedule_at for step in steps] == ([0, 0, 2] if overlap_steps else [0, 2, 4])
        times = fake.step_times
        assert (times.count, times.forward_seconds) == (3, 6)
        assert times.schedule_seconds == times.update_seconds == times.deliver_seconds == 0
        assert not any(step.is_dropped for step in steps)


async def test_record_of_a_dropped_step_is_marked(autojump_clock):
    async with open_fake_engine(step_seconds=2) as fake:
        async with fake.generate("p", SamplingParams(max_tokens=5)):
            await trio.sleep(3)
        await trio.sleep(2)
        assert [step.is_dropped for step in fake.step_times.latest()] == [False, True]


async def test_last_thousand_steps_are_kept_and_all_are_counted(autojump_clock):
    async with open_fake_engine(step_seconds=1, block_count=300, max_model_len=STEPS_MAX + 50) as fake:
        await answer(fake, STEPS_MAX + 7)
        steps = fake.step_times.latest()
        assert len(steps) == STEPS_MAX
        assert (steps[0].step_index, steps[-1].step_index) == (7, STEPS_MAX + 6)
        assert fake.step_times.count == STEPS_MAX + 7


async def test_step_times_continue_after_a_reopening(autojump_clock):
    async with open_fake_engine(step_seconds=1, engine_restarts=1) as fake:
        await answer(fake, 2)
        fake.break_next_step(RuntimeError("broken"))
        await answer(fake, 2)
        assert fake.step_times.count == 4


def test_step_times_are_empty_before_the_first_step():
    assert list(StepTimes().latest()) == []
