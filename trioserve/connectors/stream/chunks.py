"""Splits a run of positions into chunks for a transfer, and finds the bytes of each chunk in the cache.

A chunk is a run of positions in one layer. Its size is counted in tokens, so reader and holder may have blocks of
different sizes. Both compute the same list of chunks from a few numbers. A transfer can therefore resume at a
chunk index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.kv_transfer import KVLayout, KVPages

__all__ = ["Chunk", "Chunks", "Place", "places", "views"]


class Chunk(NamedTuple):
    layer: int
    token_start: int
    token_count: int


class Place(NamedTuple):
    """Run of positions in one block.

    Attributes:
        block: Index of the block.
        start: First position in the block, in tokens.
        token_count: Number of positions.
    """

    block: BlockIndex
    start: int
    token_count: int


class Chunks:
    """All chunks of a transfer, layer by layer.

    Args:
        layout: KV layout of the holder. The content is sent in its dtype.
        token_start: First position of the transfer.
        token_count: Number of positions of the transfer.
        chunk_bytes: Maximum size of a chunk. A chunk has at least one token, even if the token is larger.
    """

    def __init__(self, layout: KVLayout, token_start: int, token_count: int, chunk_bytes: int) -> None:
        self._start = token_start
        self._count = token_count
        self._chunk_tokens = max(1, chunk_bytes // layout.token_bytes)
        self._per_layer = -(-token_count // self._chunk_tokens)
        self._layer_count = layout.layer_count

    def __len__(self) -> int:
        return self._per_layer * self._layer_count

    def __getitem__(self, index: int) -> Chunk:
        layer, turn = divmod(index, self._per_layer)
        before = turn * self._chunk_tokens
        return Chunk(layer, self._start + before, min(self._chunk_tokens, self._count - before))


def places(block_table: Sequence[BlockIndex], block_size: int, chunk: Chunk) -> list[Place]:
    """Find the blocks that contain the positions of a chunk.

    Args:
        block_table: Blocks of the request. Position p is in block_table[p // block_size].
        block_size: Tokens per block.
        chunk: Positions to find.

    Returns:
        One place per block, in the order of the positions.
    """
    found = []
    position, end = chunk.token_start, chunk.token_start + chunk.token_count
    while position < end:
        index, start = divmod(position, block_size)
        count = min(block_size - start, end - position)
        found.append(Place(block_table[index], start, count))
        position += count
    return found


def views(pages: KVPages, block_table: Sequence[BlockIndex], chunk: Chunk) -> list[memoryview] | None:
    """Return writable views of the bytes of a chunk in the cache.

    Args:
        pages: KV cache of this engine.
        block_table: Blocks of the request. Position p is in block_table[p // block_size].
        chunk: Positions and layer of the bytes.

    Returns:
        One view per block, in the order of the positions. None if the CPU cannot address the cache.
    """
    # The loop repeats `places` without a Place per block, because this function takes most of the time of a transfer.
    layout = pages.layout
    block_size, token_bytes = layout.block_size, layout.token_bytes
    layer, position, left = chunk
    found = []
    while left > 0:
        index, start = divmod(position, block_size)
        count = min(block_size - start, left)
        view = pages.view(layer, block_table[index])
        if view is None:
            return None
        if count < block_size:
            view = view[start * token_bytes : (start + count) * token_bytes]
        found.append(view)
        position += count
        left -= count
    return found
