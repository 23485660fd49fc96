"""Prefix cache: finds the blocks that contain the KV of a prefix, by chained hashes and by comparing tokens.

Hashes may collide, by chance or by attack. Publishing a block means registering it in the prefix cache. Each published
block also stores its tokens, the hash input for the client's embeddings, and the identity of the prefix before it. A
lookup goes from the first block to the last, and accepts an entry only if all of these values are equal. By induction,
the whole prefix is then equal, even with a weak hash function.

If all layers have a sliding window, a prefix needs only the blocks that the window at its end reaches. Earlier blocks
may have been evicted, but a lookup verifies a prefix block
by block. So the tokens and the identity of an evicted block are kept as long as a lookup can find a later block of the
same prefix. The number of evicted blocks whose tokens are kept is at most names_max.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NewType

import msgspec

from trioserve.contracts.ids import NO_BLOCK, BlockHash, BlockIndex, hash_block, root_hash, with_material
from trioserve.contracts.media import GivenRows, rows_material
from trioserve.core.kv_blocks import BlockPool

__all__ = ["ContentId", "HashBlock", "OnResidency", "PrefixCache", "PrefixChain"]


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
        material: hash input for the client's embeddings in the block (contracts/media.py). Empty if there are none.
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


HashBlock = Callable[[BlockHash, Sequence[int]], BlockHash]

OnResidency = Callable[[BlockHash, bool], None]
"""Called with the hash of a block that becomes findable (True) or unfindable (False), inside the call that changes it.

It must not wait, raise, or call the core."""


class PrefixChain:
    """Position of one request in the prefix cache. Stores the hashes of the request's full blocks, computed when
    needed.

    `block_count` blocks of the request's prefix are published or shared. `content` identifies the prefix up to the last
    of these blocks. `found_count` is the number of blocks that the latest lookup found. It may be above `block_count`
    if the prefix was not allowed to end at a later block.

    Args:
        salt: cache salt. Requests with different salts share no blocks.
        given: rows of the prompt whose embeddings the client sent.
        is_private: True if the request shares no blocks. Its blocks are not published, and lookups find no blocks.
    """

    __slots__ = ("block_count", "content", "found_count", "given", "hashes", "is_private", "salt")

    def __init__(self, salt: str | None, given: tuple[GivenRows, ...] = (), *, is_private: bool = False) -> None:
        self.salt = salt
        self.given = given
        self.is_private = is_private
        self.hashes: list[BlockHash] = []
        self.block_count = self.found_count = 0
        self.content: ContentId | str | None = salt

    def restart(self) -> None:
        """Reset the count of published blocks, because the request has lost its blocks.

        The hashes are kept, because they depend only on the tokens.
        """
        self.block_count = self.found_count = 0
        self.content = self.salt


class PrefixCache:
    """Maps prefixes of prompts to blocks of the pool. A block is published if the cache has an entry for the block.

    Args:
        pool: the pool that owns the blocks. The cache sets its `on_evict`.
        block_size: tokens per block.
        hash_block: hash of a block, from the hash of its parent and its tokens.
        first_block_read: returns the index of the first block that the token at a position reads. None if every token
            reads all earlier blocks.
        names_max: highest number of evicted blocks whose tokens are kept for lookups, see EvictedNames. It has no
            effect without first_block_read.

    Attributes:
        on_residency: called for each block that becomes findable or stops being findable. If it is None, nothing is
            called.
        on_content: called with the content and the mark of a block that has a mark (see `publish`).
        on_forget: called with each content that cannot be found any more.

    Cost:
        O(1) per block.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        hash_block: HashBlock = hash_block,
        first_block_read: Callable[[int], int] | None = None,
        names_max: int = 0,
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._hash_block = hash_block
        self._by_hash: dict[BlockHash, PublishedBlock] = {}
        self._hash_of: dict[BlockIndex, BlockHash] = {}
        self._first_block_read = first_block_read
        self._evicted = EvictedNames(0 if first_block_read is None else names_max)
        self._next_content = 0
        self.on_residency: OnResidency | None = None
        self.on_content: Callable[[ContentId, int], None] = lambda content, mark: None
        self.on_forget: Callable[[ContentId], None] = lambda content: None
        pool.on_evict = self._forget

    def match(
        self, chain: PrefixChain, tokens: Sequence[int], can_end_at: Callable[[ContentId], bool] | None = None
    ) -> list[BlockIndex]:
        """Find the longest usable prefix, and move the chain to the end of this prefix. The caller must still claim the
        blocks.

        The prefix consists of whole blocks. It leaves at least one token, because a request must compute a token to get
        the next one.

        Args:
            chain: the request's chain, at its start.
            tokens: known tokens of the request.
            can_end_at: returns True if a prefix may end with the given content. None if a prefix may end with any
                content.

        Returns:
            The blocks of the prefix. Blocks that the sliding window does not need are NO_BLOCK.
        """
        assert chain.block_count == 0
        if chain.is_private:
            return []
        blocks: list[BlockIndex] = []
        end, content = 0, chain.content
        present_from = 0  # All found blocks from this index on are still in memory.
        for index in range((len(tokens) - 1) // self._block_size):
            found = self._find(chain, index, tokens)
            if found is None:
                break
            chain.content = found.content
            chain.found_count = index + 1
            if found.block is None:
                present_from = index + 1
            blocks.append(NO_BLOCK if found.block is None else found.block)
            if present_from <= self._first_needed(index + 1) and (can_end_at is None or can_end_at(found.content)):
                end, content = index + 1, found.content
        chain.block_count, chain.content = end, content
        first = self._first_needed(end)
        return [NO_BLOCK] * first + blocks[first:end]

    def publish(
        self,
        chain: PrefixChain,
        tokens: Sequence[int],
        computed_count: int,
        blocks: list[BlockIndex],
        marks: Mapping[int, int] | None = None,
    ) -> None:
        """Make every full block of the computed tokens findable. A private chain publishes no blocks.

        If another block already contains the same content, the other block remains the published block. A block table
        may begin with NO_BLOCK entries that the sliding window has passed. The blocks after these entries can still be
        found.

        Args:
            chain: the request's chain. It advances.
            tokens: known tokens of the request.
            computed_count: tokens whose KV is computed.
            blocks: the request's block table.
            marks: maps a number of blocks to the mark that `on_content` receives with the content of this prefix.
        """
        if chain.is_private:
            return
        for index in range(chain.block_count, computed_count // self._block_size):
            found = self._find(chain, index, tokens)
            if found is None:
                found = self._enter(chain, index, tokens, blocks[index])
            elif found.block is None and blocks[index] != NO_BLOCK:
                self._enter_again(chain.hashes[index], found, blocks[index])
            chain.content = found.content
            chain.block_count = index + 1
            if marks is not None and chain.block_count in marks:
                self.on_content(found.content, marks[chain.block_count])
        if chain.block_count and blocks[chain.block_count - 1] == NO_BLOCK:
            self._evicted.discard_alone(self.hash_at(chain, chain.block_count - 1, tokens))

    def hash_at(self, chain: PrefixChain, index: int, tokens: Sequence[int]) -> BlockHash:
        """Return the hash of one full block of a request. Each hash is computed only once.

        Args:
            chain: the request's chain.
            index: index of the block in the block table.
            tokens: known tokens of the request.
        """
        hashes = chain.hashes
        while len(hashes) <= index:
            start = len(hashes) * self._block_size
            parent = hashes[-1] if hashes else root_hash(chain.salt)
            if chain.given:
                parent = with_material(parent, self._material(chain, len(hashes)))
            hashes.append(self._hash_block(parent, tokens[start : start + self._block_size]))
        return hashes[index]

    def forget_all(self) -> None:
        """Remove all blocks from the cache.

        Requests that use these blocks continue. Blocks that these requests publish later cannot be found either,
        because a lookup begins at the first block.
        """
        by_hash, self._by_hash, self._hash_of = self._by_hash, {}, {}
        self._evicted.clear()
        for block_hash, entry in by_hash.items():
            assert entry.block is not None
            self._pool.withdraw(entry.block)
            if self.on_residency is not None:
                self.on_residency(block_hash, False)
            self.on_forget(entry.content)

    def resident_hashes(self) -> list[BlockHash]:
        """Return the hashes of all findable blocks, each once. The cost is O(blocks)."""
        return list(self._by_hash)

    def resident_contents(self) -> set[ContentId]:
        """Return the contents of all findable blocks. The cost is O(blocks)."""
        return {entry.content for entry in self._by_hash.values()}

    def check(self) -> None:
        """Assert that the maps of hashes and of blocks agree. The cost is O(blocks), so only tests and simulations call
        this.
        """
        assert len(self._by_hash) == len(self._hash_of)
        for block_hash, entry in self._by_hash.items():
            assert entry.block is not None
            assert self._hash_of[entry.block] == block_hash
            assert self._evicted.get(block_hash) is None, "a published block is also remembered as evicted"
        self._evicted.check(self._by_hash.values())

    def _first_needed(self, block_count: int) -> int:
        return 0 if self._first_block_read is None else self._first_block_read(block_count * self._block_size)

    def _find(self, chain: PrefixChain, index: int, tokens: Sequence[int]) -> PublishedBlock | None:
        block_hash = self.hash_at(chain, index, tokens)
        entry = self._by_hash.get(block_hash) or self._evicted.get(block_hash)
        if entry is None or entry.parent != chain.content:
            return None
        if (chain.given or entry.material) and entry.material != self._material(chain, index):
            return None
        start = index * self._block_size
        return entry if entry.token_ids == tuple(tokens[start : start + self._block_size]) else None

    def _material(self, chain: PrefixChain, index: int) -> bytes:
        return rows_material(chain.given, index * self._block_size, (index + 1) * self._block_size)

    def _enter(self, chain: PrefixChain, index: int, tokens: Sequence[int], block: BlockIndex) -> PublishedBlock:
        block_hash = chain.hashes[index]
        # The other entry is a collision, or its parent was evicted and published again under a new identity.
        # In both cases, the newer content is more likely to be needed.
        self._evicted.discard(block_hash)
        foreign = self._by_hash.pop(block_hash, None)
        if foreign is not None:
            assert foreign.block is not None
            del self._hash_of[foreign.block]
            self._evicted.withdrawn(foreign)
            self._pool.withdraw(foreign.block)
            if self.on_residency is not None:
                self.on_residency(block_hash, False)
            self.on_forget(foreign.content)
        start = index * self._block_size
        entry = PublishedBlock(
            None if block == NO_BLOCK else block,
            ContentId(self._next_content),
            chain.content,
            None if index == 0 else chain.hashes[index - 1],
            tuple(tokens[start : start + self._block_size]),
            self._material(chain, index) if chain.given else b"",
        )
        self._next_content += 1
        self._evicted.published(entry)
        if block == NO_BLOCK:
            self._evicted.remember(block_hash, entry)
        else:
            self._put(block_hash, entry, block)
        return entry

    def _enter_again(self, block_hash: BlockHash, found: PublishedBlock, block: BlockIndex) -> None:
        """Publish the content of an evicted block again under its old identity, because it was computed again."""
        self._evicted.back(block_hash)
        self._put(block_hash, msgspec.structs.replace(found, block=block), block)

    def _put(self, block_hash: BlockHash, entry: PublishedBlock, block: BlockIndex) -> None:
        self._by_hash[block_hash] = entry
        self._hash_of[block] = block_hash
        self._pool.publish(block)
        if self.on_residency is not None:
            self.on_residency(block_hash, True)

    def _forget(self, block: BlockIndex) -> None:
        block_hash = self._hash_of.pop(block)
        entry = self._by_hash.pop(block_hash)
        self._evicted.evicted(block_hash, entry)
        if self.on_residency is not None:
            self.on_residency(block_hash, False)
        self.on_forget(entry.content)
