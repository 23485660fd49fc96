"""What the runner asks of a model, whoever computes it: one step in, samples out. And the step in plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.step import IsAbandoned, ScheduledChunk
from trioserve.model.families.llama import LlamaModel
from trioserve.model.kv_storage import KVStorage
from trioserve.model.model_config import ModelConfig
from trioserve.model.sampler import finite_rows, sample, token_logprobs
from trioserve.model.samples import PROMPT_LOGPROB_ROWS, ComputedStep, prompt_followers
from trioserve.model.step_tensors import HeadShape, StepShape, build_step_tensors
from trioserve.model.weights import Slot

__all__ = ["StepModel", "TorchStepModel"]


class StepModel(Protocol):
    """A model that computes whole steps."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def computed_by(self) -> str:
        """What computes, in a few words for people."""
        ...

    def slots(self) -> Iterator[Slot]:
        """A place for every tensor of the checkpoint."""
        ...

    def prepare_storage(self, storage: KVStorage) -> None:
        """Called with a new KV cache before anything is written there."""
        ...

    def compute(
        self, chunks: Sequence[ScheduledChunk], storage: KVStorage, is_abandoned: IsAbandoned
    ) -> ComputedStep | None:
        """Write the KV of every chunk's tokens, attend, and sample where a chunk samples; None if it was abandoned."""
        ...

    def close(self) -> None:
        """Let weights and threads go."""
        ...


class TorchStepModel:
    """A LlamaModel, operator by operator."""

    computed_by = "plain torch"

    def __init__(self, model: LlamaModel, block_size: int) -> None:
        self._model: LlamaModel | None = model
        config = model.config
        self.config: ModelConfig = config
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self._shape = StepShape(
            block_size=block_size,
            token_kv_bytes=2 * config.kv_head_count * config.head_dim * model.dtype.itemsize,
            windows=tuple(dict.fromkeys(config.sliding_windows)),
            dtype=model.dtype,
            device=model.device,
            walked_heads=HeadShape(config.head_count, config.kv_head_count, config.head_dim)
            if model.kernels.FUSED
            else None,
        )

    def slots(self) -> Iterator[Slot]:
        assert self._model is not None, "a model is filled before it is closed"
        return self._model.slots()

    def prepare_storage(self, storage: KVStorage) -> None:
        pass

    def compute(
        self, chunks: Sequence[ScheduledChunk], storage: KVStorage, is_abandoned: IsAbandoned
    ) -> ComputedStep | None:
        assert self._model is not None, "compute after close"
        step = build_step_tensors(chunks, self._shape)
        hidden = self._model.forward(step, storage, is_abandoned)
        if hidden is None:
            return None
        samples = None
        sampled = [place for place, chunk in enumerate(chunks) if chunk.samples]
        if sampled:
            rows = [step.first_rows[place] + chunks[place].count - 1 for place in sampled]
            logits = self._model.logits(_take_rows(hidden, rows))
            samples = sample(logits, [chunks[place] for place in sampled], self._model.kernels)
        return ComputedStep(
            samples,
            {
                place: _prompt_logprobs(self._model, hidden[row : row + chunk.count], chunk)
                for place, (chunk, row) in enumerate(zip(chunks, step.first_rows, strict=True))
                if chunk.request.sampling.prompt_logprobs is not None
            },
        )

    def close(self) -> None:
        self._model = None


def _take_rows(hidden: Tensor, rows: Sequence[int]) -> Tensor:
    if list(rows) == list(range(hidden.shape[0])):
        return hidden
    return hidden.index_select(0, torch.tensor(rows).to(hidden.device, non_blocking=True))


def _prompt_logprobs(model: LlamaModel, hidden: Tensor, chunk: ScheduledChunk) -> tuple[TokenLogprob, ...] | None:
    """hidden: [count, hidden_size], the chunk's rows after the last layer."""
    top = chunk.request.sampling.prompt_logprobs or 0
    followers = prompt_followers(chunk)
    entries: list[TokenLogprob] = []
    for first in range(0, len(followers), PROMPT_LOGPROB_ROWS):
        targets = followers[first : first + PROMPT_LOGPROB_ROWS]
        logits = model.logits(hidden[first : first + len(targets)])
        if not bool(finite_rows(logits).all()):
            return None
        entries.extend(token_logprobs(logits, targets, [top] * len(targets)))
    return tuple(entries)
