"""KV buffers of all layers, and their layout. The core decides which request owns which block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from trioserve.model.kv_format import KvFormat, head_width
from trioserve.model.model_config import KVEntry, ModelConfig

__all__ = ["KVStorage"]

Buffer = TypeVar("Buffer")


class KVStorage(Generic[Buffer]):
    """KV buffers of all layers.

    Each layer has one buffer [blocks, block_size, 2, kv_heads, head_dim], keys at index 0 and values at index 1. For
    latents it is [blocks, block_size, 1, 1, entry_dim], see KVEntry. The buffer of a layer without KV entries is empty.
    In 8-bit formats the last dimension counts bytes and includes the scale after each head, see kv_format.py.

    Layers have separate buffers, because compilers that index into one common buffer would copy it whole. Keys and
    values of a token lie side by side, so a token is one row to write and a block is one contiguous range to gather.
    Buffers are torch tensors, or numpy arrays for the native CPU kernels, with the same layout. So blocks are copied in
    and out in the same way for both.

    Memory is uninitialised. A kernel that reads beyond the last token of a block must clear the block when it begins
    it.

    Args:
        config: model whose KV is stored.
        make: returns an uninitialised buffer of a shape.
        has_spare: add one block at index block_count that no request owns. Padding rows write there, and nothing reads
            it.
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
