"""Tests that blocks outside of every layer's window are freed while a request runs. Tokens equal those of transformers,
although the pool could not hold the whole context.

Free blocks are filled with NaN before each step, so a request that still reads one gets no tokens.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from trioserve.contracts.events import TokensReady
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import StepPlan
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.runner import ModelRunner
from trioserve.model.torch_step import step_model as torch_step_model
from trioserve.testing.invariants import check_core, check_idle
from trioserve_kernels import reference_fused, reference_invariant
from trioserve_kernels.native import NoNativeKernels, load_library

WINDOW = 8  # window of every layer in these checkpoints
BLOCK_SIZE = 4
VOCAB_SIZE = 320
GREEDY = SamplingParams(temperature=0.0)
BFLOAT16_NAN_BITS = 0x7FC0


class Served:
    """A core and a runner. Free blocks are filled with NaN before each step."""

    def __init__(self, runner: ModelRunner, **settings: Any) -> None:
        self.core = EngineCore(
            CoreSettings(
                **{
                    "block_count": runner.block_count,
                    "block_size": BLOCK_SIZE,
                    "context_tokens_max": 1_000,
                    "max_num_seqs": 4,
                    "step_tokens_max": 8,
                    "window_tokens": WINDOW,
                    **settings,
                }
            )
        )
        self._runner = runner
        self.tokens: dict[str, list[int]] = {}
        self.blocks_used_max = 0

    def add(self, name: str, prompt: list[int], count: int) -> None:
        self.tokens[name] = []
        self.core.add(
            EngineRequest(
                id=RequestId(name),
                prompt_token_ids=tuple(prompt),
                sampling=GREEDY,
                output_tokens_max=count,
                stop_token_ids=frozenset(),
                seed=0,
            )
        )

    def run(self) -> None:
        while (plan := self.core.schedule(0.0)) is not None:
            while plan is not None:
                self.blocks_used_max = max(self.blocks_used_max, self.core.stats().blocks_used)
                self._spoil()
                result = self._runner.execute(plan)
                ahead = self.core.schedule_ahead(0.0) if self.core.settings.overlap_steps else None
                self.take(plan, result)
                plan = ahead

    def take(self, plan: StepPlan, result: Any) -> None:
        assert not result.errors
        for event in self.core.update_from_output(plan, result, 0.0):
            if isinstance(event, TokensReady):
                self.tokens[event.request_id] += event.token_ids
        check_core(self.core)

    def _spoil(self) -> None:
        assert self._runner.storage is not None
        pool = self.core.pool
        free = [index for index in range(pool.block_count) if pool.states()[index] == 0]
        assert all(pool.is_idle(BlockIndex(index)) for index in free)
        for pages in self._runner.storage.pages:
            is_bits = isinstance(pages, np.ndarray) and pages.dtype == np.uint16
            pages[free] = BFLOAT16_NAN_BITS if is_bits else float("nan")


@pytest.fixture(params=("torch", "native", "fused", "invariant"))
def load(
    request: pytest.FixtureRequest, step_driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., ModelRunner]:
    """Function load(path, block_count=...) that returns a runner, for each way to compute on a CPU."""
    way = request.param
    if way == "native":
        try:
            load_library()
        except NoNativeKernels as error:
            pytest.skip(f"no native kernels: {error}")
    kernels = {"fused": reference_fused, "invariant": reference_invariant}.get(way)
    if kernels is not None:
        monkeypatch.setattr(torch_step_model, "pick_kernels", lambda *_, **__: kernels)

    def loaded(path: Path, *, block_count: int) -> ModelRunner:
        return step_driver.load_runner(
            path,
            cpu_kernels="native" if way == "native" else "torch",
            block_size=BLOCK_SIZE,
            block_count=block_count,
            max_num_seqs=4,
        )

    return loaded


def greedy(path: Path, prompt: list[int], count: int) -> list[int]:
    """Return the greedy tokens of transformers."""
    return _greedy(path, tuple(prompt), count)


@functools.cache
def _greedy(path: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def make_prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def test_widest_window_exists_only_if_all_layers_have_windows(tiny_checkpoint: Callable[..., Path]) -> None:
    def window_max(kind: str) -> int | None:
        return open_checkpoint(tiny_checkpoint(kind)).config.window_max

    assert window_max("mistral") == WINDOW
    assert window_max("ministral") is None, "some layers have no window"
    assert window_max("llama") is None


@pytest.mark.slow
@pytest.mark.parametrize("caching", (False, True), ids=("no prefix cache", "prefix cache"))
@pytest.mark.parametrize("overlap", (False, True), ids=("steps apart", "steps overlap"))
def test_generation_much_longer_than_the_window_equals_transformers(
    load: Callable[..., ModelRunner], overlap: bool, caching: bool, tiny_checkpoint: Callable[..., Path]
) -> None:
    path = tiny_checkpoint("mistral")
    # 13 blocks are 52 tokens. The two requests need 61 and 103, and 150 more in the end.
    served = Served(load(path, block_count=13), enable_prefix_caching=caching, overlap_steps=overlap)
    prompts = {"a": make_prompt(61), "b": make_prompt(103, 1)}
    for name, prompt in prompts.items():
        served.add(name, prompt, 75)
    served.run()
    for name, prompt in prompts.items():
        assert served.tokens[name] == greedy(path, prompt, 75), name
    check_idle(served.core)
    assert served.core.stats().blocks_given_back_total >= (61 + 103 + 2 * 75 - 4 * WINDOW) // BLOCK_SIZE
    assert served.blocks_used_max <= 13


@pytest.mark.slow
def test_next_turn_of_a_long_chat_hits_the_prefix_cache_without_its_first_blocks(
    load: Callable[..., ModelRunner], tiny_checkpoint: Callable[..., Path]
) -> None:
    path = tiny_checkpoint("mistral")
    served = Served(load(path, block_count=8))
    prompt = make_prompt(90)
    served.add("first", prompt, 30)
    served.run()
    turn = [*prompt, *served.tokens["first"], *make_prompt(9, 2)]
    hits_before = served.core.stats().prefix_hit_tokens_total
    served.add("second", turn, 30)
    served.run()
    assert served.core.stats().prefix_hit_tokens_total - hits_before == (90 + 30 - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert served.tokens["second"] == greedy(path, turn, 30)


@pytest.mark.slow
def test_window_longer_than_the_context_equals_full_attention(
    load: Callable[..., ModelRunner], tiny_checkpoint: Callable[..., Path]
) -> None:
    path = tiny_checkpoint("llama")
    plans: dict[int | None, list[object]] = {}
    tokens = {}
    for window in (None, 200):
        served = Served(load(path, block_count=60), window_tokens=window, context_tokens_max=200)
        plans[window] = seen = []
        schedule = served.core.schedule

        def noted(now: float, seen: list[object] = seen, schedule: Any = schedule) -> StepPlan | None:
            plan = schedule(now)
            if plan is not None:
                seen.append(
                    [(chunk.request.id, chunk.start, chunk.count, [*chunk.block_table]) for chunk in plan.chunks]
                )
            return plan

        served.core.schedule = noted  # type: ignore[method-assign]
        for name, length in (("a", 50), ("b", 70), ("c", 90)):
            served.add(name, make_prompt(length), 60)
        served.run()
        tokens[window] = served.tokens
        assert served.core.stats().blocks_given_back_total == 0
    assert tokens[200] == tokens[None]
    assert plans[200] == plans[None]
