"""Minimal core for tests of the runner: assigns KV blocks in shuffled order, makes plans, keeps tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from trioserve.contracts.media import GivenRows
from trioserve.contracts.pooling import Pooling
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import ScheduledChunk, StateSpan, StepPlan, StepResult
from trioserve.contracts.weights import AdapterRef
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings

__all__ = ["GREEDY", "StepDriver", "load_runner"]

BFLOAT16_NAN_BITS = 0x7FC0
GREEDY = SamplingParams(temperature=0.0)


def load_runner(
    path: Path,
    *,
    dtype: str = "float32",
    block_size: int = 4,
    block_count: int = 400,
    device: str = "cpu",
    cpu_kernels: str = "auto",
    threads: int | None = None,
    quantization: str = "none",
    max_num_seqs: int = 64,
    max_num_batched_tokens: int | None = None,
    enforce_eager: bool = False,
    batch_invariant: bool = False,
    context_tokens_max: int | None = None,
    kv_cache_dtype: str = "auto",
    max_lora_graph_rank: int = 0,
    draft_tokens: int = 0,
) -> ModelRunner:
    """Return a runner with its KV cache. Every slot holds NaN at first, so that reading an unwritten slot shows up."""
    settings = ModelSettings(
        dtype=dtype,
        device=device,
        block_size=block_size,
        kv_cache_bytes=2**24,
        kv_cache_dtype=kv_cache_dtype,
        cpu_kernels=cpu_kernels,
        threads=threads,
        quantization=quantization,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enforce_eager=enforce_eager,
        batch_invariant=batch_invariant,
        context_tokens_max=context_tokens_max,
        max_lora_graph_rank=max_lora_graph_rank,
        draft_tokens=draft_tokens,
    )
    runner = ModelRunner.load(open_checkpoint(path, context_tokens=context_tokens_max), settings)
    runner.allocate_kv(block_count)
    assert runner.storage is not None
    assert runner.states is not None or not runner.config.state_bytes
    memories = [] if runner.states is None else [memory for memory in runner.states.buffers if memory is not None]
    for pages in (*runner.storage.pages, *memories):
        if isinstance(pages, np.ndarray) and pages.dtype == np.uint16:
            pages[:] = BFLOAT16_NAN_BITS
        elif kv_cache_dtype != "auto":
            (pages if isinstance(pages, np.ndarray) else pages.view(torch.uint8))[:] = 0xFF
        else:
            pages[:] = float("nan")
    return runner


class StepDriver:
    """Requests by name. The blocks of a request are chosen at random, so neighbours in its table do not lie side by
    side.
    """

    def __init__(self, runner: ModelRunner, *, seed: int = 0) -> None:
        self._runner = runner
        self._free = list(range(runner.block_count))
        random.Random(seed).shuffle(self._free)
        self._free_states = list(range(runner.state_slot_count))
        random.Random(seed).shuffle(self._free_states)
        self._states: dict[str, int] = {}
        self._requests: dict[str, EngineRequest] = {}
        self._tables: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}
        self._steps = 0
        self._launched = 0  # launched steps that have not finished
        self.tokens: dict[str, list[int]] = {}

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        seed: int = 0,
        stop_token_ids: Sequence[int] = (),
        pooling: Pooling | None = None,
        given: tuple[GivenRows, ...] = (),
        adapter: AdapterRef | None = None,
    ) -> None:
        self._requests[name] = EngineRequest(
            id=name,
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            output_tokens_max=1000 if pooling is None else 0,
            stop_token_ids=frozenset(stop_token_ids),
            seed=seed,
            pooling=pooling,
            given=given,
            adapter=adapter,
        )
        self.tokens[name] = list(prompt)
        self._tables[name] = []
        self._computed[name] = 0

    def step(self, counts: Mapping[str, int], drafts: Mapping[str, Sequence[int]] | None = None) -> StepResult:
        """Compute some further tokens of each named request, and its draft tokens after them.

        Sampled tokens are appended to `tokens`, including tokens after accepted draft tokens.
        """
        drafts = drafts or {}
        chunks = [self.chunk(name, count, drafts.get(name, ())) for name, count in counts.items()]
        token_count = sum(chunk.row_count for chunk in chunks)
        result = self._runner.execute(StepPlan(self._steps, tuple(chunks), token_count))
        self._steps += 1
        for chunk, name, token in zip(chunks, counts, result.token_ids, strict=True):
            self._computed[name] += chunk.count
            if token is not None:
                self.tokens[name].append(token)
            for draft_token, following in zip(chunk.draft, result.draft_token_ids.get(name, ()), strict=False):
                if draft_token != self.tokens[name][-1]:
                    break
                self._computed[name] += 1
                self.tokens[name].append(following)
        return result

    def launch(self, counts: Mapping[str, int]) -> Callable[[], StepResult]:
        """Begin a step with some further tokens of each named request, and return a function that finishes it.

        If a request has no token left, the step awaits the token that the previous step samples.
        """
        chunks = [self.chunk(name, count) for name, count in counts.items()]
        plan = StepPlan(self._steps, tuple(chunks), len(chunks), is_ahead=self._launched > 0)
        self._steps += 1
        self._launched += 1
        for chunk, name in zip(chunks, counts, strict=True):
            self._computed[name] += chunk.count
        response = self._runner.launch(plan)

        def finish() -> StepResult:
            self._launched -= 1
            result = response()
            for name, token in zip(counts, result.token_ids, strict=True):
                if token is not None:
                    self.tokens[name].append(token)
            return result

        return finish

    def generate(self, names: Sequence[str], steps: int) -> None:
        """Run `steps` steps with all named requests. The first step computes all known tokens that remain, and each
        later step decodes one token.
        """
        for _ in range(steps):
            result = self.step({name: self.left(name) for name in names})
            assert not result.errors

    def take(self, name: str, chunk: ScheduledChunk, token: int | None) -> None:
        """Record the result of a chunk, for tests that execute the chunk themselves."""
        self._computed[name] += chunk.count
        if token is not None:
            self.tokens[name].append(token)

    def skip(self, name: str, count: int) -> None:
        """Mark tokens of a request as computed, without computing them. Its blocks keep their content."""
        self.chunk(name, count)
        self._computed[name] += count

    def left(self, name: str) -> int:
        return len(self.tokens[name]) - self._computed[name]

    def forget(self, name: str, *, tokens: Sequence[int] | None = None) -> None:
        """Free the blocks of a request, as a preemption does. Its tokens stay, or are replaced by `tokens`."""
        self._free.extend(self._tables[name])
        self._tables[name] = []
        self._computed[name] = 0
        if name in self._states:
            self._free_states.append(self._states.pop(name))
        if tokens is not None:
            self.tokens[name] = list(tokens)

    def chunk(self, name: str, count: int, draft: Sequence[int] = ()) -> ScheduledChunk:
        """Return a chunk with the next `count` tokens of a request and a draft, with blocks for them."""
        table, start = self._tables[name], self._computed[name]
        while len(table) * self._runner.block_size < start + count + len(draft):
            table.append(self._free.pop())
        tokens, awaits_token = self.tokens[name], start == len(self.tokens[name])
        samples = awaits_token or start + count == len(tokens)
        samples = samples and self._requests[name].pooling is None
        states: tuple[StateSpan, ...] = ()
        if self._free_states or self._states:
            slot = self._states.setdefault(name, self._free_states[-1])
            if slot in self._free_states:
                self._free_states.remove(slot)
            states = (StateSpan(count, slot if start else None, slot),)
        return ScheduledChunk(
            self._requests[name],
            tokens,
            start,
            count,
            table,
            samples,
            tuple(draft),
            awaits_token=awaits_token,
            states=states,
        )
