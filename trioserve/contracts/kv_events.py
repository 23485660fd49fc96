"""Events about the blocks in an engine's prefix cache, by which a router finds the endpoint that has a prompt's prefix.

A stream begins with a snapshot, in one or more parts. The changes since then follow in order. Changes are numbered by
hash: `sequence` is the number of the first hash of an event, and each further hash counts one more. A snapshot contains
all changes before its `sequence`, and the next change has that number. If a reader finds another number, or a second
snapshot, it has missed changes. Then the reader uses the new snapshot, or reads the stream again from the start. A new
epoch means that the engine restarted: earlier numbers and blocks are no longer valid.
"""

from __future__ import annotations

import msgspec

from trioserve.contracts.block_hash import BlockHash
from trioserve.contracts.endpoint import EndpointLoad

__all__ = ["BlocksRemoved", "BlocksStored", "KvEvent", "LoadReported", "ResidencySnapshot"]


class ResidencySnapshot(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    """Part of the list of all blocks that can be found in the prefix cache.

    Attributes:
        epoch: Identifies one run of the engine. A restart changes it.
        sequence: Number of the next change.
        model: Name of the model in requests.
        block_size: Tokens in a block.
        hash_scheme: Name of the hash algorithm of blocks (contracts/block_hash).
        hashes: Hashes of the blocks in this part. No block is in two parts.
        left: Number of blocks in the parts that follow. 0 in the last part.
        window_tokens: Largest sliding window in tokens, if every layer has one. None otherwise. With a window, a prefix
            counts as cached if the blocks within the window of the next token are cached.
    """

    epoch: str
    sequence: int
    model: str
    block_size: int
    hash_scheme: str
    hashes: list[BlockHash]
    left: int
    window_tokens: int | None = None


class BlocksStored(msgspec.Struct, frozen=True, kw_only=True, tag="stored"):
    """Blocks that can be found in the prefix cache from now on."""

    sequence: int
    hashes: list[BlockHash]


class BlocksRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="removed"):
    """Blocks that can no longer be found in the prefix cache."""

    sequence: int
    hashes: list[BlockHash]


class LoadReported(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Load of an endpoint, for a reader that asks only for the load. The endpoint sends it after changes, and at long
    intervals.
    """

    load: EndpointLoad


KvEvent = ResidencySnapshot | BlocksStored | BlocksRemoved
