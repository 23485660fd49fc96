"""How a block is named by its tokens and everything before it; core, router and connectors agree on it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

__all__ = ["HASH_SCHEME", "BlockHash", "hash_block", "root_hash", "with_material"]

BlockHash = NewType("BlockHash", bytes)
"""16 bytes. Equal for equal prefixes under an equal salt, on every machine."""

HASH_SCHEME = "trioserve.blake2b.1"
"""What these names are called between programs: two that say the same name equal blocks alike."""

_DIGEST_BYTES = 16  # 2**64 blocks until a collision is likely; the prefix cache compares tokens all the same


def root_hash(salt: str | None) -> BlockHash:
    """The parent of every first block. A salt keeps its blocks apart from all others; None and "" differ."""
    seed = b"" if salt is None else b"salt:" + salt.encode("utf-8", "surrogatepass")
    return BlockHash(blake2b(seed, digest_size=_DIGEST_BYTES).digest())


def with_material(parent: BlockHash, material: bytes) -> BlockHash:
    """The parent of what depends on more than tokens: of one block, where its embeddings are given, or of all blocks of
    a request, where it stands for the root. No material changes nothing."""
    return (
        BlockHash(blake2b(parent + b"material:" + material, digest_size=_DIGEST_BYTES).digest()) if material else parent
    )


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Name a full block by its parent's name and its own tokens (each 0 <= id < 2**32). About 1 us for 16 tokens."""
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return BlockHash(blake2b(parent + packed, digest_size=_DIGEST_BYTES).digest())
