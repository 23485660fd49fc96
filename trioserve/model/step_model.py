"""Interface between the runner and a model implementation: one step in, samples out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from trioserve.contracts.adapter import AdapterId
from trioserve.contracts.guide import TokenMasks
from trioserve.contracts.step import IsAbandoned, ScheduledChunk
from trioserve.model.device import DeviceType
from trioserve.model.kv_storage import KVMemory, KVStorage, StateStorage
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import Dtype, Float32Array
from trioserve.model.samples import ComputedStep, ReadSamples
from trioserve.model.weights import AdapterWeights, Slot

__all__ = ["StepModel"]


class StepModel(Protocol):
    """A model that computes whole steps, and its KV cache."""

    tapped_layers: tuple[int, ...]
    """Indexes of layers whose inputs each step returns, for a drafting head. layer_count means the last layer's output.
    Set it before allocate_kv."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def dtype(self) -> Dtype: ...

    @property
    def device(self) -> DeviceType: ...

    @property
    def arithmetic(self) -> str:
        """Description of everything besides tokens and weights that decides the bits of a batch-invariant model's rows.

        It names kernels and number format. Equal texts mean equal bits.
        """
        ...

    @property
    def is_batch_invariant(self) -> bool:
        """True if the bits of a row depend only on its own tokens and the weights, even if the settings do not require
        it.
        """
        ...

    @property
    def computed_by(self) -> str:
        """Device and kernels that compute, in a few words for people."""
        ...

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads, however few tokens it has."""
        ...

    @property
    def loading_threads(self) -> int:
        """Number of threads that may read tensors and fill slots at the same time. 1: only the compute thread may."""
        ...

    def slots(self) -> Iterator[Slot]:
        """Yield a destination for every tensor of the checkpoint."""
        ...

    @property
    def storage(self) -> KVStorage[Any] | None:
        """The KV cache. None before allocate_kv."""
        ...

    @property
    def states(self) -> StateStorage[Any] | None:
        """States that layers keep of sequences. None before allocate_kv, and for a model without such layers."""
        ...

    def allocate_kv(self, block_count: int, state_slot_count: int = 0, memory: KVMemory | None = None) -> None:
        """Make the KV cache and the state slots. The content of earlier ones is lost.

        Args:
            block_count: number of KV blocks.
            state_slot_count: number of state slots, copies included.
            memory: buffers for the KV cache on a CPU. None allocates them.
        """
        ...

    def release_kv(self) -> None:
        """Free what allocate_kv made. Call allocate_kv again before the next step."""
        ...

    def claim_memory(self) -> bool:
        """Make the operating system provide a small part of the KV cache's memory before it is used.

        Cost:
            At most some milliseconds.

        Returns:
            False if all memory is already provided.
        """
        ...

    def warm_up(self) -> None:
        """Prepare in advance what the first steps would have to wait for. No block is written."""
        ...

    @property
    def warms_by_shape(self) -> bool:
        """True if kernels are chosen or compiled at the first step of a shape."""
        ...

    def compute(
        self,
        chunks: Sequence[ScheduledChunk],
        is_abandoned: IsAbandoned,
        masks: TokenMasks | None = None,
        begun: Float32Array | None = None,
    ) -> ComputedStep | None:
        """Compute a step: write the KV of each chunk's tokens, attend, and sample for each chunk that samples.

        Args:
            chunks: chunks of the step.
            is_abandoned: polled between layers. True abandons the step.
            masks: masks of chunks with a mask_row. Only the choice of tokens waits for them.
            begun: float32 [rows, hidden_size], for a stage without the embedding: the hidden states from the stage
                before it.

        Returns:
            Results, or None if the step was abandoned.
        """
        ...

    def add_adapter(self, id: AdapterId, weights: AdapterWeights) -> None:
        """Add an adapter that later chunks may use.

        Args:
            id: name of the adapter.
            weights: its matrices.

        Raises:
            MemoryError: there is not enough memory. Nothing was added.
        """
        ...

    def remove_adapter(self, id: AdapterId) -> None:
        """Free an adapter. Do nothing if it is not loaded.

        Args:
            id: name of the adapter.
        """
        ...

    def has_adapter(self, id: AdapterId) -> bool: ...

    @property
    def launches(self) -> bool:
        """True if `launch` can start some steps."""
        ...

    def launch(
        self, chunks: Sequence[ScheduledChunk], awaited: Mapping[int, int], masks: TokenMasks | None = None
    ) -> ReadSamples | None:
        """Start a step and return before it has ended. Wait for masks, if there are any.

        Args:
            chunks: chunks of the step.
            awaited: for each chunk that awaits its token, by its index, the row that sampled this token in the previous
                step. The previous step must have been launched, too. Its samples need not have been read, but those of
                the step before it must have been read.
            masks: masks of chunks with a mask_row.

        Returns:
            A function that waits for the samples. None if this step cannot be launched and must be computed.
        """
        ...

    def close(self) -> None:
        """Free weights, KV cache and threads."""
        ...
