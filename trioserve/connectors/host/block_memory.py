"""Where blocks lie in host memory: in slabs, since memory that the system has to find page by page costs more than the
copy into it does."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

__all__ = ["SLAB_BYTES", "BlockMemory", "Content"]

SLAB_BYTES = 64 * 2**20
"""numpy asks for huge pages from 4 MiB on. A slab is filled before there is another, and kept until the end."""

Content = npt.NDArray[np.uint8]
"""One block: its layers, one behind the other."""


class BlockMemory:
    """Hands out memory for blocks, from any thread. It comes back by itself when nobody has a reference to it any more:
    to the array that was handed out, which whoever reads or writes a part of it has to keep."""

    def __init__(self, block_bytes: int, memory_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._slab_block_count = max(1, min(SLAB_BYTES, memory_bytes) // block_bytes)
        self._free: deque[Content] = deque()  # its own calls are atomic
        self.slab_count = 0

    def take(self) -> Content:
        """What stands in it means nothing. Raises MemoryError."""
        try:
            place = self._free.pop()
        except IndexError:
            place = self._first_of_slab()
        content = place.view()
        # A view's base is the slab, and not the place, so the place is free when this view is gone.
        weakref.finalize(content, self._free.append, place).atexit = False
        return content

    def _first_of_slab(self) -> Content:
        slab = np.empty((self._slab_block_count, self.block_bytes), np.uint8)
        self.slab_count += 1
        self._free.extend(slab[1:])
        place: Content = slab[0]
        return place
