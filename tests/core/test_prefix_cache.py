"""Tests of the prefix cache: the blocks that a lookup finds, with good and with bad hash functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.contracts.ids import BlockHash, hash_block
from trioserve.core.kv_blocks import BlockPool
from trioserve.core.prefix_cache import PrefixCache, PrefixChain

BLOCK_SIZE = 2


def always_the_same(parent: BlockHash, token_ids) -> BlockHash:
    return BlockHash(b"same")


def own_tokens_only(parent: BlockHash, token_ids) -> BlockHash:
    """Hash only the tokens of the block, and ignore its parent."""
    return BlockHash(bytes(token_ids))


def sum_of_tokens(parent: BlockHash, token_ids) -> BlockHash:
    return BlockHash(bytes([parent[0] % 2, sum(token_ids) % 3]))


HASHES = [hash_block, always_the_same, own_tokens_only, sum_of_tokens]


class Holder:
    """Computes prompts, and records the content of every block: the whole prefix up to the end of the block, and the
    salt.
    """

    def __init__(self, block_count: int, hash_function: Callable[..., BlockHash]) -> None:
        self.pool = BlockPool(block_count)
        self.cache = PrefixCache(self.pool, BLOCK_SIZE, hash_block=hash_function)
        self.content: dict[int, tuple[str | None, tuple[int, ...]]] = {}

    def match(self, tokens: tuple[int, ...], salt: str | None = None) -> int:
        """Return how many blocks are found. Check that each found block contains exactly this prefix."""
        blocks = self.cache.match(PrefixChain(salt), tokens)
        for index, block in enumerate(blocks):
            assert self.content[block] == (salt, tokens[: (index + 1) * BLOCK_SIZE])
        return len(blocks)

    def compute(self, tokens: tuple[int, ...], salt: str | None = None, *, use_hits: bool = True) -> list[int]:
        """Compute tokens, and return the full blocks. The caller must release them. Cache hits are shared."""
        chain = PrefixChain(salt)
        hits = self.cache.match(chain, tokens) if use_hits else []
        self.pool.share(hits)
        blocks = hits + self.pool.allocate(len(tokens) // BLOCK_SIZE - len(hits))
        for index in range(len(hits), len(blocks)):
            self.content[blocks[index]] = (salt, tokens[: (index + 1) * BLOCK_SIZE])
        self.cache.publish(chain, tokens, len(tokens), blocks)
        self.check()
        return blocks

    def release(self, blocks: list[int]) -> None:
        self.pool.release(blocks)
        self.check()

    def check(self) -> None:
        self.pool.check()
        self.cache.check()


def check(computed: str, asked: str, expect: int, *, salts: tuple[str | None, str | None] = (None, None)) -> None:
    """Compute the prefix `computed`, look up the prefix `asked`, and expect `expect` blocks of two tokens. Each digit
    is a token.
    """
    holder = Holder(8, hash_block)
    holder.release(holder.compute(tuple(map(int, computed)), salts[0]))
    assert holder.match(tuple(map(int, asked)), salts[1]) == expect


@pytest.mark.parametrize(
    ("computed", "asked", "expect"),
    [
        pytest.param("1234", "12345", 2, id="the whole prefix"),
        pytest.param("1234", "1234", 1, id="one token is left to compute"),
        pytest.param("12345", "12345", 2, id="a partial block is not published"),
        pytest.param("123", "1234", 1, id="a partial block is not found"),
        pytest.param("1234", "12", 0, id="a single block must be computed"),
        pytest.param("1234", "1", 0, id="less than a block"),
        pytest.param("1234", "12995", 1, id="up to the difference"),
        pytest.param("1234", "19345", 0, id="nothing after the difference"),
        pytest.param("1234", "34125", 0, id="equal blocks after another prefix"),
        pytest.param("1212", "12125", 2, id="equal blocks in one prompt"),
        pytest.param("1212", "12", 0, id="equal blocks, shorter"),
    ],
)
def test_the_longest_published_prefix_is_found(computed, asked, expect):
    check(computed, asked, expect)


@pytest.mark.parametrize(
    ("salts", "expect"),
    [((None, None), 2), (("a", "a"), 2), (("a", "b"), 0), ((None, "a"), 0), (("a", None), 0), ((None, ""), 0)],
)
@pytest.mark.parametrize("hash_function", HASHES)
def test_equal_prefixes_share_blocks_only_if_their_salts_are_equal(salts, expect, hash_function):
    holder = Holder(8, hash_function)
    holder.release(holder.compute((1, 2, 3, 4), salts[0]))
    found = holder.match((1, 2, 3, 4, 5), salts[1])
    assert found == expect if hash_function is hash_block else found <= expect


def test_blocks_with_equal_content_are_published_once():
    holder = Holder(4, hash_block)
    first = holder.compute((1, 2, 3, 4))
    second = holder.compute((1, 2, 3, 4), use_hits=False)
    assert set(first).isdisjoint(second)
    holder.release(second)
    assert holder.pool.free_count == 2, "the second copy is not kept"
    holder.release(first)
    assert holder.pool.cached_count == 2
    assert holder.match((1, 2, 3, 4, 5)) == 2


def test_a_colliding_prefix_replaces_the_entry_and_never_shares_blocks():
    holder = Holder(4, always_the_same)
    first = holder.compute((1, 2))
    second = holder.compute((3, 4))
    assert holder.match((1, 2, 5)) == 0
    assert holder.match((3, 4, 5)) == 1
    holder.release(first)
    assert (holder.pool.free_count, holder.pool.cached_count) == (3, 0)
    holder.release(second)
    assert (holder.pool.free_count, holder.pool.cached_count) == (3, 1)


def test_a_block_whose_parent_was_evicted_is_not_found_under_the_new_parent():
    holder = Holder(3, hash_block)
    first = holder.compute((1, 2))
    # Publish the prefix again with an unpublished copy of its first block. Only the second block is published.
    second = holder.compute((1, 2, 3, 4), use_hits=False)
    holder.release(first)
    holder.pool.release(holder.pool.allocate(1))  # This allocation evicts the first block.
    holder.release(second)
    assert holder.match((1, 2, 3, 4, 5)) == 0
    third = holder.compute((1, 2, 3, 4))
    holder.release(third)
    assert holder.match((1, 2, 3, 4, 5)) == 2


def test_block_hashes_are_computed_once_per_request():
    calls: list[tuple[int, ...]] = []

    def counting(parent: BlockHash, token_ids) -> BlockHash:
        calls.append(tuple(token_ids))
        return hash_block(parent, token_ids)

    pool = BlockPool(4)
    cache = PrefixCache(pool, BLOCK_SIZE, hash_block=counting)
    chain, tokens = PrefixChain(None), [1, 2, 3, 4, 5]
    for _ in range(3):
        assert cache.match(chain, tokens) == []
        chain.restart()
        cache.hash_at(chain, 1, tokens)
    cache.publish(chain, tokens, 5, pool.allocate(3))
    assert calls == [(1, 2), (3, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("hash_function", HASHES)
@given(data=st.data())
def test_no_prefix_finds_foreign_blocks_even_with_weak_hashes(hash_function, data):
    holder = Holder(6, hash_function)
    held: list[list[int]] = []
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=8).map(tuple)
    salts = st.sampled_from([None, "", "a"])
    for _ in range(data.draw(st.integers(1, 12))):
        tokens, salt = data.draw(prompts), data.draw(salts)
        holder.match(tokens, salt)
        if held and data.draw(st.booleans()):
            holder.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
        elif len(tokens) // BLOCK_SIZE <= holder.pool.free_count:
            held.append(holder.compute(tokens, salt, use_hits=data.draw(st.booleans())))
        elif len(tokens) // BLOCK_SIZE <= holder.pool.available_count:
            held.append(holder.compute(tokens, salt, use_hits=False))
    for blocks in held:
        holder.release(blocks)
    assert holder.pool.used_count == 0
