"""Memory for a KV cache that another process reads and writes, too: buffers one behind the other in one file."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

__all__ = ["KVMemory"]


class KVMemory:
    """Both processes take the same buffers in the same order. The memory of a file of memfd_create is there until
    nobody has it any more."""

    def __init__(self, descriptor: int) -> None:
        """descriptor: the caller's to close, when all has been taken."""
        self._descriptor = descriptor
        self._taken = 0

    def take(self, byte_count: int) -> npt.NDArray[np.uint8]:
        """The next buffer: zeros, or what the other process has written. Raises OSError if there is no memory."""
        first = self._taken
        self._taken += -(-byte_count // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        if os.fstat(self._descriptor).st_size < self._taken:
            os.ftruncate(self._descriptor, self._taken)
        memory = mmap.mmap(self._descriptor, byte_count, offset=first)
        return np.frombuffer(memory, dtype=np.uint8)
