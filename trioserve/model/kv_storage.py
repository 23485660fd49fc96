"""Buffers of the KV cache and of the states of all layers: their layout, shared memory, and access to their bytes.

The core decides which request owns which block, and which sequence owns which slot.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.kv_transfer import KVLayout
from trioserve.model.device import DeviceType, new_event, torch_now
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
        is_joined: allocate the buffers as parts of one buffer if their shapes are equal, so that one operation can copy
            blocks of all layers.

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
        is_joined: bool = False,
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
        kept_shapes = [shape(entry) for entry in entries if entry is not None]
        if is_joined and len(set(kept_shapes)) == 1:
            joined: Any = make((len(kept_shapes), *kept_shapes[0]))
            parts = iter(joined)
            self.pages: tuple[Buffer, ...] = tuple(
                make(shape(entry)) if entry is None else next(parts) for entry in entries
            )
        else:
            self.pages = tuple(make(shape(entry)) for entry in entries)
        self.kept: tuple[Buffer, ...] = tuple(
            pages for pages, entry in zip(self.pages, entries, strict=True) if entry is not None
        )

    def release_memory(self, first_block: int) -> None:
        """Return the memory of blocks to the operating system, as whole pages. Their content is lost.

        The system provides memory again when a block is written. The buffers must be in host memory of this process
        alone.

        Args:
            first_block: index of the first of these blocks. All later ones except the spare block belong to them.
        """
        madvise, page = ctypes.CDLL(None).madvise, mmap.PAGESIZE
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for pages in self.kept:
            content = _flat_bytes(pages)
            block_bytes = content.nbytes // (self.block_count + self.has_spare)
            start = content.ctypes.data + first_block * block_bytes
            end = content.ctypes.data + self.block_count * block_bytes
            first, last = -(-start // page) * page, end // page * page
            if first < last:
                madvise(first, last - first, mmap.MADV_DONTNEED)


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
    earlier work, and later work uses the written data. `begin_fetch` and `begin_store` copy many blocks and do not
    wait. Call these two in the thread that computes.
    """

    def __init__(self, layout: KVLayout, storage: KVStorage[Any]) -> None:
        self.layout = layout
        self.block_count = storage.block_count
        torch = torch_now()
        self._layers = [pages.view(torch.uint8).view(pages.shape[0], -1) for pages in storage.kept]
        self._token_bytes = layout.token_bytes
        self._is_cuda = self._layers[0].is_cuda
        # Copies run beside the steps, in a stream of their own. They are ordered with each other.
        self._stream = torch.cuda.Stream() if self._is_cuda else None
        first, size = self._layers[0], self._layers[0].numel()
        is_joined = all(
            layer.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and layer.storage_offset() == first.storage_offset() + index * size
            for index, layer in enumerate(self._layers)
        )
        self._joined = (
            first.as_strided((len(self._layers), *first.shape), (size, *first.stride())) if is_joined else None
        )

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

    def pinned(self, byte_count: int, content: memoryview | None = None) -> Any:
        """Return host memory that the device can copy from and to. Any thread may call this method.

        The first call for a size takes milliseconds. torch keeps the memory for later calls.

        Args:
            byte_count: size of the memory.
            content: bytes to copy into the memory. None leaves it undefined.
        """
        host = torch_now().empty(byte_count, dtype=torch_now().uint8, pin_memory=self._is_cuda)
        if content is not None:  # numpy copies without torch's team of threads, which belongs to the compute thread.
            np.copyto(host.numpy(), np.frombuffer(content, np.uint8))
        return host

    def begin_fetch(self, layers: range, blocks: Sequence[int], host: Any) -> PageCopy:
        """Start to copy blocks into host memory, see BlockCopies.fetch.

        Args:
            layers: indexes of consecutive layers.
            blocks: indexes of the blocks.
            host: result of `pinned`, which receives the bytes.
        """
        with self._beside_steps():
            index = self._index(blocks)
            if self._joined is None:
                found = torch_now().stack([self._layers[layer].index_select(0, index) for layer in layers])
            else:
                found = self._joined[layers.start : layers.stop].index_select(1, index)
            host.view(found.shape).copy_(found, non_blocking=True)
            return PageCopy(host, self._recorded(), (index, found))

    def begin_store(self, layers: range, blocks: Sequence[int], host: Any, last_token_count: int) -> PageCopy:
        """Start to write blocks from host memory, see BlockCopies.store. Later steps wait for the writes on the device.

        Args:
            layers: indexes of consecutive layers.
            blocks: indexes of the blocks.
            host: result of `pinned` with the bytes of the blocks.
            last_token_count: number of tokens to write in the last block.
        """
        block_bytes = self._layers[0].shape[1]
        with self._beside_steps():
            index = self._index(blocks)
            staged = self._on_device(host.view(len(layers), len(blocks), block_bytes))
            whole_count = len(blocks) - (last_token_count < self.layout.block_size)
            parts = (0, whole_count, block_bytes), (whole_count, len(blocks), last_token_count * self._token_bytes)
            for first, end, byte_count in parts:
                if first == end:
                    continue
                rows, values = index[first:end], staged[:, first:end, :byte_count]
                if self._joined is not None:
                    self._joined[layers.start : layers.stop, :, :byte_count].index_copy_(1, rows, values)
                    continue
                for layer, part in zip(layers, values, strict=True):
                    self._layers[layer][:, :byte_count].index_copy_(0, rows, part)
            copy = PageCopy(host, self._recorded(), (index, staged))
        if self._stream is not None:
            torch_now().cuda.current_stream().wait_stream(self._stream)
        return copy

    def _beside_steps(self) -> AbstractContextManager[Any]:
        """Launch work in the stream of copies, after all work that was launched so far."""
        if self._stream is None:
            return nullcontext()
        cuda = torch_now().cuda
        self._stream.wait_stream(cuda.current_stream())
        found: AbstractContextManager[Any] = cuda.stream(self._stream)
        return found

    def _index(self, blocks: Sequence[int]) -> Any:
        torch = torch_now()
        return self._on_device(torch.tensor(blocks, dtype=torch.int64, pin_memory=self._is_cuda))

    def _on_device(self, values: Any) -> Any:
        return values.to(self._layers[0].device, non_blocking=True)

    def _recorded(self) -> Any:
        if self._stream is None:
            return None
        event = new_event()
        event.record()
        return event


class PageCopy:
    """A copy between blocks and host memory that was launched.

    Args:
        host: result of `pinned`.
        event: passes when the copy is over. None if it is over.
        used: tensors on the device that the copy uses.
    """

    def __init__(self, host: Any, event: Any, used: tuple[Any, ...]) -> None:
        self._host, self._event, self._used = host, event, used

    def wait(self) -> memoryview:
        """Wait for the end of the copy. Any thread may call it.

        Returns:
            The bytes in host memory.
        """
        if self._event is not None:
            self._event.synchronize()
        self._used = ()
        return memoryview(self._host.numpy())


def make_kv_pages(layout: KVLayout, storage: KVStorage[Any], device: DeviceType) -> HostPages | CudaPages:
    return CudaPages(layout, storage) if device == "cuda" else HostPages(layout, storage)


def _flat_bytes(pages: Any) -> Any:
    """Return a one-dimensional uint8 array that shares the memory."""
    if not hasattr(pages, "numpy"):
        return pages.reshape(-1).view("uint8")
    return pages.view(-1).view(torch_now().uint8).numpy()
