"""In which pieces a run of positions travels, and where each lies in a cache.

A chunk is a run of positions in one layer. It is counted in tokens and not in blocks, so that the two sides may have
blocks of different sizes; both know the list of chunks from the same few numbers, so that a chunk has an index, and a
transfer can be taken up at one.
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
    """Neighbouring positions in one block. start, token_count: in tokens."""

    block: BlockIndex
    start: int
    token_count: int


class Chunks:
    """All chunks of a transfer, in their order: layer by layer.

    layout: the holder's, in whose numbers the content travels. A chunk has at most chunk_bytes, and at least one token.
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
    """Where a chunk's positions lie, in order; position p in block_table[p // block_size]."""
    found = []
    position, end = chunk.token_start, chunk.token_start + chunk.token_count
    while position < end:
        index, start = divmod(position, block_size)
        count = min(block_size - start, end - position)
        found.append(Place(block_table[index], start, count))
        position += count
    return found


def views(pages: KVPages, block_table: Sequence[BlockIndex], chunk: Chunk) -> list[memoryview] | None:
    """A chunk's bytes where they lie, to be read and written; None where the host cannot address them."""
    # As `places` does it, but without a value for each: this is most of what a byte costs in Python.
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
