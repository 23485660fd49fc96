"""A draft model beside a model, in the real core: whatever it proposes, the response is the one without it.

In float32 a step with draft tokens differs from one without by the order of sums alone, which changes no token here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from trioserve.contracts.errors import StartupError
from trioserve.contracts.events import FinishReason, RequestFinished, TokenLogprob, TokensReady
from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import DraftTask, IsAbandoned, StepPlan
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.engine.mask_rows import MasksAtOnce
from trioserve.model.drafts.draft_model import DraftModel
from trioserve.model.drafts.vocabulary import check_same_tokens
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.runner import DraftSource, ModelRunner
from trioserve.model.settings import ModelSettings
from trioserve.testing.automaton_guide import AutomatonGuide
from trioserve.testing.invariants import check_core, check_idle

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
        source = DraftSource("small", open_checkpoint(draft), settings(kernels[1]), DRAFT_TOKENS)
    runner = ModelRunner.load(open_checkpoint(target), settings(kernels[0]), draft=source)
    runner.allocate_kv(min(200, runner.block_count))
    return runner


class Driver:
    """A core over a runner. draft: None is a runner without a draft model."""

    def __init__(self, runner: ModelRunner, *, has_draft: bool, **changes: Any) -> None:
        self.runner = runner
        self.core = EngineCore(
            CoreSettings(
                **{
                    "block_count": runner.block_count,
                    "block_size": BLOCK_SIZE,
                    "context_tokens_max": 256,
                    "step_tokens_max": 128,
                    "draft_tokens_max": DRAFT_TOKENS if has_draft else 0,
                    "draft_step_tokens_max": 64,
                    "draft_source": "model" if has_draft else "text",
                    **changes,
                }
            ),
            mask_maker=MasksAtOnce(VOCAB_SIZE),
        )
        self.responses: dict[str, Response] = {}
        self.plans: list[StepPlan] = []

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        tokens: int = 24,
        guide: AutomatonGuide | None = None,
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
            )
        )

    def step(self, is_abandoned: IsAbandoned | None = None) -> bool:
        plan = self.core.schedule(0.0)
        if plan is None:
            return False
        self.plans.append(plan)
        result = self.runner.execute(plan, is_abandoned or self.core.abandonment(plan))
        if result is None:
            self.core.drop_plan(plan, 0.0)
        else:
            # What things take is the machine's business; without it drafts are as long as they may be.
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


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Callable[..., Path]) -> dict[str, Response]:
    runner = opened(tiny_checkpoint("llama"), None)
    driver = Driver(runner, has_draft=False)
    add_all(driver)
    responses = driver.run()
    runner.close()
    return responses


@pytest.mark.parametrize("draft_kernels", ["native", "torch"])
@pytest.mark.parametrize("draft", ["llama", "qwen3"])
def test_the_response_is_the_one_without_a_draft_model(
    draft: str,
    draft_kernels: str,
    cpu_kernels: str,
    tiny_checkpoint: Callable[..., Path],
    expected: dict[str, Response],
) -> None:
    """Its own weights are right nearly always, and others hardly ever; seeds, penalties, logprobs and all."""
    runner = opened(tiny_checkpoint("llama"), tiny_checkpoint(draft), (cpu_kernels, draft_kernels))
    driver = Driver(runner, has_draft=True)
    add_all(driver)
    check_equal(driver.run(), expected)
    stats = driver.core.stats()
    assert stats.draft_tokens_total > 0
    if draft == "llama":
        assert stats.accepted_tokens_total > 0.9 * stats.draft_tokens_total
        assert len(driver.plans) < 20
    else:
        assert stats.accepted_tokens_total < 0.3 * stats.draft_tokens_total
    runner.close()


def test_a_sampled_token_is_drafted_with_the_random_numbers_that_will_choose_it(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    """At a high temperature two draws of their own would hardly ever agree, whatever the model."""
    runner = opened(tiny_checkpoint("llama"), tiny_checkpoint("llama"))
    driver = Driver(runner, has_draft=True)
    driver.add("a", prompt_of(9, 1), SamplingParams(temperature=3.0), tokens=40)
    driver.run()
    stats = driver.core.stats()
    assert stats.accepted_tokens_total > 0.9 * stats.draft_tokens_total > 20
    runner.close()


def test_a_long_prompt_is_caught_up_with_in_parts_and_behind_the_first_token(
    tiny_checkpoint: Callable[..., Path], expected: dict[str, Response]
) -> None:
    runner = opened(tiny_checkpoint("llama"), tiny_checkpoint("llama"))
    driver = Driver(runner, has_draft=True, draft_catch_up_tokens_max=16, step_tokens_max=64)
    driver.add("prompt", prompt_of(60, 5), SAMPLINGS["prompt"])
    assert driver.run()["prompt"][0] == expected["prompt"][0]
    tasks = [chunk.draft_task for plan in driver.plans for chunk in plan.chunks]
    assert tasks[0] is None
    assert tasks[1:4] == [DraftTask(0, 16, 0), DraftTask(16, 32, 0), DraftTask(32, 48, 0)]
    assert tasks[4] is not None
    assert (tasks[4].start, tasks[4].end) == (48, None)
    assert driver.core.stats().accepted_tokens_total > 10
    runner.close()


def test_a_prefix_hit_is_one_for_the_draft_model_too(tiny_checkpoint: Callable[..., Path]) -> None:
    runner = opened(tiny_checkpoint("llama"), tiny_checkpoint("llama"))
    driver = Driver(runner, has_draft=True)
    driver.add("a", prompt_of(40, 1), SAMPLINGS["greedy"])
    driver.run()
    driver.plans.clear()
    driver.add("b", [*prompt_of(40, 1), 7, 8], SAMPLINGS["greedy"])
    driver.run()
    first = next(chunk.draft_task for plan in driver.plans for chunk in plan.chunks if chunk.draft_task is not None)
    assert first.start >= 40
    stats = driver.core.stats()
    assert stats.accepted_tokens_total > 0.9 * stats.draft_tokens_total
    runner.close()


def test_whoever_leaves_at_any_step_leaves_nothing_behind(
    tiny_checkpoint: Callable[..., Path], expected: dict[str, Response]
) -> None:
    runner = opened(tiny_checkpoint("llama"), tiny_checkpoint("llama"))
    for left_at in range(1, 9):
        driver = Driver(runner, has_draft=True)
        add_all(driver)
        for _ in range(left_at):
            driver.step()
        driver.core.abort([RequestId(name) for name in list(SAMPLINGS)[::2]], now=0.0)
        responses = driver.run()
        for name in list(SAMPLINGS)[1::2]:
            assert responses[name][0] == expected[name][0], (name, left_at)
    runner.close()


def test_a_step_that_everybody_left_proposes_nothing(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends between two passes of the draft model, and its requests with it."""
    runner = opened(tiny_checkpoint("llama"), tiny_checkpoint("llama"))
    driver = Driver(runner, has_draft=True)
    driver.add("a", prompt_of(9, 1), SAMPLINGS["greedy"])
    driver.step()
    drafts = runner._draft
    assert drafts is not None
    computed: list[int] = []
    compute = drafts.model.compute

    def leaving(chunks: Any, is_abandoned: IsAbandoned, masks: Any = None) -> Any:
        computed.append(len(chunks))
        driver.core.abort([RequestId("a")], now=0.0)
        return compute(chunks, is_abandoned, masks)

    monkeypatch.setattr(drafts.model, "compute", leaving)
    driver.step()
    assert computed == [1]
    assert not driver.core.schedule(0.0)
    check_idle(driver.core)
    runner.close()


def test_what_a_form_does_not_allow_is_not_drafted(tiny_checkpoint: Callable[..., Path]) -> None:
    automaton = (((20, 0), (21, 1), (22, 0)), ((30, 0), (31, 0)))
    responses = []
    for has_draft in (False, True):
        runner = opened(tiny_checkpoint("llama"), tiny_checkpoint("llama") if has_draft else None)
        driver = Driver(runner, has_draft=has_draft)
        driver.add("a", prompt_of(9, 1), SAMPLINGS["sampled"], guide=AutomatonGuide(automaton))
        driver.add("b", prompt_of(7, 2), SAMPLINGS["greedy"])
        responses.append(driver.run())
        runner.close()
    assert responses[0] == responses[1]
    assert set(responses[0]["a"][0]) <= {20, 21, 22, 30, 31}


def test_its_kv_comes_out_of_the_same_memory(tiny_checkpoint: Callable[..., Path]) -> None:
    plain = opened(tiny_checkpoint("llama"), None)
    draft = DraftSource("small", open_checkpoint(tiny_checkpoint("llama")), settings("auto"), DRAFT_TOKENS)
    runner = ModelRunner.load(open_checkpoint(tiny_checkpoint("llama")), settings("auto"), draft=draft)
    assert runner.kv_cache_bytes <= 2**22
    block_bytes = plain.kv_cache_bytes // plain.block_count
    assert runner.kv_cache_bytes > 2**22 - 2 * block_bytes
    assert 2 * runner.block_count < 2**22 // block_bytes
    runner.close()
    plain.close()


def test_a_draft_model_with_another_vocabulary_is_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama"))
    other = open_checkpoint(tiny_checkpoint("llama"))
    other.config = msgspec.structs.replace(other.config, vocab_size=319)
    with pytest.raises(StartupError, match="small has a vocabulary of 319 tokens, but the model has one of 320"):
        ModelRunner.load(checkpoint, settings("auto"), draft=DraftSource("small", other, settings("auto"), 4))


class Names:
    def __init__(self, *names: str) -> None:
        self.names = names
        self.vocab_size = len(names)

    def token_text(self, token_id: int) -> str:
        return self.names[token_id]


def test_a_draft_model_whose_tokens_are_others_is_refused() -> None:
    check_same_tokens(Names("a", "b"), Names("a", "b", "c"), "small")
    with pytest.raises(StartupError, match="token 1 is 'b' for the model and 'c' for the draft model small"):
        check_same_tokens(Names("a", "b"), Names("a", "c"), "small")


def test_a_model_may_not_lack_the_room_for_one_block_of_both(tiny_checkpoint: Callable[..., Path]) -> None:
    draft = DraftSource("small", open_checkpoint(tiny_checkpoint("llama")), settings("auto"), DRAFT_TOKENS)
    with pytest.raises(StartupError, match="one block of 4 tokens needs"):
        ModelRunner.load(open_checkpoint(tiny_checkpoint("llama")), settings("auto", 2**14), draft=draft)


def test_the_draft_model_is_closed_with_the_runner(tiny_checkpoint: Callable[..., Path]) -> None:
    runner = opened(tiny_checkpoint("llama"), tiny_checkpoint("llama"), ("native", "native"))
    draft = runner._draft
    assert isinstance(draft, DraftModel)
    runner.close()
    assert draft.model.storage is None
