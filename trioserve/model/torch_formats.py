"""Number formats, values, and places for tensors, as torch has them."""

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
    """On the CPU, in the values' own memory."""
    return torch.from_numpy(values).view(TORCH_DTYPES[dtype_of(values)])


class TensorSlot(NamedTuple):
    """A place for one tensor. fill copies it there; it is given a tensor of this shape and dtype, on any device.

    block_type: if the tensor is stored in blocks of this type, fill_blocks is given these instead; see Slot.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Callable[[Tensor], object]
    block_type: str | None = None
    fill_blocks: Callable[[Tensor], object] | None = None

    def for_values(self) -> Slot:
        """The same for what a checkpoint gives."""
        slot = Slot(self.name, self.shape, _NAMES[self.dtype], lambda values: self.fill(as_tensor(values)))
        fill_blocks = self.fill_blocks
        if fill_blocks is None:
            return slot
        return slot._replace(
            block_type=self.block_type, fill_blocks=lambda blocks: fill_blocks(torch.from_numpy(blocks))
        )
