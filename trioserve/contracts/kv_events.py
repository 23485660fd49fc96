"""What an engine tells of the blocks in its prefix cache, so that a router can send a prompt to where its beginning is.

The events of one stream are a snapshot, in one part or several, and then the changes since, in order. Each change has a
number: that of the first hash in its event, the next hash's is one more. A snapshot holds what came to pass before
`sequence`, and the first change behind it has that number. Whoever finds another number, or a second snapshot, has
missed something: the snapshot counts, or else the stream is to be read anew. A new epoch is another engine: numbers and
blocks of the one before mean nothing any more.
"""

from __future__ import annotations

import msgspec

from trioserve.contracts.block_hash import BlockHash
from trioserve.contracts.endpoint import EndpointLoad

__all__ = ["BlocksRemoved", "BlocksStored", "KvEvent", "ResidencySnapshot"]


class ResidencySnapshot(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    """All blocks that can be found. hashes: some of them, those of the parts before left out; left: how many are still
    to come, 0 in the last part. model: as requests name it. block_size: tokens in each block. hash_scheme: how blocks
    are named (contracts/block_hash). window_tokens: where every layer of the model has a sliding window the largest of
    them: a prefix is there if the blocks are that the token behind it sees, whatever became of those before them."""

    epoch: str
    sequence: int
    model: str
    block_size: int
    hash_scheme: str
    hashes: list[BlockHash]
    left: int
    window_tokens: int | None = None


class BlocksStored(msgspec.Struct, frozen=True, kw_only=True, tag="stored"):
    """These can be found from now on."""

    sequence: int
    hashes: list[BlockHash]


class BlocksRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="removed"):
    """These can be found no longer."""

    sequence: int
    hashes: list[BlockHash]


class LoadTold(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """How much there is to do, where only that is asked for: when it has changed, and once in a while."""

    load: EndpointLoad


KvEvent = ResidencySnapshot | BlocksStored | BlocksRemoved
