"""Which block holds the KV of a given prefix. Chained hashes find it; the tokens themselves decide.

A hash may collide, by chance or because somebody tries. So each published block also remembers its tokens, what their
embeddings are where these are given, and the identity of the content before it; a lookup walks from the first block on
and believes an entry only when all of them agree. By induction the whole prefix is then equal, whatever the hash
function is worth.

Where all layers have a sliding window a prefix needs the blocks alone that the window reaches from its end. Those
before them may have been evicted: what the walk has to know of them is remembered (evicted_names.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from trioserve.contracts.block_hash import BlockHash, hash_block, root_hash, with_material
from trioserve.contracts.given_rows import GivenRows, rows_material
from trioserve.contracts.ids import NO_BLOCK, BlockIndex
from trioserve.core.evicted_names import ContentId, EvictedNames, PublishedBlock
from trioserve.core.kv_blocks import BlockPool

__all__ = ["ContentId", "HashBlock", "OnResidency", "PrefixCache", "PrefixChain"]

HashBlock = Callable[[BlockHash, Sequence[int]], BlockHash]

OnResidency = Callable[[BlockHash, bool], None]
"""Told that a block of this name can be found from now on (True), or no longer (False), inside of the call that did it
and in the order in which it came to pass. It must not wait, raise, or call the core."""


class PrefixChain:
    """One request's way through the cache: the hashes of its full blocks, as far as they were asked for.

    block_count and content say how far its prefix is published, by itself or by the one it shares with. found_count:
    how many blocks of it were found when it was last looked up, also those behind the last that it could go on from.
    given: the request's. is_private: nothing of it is published, and it finds nothing.
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
        """Forget what is published, not the hashes: the tokens stay the same when a request loses its blocks."""
        self.block_count = self.found_count = 0
        self.content = self.salt


class PrefixCache:
    """Finds published blocks and publishes new ones. Cost: O(1) per block.

    first_block_read: which block is the first that the token at a position needs; None: every one needs all.
    names_max: how many evicted blocks are remembered, where these can be done without.
    on_residency: who is told of each change of what can be found, once; None: nobody, which costs nothing. on_content:
    is told of marked blocks (publish). on_forget: is told of content that can no longer be found.
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
        self, chain: PrefixChain, tokens: Sequence[int], can_go_on: Callable[[ContentId], bool] | None = None
    ) -> list[BlockIndex]:
        """The longest prefix of `tokens` that needs nothing but published blocks, in whole blocks, at least one token
        short of all of them: a request must compute something to get its next token. Blocks that it does not need are
        NO_BLOCK. Advances the chain past the match; takes no block. can_go_on: whether a prefix may end with this
        content; None: with any."""
        assert chain.block_count == 0
        if chain.is_private:
            return []
        blocks: list[BlockIndex] = []
        end, content = 0, chain.content
        there_from = 0  # the blocks from here on have not been evicted
        for index in range((len(tokens) - 1) // self._block_size):
            found = self._find(chain, index, tokens)
            if found is None:
                break
            chain.content = found.content
            chain.found_count = index + 1
            if found.block is None:
                there_from = index + 1
            blocks.append(NO_BLOCK if found.block is None else found.block)
            if there_from <= self._first_needed(index + 1) and (can_go_on is None or can_go_on(found.content)):
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
        """Make every full block among the first `computed_count` tokens findable. blocks: the request's block table.
        Where another block already holds the same content, that one stays the published one. In a place without a
        block was one that is not needed: what comes behind it is found all the same. marks: by the number of blocks,
        what on_content is told with the content that these end with. Nothing of a private chain is published."""
        if chain.is_private:
            return
        for index in range(chain.block_count, computed_count // self._block_size):
            found = self._find(chain, index, tokens)
            if found is None:
                found = self._enter(chain, index, tokens, blocks[index])
            elif found.block is None and blocks[index] != NO_BLOCK:
                self._enter_again(chain, index, tokens, found, blocks[index])
            chain.content = found.content
            chain.block_count = index + 1
            if marks is not None and chain.block_count in marks:
                self.on_content(found.content, marks[chain.block_count])
        if chain.block_count and blocks[chain.block_count - 1] == NO_BLOCK:
            self._evicted.discard_alone(self.hash_at(chain, chain.block_count - 1, tokens))

    def hash_at(self, chain: PrefixChain, index: int, tokens: Sequence[int]) -> BlockHash:
        """The hash of the request's full block `index`; computed once."""
        hashes = chain.hashes
        while len(hashes) <= index:
            start = len(hashes) * self._block_size
            parent = hashes[-1] if hashes else root_hash(chain.salt)
            if chain.given:
                parent = with_material(parent, self._material(chain, len(hashes)))
            hashes.append(self._hash_block(parent, tokens[start : start + self._block_size]))
        return hashes[index]

    def forget_all(self) -> None:
        """Nothing that is published now is found again. What is published behind it, by whoever goes on, is not found
        either: there is no way to it."""
        by_hash, self._by_hash, self._hash_of = self._by_hash, {}, {}
        self._evicted.clear()
        for block_hash, entry in by_hash.items():
            assert entry.block is not None
            self._pool.withdraw(entry.block)
            if self.on_residency is not None:
                self.on_residency(block_hash, False)
            self.on_forget(entry.content)

    def resident_hashes(self) -> list[BlockHash]:
        """The names of all blocks that can be found now, each once. O(blocks)."""
        return list(self._by_hash)

    def resident_contents(self) -> set[ContentId]:
        """The content of all blocks that can be found now. O(blocks)."""
        return {entry.content for entry in self._by_hash.values()}

    def check(self) -> None:
        """Assert that the two maps agree. O(blocks): for tests and simulations."""
        assert len(self._by_hash) == len(self._hash_of)
        for block_hash, entry in self._by_hash.items():
            assert entry.block is not None
            assert self._hash_of[entry.block] == block_hash
            assert self._evicted.get(block_hash) is None, "a block is there, and remembered as one that is not"
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
        block_hash = self.hash_at(chain, index, tokens)
        # A foreign entry under this hash is a collision, or a block whose parent was evicted and came back under a new
        # identity. Either way the newer content is the one more likely to be asked for.
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
            None if index == 0 else self.hash_at(chain, index - 1, tokens),
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

    def _enter_again(
        self, chain: PrefixChain, index: int, tokens: Sequence[int], found: PublishedBlock, block: BlockIndex
    ) -> None:
        """An evicted block has been computed again: it is what it was."""
        block_hash = self.hash_at(chain, index, tokens)
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
