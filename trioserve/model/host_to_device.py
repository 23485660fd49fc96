"""Transfer of small arrays to the device. A step's arrays lie side by side in pinned memory, so they need one copy, for
which the host does not wait.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Sending"]

PIECE_BYTES = 2**18  # enough for 4,096 prompt tokens and 64 decodes of 4,000 tokens; a larger step needs further copies
# Triton compiles another kernel for a pointer that is not a multiple of this.
ALIGNMENT_BYTES = 16

_Array = npt.NDArray[np.generic]


class Sending:
    """Transfer of the arrays of one step. Add all arrays, then send, then compute with the tensors that add returned.

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
        """Start the copies, without waiting for them. Nothing can be added afterwards."""
        for piece in self._pieces:
            piece.send()
        self._pieces = []


class _Piece:
    """One pinned buffer and its copy on the device.

    torch's allocators reuse both only after the device has finished with them, so they may be freed early.
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
