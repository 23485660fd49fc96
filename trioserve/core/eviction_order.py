"""The order in which cached blocks are evicted.

Without sessions, this is the order of last use. A session that waits for its next turn retains chains of blocks: a
retained block counts as if it had been used later than it was, by the bonus of its chain in seconds. So a bonus of 60
seconds protects a chain from blocks that were last used in the 60 seconds after it, and from no others. This is the
same as a value that halves per unit of time. Time does not change the order of two entries, because all of them age
alike. So nothing is sorted again while time passes.

    ended       blocks that only an ended session used. They are evicted first, last blocks of a chain first
    unretained  by last use. A block that was used again while it was cached has a bonus, too, when it is compared with
                retained blocks
    retained    by the value of the best chain that lists the block: last use plus bonus

A chain is evicted from its end, because a block is useless without the blocks before it. Several chains may list one
block. It is retained until the last of these chains drops it. So the best chain decides.

Every cached block can be evicted at any time. A chain has no claim on a block. It only changes the order.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.page import EvictionClass

__all__ = ["BONUS_SECONDS", "STALE_MAX", "Chain", "ChainRanking", "EvictionOrder", "TenantShare"]

# A block that is likely to be used again counts as used this many seconds later than it was.
BONUS_SECONDS: Final = 60.0
STALE_MAX: Final = 64  # Stale entries of a heap, beyond one per valid entry, from which on the heap is built again.


class Chain:
    """Consecutive blocks that a session retains, from the first block of a prefix on.

    Args:
        share: the share of the session's tenant. It counts the blocks of this chain that no earlier chain lists.

    Attributes:
        is_expected: True while the session is expected. EvictionOrder.expect changes it.
        listings: the blocks, as EvictionOrder.listings returns them.
        used_at: time of the last turn or hint, in seconds.
        value: time of the last turn or hint plus the bonus, in seconds. The chain with the smallest value is evicted
            first.
    """

    __slots__ = ("is_expected", "listings", "share", "used_at", "value")

    def __init__(self, share: TenantShare) -> None:
        self.share = share
        self.is_expected = False
        self.listings: list[int] = []
        self.used_at = 0.0
        self.value = 0.0


class ChainRanking:
    """Finds the chain with the smallest value.

    Cost:
        O(log chains) for a change, amortized. A chain whose value changes leaves a stale entry in the heap, and too
        many stale entries are removed together.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Chain]] = []
        self._chains: set[Chain] = set()
        self._serials = itertools.count()

    def __len__(self) -> int:
        return len(self._chains)

    def __iter__(self) -> Iterator[Chain]:
        return iter(self._chains)

    def put(self, chain: Chain) -> None:
        """Add a chain, or note that its value has changed.

        Args:
            chain: a chain with its value.
        """
        self._chains.add(chain)
        if len(self._heap) > 2 * len(self._chains) + STALE_MAX:
            self._heap = [(other.value, next(self._serials), other) for other in self._chains]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (chain.value, next(self._serials), chain))

    def remove(self, chain: Chain) -> None:
        self._chains.discard(chain)

    def weakest(self) -> Chain | None:
        """Return the chain with the smallest value. None if there is no chain."""
        heap = self._heap
        while heap:
            value, _serial, chain = heap[0]
            if chain in self._chains and chain.value == value:
                return chain
            heapq.heappop(heap)
        return None


class TenantShare:
    """The retained blocks of one tenant. They are limited to a share of the pool.

    Attributes:
        block_count: blocks that the tenant's chains list. A block that several chains list counts once, for the tenant
            whose chain listed it first.
        ranking: the tenant's chains.
        return_rates: fractions of waits after which the tenant's sessions returned, as moving averages: for the first
            wait of a session, and for later waits.
    """

    __slots__ = ("block_count", "ranking", "return_rates")

    RATE_AT_START = 0.1
    RATE_WEIGHT = 1 / 16  # Weight of the latest wait in the moving average `return_rates`.

    def __init__(self) -> None:
        self.block_count = 0
        self.ranking = ChainRanking()
        self.return_rates = [self.RATE_AT_START, self.RATE_AT_START]

    def note_wait(self, *, is_first: bool, returned: bool) -> None:
        """Note whether a session returned after a wait, and update the tenant's rate of returns.

        Args:
            is_first: True if it is the session's first wait.
            returned: True if the session's next turn has come. False if it did not come for a long time.
        """
        self.return_rates[not is_first] += self.RATE_WEIGHT * (returned - self.return_rates[not is_first])


class EvictionOrder:
    """The cached blocks of a pool, and the chains that retain them.

    Args:
        block_count: blocks in the pool.

    Attributes:
        now: time of the current call, in seconds. Blocks that become cached count as used at this time.
        retained_count: cached blocks that a chain lists.
        expected_count: cached blocks that a chain of an expected session lists.
        spared_count: retained blocks that would be evicted already if only recency counted.
        spared_hits_total: number of times that a block counted in spared_count was used again.
        evictions_total: evicted blocks by class.

    Cost:
        O(1) per block, and O(log n) for a block that loses its last chain.
    """

    def __init__(self, block_count: int) -> None:
        self.now = 0.0
        self._block_count = block_count
        # The least recently used block comes first, with the time of its last use.
        self._recent: OrderedDict[BlockIndex, float] = OrderedDict()
        self._kept: OrderedDict[BlockIndex, float] = OrderedDict()  # Retained blocks, with the time of their last use.
        self._spared: dict[BlockIndex, float] = {}  # Retained blocks that recency alone would have evicted.
        self._ended: dict[BlockIndex, float] = {}  # The last block is evicted first.
        # Blocks that lost their last chain keep their place by last use, so they are in a heap. The dict has the
        # current entry of each of these blocks. Other entries of the heap are stale.
        self._former: dict[BlockIndex, tuple[float, int]] = {}
        self._former_heap: list[tuple[float, int, BlockIndex]] = []
        self._serials = itertools.count()
        self._list_counts = [0] * block_count  # Number of chains that list each block.
        self._expected_counts = [0] * block_count  # Number of chains of expected sessions that list each block.
        self._share_of: dict[BlockIndex, TenantShare] = {}
        # A block that loses its content gets the next generation. Listings of earlier generations mean nothing.
        self._generations = [0] * block_count
        self._was_hit = bytearray(block_count)  # 1 if the block was used again while it was cached.
        self._ranking = ChainRanking()
        self.expected_count = 0
        self.spared_hits_total = 0
        self.evictions_total = dict.fromkeys(EvictionClass, 0)

    # --- Blocks ---

    def __len__(self) -> int:
        return len(self._recent) + len(self._kept) + len(self._spared) + len(self._ended) + len(self._former)

    def __contains__(self, block: object) -> bool:
        return (
            block in self._recent
            or block in self._kept
            or block in self._spared
            or block in self._ended
            or block in self._former
        )

    @property
    def retained_count(self) -> int:
        return len(self._kept) + len(self._spared)

    @property
    def spared_count(self) -> int:
        return len(self._spared)

    def retained_blocks(self) -> list[BlockIndex]:
        """Return the cached blocks that a chain lists."""
        return [*self._kept, *self._spared]

    def add(self, block: BlockIndex) -> None:
        """Add a block that becomes cached.

        Args:
            block: a block without claims. Of several blocks of a prefix, the last one is added first.
        """
        (self._kept if self._list_counts[block] else self._recent)[block] = self.now
        self.expected_count += self._expected_counts[block] > 0

    def remove(self, block: BlockIndex) -> None:
        """Remove a cached block because it is used again, or because its content is lost.

        Args:
            block: a cached block.

        Raises:
            KeyError: the block is not cached.
        """
        self._was_hit[block] = True
        self.expected_count -= self._expected_counts[block] > 0
        if block in self._recent:
            del self._recent[block]
        elif block in self._kept:
            del self._kept[block]
        elif block in self._spared:
            del self._spared[block]
            self.spared_hits_total += 1
        elif block in self._former:
            del self._former[block]
        else:
            del self._ended[block]

    def forget(self, block: BlockIndex) -> None:
        """Note that a block loses its content, so no chain lists it any more.

        Args:
            block: a block that is not in this order. It may be in use.
        """
        self._was_hit[block] = False
        if self._list_counts[block]:
            self._generations[block] += 1
            self._list_counts[block] = self._expected_counts[block] = 0
            self._share_of.pop(block).block_count -= 1

    def evict(self) -> BlockIndex:
        """Remove and return the cached block that is first in this order. There must be a cached block."""
        return self._evicted(*self._pop_first())

    def evict_unretained(self) -> BlockIndex:
        """Remove and return the first cached block that no chain lists. There must be one."""
        if self._ended:
            return self._evicted(*self._ended.popitem(), EvictionClass.ENDED)
        stamp = self._first_stamp()
        return self._evicted(self._pop_unretained(), stamp, EvictionClass.RECENCY)

    def _evicted(self, block: BlockIndex, used_at: float, kind: EvictionClass) -> BlockIndex:
        self._was_hit[block] = False
        self.evictions_total[kind] += 1
        if self._kept:
            # Recency alone evicts the block that was used least recently. If this is a retained block, it is spared.
            oldest, stamp = next(iter(self._kept.items()))
            if stamp <= used_at and stamp <= self._first_stamp():
                del self._kept[oldest]
                self._spared[oldest] = stamp
        return block

    def _pop_first(self) -> tuple[BlockIndex, float, EvictionClass]:
        """Remove the first cached block. Return it with the time of its last use and its class."""
        if self._ended:
            return *self._ended.popitem(), EvictionClass.ENDED
        while True:
            chain = self._ranking.weakest()
            stamp = self._first_stamp()
            if chain is None or (stamp != _NEVER and self._unretained_value(stamp) <= chain.value):
                return self._pop_unretained(), stamp, EvictionClass.RECENCY
            block = self._drop_last(chain)
            # A block that was used later, by a request without a session, keeps its place by last use.
            if block is not None and self._former[block][0] <= stamp:
                return block, self._former.pop(block)[0], EvictionClass.RETAINED

    def _first_stamp(self) -> float:
        """Return the last use of the first unretained block, or _NEVER if there is none."""
        heap = self._former_heap
        while heap and self._former.get(heap[0][2]) != heap[0][:2]:
            heapq.heappop(heap)
        former = heap[0][0] if heap else _NEVER
        recent = next(iter(self._recent.values()), _NEVER)
        return min(former, recent)

    def _unretained_value(self, stamp: float) -> float:
        """Return the value of the first unretained block, whose last use was at `stamp`.

        A block that was used again has shown that it is worth as much as a block of a session.
        """
        is_former = next(iter(self._recent.values()), _NEVER) != stamp
        block = self._former_heap[0][2] if is_former else next(iter(self._recent))
        return stamp + BONUS_SECONDS if self._was_hit[block] else stamp

    def _pop_unretained(self) -> BlockIndex:
        heap = self._former_heap
        if self._first_stamp() != next(iter(self._recent.values()), _NEVER):
            block = heapq.heappop(heap)[2]
            del self._former[block]
            return block
        return self._recent.popitem(last=False)[0]

    # --- Chains ---

    def listings(self, blocks: Iterable[BlockIndex]) -> list[int]:
        """Return a number for each block that identifies the block with its current content.

        Args:
            blocks: published blocks.
        """
        generations, count = self._generations, self._block_count
        return [generations[block] * count + block for block in blocks]

    def retain(self, chain: Chain, listings: Sequence[int]) -> None:
        """Let a chain list these blocks, in addition to the blocks that it lists already. The caller must rank it.

        Args:
            chain: a chain of this order, or a new one.
            listings: further blocks, all in use.
        """
        assert not chain.is_expected, "a session with a live request is not expected"
        counts = self._list_counts
        for listing in listings:
            block = BlockIndex(listing % self._block_count)
            if counts[block] == 0:
                self._share_of[block] = chain.share
                chain.share.block_count += 1
            counts[block] += 1
        chain.listings += listings

    def is_expected(self, block: BlockIndex) -> bool:
        """Return True if a chain of an expected session lists the block with its current content.

        Args:
            block: a block in any state.
        """
        return self._expected_counts[block] > 0

    def is_listed(self, block: BlockIndex) -> bool:
        """Return True if a chain lists the block with its current content.

        Args:
            block: a block in any state.
        """
        return self._list_counts[block] > 0

    def expect(self, chain: Chain, *, is_expected: bool) -> None:
        """Note that a chain's session is expected from now on, or is not expected any more.

        Args:
            chain: a chain of this order. While its session is expected, it lists no further blocks.
            is_expected: True if the session is expected.
        """
        assert chain.is_expected != is_expected
        chain.is_expected = is_expected
        step = 1 if is_expected else -1
        counts, generations, size, kept, spared = (
            self._expected_counts,
            self._generations,
            self._block_count,
            self._kept,
            self._spared,
        )
        for listing in chain.listings:
            block = BlockIndex(listing % size)
            if generations[block] == listing // size:
                counts[block] += step
                if counts[block] == is_expected and (block in kept or block in spared):
                    self.expected_count += step

    def rank(self, chain: Chain) -> None:
        """Note that the value of a chain has changed, or that the chain lists its first blocks.

        Args:
            chain: a chain that lists blocks.
        """
        self._ranking.put(chain)
        chain.share.ranking.put(chain)

    def drop(self, chain: Chain) -> list[BlockIndex]:
        """Remove a chain. Its blocks that no other chain lists are evicted by last use from now on.

        Args:
            chain: any chain of this order.

        Returns:
            Those of these blocks that are cached, the last block first.
        """
        dropped = (self._drop_last(chain) for _ in range(len(chain.listings)))
        return [block for block in dropped if block is not None]

    def limit(self, share: TenantShare, block_count_max: int) -> None:
        """Drop the last blocks of a tenant's weakest chains while the tenant has too many blocks.

        Args:
            share: the blocks of the tenant.
            block_count_max: highest number of blocks.
        """
        while share.block_count > block_count_max:
            chain = share.ranking.weakest()
            if chain is None:
                return  # Chains of other tenants list the remaining blocks.
            self._drop_last(chain)

    def evict_soon(self, blocks: Iterable[BlockIndex]) -> None:
        """Move cached blocks that no chain lists to the front of the order.

        Args:
            blocks: blocks in any state, the first block of a prefix first.
        """
        for block in blocks:
            if block in self._recent:
                self._ended[block] = self._recent.pop(block)
            elif block in self._former:
                self._ended[block] = self._former.pop(block)[0]

    def _drop_last(self, chain: Chain) -> BlockIndex | None:
        """Remove the last block of a chain.

        Returns:
            The block, if it is cached and no other chain lists it.
        """
        listing = chain.listings.pop()
        if not chain.listings:
            self._ranking.remove(chain)
            chain.share.ranking.remove(chain)
        generation, index = divmod(listing, self._block_count)
        block = BlockIndex(index)
        if self._generations[block] != generation:
            return None
        if chain.is_expected:
            self._expected_counts[block] -= 1
            if not self._expected_counts[block] and (block in self._kept or block in self._spared):
                self.expected_count -= 1
        self._list_counts[block] -= 1
        if self._list_counts[block]:
            return None
        self._share_of.pop(block).block_count -= 1
        stamp = self._kept.pop(block, None)
        if stamp is None:
            stamp = self._spared.pop(block, None)
        if stamp is None:
            return None
        entry = (stamp, next(self._serials))
        self._former[block] = entry
        heapq.heappush(self._former_heap, (*entry, block))
        return block

    def check(self) -> None:
        """Assert that the counts agree with the chains. The cost is O(blocks + listings), so only tests call this."""
        counts, expected = [0] * self._block_count, [0] * self._block_count
        for chain in self._ranking:
            for listing in chain.listings:
                generation, block = divmod(listing, self._block_count)
                counts[block] += self._generations[block] == generation
                expected[block] += self._generations[block] == generation and chain.is_expected
        assert counts == self._list_counts, "the chains of blocks are miscounted"
        assert expected == self._expected_counts, "the chains of expected sessions are miscounted"
        assert self.expected_count == sum(expected[block] > 0 for block in self.retained_blocks()), (
            "the cached blocks of expected sessions are miscounted"
        )
        places = (self._recent, self._kept, self._spared, self._ended, self._former)
        assert len(self) == len({block for place in places for block in place}), "a block is in the order twice"
        for place in places:
            for block in place:
                is_retained = place is self._kept or place is self._spared
                assert (counts[block] > 0) == is_retained, f"block {block} is retained without a chain, or not with one"
        paid: dict[TenantShare, int] = {}
        for share in self._share_of.values():
            paid[share] = paid.get(share, 0) + 1
        assert all(share.block_count == count for share, count in paid.items()), "a tenant's blocks are miscounted"
        assert self._share_of.keys() == {block for block, count in enumerate(counts) if count}, "a block has no share"


_NEVER: Final = float("inf")
