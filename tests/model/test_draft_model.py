"""Tests of a draft model with a real core and runner. The response must equal the response without draft tokens.

In float32, a step with draft tokens differs from decoding only in the order of sums. That changes no token here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from trioserve.contracts.errors import StartupError
from trioserve.contracts.ids import RequestId
from trioserve.contracts.media import GivenRows
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import DraftTask, IsAbandoned
from trioserve.model.drafts.checkpoints import DraftSource, check_draft, check_same_tokens
from trioserve.model.drafts.draft_model import DraftModel
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.runner import ModelRunner
from trioserve.testing.automaton_guide import AutomatonGuide
from trioserve.testing.invariants import check_idle


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Callable[..., Path], draft_driver: ModuleType) -> dict[str, Any]:
    runner = draft_driver.opened(tiny_checkpoint("llama"), None)
    driver = draft_driver.Driver(runner, source=None)
    draft_driver.add_all(driver)
    responses = driver.run()
    runner.close()
    return responses


@pytest.mark.parametrize("draft_kernels", ["native", "torch"])
@pytest.mark.parametrize("draft", ["llama", "qwen3"])
def test_draft_model_does_not_change_the_response(
    draft: str,
    draft_kernels: str,
    cpu_kernels: str,
    tiny_checkpoint: Callable[..., Path],
    draft_driver: ModuleType,
    expected: dict[str, Any],
) -> None:
    """Draft with the target's own weights, which are nearly always right, and with others, which are mostly wrong."""
    runner = draft_driver.opened(tiny_checkpoint("llama"), tiny_checkpoint(draft), (cpu_kernels, draft_kernels))
    driver = draft_driver.Driver(runner, source="model")
    draft_driver.add_all(driver)
    draft_driver.check_equal(driver.run(), expected)
    stats = driver.core.stats()
    assert stats.draft_tokens_total > 0
    if draft == "llama":
        assert stats.accepted_tokens_total > 0.9 * stats.draft_tokens_total
        assert len(driver.plans) < 20
    else:
        assert stats.accepted_tokens_total < 0.3 * stats.draft_tokens_total
    runner.close()


def test_draft_model_samples_with_the_random_numbers_of_the_target_model(
    tiny_checkpoint: Callable[..., Path],
    draft_driver: ModuleType,
) -> None:
    """Compare acceptance at a high temperature, where independent random numbers would hardly ever agree."""
    runner = draft_driver.opened(tiny_checkpoint("llama"), tiny_checkpoint("llama"))
    driver = draft_driver.Driver(runner, source="model")
    driver.add("a", draft_driver.prompt_of(9, 1), SamplingParams(temperature=3.0), tokens=40)
    driver.run()
    stats = driver.core.stats()
    assert stats.accepted_tokens_total > 0.9 * stats.draft_tokens_total > 20
    runner.close()


def test_draft_model_reads_a_long_prompt_in_parts_after_the_first_output_token(
    tiny_checkpoint: Callable[..., Path], draft_driver: ModuleType, expected: dict[str, Any]
) -> None:
    runner = draft_driver.opened(tiny_checkpoint("llama"), tiny_checkpoint("llama"))
    driver = draft_driver.Driver(runner, source="model", draft_catch_up_tokens_max=16, step_tokens_max=64)
    driver.add("prompt", draft_driver.prompt_of(60, 5), draft_driver.SAMPLINGS["prompt"])
    assert driver.run()["prompt"][0] == expected["prompt"][0]
    tasks = [chunk.draft_task for plan in driver.plans for chunk in plan.chunks]
    assert tasks[0] is None
    assert tasks[1:4] == [DraftTask(0, 16, 0), DraftTask(16, 32, 0), DraftTask(32, 48, 0)]
    assert tasks[4] is not None
    assert (tasks[4].start, tasks[4].end) == (48, None)
    assert driver.core.stats().accepted_tokens_total > 10
    runner.close()


def test_prefix_cache_hit_counts_for_the_draft_model(
    tiny_checkpoint: Callable[..., Path], draft_driver: ModuleType
) -> None:
    runner = draft_driver.opened(tiny_checkpoint("llama"), tiny_checkpoint("llama"))
    driver = draft_driver.Driver(runner, source="model")
    driver.add("a", draft_driver.prompt_of(40, 1), draft_driver.SAMPLINGS["greedy"])
    driver.run()
    driver.plans.clear()
    driver.add("b", [*draft_driver.prompt_of(40, 1), 7, 8], draft_driver.SAMPLINGS["greedy"])
    driver.run()
    first = next(chunk.draft_task for plan in driver.plans for chunk in plan.chunks if chunk.draft_task is not None)
    assert first.start >= 40
    stats = driver.core.stats()
    assert stats.accepted_tokens_total > 0.9 * stats.draft_tokens_total
    runner.close()


def test_aborts_at_any_step_leave_no_blocks_and_do_not_change_other_requests(
    tiny_checkpoint: Callable[..., Path], draft_driver: ModuleType, expected: dict[str, Any]
) -> None:
    runner = draft_driver.opened(tiny_checkpoint("llama"), tiny_checkpoint("llama"))
    for left_at in range(1, 9):
        driver = draft_driver.Driver(runner, source="model")
        draft_driver.add_all(driver)
        for _ in range(left_at):
            driver.step()
        driver.core.abort([RequestId(name) for name in list(draft_driver.SAMPLINGS)[::2]], now=0.0)
        responses = driver.run()
        for name in list(draft_driver.SAMPLINGS)[1::2]:
            assert responses[name][0] == expected[name][0], (name, left_at)
    runner.close()


def test_draft_model_proposes_nothing_after_an_abandoned_step(
    tiny_checkpoint: Callable[..., Path], draft_driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Abort the only request between two passes of the draft model. No further pass runs, and the core ends idle."""
    runner = draft_driver.opened(tiny_checkpoint("llama"), tiny_checkpoint("llama"))
    driver = draft_driver.Driver(runner, source="model")
    driver.add("a", draft_driver.prompt_of(9, 1), draft_driver.SAMPLINGS["greedy"])
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


def test_draft_tokens_follow_the_grammar(tiny_checkpoint: Callable[..., Path], draft_driver: ModuleType) -> None:
    automaton = (((20, 0), (21, 1), (22, 0)), ((30, 0), (31, 0)))
    responses = []
    for has_draft in (False, True):
        runner = draft_driver.opened(tiny_checkpoint("llama"), tiny_checkpoint("llama") if has_draft else None)
        driver = draft_driver.Driver(runner, source="model" if has_draft else None)
        driver.add(
            "a", draft_driver.prompt_of(9, 1), draft_driver.SAMPLINGS["sampled"], guide=AutomatonGuide(automaton)
        )
        driver.add("b", draft_driver.prompt_of(7, 2), draft_driver.SAMPLINGS["greedy"])
        responses.append(driver.run())
        runner.close()
    assert responses[0] == responses[1]
    assert set(responses[0]["a"][0]) <= {20, 21, 22, 30, 31}


def test_given_rows_go_only_to_the_target_model(
    cpu_kernels: str, tiny_checkpoint: Callable[..., Path], draft_driver: ModuleType
) -> None:
    """Use a draft model with another hidden size, which could not read the rows."""
    rows = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
    given = (GivenRows(2, 5, bytes(16), rows),)
    responses = []
    for draft in (None, tiny_checkpoint("llama-wide")):
        runner = draft_driver.opened(tiny_checkpoint("llama"), draft, (cpu_kernels, cpu_kernels))
        driver = draft_driver.Driver(runner, source=None if draft is None else "model")
        driver.add("a", draft_driver.prompt_of(12, 1), draft_driver.SAMPLINGS["sampled"], given=given)
        driver.add("b", draft_driver.prompt_of(12, 1), draft_driver.SAMPLINGS["sampled"])
        responses.append(driver.run())
        runner.close()
    assert responses[0] == responses[1]
    assert responses[0]["a"] != responses[0]["b"]


def test_both_models_share_the_kv_cache_memory(tiny_checkpoint: Callable[..., Path], draft_driver: ModuleType) -> None:
    plain = draft_driver.opened(tiny_checkpoint("llama"), None)
    draft = DraftSource(
        "small", open_checkpoint(tiny_checkpoint("llama")), draft_driver.settings("auto"), draft_driver.DRAFT_TOKENS
    )
    runner = ModelRunner.load(open_checkpoint(tiny_checkpoint("llama")), draft_driver.settings("auto"), draft=draft)
    assert runner.kv_cache_bytes <= 2**22
    block_bytes = plain.kv_cache_bytes // plain.block_count
    assert runner.kv_cache_bytes > 2**22 - 2 * block_bytes
    assert 2 * runner.block_count < 2**22 // block_bytes
    runner.close()
    plain.close()


def test_draft_model_with_another_vocabulary_size_is_refused(
    tiny_checkpoint: Callable[..., Path], draft_driver: ModuleType
) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama"))
    other = open_checkpoint(tiny_checkpoint("llama"))
    other.config = msgspec.structs.replace(other.config, vocab_size=319)
    with pytest.raises(StartupError, match="small has a vocabulary of 319 tokens, but the model has one of 320"):
        ModelRunner.load(
            checkpoint,
            draft_driver.settings("auto"),
            draft=DraftSource("small", other, draft_driver.settings("auto"), 4),
        )


def test_draft_model_with_state_layers_is_refused(
    tiny_checkpoint: Callable[..., Path], draft_driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = open_checkpoint(tiny_checkpoint("llama")).config
    check_draft(config, config, "small")
    monkeypatch.setattr(type(config), "state_bytes", 64)
    with pytest.raises(StartupError, match="small has layers that keep a state"):
        check_draft(config, config, "small")


class Names:
    def __init__(self, *names: str) -> None:
        self.names = names
        self.vocab_size = len(names)

    def token_text(self, token_id: int) -> str:
        return self.names[token_id]


def test_draft_model_with_other_token_texts_is_refused() -> None:
    check_same_tokens(Names("a", "b"), Names("a", "b", "c"), "small")
    with pytest.raises(StartupError, match="token 1 is 'b' for the model and 'c' for the draft model small"):
        check_same_tokens(Names("a", "b"), Names("a", "c"), "small")


def test_kv_cache_too_small_for_one_block_of_both_models_is_refused(
    tiny_checkpoint: Callable[..., Path], draft_driver: ModuleType
) -> None:
    draft = DraftSource(
        "small", open_checkpoint(tiny_checkpoint("llama")), draft_driver.settings("auto"), draft_driver.DRAFT_TOKENS
    )
    with pytest.raises(StartupError, match="one block of 4 tokens needs"):
        ModelRunner.load(open_checkpoint(tiny_checkpoint("llama")), draft_driver.settings("auto", 2**14), draft=draft)


def test_closing_the_runner_closes_the_draft_model(
    tiny_checkpoint: Callable[..., Path], draft_driver: ModuleType
) -> None:
    runner = draft_driver.opened(tiny_checkpoint("llama"), tiny_checkpoint("llama"), ("native", "native"))
    draft = runner._draft
    assert isinstance(draft, DraftModel)
    runner.close()
    assert draft.model.storage is None


def test_kv_memory_of_the_draft_model_is_claimed_after_the_target_models(
    tiny_checkpoint: Callable[..., Path], draft_driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = draft_driver.opened(tiny_checkpoint("llama"), tiny_checkpoint("llama"))
    assert runner._model is not None
    assert runner._draft is not None
    asked: list[str] = []
    for name, model, calls_left in (("model", runner._model, 1), ("draft", runner._draft.model, 2)):
        pieces = [True] * calls_left
        monkeypatch.setattr(
            model,
            "claim_memory",
            lambda name=name, pieces=pieces: (asked.append(name), bool(pieces and pieces.pop()))[1],
        )
    assert [runner.claim_memory() for _ in range(4)] == [True, True, True, False]
    assert asked == ["model", "model", "draft", "model", "draft", "model", "draft"]
    runner.close()
