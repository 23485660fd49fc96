"""States of all layers that keep one state per sequence, and their layout. The core decides which sequence owns which
slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from trioserve.model.model_config import ModelConfig

__all__ = ["StateStorage"]

Buffer = TypeVar("Buffer")


class StateStorage(Generic[Buffer]):
    """State buffers of all layers.

    Each layer has one float32 buffer [slots, state_size], or None if the layer keeps no state. A state begins with the
    last inputs of the layer's convolution, oldest first: [kernel_size - 1, channels]. State spaces and delta rules then
    have [heads, vector_size, head_dim].

    Buffers are torch tensors or numpy arrays. Memory is uninitialised: a sequence that starts in a slot does not read
    it.

    Args:
        config: model whose states are stored.
        slot_count: number of slots in each buffer.
        make: returns an uninitialised float32 buffer of a shape.
    """

    def __init__(self, config: ModelConfig, *, slot_count: int, make: Callable[[tuple[int, ...]], Buffer]) -> None:
        self.slot_count = slot_count
        self.buffers: tuple[Buffer | None, ...] = tuple(
            None if layer.recurrent is None else make((slot_count, layer.recurrent.state_size))
            for layer in config.layers
        )
