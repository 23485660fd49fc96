"""What the runner asks of a model, whoever computes it: one step in, samples out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from trioserve.contracts.adapter import AdapterId
from trioserve.contracts.step import IsAbandoned, ScheduledChunk
from trioserve.contracts.token_masks import TokenMasks
from trioserve.model.adapter_weights import AdapterWeights
from trioserve.model.device import DeviceType
from trioserve.model.kv_memory import KVMemory
from trioserve.model.kv_storage import KVStorage
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import Dtype, Float32Array
from trioserve.model.samples import ComputedStep, ReadSamples
from trioserve.model.state_storage import StateStorage
from trioserve.model.weights import Slot

__all__ = ["StepModel"]


class StepModel(Protocol):
    """A model that computes whole steps, and its KV cache."""

    tapped_layers: tuple[int, ...]
    """What goes into these layers is given out with each step, for a head that drafts; the number of layers stands for
    what comes out of the last. Set before allocate_kv."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def dtype(self) -> Dtype: ...

    @property
    def device(self) -> DeviceType: ...

    @property
    def arithmetic(self) -> str:
        """What decides about the bits of a row besides its tokens and the weights, in a batch-invariant model: what
        computes, in which format. Equal texts are equal bits."""
        ...

    @property
    def is_batch_invariant(self) -> bool:
        """Whether the bits of a row depend on its own tokens and the weights alone, asked for or not."""
        ...

    @property
    def computed_by(self) -> str:
        """What computes, in a few words for people."""
        ...

    @property
    def step_weight_bytes(self) -> int:
        """What a decode step has to read of the weights, however few tokens it has."""
        ...

    @property
    def loading_threads(self) -> int:
        """How many tensors may be read, and their slots filled, at the same time; 1: in the compute thread alone."""
        ...

    def slots(self) -> Iterator[Slot]:
        """A place for every tensor of the checkpoint."""
        ...

    @property
    def storage(self) -> KVStorage[Any] | None:
        """The KV cache; None before allocate_kv."""
        ...

    @property
    def states(self) -> StateStorage[Any] | None:
        """What layers keep of sequences; None before allocate_kv, and of a model without such layers."""
        ...

    def allocate_kv(self, block_count: int, state_slot_count: int = 0, memory: KVMemory | None = None) -> None:
        """Make the KV cache, and the slots of layers that keep a state; what earlier ones held is gone. memory: where
        the KV cache is to lie, on a CPU; None: in some of its own."""
        ...

    def release_kv(self) -> None:
        """Let go of what allocate_kv made, which comes again before the next step."""
        ...

    def claim_memory(self) -> bool:
        """Have the system give a small piece of the KV cache's memory ahead of its use, which takes at most some
        milliseconds. False: nothing is left to be claimed."""
        ...

    def warm_up(self) -> None:
        """Prepare ahead what the first steps would have to wait for. No block is written."""
        ...

    @property
    def warms_by_shape(self) -> bool:
        """Whether kernels are chosen, or compiled, at the first step of a shape."""
        ...

    def compute(
        self,
        chunks: Sequence[ScheduledChunk],
        is_abandoned: IsAbandoned,
        masks: TokenMasks | None = None,
        begun: Float32Array | None = None,
    ) -> ComputedStep | None:
        """Write the KV of every chunk's tokens, attend, and sample where a chunk samples; None if it was abandoned.
        masks: of the chunks that have a mask_row. What is computed before a token is chosen does not wait for them.
        begun: [T, hidden_size], of a stage without the embedding: the step's rows as the stage before gave them."""
        ...

    def add_adapter(self, id: AdapterId, weights: AdapterWeights) -> None:
        """From here on chunks may have it. Raises MemoryError, and has kept nothing."""
        ...

    def remove_adapter(self, id: AdapterId) -> None:
        """Let it go; nothing to do if it is not there."""
        ...

    def has_adapter(self, id: AdapterId) -> bool: ...

    @property
    def launches(self) -> bool:
        """Whether there are steps that `launch` takes."""
        ...

    def launch(
        self, chunks: Sequence[ScheduledChunk], awaited: Mapping[int, int], masks: TokenMasks | None = None
    ) -> ReadSamples | None:
        """Begin what compute does and come back before it is done; what comes back waits for it. awaited: of chunks
        that await their token, by their place, the row which that token had in the step before; that one was launched,
        too, and need not have been read, but the one before it has. Waits for masks, if there are some. None: this is a
        step that has to be computed."""
        ...

    def close(self) -> None:
        """Let weights, KV cache and threads go."""
        ...
