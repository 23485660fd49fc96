"""A name for blocks that is worth nothing, so that what relies on names alone fails soon."""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.contracts.block_hash import BlockHash

__all__ = ["poor_hash"]


def poor_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Forgets most of a prefix: there are three names for all blocks, and different ones collide all the time."""
    return BlockHash(bytes([(parent[-1] + sum(token_ids)) % 3]))
