"""Number formats, values and loading slots for torch, and the transfer of small arrays to the device.

The arrays of a step are adjacent in pinned memory. One copy transfers all arrays, and the host does not wait for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trioserve.model.device import new_event
from trioserve.model.loading.stored_tensor import Bytes
from trioserve.model.number_formats import Dtype, Values, dtype_of
from trioserve.model.weights import BUFFER_BYTES, BUFFER_COUNT, Slot, StagedSlot, Staging

__all__ = ["TORCH_DTYPES", "PinnedStaging", "TensorSlot", "as_tensor", "Sending"]

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
        fill: function that copies the weight to its destination. The argument is a tensor with the slot's shape and
            dtype, on any device.
        block_type: type of quantized blocks that fill_blocks accepts, see Slot.
        fill_blocks: function that copies uint8 blocks, if the checkpoint stores the weight in blocks of block_type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Callable[[Tensor], object]
    block_type: str | None = None
    fill_blocks: Callable[[Tensor], object] | None = None

    def for_values(self, staging: Staging | None = None) -> Slot:
        """Return a Slot that accepts numpy values from a checkpoint.

        Args:
            staging: host buffers through which the slot is filled. None: it is filled directly.
        """
        slot = Slot(self.name, self.shape, _NAMES[self.dtype], lambda values: self.fill(as_tensor(values)))
        fill_blocks = self.fill_blocks
        if fill_blocks is not None:
            slot = slot._replace(
                block_type=self.block_type, fill_blocks=lambda blocks: fill_blocks(torch.from_numpy(blocks))
            )
        if staging is None:
            return slot
        staged = StagedSlot(staging, self._fill_from, None if fill_blocks is None else self._fill_blocks_from)
        return slot._replace(staged=staged)

    def _fill_from(self, memory: Tensor) -> None:
        self.fill(memory.view(self.dtype).view(self.shape))

    def _fill_blocks_from(self, memory: Tensor) -> None:
        assert self.fill_blocks is not None, "a slot without a block type"
        self.fill_blocks(memory.view(self.shape[0], -1))


class PinnedStaging:
    """Staging in pinned memory. The device executes the copies in the order of the calls.

    Args:
        device: destination.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @functools.cached_property
    def _host(self) -> list[Tensor]:
        is_pinned = self._device.type == "cuda"
        return [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(BUFFER_COUNT)]

    @functools.cached_property
    def buffers(self) -> Sequence[Bytes]:
        return [buffer.numpy() for buffer in self._host]

    def reserve(self, byte_count: int) -> Tensor:
        return torch.empty(byte_count, dtype=torch.uint8, device=self._device)

    def send(self, buffer: int, byte_count: int, to: Tensor, offset: int) -> Callable[[], object]:
        to[offset : offset + byte_count].copy_(self._host[buffer][:byte_count], non_blocking=True)
        if self._device.type != "cuda":
            return lambda: None
        event = new_event()
        event.record()
        return event.synchronize


# Enough for 4,096 prompt tokens and 64 decodes of 4,000 tokens. A larger step needs several copies.
PIECE_BYTES = 2**18
# If a pointer is not a multiple of this number, Triton compiles a different kernel.
ALIGNMENT_BYTES = 16

_Array = npt.NDArray[np.generic]


class Sending:
    """Transfers the arrays of one step. Call `add` for each array, then `send`, then use the tensors from `add`.

    Args:
        device: destination.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: list[_Piece] = []

    def add(self, values: _Array) -> Tensor:
        """Reserve a tensor for an array.

        Args:
            values: array with at least one element.

        Returns:
            Tensor on the device with the array's shape and dtype. Its values are defined after `send`.
        """
        assert values.nbytes, "an empty array cannot be sent"
        if not self._pieces or not self._pieces[-1].fits(values.nbytes):
            self._pieces.append(_Piece(max(PIECE_BYTES, values.nbytes), self._device))
        return self._pieces[-1].add(values)

    def send(self) -> None:
        """Start the copies without waiting for their end. `add` cannot be called afterwards."""
        for piece in self._pieces:
            piece.send()
        self._pieces = []


class _Piece:
    """One pinned buffer and its copy on the device.

    Both may be freed while the device still uses them, because torch's allocators wait before they reuse the memory.
    """

    def __init__(self, byte_count: int, device: torch.device) -> None:
        self._host = torch.empty(byte_count, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._on_device = torch.empty(byte_count, dtype=torch.uint8, device=device)
        self._end = 0

    def fits(self, byte_count: int) -> bool:
        return self._end + byte_count <= self._host.shape[0]

    def add(self, values: _Array) -> Tensor:
        begin, end = self._end, self._end + values.nbytes
        self._end = end + -end % ALIGNMENT_BYTES
        host: npt.NDArray[Any] = self._host.numpy()
        host[begin:end].view(values.dtype)[:] = values.reshape(-1)
        return self._on_device[begin:end].view(_TORCH_TYPES[values.dtype.name]).view(values.shape)

    def send(self) -> None:
        self._on_device[: self._end].copy_(self._host[: self._end], non_blocking=True)


_TORCH_TYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64, "int32": torch.int32}
