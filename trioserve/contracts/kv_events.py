"""Events about the blocks in an engine's prefix cache, by which a router finds the endpoint that has a prompt's prefix.

A stream begins with a snapshot, in one or more parts. The changes since then follow in order. Changes are numbered by
hash: `sequence` is the number of the first hash of an event, and each further hash counts one more. A snapshot contains
all changes before its `sequence`, and the next change has that number. A reader that finds another number, or a second
snapshot, has missed changes. It uses the new snapshot, or reads the stream again from the start. A new epoch means that
the engine restarted: earlier numbers and blocks are void.
"""

from __future__ import annotations

import msgspec

from trioserve.contracts.block_hash import BlockHash
from trioserve.contracts.endpoint import EndpointLoad

__all__ = ["BlocksRemoved", "BlocksStored", "KvEvent", "LoadReported", "ResidencySnapshot"]


class ResidencySnapshot(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    """Part of the list of all blocks that can be found.

    Attributes:
        epoch: Identifies the engine's run.
        sequence: Number of the next change.
        model: Name of the model in requests.
        block_size: Tokens in a block.
        hash_scheme: How blocks are named (contracts/block_hash).
        hashes: Blocks of this part. No block is in two parts.
        left: Blocks in the parts that follow. 0 in the last part.
        window_tokens: Largest sliding window, if every layer has one. None otherwise. With a window, a prefix counts as
            cached if the blocks within the window of the next token are cached.
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
    """Blocks that can be found from now on."""

    sequence: int
    hashes: list[BlockHash]


class BlocksRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="removed"):
    """Blocks that can no longer be found."""

    sequence: int
    hashes: list[BlockHash]


class LoadReported(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Load of an endpoint, for a reader that asks only for the load. Sent after changes, and at long intervals."""

    load: EndpointLoad


KvEvent = ResidencySnapshot | BlocksStored | BlocksRemoved
