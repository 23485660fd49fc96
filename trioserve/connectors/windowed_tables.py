"""Block tables whose first entries are NO_BLOCK, because no sliding window reaches these positions.

Connectors do not transfer the KV of these positions.
"""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.contracts.ids import NO_BLOCK, BlockIndex

__all__ = ["first_place", "first_position"]


def first_place(block_table: Sequence[BlockIndex]) -> int:
    """Find the first entry of a block table that is a block.

    Args:
        block_table: Blocks of a request, with NO_BLOCK behind the sliding window.

    Returns:
        Index of the entry. The length of the table if all entries are NO_BLOCK.

    Cost: O(entries that are NO_BLOCK).
    """
    return next((place for place, block in enumerate(block_table) if block != NO_BLOCK), len(block_table))


def first_position(block_table: Sequence[BlockIndex], block_size: int, start: int) -> int:
    """Find the first position that has a block, at `start` or after it.

    Args:
        block_table: Blocks of a request, with NO_BLOCK behind the sliding window.
        block_size: Tokens per block.
        start: First position to consider.
    """
    return max(start, first_place(block_table) * block_size)
