"""Block tables whose first places have no block, because no sliding window reaches them.

Connectors transfer nothing from or to these places.
"""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.contracts.ids import NO_BLOCK, BlockIndex

__all__ = ["first_place", "first_position"]


def first_place(block_table: Sequence[BlockIndex]) -> int:
    """Find the first place that has a block.

    Args:
        block_table: Blocks of a request, with NO_BLOCK behind the sliding window.

    Returns:
        Index of the place. The length of the table if no place has a block.

    Cost: O(places without a block).
    """
    return next((place for place, block in enumerate(block_table) if block != NO_BLOCK), len(block_table))


def first_position(block_table: Sequence[BlockIndex], block_size: int, start: int) -> int:
    """Find the first position from `start` on that has a block.

    Args:
        block_table: Blocks of a request, with NO_BLOCK behind the sliding window.
        block_size: Tokens per block.
        start: First position to consider.
    """
    return max(start, first_place(block_table) * block_size)
