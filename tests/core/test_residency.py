"""Tests of residency events. The prefix cache reports each change once, in order."""

from __future__ import annotations

import pytest

from trioserve.contracts.ids import BlockHash, hash_block, root_hash
from trioserve.core.kv_blocks import BlockPool
from trioserve.core.prefix_cache import PrefixCache, PrefixChain
from trioserve.simulation.core.expected import ResidencyBook

BLOCK_SIZE = 2


class Cache:
    """A prefix cache with a listener.

    `events` contains "+" or "-" for each change, and the tokens of the block that the hash belongs to.
    """

    def __init__(self, block_count: int, **options) -> None:
        self.pool = BlockPool(block_count)
        self.cache = PrefixCache(self.pool, BLOCK_SIZE, **options)
        self.events: list[str] = []
        self.names: dict[BlockHash, str] = {}
        self.cache.on_residency = lambda name, is_resident: self.events.append(
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


def test_publishing_and_evicting_a_block_are_reported():
    cache = Cache(4)
    cache.pool.release(cache.compute("aabbc"))
    assert cache.events == ["+aa", "+aabb"]
    # Cache hits are not reported again, and neither is a release that makes a block cached.
    cache.pool.release(cache.compute("aabbdd"))
    assert cache.events[2:] == ["+aabbdd"]
    cache.compute("xxyyzzww")
    assert cache.events[3:] == ["-aabbdd", "-aabb", "-aa", "+xx", "+xxyy", "+xxyyzz", "+xxyyzzww"]


def test_content_that_is_already_published_is_not_reported_again():
    cache = Cache(4)
    first, second = PrefixChain(None), PrefixChain(None)
    tokens = [1, 2, 3]
    blocks = cache.pool.allocate(4)
    cache.cache.publish(first, tokens, 2, blocks[:2])
    cache.cache.publish(second, tokens, 2, blocks[2:])
    assert cache.events == ["+?"]


@pytest.mark.parametrize("is_told", [True, False])
def test_removal_of_a_replaced_block_is_reported_before_the_new_block(is_told):
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
