"""Test driver: a real core and a real runner, with or without a draft model or head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from trioserve.contracts.events import FinishReason, RequestFinished, TokenLogprob, TokensReady
from trioserve.contracts.ids import RequestId
from trioserve.contracts.media import GivenRows
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import IsAbandoned, StepPlan, StepResult
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.engine.structured_output import MasksAtOnce
from trioserve.model.drafts.checkpoints import DraftSource, is_eagle, open_eagle
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings
from trioserve.testing.automaton_guide import AutomatonGuide
from trioserve.testing.invariants import check_core, check_idle

__all__ = [
    "BLOCK_SIZE",
    "DRAFT_TOKENS",
    "SAMPLINGS",
    "Driver",
    "add_all",
    "check_equal",
    "check_proposed",
    "opened",
    "prompt_of",
    "settings",
]

VOCAB_SIZE = 320
BLOCK_SIZE = 4
DRAFT_TOKENS = 4
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.9),
    "filtered": SamplingParams(temperature=1.2, top_k=20, top_p=0.8, min_p=0.01),
    "penalties": SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5),
    "bias": SamplingParams(temperature=0.0, logit_bias={7: 3.0, 9: -4.0}, logprobs=3),
    "prompt": SamplingParams(temperature=0.8, logprobs=2, prompt_logprobs=1),
}
Response = tuple[list[int], list[TokenLogprob], FinishReason]


def settings(cpu_kernels: str, kv_bytes: int = 2**22) -> ModelSettings:
    return ModelSettings(
        dtype="float32",
        device="cpu",
        block_size=BLOCK_SIZE,
        kv_cache_bytes=kv_bytes,
        cpu_kernels=cpu_kernels,
        quantization="none",
    )


def opened(target: Path, draft: Path | None, kernels: Sequence[str] = ("auto", "auto")) -> ModelRunner:
    source = None
    if draft is not None:
        checkpoint = open_eagle(draft) if is_eagle(draft) else open_checkpoint(draft)
        source = DraftSource("small", checkpoint, settings(kernels[1]), DRAFT_TOKENS)
    runner = ModelRunner.load(open_checkpoint(target), settings(kernels[0]), draft=source)
    runner.allocate_kv(min(200, runner.block_count))
    return runner


class Driver:
    """Runs requests step by step and collects their responses.

    Args:
        runner: computes the steps.
        source: `draft_source` of the core's settings, or None for no draft tokens.
        changes: further settings of the core.

    Attributes:
        plans: plans of all steps.
        results: their results, in the same order. None marks an abandoned step.
    """

    def __init__(self, runner: ModelRunner, *, source: str | None, **changes: Any) -> None:
        self.runner = runner
        self.core = EngineCore(
            CoreSettings(
                **{
                    "block_count": runner.block_count,
                    "block_size": BLOCK_SIZE,
                    "context_tokens_max": 256,
                    "max_num_seqs": 8,
                    "step_tokens_max": 128,
                    "draft_tokens_max": 0 if source is None else DRAFT_TOKENS,
                    "draft_step_tokens_max": 64,
                    "draft_source": source or "text",
                    **changes,
                }
            ),
            mask_maker=MasksAtOnce(VOCAB_SIZE),
        )
        self.responses: dict[str, Response] = {}
        self.plans: list[StepPlan] = []
        self.results: list[StepResult | None] = []

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        tokens: int = 24,
        guide: AutomatonGuide | None = None,
        given: tuple[GivenRows, ...] = (),
    ) -> None:
        self.responses[name] = ([], [], FinishReason.ERROR)
        self.core.add(
            EngineRequest(
                id=RequestId(name),
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                output_tokens_max=tokens,
                stop_token_ids=frozenset(),
                seed=sum(name.encode()),
                guide=guide,
                given=given,
            )
        )

    def step(self, is_abandoned: IsAbandoned | None = None) -> bool:
        plan = self.core.schedule(0.0)
        if plan is None:
            return False
        self.plans.append(plan)
        result = self.runner.execute(plan, is_abandoned or self.core.flights.abandonment(plan))
        self.results.append(result)
        if result is None:
            self.core.drop_plan(plan, 0.0)
        else:
            # Measured times would shorten the drafts. Without them, drafts have full length on every machine.
            result = msgspec.structs.replace(result, draft_times=None)
            for event in self.core.update_from_output(plan, result, 0.0):
                self._take(event)
        check_core(self.core)
        return True

    def run(self) -> dict[str, Response]:
        while self.step():
            pass
        check_idle(self.core)
        return self.responses

    def _take(self, event: object) -> None:
        if isinstance(event, TokensReady):
            tokens, logprobs, _reason = self.responses[event.request_id]
            tokens += event.token_ids
            logprobs += event.logprobs or ()
        elif isinstance(event, RequestFinished):
            tokens, logprobs, _reason = self.responses[event.request_id]
            assert event.reason is not FinishReason.ERROR, event.message
            self.responses[event.request_id] = (tokens, logprobs, event.reason)


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, VOCAB_SIZE, length).tolist()


def add_all(driver: Driver) -> None:
    for number, (name, sampling) in enumerate(SAMPLINGS.items()):
        driver.add(name, prompt_of(5 + 11 * number, number), sampling)


def check_equal(responses: dict[str, Response], expected: dict[str, Response]) -> None:
    assert responses.keys() == expected.keys()
    for name, (tokens, logprobs, reason) in expected.items():
        assert responses[name][0] == tokens, name
        assert responses[name][2] is reason, name
        assert len(responses[name][1]) == len(logprobs)
        for mine, other in zip(responses[name][1], logprobs, strict=True):
            assert mine.token_id == other.token_id
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-3)


def check_proposed(runner: ModelRunner, expected: Callable[[list[int], int], list[int]]) -> None:
    """Check the draft tokens of a head after each step of two requests.

    Prompts take several steps, and drafts are accepted, partly accepted and rejected.

    Args:
        runner: target model with a head.
        expected: returns the draft tokens for the tokens so far and a number of tokens.
    """
    driver = Driver(runner, source="head", step_tokens_max=24)
    prompts = {"a": prompt_of(9, 1), "b": prompt_of(30, 2)}
    for name, prompt in prompts.items():
        driver.add(name, prompt, SamplingParams(temperature=0.0), tokens=12)
    proposed_count = 0
    while driver.step():
        plan, result = driver.plans[-1], driver.results[-1]
        assert result is not None
        for chunk in plan.chunks:
            name = chunk.request.id
            proposed = result.proposed.get(name)
            assert chunk.draft_task is not None
            assert proposed is not None
            assert len(proposed) == chunk.draft_task.token_count
            if proposed:
                tokens = [*prompts[name], *driver.responses[name][0]]
                assert list(proposed) == expected(tokens, len(proposed)), (name, len(tokens))
            proposed_count += len(proposed)
    assert proposed_count > 20
