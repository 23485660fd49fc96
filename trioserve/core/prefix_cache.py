"""Which block holds the KV of a given prefix. Chained hashes find it; the tokens themselves decide.

A hash may collide, by chance or because somebody tries. So each published block also remembers its tokens and the
identity of the content before it; a lookup walks from the first block on and believes an entry only when both agree. By
induction the whole prefix is then equal, whatever the hash function is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NewType

import msgspec

from trioserve.contracts.block_hash import BlockHash, hash_block, root_hash
from trioserve.contracts.ids import BlockIndex
from trioserve.core.kv_blocks import BlockPool

__all__ = ["ContentId", "HashBlock", "OnResidency", "PrefixCache", "PrefixChain"]

ContentId = NewType("ContentId", int)
"""Identity of one published prefix, never used twice."""

HashBlock = Callable[[BlockHash, Sequence[int]], BlockHash]

OnResidency = Callable[[BlockHash, bool], None]
"""Told that a block of this name can be found from now on (True), or no longer (False), inside of the call that did it
and in the order in which it came to pass. It must not wait, raise, or call the core."""


class PublishedBlock(msgspec.Struct, frozen=True):
    block: BlockIndex
    content: ContentId
    parent: ContentId | str | None  # of a first block: the salt
    token_ids: tuple[int, ...]


class PrefixChain:
    """One request's way through the cache: the hashes of its full blocks, as far as they were asked for.

    block_count and content say how far its prefix is published, by itself or by the one it shares with. found_count:
    how many blocks of it were found when it was last looked up, also those behind the last that it could go on from.
    """

    __slots__ = ("block_count", "content", "found_count", "hashes", "salt")

    def __init__(self, salt: str | None) -> None:
        self.salt = salt
        self.hashes: list[BlockHash] = []
        self.block_count = self.found_count = 0
        self.content: ContentId | str | None = salt

    def restart(self) -> None:
        """Forget what is published, not the hashes: the tokens stay the same when a request loses its blocks."""
        self.block_count = self.found_count = 0
        self.content = self.salt


class PrefixCache:
    """Finds published blocks and publishes new ones. Cost: O(1) per block.

    on_residency: who is told of each change of what can be found, once; None: nobody, which costs nothing. on_content:
    is told of marked blocks (publish). on_forget: is told of content that can no longer be found.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, hash_block: HashBlock = hash_block) -> None:
        self._pool = pool
        self._block_size = block_size
        self._hash_block = hash_block
        self._by_hash: dict[BlockHash, PublishedBlock] = {}
        self._hash_of: dict[BlockIndex, BlockHash] = {}
        self._next_content = 0
        self.on_residency: OnResidency | None = None
        self.on_content: Callable[[ContentId, int], None] = lambda content, mark: None
        self.on_forget: Callable[[ContentId], None] = lambda content: None
        pool.on_evict = self._forget

    def match(
        self, chain: PrefixChain, tokens: Sequence[int], can_go_on: Callable[[ContentId], bool] | None = None
    ) -> list[BlockIndex]:
        """The longest published prefix of `tokens`, in whole blocks, at least one token short of all of them: a request
        must compute something to get its next token. Advances the chain past the match; takes no block. can_go_on:
        whether a prefix may end with this content; None: with any."""
        assert chain.block_count == 0
        blocks: list[BlockIndex] = []
        last_end: tuple[int, ContentId | str | None] = (0, chain.salt)
        for index in range((len(tokens) - 1) // self._block_size):
            found = self._find(chain, index, tokens)
            if found is None:
                break
            blocks.append(found.block)
            chain.content = found.content
            chain.block_count = chain.found_count = index + 1
            if can_go_on is not None and can_go_on(found.content):
                last_end = (index + 1, found.content)
        if can_go_on is not None:
            chain.block_count, chain.content = last_end
            del blocks[chain.block_count :]
        return blocks

    def publish(
        self,
        chain: PrefixChain,
        tokens: Sequence[int],
        computed_count: int,
        blocks: list[BlockIndex],
        marks: Mapping[int, int] | None = None,
    ) -> None:
        """Make every full block among the first `computed_count` tokens findable. blocks: the request's block table.
        Where another block already holds the same content, that one stays the published one. marks: by the number of
        blocks, what on_content is told with the content that these end with."""
        for index in range(chain.block_count, computed_count // self._block_size):
            found = self._find(chain, index, tokens)
            if found is None:
                found = self._enter(chain, index, tokens, blocks[index])
            chain.content = found.content
            chain.block_count = index + 1
            if marks is not None and chain.block_count in marks:
                self.on_content(found.content, marks[chain.block_count])

    def hash_at(self, chain: PrefixChain, index: int, tokens: Sequence[int]) -> BlockHash:
        """The hash of the request's full block `index`; computed once."""
        hashes = chain.hashes
        while len(hashes) <= index:
            start = len(hashes) * self._block_size
            parent = hashes[-1] if hashes else root_hash(chain.salt)
            hashes.append(self._hash_block(parent, tokens[start : start + self._block_size]))
        return hashes[index]

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
            assert self._hash_of[entry.block] == block_hash

    def _find(self, chain: PrefixChain, index: int, tokens: Sequence[int]) -> PublishedBlock | None:
        entry = self._by_hash.get(self.hash_at(chain, index, tokens))
        if entry is None or entry.parent != chain.content:
            return None
        start = index * self._block_size
        return entry if entry.token_ids == tuple(tokens[start : start + self._block_size]) else None

    def _enter(self, chain: PrefixChain, index: int, tokens: Sequence[int], block: BlockIndex) -> PublishedBlock:
        block_hash = self.hash_at(chain, index, tokens)
        # A foreign entry under this hash is a collision, or a block whose parent was evicted and came back under a new
        # identity. Either way the newer content is the one more likely to be asked for.
        foreign = self._by_hash.pop(block_hash, None)
        if foreign is not None:
            del self._hash_of[foreign.block]
            self._pool.withdraw(foreign.block)
            if self.on_residency is not None:
                self.on_residency(block_hash, False)
            self.on_forget(foreign.content)
        start = index * self._block_size
        entry = PublishedBlock(
            block,
            ContentId(self._next_content),
            chain.content,
            tuple(tokens[start : start + self._block_size]),
        )
        self._next_content += 1
        self._by_hash[block_hash] = entry
        self._hash_of[block] = block_hash
        self._pool.publish(block)
        if self.on_residency is not None:
            self.on_residency(block_hash, True)
        return entry

    def _forget(self, block: BlockIndex) -> None:
        block_hash = self._hash_of.pop(block)
        entry = self._by_hash.pop(block_hash)
        if self.on_residency is not None:
            self.on_residency(block_hash, False)
        self.on_forget(entry.content)
