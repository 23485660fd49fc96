"""Distinct types for identities, so that type checks find an index that is used as a name."""

from __future__ import annotations

from typing import NewType

__all__ = ["NO_BLOCK", "BlockIndex", "RequestId"]

RequestId = NewType("RequestId", str)
"""The engine's own name of one sequence. Unique for one engine, even if clients repeat their ids."""

BlockIndex = NewType("BlockIndex", int)
"""Position of one KV block in the pool: 0 <= index < block_count."""

NO_BLOCK = BlockIndex(2**31 - 1)
"""Placeholder in a block table for a block that was freed behind a sliding window.

No pool is that large. A reader that uses the placeholder by mistake is out of bounds, and does not read the KV of
another request. Fits into an int32.
"""
