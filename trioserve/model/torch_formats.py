"""Number formats and values, as torch has them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trioserve.model.number_formats import Dtype, Values, dtype_of
from trioserve.model.weights import Slot

__all__ = ["TORCH_DTYPES", "as_tensor", "torch_slot"]

TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def as_tensor(values: Values) -> Tensor:
    """On the CPU, in the values' own memory."""
    return torch.from_numpy(values).view(TORCH_DTYPES[dtype_of(values)])


def torch_slot(name: str, shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[Tensor], object]) -> Slot:
    """A slot whose fill takes a tensor on the CPU."""
    return Slot(name, shape, _NAMES[dtype], lambda values: fill(as_tensor(values)))
