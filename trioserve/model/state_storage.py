"""The states of all layers that keep one for a whole sequence, and their layout. Who may use which slot is settled in
the core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from trioserve.model.model_config import ModelConfig

__all__ = ["StateStorage"]

Buffer = TypeVar("Buffer")


class StateStorage(Generic[Buffer]):
    """One buffer a layer, float32 [slots, numbers of its state]; None for layers that keep none. A state has the last
    inputs of the layer's convolution first, oldest first: [kernel_size - 1, channels]; and then, of a state space,
    [heads, vector_size, head_dim].

    Buffers are torch's tensors or numpy's arrays. The memory comes uninitialised: who begins with a slot is told that
    nothing came before, and does not read it.
    """

    def __init__(self, config: ModelConfig, *, slot_count: int, make: Callable[[tuple[int, ...]], Buffer]) -> None:
        """make: gives a float32 buffer of this shape, not yet written."""
        self.slot_count = slot_count
        self.buffers: tuple[Buffer | None, ...] = tuple(
            None if layer.recurrent is None else make((slot_count, layer.recurrent.state_size))
            for layer in config.layers
        )
