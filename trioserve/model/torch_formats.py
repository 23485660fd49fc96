"""Number formats, values and weight slots of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trioserve.model.number_formats import Dtype, Values, dtype_of
from trioserve.model.weights import Slot

__all__ = ["TORCH_DTYPES", "TensorSlot", "as_tensor"]

TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def as_tensor(values: Values) -> Tensor:
    """Return the values as a CPU tensor that shares their memory.

    Args:
        values: array in one of the number formats.
    """
    return torch.from_numpy(values).view(TORCH_DTYPES[dtype_of(values)])


class TensorSlot(NamedTuple):
    """Destination of one weight as a torch tensor.

    Attributes:
        name: name of the weight.
        fill: copies the weight to its destination. Its argument is a tensor of this shape and dtype, on any device.
        block_type: type of quantized blocks that fill_blocks accepts, see Slot.
        fill_blocks: copies the weight as uint8 blocks, if the checkpoint stores it in blocks of block_type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Callable[[Tensor], object]
    block_type: str | None = None
    fill_blocks: Callable[[Tensor], object] | None = None

    def for_values(self) -> Slot:
        """Return a Slot that accepts numpy values from a checkpoint."""
        slot = Slot(self.name, self.shape, _NAMES[self.dtype], lambda values: self.fill(as_tensor(values)))
        fill_blocks = self.fill_blocks
        if fill_blocks is None:
            return slot
        return slot._replace(
            block_type=self.block_type, fill_blocks=lambda blocks: fill_blocks(torch.from_numpy(blocks))
        )
