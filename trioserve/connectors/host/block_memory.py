"""Host memory for blocks, allocated in large slabs.

With small allocations, the page faults would cost more time than the copies.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

__all__ = ["SLAB_BYTES", "BlockMemory", "Content"]

SLAB_BYTES = 64 * 2**20
"""Maximum size of a slab. numpy asks for huge pages from 4 MiB on. A slab is never freed before its owner."""

Content = npt.NDArray[np.uint8]
"""Content of one block, layer by layer."""


class BlockMemory:
    """Allocator of host memory for blocks. Any thread may use it.

    The memory of a block is free again once no reference to its array exists. Code that uses a part of the array must
    keep a reference to the whole array.

    Args:
        block_bytes: Size of a block.
        memory_bytes: Limit that the caller enforces. It only bounds the size of a slab.
    """

    def __init__(self, block_bytes: int, memory_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._slab_block_count = max(1, min(SLAB_BYTES, memory_bytes) // block_bytes)
        self._free: deque[Content] = deque()  # append and pop are atomic
        self.slab_count = 0

    def take(self) -> Content:
        """Return memory for one block. Its content is undefined.

        Raises:
            MemoryError: the system has no memory for another slab.
        """
        try:
            place = self._free.pop()
        except IndexError:
            place = self._first_of_slab()
        content = place.view()
        # The base of a view is the slab, not the place. So no other reference exists when this view is collected.
        weakref.finalize(content, self._free.append, place).atexit = False
        return content

    def _first_of_slab(self) -> Content:
        slab = np.empty((self._slab_block_count, self.block_bytes), np.uint8)
        self.slab_count += 1
        self._free.extend(slab[1:])
        place: Content = slab[0]
        return place
