"""Identities as distinct types, so that an index is never taken for a name. No behaviour lives here."""

from __future__ import annotations

from typing import NewType

__all__ = ["BlockIndex", "RequestId"]

RequestId = NewType("RequestId", str)
"""The engine's own name of one sequence. Unique while the engine lives, even when clients repeat their ids."""

BlockIndex = NewType("BlockIndex", int)
"""Position of one KV block in the pool: 0 <= index < block_count."""
