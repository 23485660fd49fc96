"""Tests a step that was planned before the previous step's result was known. The executor fills in awaited tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from trioserve.contracts.events import RequestFinished, TokensReady
from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import ScheduledChunk, StepPlan, StepResult
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.model.begun_step import BegunStep, fill_awaited_tokens
from trioserve.model.runner import ModelRunner

SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, logprobs=2),
    SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    SamplingParams(temperature=0.0, logit_bias={7: 3.0}, prompt_logprobs=1),
    SamplingParams(temperature=0.8, min_tokens=6),
)


def chunk(
    name: str, tokens: Sequence[int], start: int, *, count: int = 1, awaits_token: bool = False
) -> ScheduledChunk:
    request = EngineRequest(
        id=RequestId(name),
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(),
        output_tokens_max=9,
        stop_token_ids=frozenset(),
        seed=0,
    )
    samples = start + count >= len(tokens)
    return ScheduledChunk(request, tokens, start, count, [0], samples, awaits_token=awaits_token)


def plan_of(index: int, *chunks: ScheduledChunk) -> StepPlan:
    return StepPlan(index, chunks, len(chunks), is_ahead=index > 0)


def begun(plan: StepPlan, result: StepResult | None) -> BegunStep:
    return BegunStep(plan, lambda: result)


def test_awaited_token_follows_the_known_tokens():
    tokens = [1, 2, 3]
    before = begun(plan_of(0, chunk("a", tokens, 0, count=3)), StepResult((7,)))
    plan = plan_of(1, chunk("a", tokens, 3, awaits_token=True), chunk("b", (5, 6), 0, count=2))
    for _ in range(2):  # The token is read first before, then after the core has processed the result.
        (place, filled), (other_place, other) = fill_awaited_tokens(plan, before)
        assert (place, other_place, other) == (0, 1, plan.chunks[1])
        assert list(filled.row_tokens) == [7]
        assert list(filled.tokens) == list(filled.tokens[:]) == [1, 2, 3, 7]
        assert (len(filled.tokens), filled.tokens[3], filled.tokens[-1], filled.tokens[1]) == (4, 7, 7, 2)
        assert (list(filled.tokens[1:3]), list(filled.tokens[2:9]), list(filled.tokens[4:])) == ([2, 3], [3, 7], [])
        assert (filled.awaits_token, filled.samples) == (False, True)
        with pytest.raises(IndexError):
            filled.tokens[4]
        tokens[3:] = [7]


@pytest.mark.parametrize(
    "result",
    [None, StepResult((None, 8), errors={RequestId("a"): "broken"}), StepResult((7, 8), errors={RequestId("a"): "x"})],
    ids=["abandoned", "failed", "failed after its token"],
)
def test_step_omits_a_request_without_a_result_in_the_previous_step(result):
    before = begun(plan_of(0, chunk("a", [1, 2, 3], 0, count=3), chunk("b", [1, 2, 3], 0, count=3)), result)
    ahead = [chunk(name, [1, 2, 3], 3, awaits_token=True) for name in "ab"]
    filled = fill_awaited_tokens(plan_of(1, *ahead, chunk("c", [4], 0)), before)
    expected = ["c"] if result is None else ["b", "c"]
    assert [filled_chunk.request.id for _place, filled_chunk in filled] == expected


def test_step_omits_an_unfinished_prompt_only_if_it_failed():
    for errors, expected in (({}, ["a"]), ({RequestId("a"): "broken"}, [])):
        before = begun(plan_of(0, chunk("a", [1, 2, 3], 0)), StepResult((None,), errors=errors))
        filled = fill_awaited_tokens(plan_of(1, chunk("a", [1, 2, 3], 1)), before)
        assert [filled_chunk.request.id for _place, filled_chunk in filled] == expected


def responses(runner: ModelRunner, *, overlap_steps: bool, seed: int = 0) -> dict[str, list[object]]:
    """Return the responses of a core with this runner. With overlap, steps are executed in any possible order."""
    rng = random.Random(seed)
    core = EngineCore(
        CoreSettings(
            block_count=runner.block_count,
            block_size=runner.block_size,
            context_tokens_max=64,
            max_num_seqs=4,
            step_tokens_max=16,
            overlap_steps=overlap_steps,
        )
    )
    responses_by_name: dict[str, list[object]] = {}
    for number in range(10):
        name = f"r{number}"
        responses_by_name[name] = []
        core.add(
            EngineRequest(
                id=RequestId(name),
                prompt_token_ids=tuple((7 * number + 11 * place) % 300 + 5 for place in range(3 + 4 * number)),
                sampling=SAMPLINGS[number % len(SAMPLINGS)],
                output_tokens_max=4 + number % 7,
                stop_token_ids=frozenset(range(0, 320, 9)),
                seed=number,
            )
        )
    flights: list[tuple[StepPlan, list[StepResult | None]]] = []
    while list(core.live_requests()) or flights:
        if not flights:
            plan = core.schedule(0.0)
            assert plan is not None
            flights.append((plan, []))
        if overlap_steps and len(flights) == 1 and rng.random() < 0.8:
            plan = core.schedule_ahead(0.0)
            flights += [] if plan is None else [(plan, [])]
        for plan, results in flights[: rng.randint(1, 2)]:
            if not results:
                results.append(runner.execute(plan, core.flights.abandonment(plan)))
        plan, (result,) = flights.pop(0)
        events = core.drop_plan(plan, 0.0) if result is None else core.update_from_output(plan, result, 0.0)
        for event in events:
            if isinstance(event, TokensReady):
                responses_by_name[event.request_id] += event.token_ids
            elif isinstance(event, RequestFinished):
                responses_by_name[event.request_id].append((event.reason, event.stop_token_id))
    assert core.stats().blocks_used == 0
    return responses_by_name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_overlapping_steps_give_the_responses_of_separate_steps(
    kind: str, cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    runner = step_driver.load_runner(tiny_checkpoint(kind), cpu_kernels=cpu_kernels)
    try:
        expected = responses(runner, overlap_steps=False)
        for seed in range(4):
            assert responses(runner, overlap_steps=True, seed=seed) == expected
    finally:
        runner.close()
