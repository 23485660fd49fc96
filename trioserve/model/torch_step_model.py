"""Steps in plain torch, operator by operator, or with the Triton kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.step import IsAbandoned, ScheduledChunk
from trioserve.model.device import DeviceType, step_weight_bytes
from trioserve.model.families import MODEL_TYPES
from trioserve.model.families.llama import LlamaModel
from trioserve.model.kv_storage import KVStorage
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import VALUE_BYTES, Dtype
from trioserve.model.sampler import finite_rows, sample, token_logprobs
from trioserve.model.samples import PROMPT_LOGPROB_ROWS, ComputedStep, prompt_followers, sampled_rows
from trioserve.model.step_tensors import HeadShape, StepShape, build_step_tensors
from trioserve.model.torch_formats import TORCH_DTYPES
from trioserve.model.weights import Slot
from trioserve_kernels import pick_kernels

__all__ = ["TorchStepModel"]


class TorchStepModel:
    """A LlamaModel with its KV cache. thread_count: None takes torch's default, which holds for the whole process."""

    computed_by = "plain torch"
    loading_threads = 1  # a second thread in which torch computes would have a team of its own

    def __init__(
        self, config: ModelConfig, *, dtype: Dtype, device: DeviceType, block_size: int, thread_count: int | None
    ) -> None:
        if thread_count is not None:
            torch.set_num_threads(thread_count)
        self.config = config
        self.dtype: Dtype = dtype
        self.device: DeviceType = device
        self.step_weight_bytes: int = step_weight_bytes(config, dtype)
        self._storage: KVStorage[Tensor] | None = None
        place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        kernels = pick_kernels(device)
        self._model: LlamaModel | None = MODEL_TYPES[config.architecture](
            config, kernels, dtype=TORCH_DTYPES[dtype], device=place
        )
        self._shape = StepShape(
            block_size=block_size,
            token_kv_bytes=2 * config.kv_head_count * config.head_dim * VALUE_BYTES[dtype],
            windows=tuple(dict.fromkeys(config.sliding_windows)),
            dtype=TORCH_DTYPES[dtype],
            device=place,
            walked_heads=HeadShape(config.head_count, config.kv_head_count, config.head_dim) if kernels.FUSED else None,
        )

    def slots(self) -> Iterator[Slot]:
        assert self._model is not None, "a model is filled before it is closed"
        return self._model.slots()

    @property
    def storage(self) -> KVStorage[Tensor] | None:
        return self._storage

    def allocate_kv(self, block_count: int) -> None:
        def make(shape: tuple[int, ...]) -> Tensor:
            return torch.empty(shape, dtype=self._shape.dtype, device=self._shape.device)

        self._storage = None  # before the new one is made: two might not fit
        self._storage = KVStorage(self.config, block_count=block_count, block_size=self._shape.block_size, make=make)

    @torch.inference_mode()
    def compute(self, chunks: Sequence[ScheduledChunk], is_abandoned: IsAbandoned) -> ComputedStep | None:
        model, storage = self._model, self._storage
        assert model is not None, "compute after close"
        assert storage is not None, "compute before allocate_kv"
        step = build_step_tensors(chunks, self._shape)
        hidden = model.forward(step, storage, is_abandoned)
        if hidden is None:
            return None
        samples = None
        sampled = [place for place, chunk in enumerate(chunks) if chunk.samples]
        if sampled:
            rows = [
                row
                for place in sampled
                for row in range(
                    step.first_rows[place] + chunks[place].count - 1, step.first_rows[place] + chunks[place].row_count
                )
            ]
            logits = model.logits(_take_rows(hidden, rows))
            samples = sample(logits, sampled_rows(chunks), model.kernels)
        return ComputedStep(
            samples,
            {
                place: _prompt_logprobs(model, hidden[row : row + chunk.count], chunk)
                for place, (chunk, row) in enumerate(zip(chunks, step.first_rows, strict=True))
                if chunk.request.sampling.prompt_logprobs is not None
            },
        )

    def close(self) -> None:
        self._model = self._storage = None
        if self.device == "cuda":
            torch.cuda.empty_cache()


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
