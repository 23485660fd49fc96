"""A bad hash of blocks, so that code that relies only on hashes fails soon."""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.contracts.block_hash import BlockHash

__all__ = ["poor_hash"]


def poor_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Return one of three hashes, so that different blocks collide all the time.

    Args:
        parent: hash of the block before.
        token_ids: tokens of the block.
    """
    return BlockHash(bytes([(parent[-1] + sum(token_ids)) % 3]))
