"""Memory for a KV cache that another process also reads and writes: consecutive buffers in one file."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

__all__ = ["KVMemory"]


class KVMemory:
    """Buffers in a file that two processes share.

    Both processes must take the same buffers in the same order. Memory of a memfd_create file exists until the last
    process closes it.

    Args:
        descriptor: file descriptor. The caller closes it after the last take.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._taken = 0

    def take(self, byte_count: int) -> npt.NDArray[np.uint8]:
        """Map the next buffer.

        Args:
            byte_count: size of the buffer.

        Returns:
            uint8 [byte_count]: zeros, or the bytes that the other process wrote.

        Raises:
            OSError: there is not enough memory.
        """
        first = self._taken
        self._taken += -(-byte_count // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        if os.fstat(self._descriptor).st_size < self._taken:
            os.ftruncate(self._descriptor, self._taken)
        memory = mmap.mmap(self._descriptor, byte_count, offset=first)
        return np.frombuffer(memory, dtype=np.uint8)
