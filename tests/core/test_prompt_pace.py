"""Tests of prompts in steps with decodes. Time limits the prompt tokens of a step. Each step advances the clock by a
known cost.
"""

from __future__ import annotations

import math
import random
from statistics import median

import pytest

from trioserve.contracts.errors import StartupError
from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import StepPlan, StepResult
from trioserve.core.engine import EngineCore
from trioserve.core.prompt_pace import CHUNK_TOKENS_MIN, PROBE_EVERY, PromptPace
from trioserve.core.settings import CoreSettings
from trioserve.testing.invariants import check_idle

ROOM = {"block_count": 20_000, "context_tokens_max": 40_000, "max_num_seqs": 70, "step_tokens_max": 512}
STRETCH = CoreSettings(**ROOM).wide_prompt_stretch


class Costs:
    """The cost of a step in seconds.

    Args:
        step: cost of any step.
        floor: additional cost of a step with prompt tokens.
        decode: cost of each decode.
        token: cost of each prompt token.
        attended: cost of each token to which a prompt token attends.
        read: cost of each token of context that a chunk reads.
        noise: standard deviation, relative to the cost.
    """

    def __init__(self, *, step=0.03, floor=0.0, decode=0.0002, token=0.0002, attended=0.0, read=0.0, noise=0.0) -> None:
        self.step, self.floor, self.decode, self.token = step, floor, decode, token
        self.attended, self.read, self.noise = attended, read, noise
        self._random = random.Random(1)

    def __call__(self, plan) -> float:
        seconds = self.step
        prompts = [chunk for chunk in plan.chunks if chunk.count > 1]
        seconds += self.decode * (len(plan.chunks) - len(prompts)) + (self.floor if prompts else 0.0)
        for chunk in prompts:
            seconds += chunk.count * (self.token + self.attended * (chunk.start + chunk.count / 2))
            seconds += self.read * chunk.start
        return seconds * (1 + abs(self._random.gauss(0, self.noise)))


def gpu(**more) -> Costs:
    """An 8B model: 5 ms for each step, 0.02 ms for each prompt token."""
    return Costs(**{"step": 0.005, "decode": 0.00002, "token": 0.00002, **more})


def cpu(**more) -> Costs:
    """A 135M model on two cores with AVX2, measured with 8 streams and a prompt of 6,000 tokens."""
    return Costs(
        **{"step": 0.003, "floor": 0.0012, "decode": 0.00115, "token": 0.00088, "attended": 6.9e-7, "read": 8.2e-6}
        | more
    )


class Timed:
    """A core without a model. Each step advances the clock by the cost of the step."""

    def __init__(
        self, costs: Costs, decode_count: int = 0, *, overlap_steps: bool = False, stretch: float = STRETCH
    ) -> None:
        self.core = EngineCore(CoreSettings(**ROOM, overlap_steps=overlap_steps, wide_prompt_stretch=stretch))
        self.costs = costs
        self.now = 0.0
        self.add_decodes(0, decode_count)
        for _ in range(6 if decode_count else 0):
            self.step()

    def add(self, name: str, prompt: range, output_tokens_max: int = 1, priority: int = 0) -> None:
        self.core.add(
            EngineRequest(
                id=RequestId(name),
                prompt_token_ids=tuple(prompt),
                output_tokens_max=output_tokens_max,
                sampling=SamplingParams(),
                stop_token_ids=frozenset(),
                seed=0,
                priority=priority,
            )
        )

    def add_decodes(self, first: int, end: int) -> None:
        for index in range(first, end):
            self.add(f"d{index}", range(100 * index, 100 * index + 3), 4_000)

    def lives(self, name: str) -> bool:
        return any(live.request.id == name for live in self.core.live_requests())

    def land(self, plan: StepPlan) -> float:
        seconds = self.costs(plan)
        self.now += seconds
        tokens = tuple(1 if chunk.samples else None for chunk in plan.chunks)
        self.core.update_from_output(plan, StepResult(tokens), self.now)
        return seconds

    def step(self) -> tuple[float, int]:
        """Do one step. Return its duration in seconds, and the number of prompt tokens in it."""
        plan = self.core.schedule(self.now)
        assert plan is not None
        return self.land(plan), sum(chunk.count for chunk in plan.chunks if chunk.count > 1)

    def chunk_counts(self) -> dict[str, int]:
        """Do one step. Return the number of tokens of each request."""
        plan = self.core.schedule(self.now)
        assert plan is not None
        self.land(plan)
        return {chunk.request.id: chunk.count for chunk in plan.chunks}

    def until_end(self, name: str) -> list[tuple[float, int]]:
        steps = []
        while self.lives(name):
            steps.append(self.step())
        return steps

    def leave(self) -> None:
        self.core.abort([live.request.id for live in list(self.core.live_requests())], now=self.now)
        check_idle(self.core)


def p99(values) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def checked_long_prompt(costs: Costs, decode_count: int, tokens: int, stretch: float = STRETCH) -> list[int]:
    """Compute a long prompt beside decodes. Check that steps are short enough. Return the chunk sizes."""
    timed = Timed(costs, decode_count, stretch=stretch)
    alone = median(timed.step()[0] for _ in range(20))
    timed.add("wide", range(10_000, 10_000 + tokens))
    steps = timed.until_end("wide")
    timed.leave()
    smallest = CHUNK_TOKENS_MIN * (costs.token + costs.attended * tokens)
    limit = max(stretch * alone, alone + smallest) + costs.floor + costs.read * tokens
    assert p99([seconds for seconds, _ in steps]) <= limit * (1.15 + 3 * costs.noise)
    return [count for _, count in steps]


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("floor", [0.0, 0.002, 0.01], ids=["no floor", "small floor", "high floor"])
def test_long_prompt_on_a_gpu_takes_few_steps(floor, noise):
    """With chunks of 16 tokens, the prompt would take 546 steps. A step has room for 17 chunks of 496 tokens."""
    counts = checked_long_prompt(gpu(floor=floor, noise=noise), 16, 8_192)
    assert len(counts) <= 40
    assert median(counts) >= 300


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_long_prompt_on_a_gpu_gets_chunks_for_a_small_stretch(noise):
    counts = checked_long_prompt(gpu(floor=0.002, noise=noise), 16, 8_192, stretch=1.5)
    # Half of 5.3 ms are 130 tokens.
    assert 90 <= median(counts) <= 160
    assert len(counts) <= 110


@pytest.mark.parametrize(("stretch", "step_count"), [(1.5, 440), (3.0, 420), (6.0, 310), (12.0, 150)])
def test_long_prompt_on_a_cpu_takes_fewer_steps_with_a_larger_stretch(stretch, step_count):
    assert len(checked_long_prompt(cpu(noise=0.05), 8, 6_000, stretch)) <= step_count


@pytest.mark.parametrize("count", [4, 16, 64])
def test_the_allowed_time_is_used(count):
    costs = Costs()
    timed = Timed(costs, count)
    alone = timed.step()[0]
    timed.add("wide", range(10_000, 42_000))
    steps = timed.until_end("wide")
    timed.leave()
    assert sum(seconds for seconds, _ in steps) / len(steps) >= 0.75 * STRETCH * alone
    # A step without prompt tokens only measures the time of decodes. One in PROBE_EVERY steps is such a measurement.
    assert sum(1 for _, tokens in steps if not tokens) <= len(steps) // PROBE_EVERY + 2


class ForgetsTheFloor(PromptPace):
    """A planted bug: all additional time counts as time of prompt tokens."""

    def end(self, now, *, is_whole):
        super().end(now, is_whole=is_whole)
        self._prompts.slope += self._prompts.floor / max(1, self._prompts._x)
        self._prompts.floor = 0.0


class NeverMeasuresAgain(PromptPace):
    """A planted bug: only the first steps of each kind are measured."""

    def end(self, now, *, is_whole):
        if self._prompts.sample_count < 20:
            super().end(now, is_whole=is_whole)
        else:
            self._begun.popleft()


@pytest.mark.parametrize("pace", [PromptPace, ForgetsTheFloor])
def test_prompt_chunks_are_small_only_if_the_fixed_time_of_a_step_is_ignored(pace, monkeypatch):
    monkeypatch.setattr("trioserve.core.scheduler.PromptPace", pace)
    timed = Timed(gpu(floor=0.004), 16, stretch=1.5)
    timed.add("wide", range(10_000, 18_192))
    counts = [tokens for _, tokens in timed.until_end("wide")]
    timed.leave()
    assert (len(counts) > 200) == (pace is ForgetsTheFloor)


@pytest.mark.parametrize("pace", [PromptPace, NeverMeasuresAgain])
def test_chunks_follow_a_machine_that_becomes_slower(pace, monkeypatch):
    """The time of a prompt token becomes ten times as long, for example because other programs compute."""
    monkeypatch.setattr("trioserve.core.scheduler.PromptPace", pace)
    costs = Costs(token=0.0002)
    timed = Timed(costs, 16)
    timed.add("wide", range(10_000, 42_000))
    for _ in range(60):
        timed.step()
    costs.token *= 10
    for _ in range(30):
        timed.step()
    slow = median(timed.step()[0] for _ in range(20))
    timed.leave()
    alone = costs.step + 16 * costs.decode
    assert (slow > 1.5 * STRETCH * alone) == (pace is NeverMeasuresAgain)


def test_chunks_become_smaller_toward_the_end_of_a_long_prompt():
    costs = Costs(attended=4e-8)
    timed = Timed(costs, 32)
    timed.add("wide", range(10_000, 42_000))
    tokens = [tokens for _, tokens in timed.until_end("wide")]
    assert max(tokens[-20:]) * 1.5 < max(tokens[:40])
    timed.leave()


def test_two_prompts_beside_one_decode_get_four_times_the_time_of_the_decode():
    """A prompt counts as two decodes."""
    timed = Timed(Costs(), 1)
    alone = timed.step()[0]
    timed.add("wide", range(10_000, 42_000))
    timed.add("too", range(50_000, 82_000))
    times = sorted(timed.step()[0] for _ in range(100))
    assert times[70] == pytest.approx(5 * alone, rel=0.15)
    timed.leave()


def test_long_prompt_without_decodes_gets_whole_steps():
    timed = Timed(Costs())
    timed.add("wide", range(10_000, 14_096))
    assert [timed.step()[1] for _ in range(8)] == [512] * 8
    check_idle(timed.core)


def test_several_prompts_that_fit_a_step_are_divided_among_steps():
    """Four prompts of 120 tokens fit one step. Beside 16 decodes, this step would take 13 times as long."""
    timed = Timed(cpu(), 16)
    alone = timed.step()[0]
    times, tokens = [], 0
    for first in range(10, 58, 4):
        for index in range(first, first + 4):
            timed.add(f"p{index}", range(1_000 * index, 1_000 * index + 120))
        for _ in range(20):
            before = timed.now
            tokens += sum(count for name, count in timed.chunk_counts().items() if name.startswith("p"))
            times.append(timed.now - before)
    timed.leave()
    assert p99(times) < 4 * alone
    assert tokens == 12 * 4 * 120


def test_short_prompt_does_not_wait_for_a_long_prompt():
    timed = Timed(cpu(), 8)
    timed.add("wide", range(10_000, 42_000))
    for _ in range(100):
        timed.step()
    timed.add("short", range(50_000, 50_020))
    assert len(timed.until_end("short")) <= 6
    timed.leave()


def test_first_prompt_gets_half_beside_shorter_prompts():
    """New short prompts arrive all the time, and could use all tokens."""
    timed = Timed(Costs(token=0.002), 16)
    timed.add("wide", range(10_000, 42_000))
    for _ in range(40):
        timed.step()
    own = total = 0
    for index in range(60):
        timed.add(f"p{index}", range(100_000 + 100 * index, 100_100 + 100 * index))
        counts = timed.chunk_counts()
        own += counts.get("wide", 0)
        total += sum(count for count in counts.values() if count > 1)
    timed.leave()
    assert own >= 0.45 * total


def test_first_prompt_in_order_continues_first_without_decodes():
    """The urgent prompt starts later, beside a decode, which then ends."""
    timed = Timed(Costs(), 1)
    timed.add("wide", range(10_000, 42_000), priority=1)
    timed.step()
    timed.add("urgent", range(50_000, 82_000))
    timed.step()
    timed.core.abort([RequestId("d0")], now=timed.now)
    assert [timed.chunk_counts() for _ in range(3)] == [{"urgent": 512}] * 3
    timed.leave()


def test_prompt_starts_with_one_token_if_no_tokens_are_left():
    """A step that only measures decodes still starts a waiting request."""
    timed = Timed(Costs(), 16)
    timed.core.scheduler.pace.tokens_max = lambda decodes, prompts: 0
    timed.add("new", range(10_000, 10_100))
    assert timed.chunk_counts()["new"] == 1
    timed.leave()


def test_prompt_waits_for_common_blocks_that_another_prompt_computes_in_several_steps():
    timed = Timed(cpu(), 16)
    timed.add("one", range(10_000, 10_200))
    timed.add("other", range(10_000, 10_203))
    counts = []
    while timed.lives("one") or timed.lives("other"):
        counts.append(timed.chunk_counts())
    timed.leave()
    assert sum(count.get("one", 0) for count in counts) == 200
    assert sum(count.get("other", 0) for count in counts) == 203 - 192


def test_two_long_prompts_share_the_tokens_of_one_long_prompt():
    costs = Costs()
    timed = Timed(costs, 32)
    timed.add("wide", range(10_000, 42_000))
    one = max(timed.step()[1] for _ in range(40))
    timed.add("wide too", range(50_000, 82_000))
    two = max(timed.step()[1] for _ in range(40))
    assert two <= 1.1 * one
    timed.leave()


def test_pace_adapts_when_there_are_more_decodes():
    """If there are many more decodes, the time of a step that only decodes is soon measured again."""
    timed = Timed(Costs(decode=0.002), 8, stretch=1.5)
    timed.add("wide", range(10_000, 42_000))
    few = max(timed.step()[1] for _ in range(40))
    while timed.step()[1]:
        pass
    timed.add_decodes(8, 64)
    counts = [timed.chunk_counts() for _ in range(PROBE_EVERY - 4)]
    assert any(max(count.values()) == 1 for count in counts)
    assert max(timed.step()[1] for _ in range(40)) > 2 * few
    timed.leave()


def test_first_prompt_tokens_beside_decodes_follow_earlier_prompts():
    """Before a step with decodes and prompt tokens was measured, the time of a prompt alone gives a limit."""
    timed = Timed(Costs(step=0.001, token=0.001), 1)
    timed.add("wide", range(10_000, 42_000))
    counts = [timed.step()[1] for _ in range(12)]
    assert max(counts[:2]) <= CHUNK_TOKENS_MIN
    assert all(later <= 2 * max(counts[: index + 1], default=0) for index, later in enumerate(counts[1:]) if later > 16)
    timed.leave()


def test_prompts_are_not_limited_by_an_infinite_stretch():
    timed = Timed(Costs(token=0.01), 16, stretch=math.inf)
    timed.add("wide", range(10_000, 14_000))
    assert [timed.step()[1] for _ in range(8)] == [496] * 8
    timed.leave()


def test_prompt_tokens_per_step_are_not_limited_if_the_clock_does_not_advance():
    timed = Timed(Costs(step=0.0, decode=0.0, token=0.0), 16)
    timed.add("short", range(10_000, 10_400))
    assert timed.step()[1] == 400
    timed.leave()


@pytest.mark.parametrize("seed", range(60))
def test_long_prompts_continue_when_all_decodes_are_preempted(drive, seed):
    """Prompts are left out so that decodes stay fast. Some prompt is planned if all decodes are preempted."""
    draw = random.Random(seed)
    driver = drive(block_count=20, block_size=4, max_num_seqs=5, step_tokens_max=8)
    tokens_max = driver.core.scheduler.pace.tokens_max
    driver.core.scheduler.pace.tokens_max = lambda decodes, wide: (
        None if tokens_max(decodes, wide) is None else draw.choice((0, 0, 2, 4))
    )
    for index in range(12):
        prompt = draw.choice((3, 6, 8, 20, 40, 60))
        driver.add(
            f"r{index}", range(100 * index, 100 * index + prompt), draw.randint(1, 18), priority=draw.choice((-1, 0, 1))
        )
        for _ in range(draw.randint(1, 6)):
            driver.step()
    driver.run()


def test_step_time_is_counted_once_for_overlapping_steps_and_not_for_dropped_steps():
    """The measured time of a step begins when the previous step has returned. Dropped steps do not change the
    estimates.
    """
    timed = Timed(Costs(), 32, overlap_steps=True)
    timed.add("wide", range(10_000, 42_000))
    core, times = timed.core, []
    plan = core.schedule(timed.now)
    while timed.lives("wide"):
        behind = core.schedule_ahead(timed.now)
        times.append(timed.land(plan))
        plan = behind or core.schedule(timed.now)
    assert p99(times) <= 1.1 * STRETCH * (0.03 + 32 * 0.0002)
    assert len(times) < 150
    core.abort([live.request.id for live in list(core.live_requests())], now=timed.now)
    timed.now += 1_000
    core.drop_plan(plan, timed.now)
    check_idle(core)
    timed.add_decodes(100, 132)
    timed.step()
    timed.add("wide", range(50_000, 82_000))
    assert max(timed.step()[0] for _ in range(10)) <= 1.1 * STRETCH * (0.03 + 32 * 0.0002)


def test_step_stretch_of_one_or_less_is_refused():
    with pytest.raises(StartupError, match=r"wide_prompt_stretch is 1.0, it must be above 1"):
        CoreSettings(block_count=10, context_tokens_max=100, wide_prompt_stretch=1.0)
