"""Tests of the states of a block: free, cached, used and retired."""

from __future__ import annotations

import pytest

from trioserve.contracts.page import BlockState
from trioserve.core.kv_blocks import BlockPool


def check(pool: BlockPool, *, free: int, cached: int, used: int) -> None:
    pool.check()
    assert (pool.free_count, pool.cached_count, pool.used_count) == (free, cached, used)
    assert pool.available_count == free + cached
    assert pool.block_count == free + cached + used


def test_block_is_not_allocated_again_until_it_is_released():
    pool = BlockPool(3)
    first = pool.allocate(2)
    check(pool, free=1, cached=0, used=2)
    second = pool.allocate(1)
    assert sorted(first + second) == [0, 1, 2]
    check(pool, free=0, cached=0, used=3)
    pool.release(first)
    check(pool, free=2, cached=0, used=1)
    assert sorted(pool.allocate(2)) == sorted(first)


def test_an_empty_pool_allocates_nothing():
    pool = BlockPool(1)
    assert pool.allocate(0) == []
    pool.allocate(1)
    assert pool.allocate(0) == []
    with pytest.raises(AssertionError):
        pool.allocate(1)
    with pytest.raises(AssertionError):
        BlockPool(1).allocate(-1)


def test_a_shared_block_is_free_after_its_last_release():
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.share(blocks)
    assert pool.user_count(blocks[0]) == 2
    pool.release(blocks)
    check(pool, free=0, cached=0, used=1)
    pool.release(blocks)
    check(pool, free=1, cached=0, used=0)


def test_second_release_of_a_block_is_refused_and_changes_nothing():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released without a user"):
        pool.release(blocks)
    check(pool, free=2, cached=0, used=0)


def test_a_free_block_cannot_be_shared():
    with pytest.raises(KeyError):
        BlockPool(1).share([0])


def test_a_published_block_is_cached_when_released_and_can_be_shared_again():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.publish(blocks[0])
    assert not pool.is_idle(blocks[0])
    pool.release(blocks)
    check(pool, free=1, cached=1, used=0)
    assert pool.is_idle(blocks[0])
    pool.share(blocks)
    check(pool, free=1, cached=0, used=1)
    pool.release(blocks)
    check(pool, free=1, cached=1, used=0)


def test_only_a_used_block_can_be_published():
    with pytest.raises(AssertionError):
        BlockPool(1).publish(0)


def evicted(pool: BlockPool, count: int) -> list[int]:
    """Allocate `count` blocks. Return the blocks that were evicted for this, in order."""
    seen: list[int] = []
    pool.on_evict = seen.append
    pool.allocate(count)
    return seen


def cached_chain(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    for block in blocks:
        pool.publish(block)
    pool.release(blocks)
    return blocks


def test_free_blocks_are_allocated_before_cached_blocks():
    pool = BlockPool(3)
    cached_chain(pool, 1)
    assert evicted(pool, 2) == []
    check(pool, free=0, cached=1, used=2)


def test_oldest_prefix_is_evicted_first_from_its_last_block():
    pool = BlockPool(4)
    old, new = cached_chain(pool, 2), cached_chain(pool, 2)
    assert evicted(pool, 3) == [old[1], old[0], new[1]]
    check(pool, free=0, cached=1, used=3)


def test_sharing_moves_a_cached_block_to_the_end_of_the_eviction_order():
    pool = BlockPool(4)
    old, new = cached_chain(pool, 2), cached_chain(pool, 2)
    pool.share(old)
    pool.release(old)
    assert evicted(pool, 2) == [new[1], new[0]]


def test_evicted_block_is_no_longer_in_the_prefix_cache():
    pool = BlockPool(1)
    cached_chain(pool, 1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    check(pool, free=1, cached=0, used=0)


def test_withdrawing_a_cached_block_frees_it():
    pool = BlockPool(1)
    blocks = cached_chain(pool, 1)
    pool.withdraw(blocks[0])
    check(pool, free=1, cached=0, used=0)


def test_withdrawing_a_used_block_frees_it_when_it_is_released():
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.publish(blocks[0])
    pool.withdraw(blocks[0])
    check(pool, free=0, cached=0, used=1)
    pool.release(blocks)
    check(pool, free=1, cached=0, used=0)
    with pytest.raises(AssertionError):
        pool.withdraw(blocks[0])


def test_blocks_at_the_limit_are_retired_when_they_have_no_claims():
    pool = BlockPool(4)
    pool.allocate(4)
    pool.publish(3)
    pool.release([1, 3])
    pool.set_limit(2)
    pool.check()
    assert pool.states() == bytes([BlockState.USED, BlockState.FREE, BlockState.USED, BlockState.RETIRED])
    assert (pool.free_count, pool.cached_count, pool.used_count, pool.total_count) == (1, 0, 2, 3)
    pool.release([2])
    pool.check()
    assert (pool.available_count, pool.used_count, pool.retiring_count, pool.total_count) == (1, 1, 0, 2)
    pool.set_limit(4)
    check(pool, free=3, cached=0, used=1)


def test_content_of_a_used_block_at_the_limit_is_lost():
    lost = []
    pool = BlockPool(2)
    pool.on_evict = lost.append
    pool.allocate(2)
    pool.publish(1)
    pool.set_limit(1)
    assert (lost, pool.retiring_count) == ([1], 1)
    pool.release([1])
    assert (lost, pool.total_count) == ([1], 1)
