"""Small arrays on their way to the device: laid side by side in pinned memory, so that a step's are one copy, for which
the host does not wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Sending"]

PIECE_BYTES = 2**18  # a step of 4,096 prompt tokens and 64 decodes of 4,000 tokens; a larger one takes further copies
# Triton compiles a kernel anew for a pointer that is no multiple of this.
ALIGNMENT_BYTES = 16

_Array = npt.NDArray[np.generic]


class Sending:
    """add what the device is to have, then send, then compute with what add has given."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: list[_Piece] = []

    def add(self, values: _Array) -> Tensor:
        """A tensor on the device, of the array's shape and dtype, which has its values from `send` on."""
        assert values.nbytes, "nothing to be sent"
        if not self._pieces or not self._pieces[-1].has_room(values.nbytes):
            self._pieces.append(_Piece(max(PIECE_BYTES, values.nbytes), self._device))
        return self._pieces[-1].add(values)

    def send(self) -> None:
        """Copies, and does not wait. Nothing is to be added any more."""
        for piece in self._pieces:
            piece.send()
        self._pieces = []


class _Piece:
    """torch's allocators give both sides again once the device is done with them, however early they are let go."""

    def __init__(self, byte_count: int, device: torch.device) -> None:
        self._host = torch.empty(byte_count, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._there = torch.empty(byte_count, dtype=torch.uint8, device=device)
        self._end = 0

    def has_room(self, byte_count: int) -> bool:
        return self._end + byte_count <= self._host.shape[0]

    def add(self, values: _Array) -> Tensor:
        begin, end = self._end, self._end + values.nbytes
        self._end = end + -end % ALIGNMENT_BYTES
        host: npt.NDArray[Any] = self._host.numpy()
        host[begin:end].view(values.dtype)[:] = values.reshape(-1)
        return self._there[begin:end].view(_TORCH_TYPES[values.dtype.name]).view(values.shape)

    def send(self) -> None:
        self._there[: self._end].copy_(self._host[: self._end], non_blocking=True)


_TORCH_TYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64, "int32": torch.int32}
