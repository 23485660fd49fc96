"""Buffers of the KV cache and of the states of all layers: their layout, shared memory, and access to their bytes.

The core decides which request owns which block, and which sequence owns which slot.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.kv_transfer import KVLayout
from trioserve.model.device import DeviceType, torch_now
from trioserve.model.layer_config import KVEntry
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import KvFormat, head_width

__all__ = [
    "KVStorage",
    "StateStorage",
    "KVMemory",
    "make_kv_pages",
]

Buffer = TypeVar("Buffer")


class KVStorage(Generic[Buffer]):
    """KV buffers of all layers.

    Each layer has one buffer [blocks, block_size, 2, kv_heads, head_dim], with keys at index 0 and values at index 1.
    The buffer of a layer with latents is [blocks, block_size, 1, 1, entry_dim], see KVEntry. The buffer of a layer
    without KV entries is empty. In 8-bit formats, the last dimension counts bytes and includes the scale after each
    head, see KvFormat.

    Each layer has a separate buffer, because a compiler that indexes into a common buffer would copy the whole buffer.
    Keys and values of a token are adjacent: a token is written as one row, and a block is read as one contiguous range.
    Buffers are torch tensors, or numpy arrays for the native CPU kernels. Both have the same layout, so the same code
    copies blocks to and from both.

    Memory is uninitialised. A kernel that reads beyond the last token of a block must clear the block before it writes
    the block's first token.

    Args:
        config: model whose KV is stored.
        make: returns an uninitialised buffer of a shape.
        has_spare: add one block, at index block_count, that no request owns. Padding rows write to this block, and it
            is never read.
        kv_format: number format of the buffers.

    Attributes:
        pages: buffers of all layers.
        kept: buffers that are not empty.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        block_count: int,
        block_size: int,
        make: Callable[[tuple[int, ...]], Buffer],
        has_spare: bool = False,
        kv_format: KvFormat = "plain",
    ) -> None:
        self.block_count = block_count
        self.block_size = block_size
        self.has_spare = has_spare

        def shape(entry: KVEntry | None) -> tuple[int, ...]:
            if entry is None:
                return (0, block_size, 1, 1, 1)
            width = head_width(entry.head_dim, kv_format)
            return (block_count + has_spare, block_size, entry.part_count, entry.head_count, width)

        entries = config.kv_entries
        self.pages: tuple[Buffer, ...] = tuple(make(shape(entry)) for entry in entries)
        self.kept: tuple[Buffer, ...] = tuple(
            pages for pages, entry in zip(self.pages, entries, strict=True) if entry is not None
        )


class StateStorage(Generic[Buffer]):
    """State buffers of all layers.

    Each layer has one float32 buffer [slots, state_size], or None if the layer has no state. A state begins with the
    last inputs of the layer's convolution, oldest first: [kernel_size - 1, channels]. In state spaces and delta rules,
    [heads, vector_size, head_dim] numbers follow.

    Buffers are torch tensors or numpy arrays. Memory is uninitialised, because a sequence does not read its slot before
    it has written the slot.

    Args:
        config: model whose states are stored.
        slot_count: number of slots in each buffer.
        make: returns an uninitialised float32 buffer of a shape.
    """

    def __init__(self, config: ModelConfig, *, slot_count: int, make: Callable[[tuple[int, ...]], Buffer]) -> None:
        self.slot_count = slot_count
        self.buffers: tuple[Buffer | None, ...] = tuple(
            None if layer.recurrent is None else make((slot_count, layer.recurrent.state_size))
            for layer in config.layers
        )


class KVMemory:
    """Buffers in a file that two processes share.

    Both processes must map buffers of the same sizes in the same order. The memory of a memfd_create file exists until
    the last process closes the file.

    Args:
        descriptor: file descriptor. The caller closes it after the last call of `take`.
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


class HostPages:
    """Pages in host memory: numpy arrays, or torch tensors on a CPU. Blocks are read and written in place."""

    def __init__(self, layout: KVLayout, storage: KVStorage[Any]) -> None:
        self.layout = layout
        self.block_count = storage.block_count
        self._block_bytes = layout.block_size * layout.token_bytes
        self._layers = [memoryview(_flat_bytes(pages)) for pages in storage.kept]

    def view(self, layer: int, block: BlockIndex) -> memoryview:
        return self._layers[layer][block * self._block_bytes : (block + 1) * self._block_bytes]

    def read(self, layer: int, block: BlockIndex) -> memoryview:
        return self.view(layer, block).toreadonly()

    def write(self, layer: int, block: BlockIndex, start: int, content: memoryview) -> None:
        self.view(layer, block)[start : start + len(content)] = content


class CudaPages:
    """Pages on a GPU. Each call copies data and waits for the device.

    A copy runs after all earlier work of the device and before all later work. Therefore, a read returns the results of
    earlier work, and later work uses the written data.
    """

    def __init__(self, layout: KVLayout, storage: KVStorage[Any]) -> None:
        self.layout = layout
        self.block_count = storage.block_count
        torch = torch_now()
        self._layers = [pages.view(torch.uint8).view(pages.shape[0], -1) for pages in storage.kept]

    def region(self, layer: int) -> tuple[int, int, int]:
        """Return the memory range of a layer's blocks.

        Args:
            layer: index among the layers that keep KV entries.

        Returns:
            Address on the device, number of bytes, and index of the device.
        """
        pages = self._layers[layer][: self.block_count]
        return pages.data_ptr(), pages.numel(), pages.get_device()

    def view(self, layer: int, block: BlockIndex) -> None:
        return None

    def read(self, layer: int, block: BlockIndex) -> memoryview:
        return memoryview(self._layers[layer][block].cpu().numpy()).toreadonly()

    def write(self, layer: int, block: BlockIndex, start: int, content: memoryview) -> None:
        torch = torch_now()
        there = self._layers[layer][block, start : start + len(content)]
        there.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def make_kv_pages(layout: KVLayout, storage: KVStorage[Any], device: DeviceType) -> HostPages | CudaPages:
    return CudaPages(layout, storage) if device == "cuda" else HostPages(layout, storage)


def _flat_bytes(pages: Any) -> Any:
    """Return a one-dimensional uint8 array that shares the memory."""
    if not hasattr(pages, "numpy"):
        return pages.reshape(-1).view("uint8")
    return pages.view(-1).view(torch_now().uint8).numpy()
