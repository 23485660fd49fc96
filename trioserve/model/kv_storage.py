"""The KV buffers of all layers and their layout. Who may use which block is settled in the core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from trioserve.model.kv_format import KvFormat, head_width
from trioserve.model.model_config import KVEntry, ModelConfig

__all__ = ["KVStorage"]

Buffer = TypeVar("Buffer")


class KVStorage(Generic[Buffer]):
    """One buffer a layer, each [blocks, block_size, 2, kv_heads, head_dim], keys at index 0 and values at index 1; or,
    of latents, [blocks, block_size, 1, 1, entry_dim]: see KVEntry. That of a layer without attention is empty. In 8
    bits the last length is in bytes, and counts the scale that lies behind a head's numbers, too; see kv_format.py.

    One buffer for all layers would be copied whole by compilers that index it. Within a layer a token's keys and values
    lie side by side: one row to write, and one contiguous block to gather. Buffers are torch's tensors or, for the
    native CPU kernels, numpy's arrays, in the same layout: a block is copied in and out alike, whatever computes. The
    memory comes uninitialised; who begins a block clears what lies behind its last token, unless the kernels never read
    that.

    kept: the buffers that are not empty. With has_spare there is one block more, at index block_count, which no request
    owns: rows that stand for nobody write there. What lies in it is never read.
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
        """make: gives a buffer of this shape, not yet written."""
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
