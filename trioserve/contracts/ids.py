"""Identities as distinct types, so that an index is never taken for a name. No behaviour lives here."""

from __future__ import annotations

from typing import NewType

__all__ = ["NO_BLOCK", "BlockIndex", "RequestId"]

RequestId = NewType("RequestId", str)
"""The engine's own name of one sequence. Unique while the engine lives, even when clients repeat their ids."""

BlockIndex = NewType("BlockIndex", int)
"""Position of one KV block in the pool: 0 <= index < block_count."""

NO_BLOCK = BlockIndex(2**31 - 1)
"""Stands in a block table where a block was given back. No pool has so many, so that whoever reads it all the same is
out of bounds and does not get another's KV. It fits an int32."""
