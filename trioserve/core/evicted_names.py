"""What is remembered of blocks that were evicted, where what comes behind them can do without them.

Behind a sliding window a block is of use although those before it have gone. But a prefix is believed block by block,
by the tokens of each. So of an evicted block its tokens and its identity stay, without a block, for as long as
something behind it can be found: that is no more than a few contexts, and names_max in any case.
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
    """block: None when it was evicted. parent: of a first block the salt. parent_hash: of a first block None."""

    block: BlockIndex | None
    content: ContentId
    parent: ContentId | str | None
    parent_hash: BlockHash | None
    token_ids: tuple[int, ...]
    material: bytes = b""  # of given rows (contracts/given_rows)


class EvictedNames:
    """All calls are O(1), but for those that let go a chain that nothing is left of: O(1) for each of its names.

    names_max: 0 remembers nothing, and costs nothing.
    """

    def __init__(self, names_max: int) -> None:
        self._names_max = names_max
        self._by_hash: OrderedDict[BlockHash, PublishedBlock] = OrderedDict()  # the first one to go comes first
        self._child_counts: Counter[ContentId | str | None] = Counter()  # of contents: published or remembered here

    def __len__(self) -> int:
        return len(self._by_hash)

    def get(self, block_hash: BlockHash) -> PublishedBlock | None:
        entry = self._by_hash.get(block_hash)
        if entry is not None:
            self._by_hash.move_to_end(block_hash)
        return entry

    def published(self, entry: PublishedBlock) -> None:
        """It can be found from now on, under an identity of its own."""
        if self._names_max:
            self._child_counts[entry.parent] += 1

    def evicted(self, block_hash: BlockHash, entry: PublishedBlock) -> None:
        """Its block has gone."""
        if not self._names_max:
            return
        if not self._child_counts[entry.content]:
            self.withdrawn(entry)
            return
        self.remember(block_hash, msgspec.structs.replace(entry, block=None))

    def remember(self, block_hash: BlockHash, entry: PublishedBlock) -> None:
        """One without a block; what comes behind it is published next."""
        self._by_hash[block_hash] = entry
        if len(self._by_hash) > self._names_max:
            _hash, oldest = self._by_hash.popitem(last=False)
            self.withdrawn(oldest)

    def back(self, block_hash: BlockHash) -> None:
        """A remembered one has a block again."""
        del self._by_hash[block_hash]

    def discard(self, block_hash: BlockHash) -> None:
        """Another content has this name from now on."""
        entry = self._by_hash.pop(block_hash, None)
        if entry is not None:
            self.withdrawn(entry)

    def discard_alone(self, block_hash: BlockHash) -> None:
        """Nothing behind it was published, after all."""
        entry = self._by_hash.get(block_hash)
        if entry is not None and not self._child_counts[entry.content]:
            self.discard(block_hash)

    def withdrawn(self, entry: PublishedBlock) -> None:
        """It can be found no longer, and is not remembered: nor is what was there only for it."""
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
        """Nothing that was published can be found any more."""
        self._by_hash.clear()
        self._child_counts.clear()

    def check(self, published: Iterable[PublishedBlock]) -> None:
        """Assert that the counts agree, and that nothing is remembered for nobody. O(names): for tests."""
        assert len(self._by_hash) <= self._names_max
        if not self._names_max:
            return
        counts = Counter(entry.parent for entry in (*published, *self._by_hash.values()))
        assert self._child_counts == counts, "what comes behind the blocks is miscounted"
        for entry in self._by_hash.values():
            assert entry.block is None
            assert counts[entry.content], "an evicted block is remembered, and nothing comes behind it"
