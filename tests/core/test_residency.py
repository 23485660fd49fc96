"""Whoever listens to the prefix cache is told of each change once, in order, and so knows what is in it."""

from __future__ import annotations

import pytest

from trioserve.contracts.block_hash import BlockHash, hash_block, root_hash
from trioserve.core.kv_blocks import BlockPool
from trioserve.core.prefix_cache import PrefixCache, PrefixChain
from trioserve.simulation.core.expected import ResidencyBook

BLOCK_SIZE = 2


class Cache:
    """A prefix cache with somebody who listens. told: "+" or "-", and the tokens that the block's name is known for."""

    def __init__(self, block_count: int, **options) -> None:
        self.pool = BlockPool(block_count)
        self.cache = PrefixCache(self.pool, BLOCK_SIZE, **options)
        self.told: list[str] = []
        self.names: dict[BlockHash, str] = {}
        self.cache.on_residency = lambda name, is_resident: self.told.append(
            ("+" if is_resident else "-") + self.names.get(name, "?")
        )

    def compute(self, text: str) -> list[int]:
        tokens = [ord(character) for character in text]
        name = root_hash(None)
        for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
            name = hash_block(name, tokens[end - BLOCK_SIZE : end])
            self.names[name] = text[:end]
        chain = PrefixChain(None)
        hits = self.cache.match(chain, tokens)
        self.pool.share(hits)
        blocks = hits + self.pool.allocate(-(-len(tokens) // BLOCK_SIZE) - len(hits))
        self.cache.publish(chain, tokens, len(tokens), blocks)
        return blocks


def test_a_block_is_told_when_it_can_be_found_and_when_it_is_evicted():
    cache = Cache(4)
    cache.pool.release(cache.compute("aabbc"))
    assert cache.told == ["+aa", "+aabb"]
    cache.pool.release(cache.compute("aabbdd"))  # hits are not told again, and keeping is no change
    assert cache.told[2:] == ["+aabbdd"]
    cache.compute("xxyyzzww")
    assert cache.told[3:] == ["-aabbdd", "-aabb", "-aa", "+xx", "+xxyy", "+xxyyzz", "+xxyyzzww"]


def test_content_that_another_block_holds_already_is_not_told_again():
    cache = Cache(4)
    first, second = PrefixChain(None), PrefixChain(None)
    tokens = [1, 2, 3]
    blocks = cache.pool.allocate(4)
    cache.cache.publish(first, tokens, 2, blocks[:2])
    cache.cache.publish(second, tokens, 2, blocks[2:])
    assert cache.told == ["+?"]


@pytest.mark.parametrize("is_told", [True, False])
def test_a_block_that_another_of_its_name_replaces_goes_before_that_comes(is_told):
    cache = Cache(4, hash_block=lambda parent, token_ids: BlockHash(b"same"))
    book = ResidencyBook(cache.cache)
    if not is_told:
        cache.cache.on_residency = None
    cache.compute("aa?")
    cache.compute("bb?")
    assert cache.cache.resident_hashes() == [b"same"]
    assert book.resident == ({b"same"} if is_told else set())
    if is_told:
        book.check()
