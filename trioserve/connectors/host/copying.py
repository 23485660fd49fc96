"""Copies blocks between an engine's KV cache and host memory, in a worker thread.

numpy releases the GIL during a copy. An assignment to a memoryview keeps it: the event loop would wait for a switch
interval each time it wakes up. So numpy copies the blocks if the CPU can address them.

Memory for blocks is allocated in large slabs. With small allocations, the page faults would cost more time than the
copies.

A thread copies blocks in pieces of at most PIECE_BYTES, and enters a gate for each piece. The engine can close the gate
at any time. Closing waits until the current piece is copied, which takes about 30 us. Afterwards, the thread cannot
access the blocks. `hold_expired` must give this guarantee when it returns, and a plain flag would not be enough. The
engine can end without waiting for its threads, even if a broken disk blocks a thread forever.

A device copies many of its blocks in one operation (DeviceBlocks). Closing the gate does not wait for it: the device
executes copies and steps in order, and the job drops what was fetched before its gate was closed.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType

import numpy as np
import numpy.typing as npt
import trio

from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.kv_transfer import BlockCopies, KVLayout, KVPages

__all__ = [
    "PIECE_BYTES",
    "SLAB_BYTES",
    "BlockMemory",
    "Content",
    "DeviceBlocks",
    "Gate",
    "block_bytes",
    "copy_in",
    "copy_out",
]


class Gate:
    """Lock around each access to an engine's blocks, which can be closed permanently.

    Use: `with gate as is_open: if is_open: ...copy at most PIECE_BYTES...`. At most one thread holds the lock.

    Args:
        lock: Lock that the gate uses. None creates a new lock.

    Attributes:
        is_wanted: Any thread may set it to False to stop the work soon. This does not wait, and guarantees nothing.
    """

    def __init__(self, lock: AbstractContextManager[object] | None = None) -> None:
        self._lock = threading.Lock() if lock is None else lock
        self._is_open = True
        self.is_wanted = True

    @property
    def is_open(self) -> bool:
        return self._is_open

    def __enter__(self) -> bool:
        self._lock.__enter__()
        return self._is_open and self.is_wanted

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.__exit__(kind, error, traceback)

    def close(self) -> None:
        """Wait for the current piece, then close the gate. After the return, no thread uses the blocks."""
        self.is_wanted = False  # The thread starts no other piece while this call waits for the current piece.
        with self._lock:
            self._is_open = False


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
        self._free: deque[Content] = deque()  # Threads may share a deque, because its append and pop are atomic.
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
        # The numpy base of `content` is the slab, and not `place`. So only the finalizer has a reference to `place`.
        weakref.finalize(content, self._free.append, place).atexit = False
        return content

    def _first_of_slab(self) -> Content:
        slab = np.empty((self._slab_block_count, self.block_bytes), np.uint8)
        self.slab_count += 1
        self._free.extend(slab[1:])
        place: Content = slab[0]
        return place


PIECE_BYTES = 256 * 1024
"""Bytes per piece. A copy takes about 30 us at 10 GB/s. Closing a gate waits at most this long."""


def block_bytes(layout: KVLayout) -> int:
    """Return the size of one block in all layers, in bytes.

    Args:
        layout: KV layout of the engine.
    """
    return layout.layer_count * layout.block_size * layout.token_bytes


class DeviceBlocks:
    """Copies whole blocks of an engine whose blocks are on a device. Call it in a worker thread that Trio started.

    The device executes copies and steps in order, so no gate is held while a copy runs.

    Args:
        layout: KV layout of the engine.
        copies: Copies of the engine.
    """

    def __init__(self, layout: KVLayout, copies: BlockCopies) -> None:
        self._layout = layout
        self._copies = copies
        self._layers = range(layout.layer_count)

    def copy_out(self, blocks: Sequence[BlockIndex], contents: Sequence[Content]) -> None:
        """Copy blocks to host memory. The contents are valid if the blocks are still held afterwards.

        Args:
            blocks: Blocks to copy.
            contents: Host memory for each block.
        """
        found = trio.from_thread.run(self._copies.fetch, self._layers, blocks)
        staged = np.frombuffer(found, np.uint8).reshape(len(self._layers), len(blocks), -1)
        for place, content in enumerate(contents):
            np.copyto(content.reshape(len(self._layers), -1), staged[:, place])

    def copy_in(
        self, blocks: Sequence[BlockIndex], contents: Sequence[Content], last_token_count: int, gate: Gate
    ) -> bool:
        """Copy blocks from host memory to the engine.

        Args:
            blocks: Blocks to fill.
            contents: Host memory with each block.
            last_token_count: Number of tokens to copy into the last block.
            gate: Must be open when the device gets the copy.

        Returns:
            False if the gate was closed before. Nothing is written then.
        """
        staged = np.empty((len(self._layers), len(blocks), contents[0].size // len(self._layers)), np.uint8)
        for place, content in enumerate(contents):
            np.copyto(staged[:, place], content.reshape(len(self._layers), -1))
        wanted: bool = trio.from_thread.run(
            self._copies.store,
            self._layers,
            blocks,
            staged.reshape(-1).data,
            last_token_count,
            lambda: gate.is_open and gate.is_wanted,
        )
        return wanted


def copy_out(pages: KVPages, block: BlockIndex, content: Content, gate: Gate) -> bool:
    """Copy a block from the engine to host memory.

    Args:
        pages: KV cache of the engine.
        block: Block to copy.
        content: Host memory for the block.
        gate: Gate to enter for each piece of at most PIECE_BYTES.

    Returns:
        False if the gate was closed before the end. The content is not valid then.
    """
    layout = pages.layout
    size = layout.block_size * layout.token_bytes
    for layer in range(layout.layer_count):
        there = content[layer * size : (layer + 1) * size]
        here: Content | None = None
        for start in range(0, size, PIECE_BYTES):
            end = min(start + PIECE_BYTES, size)
            with gate as is_open:
                if not is_open:
                    return False
                if here is None:  # `pages.read` copies the block from the device to host memory.
                    here = np.frombuffer(pages.read(layer, block), np.uint8)
                np.copyto(there[start:end], here[start:end])
    return True


def copy_in(pages: KVPages, block: BlockIndex, content: Content, token_count: int, gate: Gate) -> bool:
    """Copy the first tokens of a block from host memory to the engine.

    Args:
        pages: KV cache of the engine.
        block: Block to fill.
        content: Host memory with the block.
        token_count: Number of tokens to copy.
        gate: Gate to enter for each piece of at most PIECE_BYTES.

    Returns:
        False if the gate was closed before the end. The block is not complete then.
    """
    layout = pages.layout
    size = layout.block_size * layout.token_bytes
    wanted = token_count * layout.token_bytes
    for layer in range(layout.layer_count):
        here = content[layer * size : layer * size + wanted]
        for start in range(0, wanted, PIECE_BYTES):
            end = min(start + PIECE_BYTES, wanted)
            with gate as is_open:
                if not is_open:
                    return False
                view = pages.view(layer, block)
                if view is None:
                    pages.write(layer, block, start, here[start:end].data)
                else:
                    np.copyto(np.frombuffer(view, np.uint8)[start:end], here[start:end])
    return True
