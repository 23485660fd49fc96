"""Block tables whose first places have no block, since no layer's sliding window reaches them: nothing is carried from
or to there."""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.contracts.ids import NO_BLOCK, BlockIndex

__all__ = ["first_place", "first_position"]


def first_place(block_table: Sequence[BlockIndex]) -> int:
    """The first one with a block; behind the last one if none has. O(places without a block)."""
    return next((place for place, block in enumerate(block_table) if block != NO_BLOCK), len(block_table))


def first_position(block_table: Sequence[BlockIndex], block_size: int, start: int) -> int:
    """Of those from `start` on the first one that lies in a block."""
    return max(start, first_place(block_table) * block_size)
