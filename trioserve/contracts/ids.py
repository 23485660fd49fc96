"""Distinct types for identities, so that type checks find an index that is used as a name.

Hashes name KV blocks by their tokens and all tokens before them. Core, router and connectors share these names.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

__all__ = [
    "BlockHash",
    "BlockIndex",
    "HASH_SCHEME",
    "NO_BLOCK",
    "RequestId",
    "hash_block",
    "root_hash",
    "with_material",
]

RequestId = NewType("RequestId", str)
"""The engine's own name of one sequence. Unique for one engine, even if clients repeat their ids."""

BlockIndex = NewType("BlockIndex", int)
"""Position of one KV block in the pool: 0 <= index < block_count."""

NO_BLOCK = BlockIndex(2**31 - 1)
"""Placeholder in a block table for a block that was freed behind a sliding window.

No pool is that large. A reader that uses the placeholder by mistake is out of bounds, and does not read the KV of
another request. Fits into an int32.
"""


BlockHash = NewType("BlockHash", bytes)
"""16 bytes. Equal for equal prefixes under an equal salt, on every machine."""

HASH_SCHEME = "trioserve.blake2b.1"
"""Identifies this hash function between servers. Servers with the same scheme give equal blocks equal hashes."""

# With 16 bytes, a hash collision is likely after 2**64 blocks. The prefix cache also compares tokens.
_DIGEST_BYTES = 16


def root_hash(salt: str | None) -> BlockHash:
    """Return the parent hash of every first block.

    Args:
        salt: Requests with different salts share no blocks. None and "" are different salts.
    """
    seed = b"" if salt is None else b"salt:" + salt.encode("utf-8", "surrogatepass")
    return BlockHash(blake2b(seed, digest_size=_DIGEST_BYTES).digest())


def with_material(parent: BlockHash, material: bytes) -> BlockHash:
    """Return a parent hash that depends on more than tokens.

    The result replaces the parent hash of a block with given embeddings, or the root hash of a whole request.

    Args:
        parent: Hash of the previous block, or the root hash.
        material: Bytes to include in the hash. With b"", the parent is returned unchanged.
    """
    return (
        BlockHash(blake2b(parent + b"material:" + material, digest_size=_DIGEST_BYTES).digest()) if material else parent
    )


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Return the hash of a full block.

    Args:
        parent: Hash of the previous block, or the root hash.
        token_ids: The block's tokens, each 0 <= id < 2**32.

    Cost:
        About 1 us for 16 tokens.
    """
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return BlockHash(blake2b(parent + packed, digest_size=_DIGEST_BYTES).digest())
