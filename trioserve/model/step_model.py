"""What the runner asks of a model, whoever computes it: one step in, samples out. And the step in plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trioserve.contracts.step import IsAbandoned, ScheduledChunk
from trioserve.model.families.llama import LlamaModel
from trioserve.model.kv_storage import KVStorage
from trioserve.model.model_config import ModelConfig
from trioserve.model.sampler import Samples, sample
from trioserve.model.step_tensors import HeadShape, StepShape, build_step_tensors
from trioserve.model.weights import Slot

__all__ = ["ComputedStep", "StepModel", "TorchStepModel"]


@dataclass(slots=True)
class ComputedStep:
    """hidden: [T, hidden_size] after the last layer, for StepModel.logits; it may be None if no chunk asks for
    prompt_logprobs. first_rows: each chunk's first row. samples: a row for each chunk that samples, in their order;
    None without any."""

    hidden: Tensor | None
    first_rows: Sequence[int]
    samples: Samples | None


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

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocab_size] of rows of ComputedStep.hidden."""
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
            logits = self.logits(_take_rows(hidden, rows))
            samples = sample(logits, [chunks[place] for place in sampled], self._model.kernels)
        return ComputedStep(hidden, step.first_rows, samples)

    def logits(self, hidden: Tensor) -> Tensor:
        assert self._model is not None, "compute after close"
        return self._model.logits(hidden)

    def close(self) -> None:
        self._model = None


def _take_rows(hidden: Tensor, rows: Sequence[int]) -> Tensor:
    if list(rows) == list(range(hidden.shape[0])):
        return hidden
    return hidden.index_select(0, torch.tensor(rows).to(hidden.device, non_blocking=True))
