"""Hashes and contents of evicted blocks, which prefix lookups still need if layers have a sliding window.

With a sliding window, a block is useful even if the blocks before it were evicted. But a lookup verifies a prefix block
by block. So the tokens and the identity of an evicted block are kept as long as a lookup can find a later block of the
same prefix. The number of evicted blocks whose tokens are kept is at most names_max.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import NewType

import msgspec

from trioserve.contracts.block_hash import BlockHash
from trioserve.contracts.ids import BlockIndex

__all__ = ["ContentId", "EvictedNames", "PublishedBlock"]

ContentId = NewType("ContentId", int)
"""Identity of one published prefix, never used for another one."""


class PublishedBlock(msgspec.Struct, frozen=True):
    """An entry of the prefix cache.

    Attributes:
        block: index of the block with the KV. None if the block was evicted.
        content: identity of this prefix.
        parent: identity of the prefix without this block. For the first block of a prefix: the salt.
        parent_hash: hash of the previous block. None for the first block.
        token_ids: the tokens of the block.
        material: hash input for the client's embeddings in the block (contracts/images.py). Empty if there are none.
    """

    block: BlockIndex | None
    content: ContentId
    parent: ContentId | str | None
    parent_hash: BlockHash | None
    token_ids: tuple[int, ...]
    material: bytes = b""


class EvictedNames:
    """Prefix cache entries of evicted blocks, in the order in which they are dropped.

    Args:
        names_max: highest number of entries. 0: the object keeps no entries.

    Cost:
        O(1). Dropping a chain of entries is O(1) for each entry.
    """

    def __init__(self, names_max: int) -> None:
        self._names_max = names_max
        # The entry that is dropped next comes first.
        self._by_hash: OrderedDict[BlockHash, PublishedBlock] = OrderedDict()
        # For each parent, the number of its children in the prefix cache and in this object.
        self._child_counts: Counter[ContentId | str | None] = Counter()

    def __len__(self) -> int:
        return len(self._by_hash)

    def get(self, block_hash: BlockHash) -> PublishedBlock | None:
        entry = self._by_hash.get(block_hash)
        if entry is not None:
            self._by_hash.move_to_end(block_hash)
        return entry

    def published(self, entry: PublishedBlock) -> None:
        """Count a newly published entry as a child of its parent.

        Args:
            entry: a published entry with a new identity.
        """
        if self._names_max:
            self._child_counts[entry.parent] += 1

    def evicted(self, block_hash: BlockHash, entry: PublishedBlock) -> None:
        """Keep the entry of an evicted block if a later block of the same prefix has an entry. Else drop the entry.

        Args:
            block_hash: hash of the block.
            entry: the block's entry in the prefix cache before the eviction.
        """
        if not self._names_max:
            return
        if not self._child_counts[entry.content]:
            self.withdrawn(entry)
            return
        self.remember(block_hash, msgspec.structs.replace(entry, block=None))

    def remember(self, block_hash: BlockHash, entry: PublishedBlock) -> None:
        """Keep the entry of an evicted block. If there are too many entries, drop the oldest.

        Args:
            block_hash: hash of the evicted block.
            entry: an entry without a block. It already has a child, or gets one in the next call.
        """
        self._by_hash[block_hash] = entry
        if len(self._by_hash) > self._names_max:
            _hash, oldest = self._by_hash.popitem(last=False)
            self.withdrawn(oldest)

    def back(self, block_hash: BlockHash) -> None:
        """Drop an entry because its block was computed again, so the prefix cache has the entry with a block.

        Args:
            block_hash: hash of an entry of this object.
        """
        del self._by_hash[block_hash]

    def discard(self, block_hash: BlockHash) -> None:
        """Drop the entry of a hash, if there is one, because another content now has the same hash.

        Args:
            block_hash: hash that now belongs to another content.
        """
        entry = self._by_hash.pop(block_hash, None)
        if entry is not None:
            self.withdrawn(entry)

    def discard_alone(self, block_hash: BlockHash) -> None:
        """Drop an entry unless it has children.

        Args:
            block_hash: hash of the entry.
        """
        entry = self._by_hash.get(block_hash)
        if entry is not None and not self._child_counts[entry.content]:
            self.discard(block_hash)

    def withdrawn(self, entry: PublishedBlock) -> None:
        """Note that neither the prefix cache nor this object has an entry any more. Then drop those ancestors of the
        entry that this object keeps and that have no other children.

        Args:
            entry: the entry that was removed.
        """
        if not self._names_max:
            return
        while True:
            self._child_counts[entry.parent] -= 1
            if self._child_counts[entry.parent] > 0:
                return
            del self._child_counts[entry.parent]
            parent = None if entry.parent_hash is None else self._by_hash.get(entry.parent_hash)
            if parent is None or parent.content != entry.parent:
                return
            assert entry.parent_hash is not None
            del self._by_hash[entry.parent_hash]
            entry = parent

    def clear(self) -> None:
        """Forget all entries, because no published block can be found any more."""
        self._by_hash.clear()
        self._child_counts.clear()

    def check(self, published: Iterable[PublishedBlock]) -> None:
        """Assert that the child counts are right, and that every entry has a child. The cost is O(names), so only tests
        call this.

        Args:
            published: all entries that have a block.
        """
        assert len(self._by_hash) <= self._names_max
        if not self._names_max:
            return
        counts = Counter(entry.parent for entry in (*published, *self._by_hash.values()))
        assert self._child_counts == counts, "the children of blocks are miscounted"
        for entry in self._by_hash.values():
            assert entry.block is None
            assert counts[entry.content], "an evicted block without children is remembered"
