"""Tests of long prompts in steps with decodes. The time for chunks is limited. Each step advances the clock by a known
cost.
"""

from __future__ import annotations

import itertools
import random

import pytest

from trioserve.contracts.errors import StartupError
from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import StepPlan, StepResult
from trioserve.core.engine import EngineCore
from trioserve.core.prompt_pace import CHUNK_TOKENS_MIN, PROBE_EVERY
from trioserve.core.settings import CoreSettings
from trioserve.testing.invariants import check_idle

ROOM = {"block_count": 20_000, "context_tokens_max": 40_000, "max_num_seqs": 70, "step_tokens_max": 512}


class Costs:
    """The cost of a step in seconds, for the weights, for each decode, for each prompt token, and for each token to
    which a prompt token attends.
    """

    def __init__(self, *, decode=0.0002, token=0.0002, attended=1e-8, noise=0.0) -> None:
        self.decode, self.token, self.attended, self.noise = decode, token, attended, noise
        self._random = random.Random(1)

    def __call__(self, plan) -> float:
        seconds = 0.03
        for chunk in plan.chunks:
            cost = self.decode if chunk.count == 1 else self.token * chunk.count
            seconds += cost + self.attended * chunk.count * (chunk.start + chunk.count)
        return seconds * self._random.uniform(1, 1 + self.noise)


class Timed:
    """A core without a model. Each step advances the clock by the cost of the step."""

    def __init__(self, costs: Costs, decode_count: int = 0, *, overlap_steps: bool = False) -> None:
        self.core = EngineCore(CoreSettings(**ROOM, overlap_steps=overlap_steps))
        self.costs = costs
        self.now = 0.0
        self.add_decodes(0, decode_count)
        for _ in range(6 if decode_count else 0):
            self.step()

    def add(self, name: str, prompt: range, output_tokens_max: int = 1) -> None:
        self.core.add(
            EngineRequest(
                id=RequestId(name),
                prompt_token_ids=tuple(prompt),
                output_tokens_max=output_tokens_max,
                sampling=SamplingParams(),
                stop_token_ids=frozenset(),
                seed=0,
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
        """Do one step. Return its duration in seconds, and the number of long-prompt tokens in it."""
        plan = self.core.schedule(self.now)
        assert plan is not None
        wide = sum(chunk.count for chunk in plan.chunks if chunk.request.id.startswith("wide") and chunk.count > 1)
        return self.land(plan), wide

    def leave(self) -> None:
        self.core.abort([live.request.id for live in list(self.core.live_requests())], now=self.now)
        check_idle(self.core)


@pytest.mark.parametrize(
    ("count", "noise"), [(64, 0.0), (64, 0.3), (16, 0.0), (4, 0.0)], ids=["64", "64 and noise", "16", "4"]
)
def test_long_prompt_makes_steps_at_most_half_longer_and_is_completed(count, noise):
    costs = Costs(noise=noise)
    timed = Timed(costs, count)
    alone = max(timed.step()[0] for _ in range(20))
    timed.add("wide", range(10_000, 42_000))
    beside = []
    while timed.lives("wide"):
        beside.append(timed.step())
    times = sorted(seconds for seconds, _ in beside)
    assert times[int(len(times) * 0.99)] <= 1.5 * alone * (1 + noise) + 16 * costs.token
    # The allowed time is used. Only probes contain no tokens of long prompts.
    assert sum(tokens for _, tokens in beside) >= 31_000
    assert sum(times) / len(times) >= 1.25 * alone / (1 + noise)
    assert sum(1 for _, tokens in beside if not tokens) <= len(beside) // PROBE_EVERY + 2
    timed.leave()


def test_chunks_become_smaller_toward_the_end_of_a_long_prompt():
    costs = Costs(attended=4e-8)
    timed = Timed(costs, 32)
    timed.add("wide", range(10_000, 42_000))
    tokens = [timed.step()[1] for _ in range(400)]
    assert max(tokens[-20:]) * 1.5 < max(tokens[:40])
    timed.leave()


def test_long_prompt_beside_one_decode_gets_half_of_the_time():
    costs = Costs(attended=0.0)
    timed = Timed(costs, 1)
    alone = timed.step()[0]
    timed.add("wide", range(10_000, 42_000))
    seconds = sorted(timed.step()[0] for _ in range(100))
    assert seconds[50] == pytest.approx(2 * alone, rel=0.15)
    timed.leave()


def test_long_prompt_without_decodes_gets_whole_steps():
    timed = Timed(Costs())
    timed.add("wide", range(10_000, 14_096))
    assert [timed.step()[1] for _ in range(8)] == [512] * 8
    check_idle(timed.core)


def test_prompt_that_fits_into_one_step_is_computed_in_one_step():
    costs = Costs()
    timed = Timed(costs, 16)
    timed.add("short", range(10_000, 10_496))
    plan = timed.core.schedule(timed.now)
    assert [chunk.count for chunk in plan.chunks if chunk.request.id == "short"] == [496]
    timed.land(plan)
    timed.leave()


def test_two_long_prompts_share_the_tokens_of_one_long_prompt():
    costs = Costs(attended=0.0)
    timed = Timed(costs, 32)
    timed.add("wide", range(10_000, 42_000))
    one = max(timed.step()[1] for _ in range(40))
    timed.add("wide too", range(50_000, 82_000))
    two = max(timed.step()[1] for _ in range(40))
    assert two <= one + CHUNK_TOKENS_MIN
    timed.leave()


def test_pace_adapts_when_there_are_more_decodes():
    """If there are many more decodes, the time of a step that only decodes is soon measured again."""
    timed = Timed(Costs(decode=0.002, attended=0.0), 8)
    timed.add("wide", range(10_000, 42_000))
    few = max(timed.step()[1] for _ in range(40))
    while timed.step()[1]:
        pass
    timed.add_decodes(8, 64)
    tokens = [timed.step()[1] for _ in range(PROBE_EVERY - 4)]
    assert 0 in tokens
    assert max(timed.step()[1] for _ in range(40)) > 2 * few
    timed.leave()


def test_chunk_of_a_long_prompt_at_most_doubles_from_step_to_step():
    timed = Timed(Costs(token=1e-6, attended=0.0), 16)
    timed.add("wide", range(10_000, 42_000))
    tokens = [tokens for tokens in (timed.step()[1] for _ in range(30)) if tokens]
    assert tokens[0] == CHUNK_TOKENS_MIN
    assert all(later <= 2 * earlier for earlier, later in itertools.pairwise(tokens))
    assert max(tokens) > 400
    timed.leave()


@pytest.mark.parametrize("seed", range(60))
def test_long_prompts_continue_when_all_decodes_are_preempted(drive, seed):
    """Long prompts were left out so that decodes stay fast. They are planned when all decodes are preempted."""
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


def test_long_prompt_continues_when_all_other_requests_of_its_step_are_preempted(drive):
    """The long prompt is left out, because an earlier prompt uses all tokens that the decodes allow.

    The earlier prompt then preempts the decode. It still lacks blocks, and is preempted, too.
    """
    driver = drive(block_count=11, block_size=4, step_tokens_max=16)
    allowed = 0
    driver.core.scheduler.pace.tokens_max = lambda decodes, wide: allowed if decodes else None
    driver.add("decode", (1,), 8, priority=1)
    driver.step()
    driver.add("second", range(100, 140), priority=0)
    driver.step()
    driver.add("first", range(200, 217), priority=-1)
    driver.step()
    assert [(live.request.id, live.computed_count) for live in driver.core.scheduler.running.values()] == [
        ("decode", 3),
        ("second", 15),
        ("first", 15),
    ]
    allowed = 15
    plan = driver.step()
    assert plan.preempted == ("decode", "second")
    assert [(chunk.request.id, chunk.start, chunk.count) for chunk in plan.chunks] == [("first", 15, 2)]
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
    times.sort()
    assert times[int(len(times) * 0.99)] <= 1.5 * (0.03 + 32 * 0.0002) + 16 * timed.costs.token
    assert len(times) < 32_000 / CHUNK_TOKENS_MIN
    core.abort([live.request.id for live in list(core.live_requests())], now=timed.now)
    timed.now += 1_000
    core.drop_plan(plan, timed.now)
    check_idle(core)
    timed.add_decodes(100, 132)
    timed.step()
    timed.add("wide", range(50_000, 82_000))
    assert max(timed.step()[1] for _ in range(10)) < 100


def test_step_stretch_of_one_or_less_is_refused():
    with pytest.raises(StartupError, match=r"wide_prompt_stretch is 1.0, it must be above 1"):
        CoreSettings(block_count=10, context_tokens_max=100, wide_prompt_stretch=1.0)
