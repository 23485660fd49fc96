"""Ownership of KV blocks. Each block is free, cached, used, held or retired.

The pool counts claims on block indexes, and never touches a tensor. Every block is in exactly one state:

    free     no claims, and no findable content
    cached   no claims, but its content can still be found. Allocated last, in the eviction order (eviction_order.py)
    used     one or more live requests use the block. It may have holds too
    held     only connectors have claims, for one or more finished requests
    retired  no claims and no content. Not allocated until the pool may grow again, so its memory can be released

    free ──allocate──► used ──last release──► free, or cached if its content is published
    cached ──share──► used                    cached ──allocate (evicted)──► used
    used ──last release, with a hold on it──► held ──share──► used
    held ──last unhold──► free, or cached if its content is published
    any ──without claims, at or above the limit──► retired ──the limit rises──► free

Users and holds are claims on a block. The code that adds a claim must also release it. A block with a claim is never
allocated. A block with a user counts as used. A block that has only holds counts as held. The published content of a
held block can still be found and shared, because the connector only reads it. A block that a connector may write to is
not published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.page import BlockState
from trioserve.core.eviction_order import EvictionOrder

__all__ = ["BlockPool"]


class BlockPool:
    """Counts the claims on every KV block.

    Args:
        block_count: blocks in the pool.

    Attributes:
        limit: blocks with this index or a higher one are retired as soon as they have no claims.
        retiring_count: number of blocks at or above the limit that still have claims.
        on_retired: called when retiring_count becomes 0.
        order: the cached blocks, in the order in which they are evicted.

    Cost:
        O(1) per block. held_count and used_count are O(held blocks).
    """

    def __init__(self, block_count: int) -> None:
        self.limit = block_count
        self.retiring_count = 0
        self.on_retired: Callable[[], None] = lambda: None
        self._claim_counts = [0] * block_count
        # Number of holds of each block. A block without holds has no entry.
        self._hold_counts: dict[BlockIndex, int] = {}
        self._published = [False] * block_count
        self._drafted = bytearray(block_count)
        # This list is a stack, because the block that was freed last is most likely still in a CPU cache.
        self._free = [BlockIndex(index) for index in reversed(range(block_count))]
        self.order = EvictionOrder(block_count)
        # For each block: serial number of a session if only requests of this session have used the block, otherwise 0.
        self._owners = [0] * block_count
        self.on_evict: Callable[[BlockIndex], None] = lambda block: None

    @property
    def block_count(self) -> int:
        return len(self._claim_counts)

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def cached_count(self) -> int:
        return len(self.order)

    @property
    def held_count(self) -> int:
        return sum(1 for block, count in self._hold_counts.items() if count == self._claim_counts[block])

    @property
    def total_count(self) -> int:
        """Return the number of blocks that are not retired."""
        return self.limit + self.retiring_count

    @property
    def used_count(self) -> int:
        return self.total_count - len(self._free) - len(self.order) - self.held_count

    @property
    def available_count(self) -> int:
        """Return the number of blocks that allocate() can return. These are the free and the cached blocks."""
        return len(self._free) + len(self.order)

    @property
    def spare_count(self) -> int:
        """Return the number of spare blocks: the free ones, and the cached ones that no session retains."""
        return self.available_count - self.order.retained_count

    def spare_count_of(self, blocks: Iterable[BlockIndex]) -> int:
        """Return how many of the given blocks count as spare.

        Args:
            blocks: blocks that have entries in the prefix cache.
        """
        return sum(1 for block in blocks if self.is_idle(block) and not self.order.is_listed(block))

    def user_count(self, block: BlockIndex) -> int:
        return self._claim_counts[block] - self._hold_counts.get(block, 0)

    def hold_count(self, block: BlockIndex) -> int:
        return self._hold_counts.get(block, 0)

    def allocate(self, count: int, owner: int = 0, *, is_spare: bool = False) -> list[BlockIndex]:
        """Allocate blocks with one user each. If no block is free, evict cached blocks.

        Args:
            count: 0 to available_count, or to spare_count if is_spare is True.
            owner: serial number of the user's session. 0 without a session.
            is_spare: True to evict only blocks that no session retains.
        """
        assert 0 <= count <= (self.spare_count if is_spare else self.available_count)
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block = self.order.evict_unretained() if is_spare else self.order.evict()
                self._published[block] = False
                self.on_evict(block)
            assert self._claim_counts[block] == 0
            self._claim_counts[block] = 1
            self._drafted[block] = False
            self._owners[block] = owner
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[BlockIndex], owner: int = 0) -> None:
        """Add a user to blocks that are cached, used or held.

        Args:
            blocks: blocks that have entries in the prefix cache.
            owner: serial number of the user's session. 0 without a session.
        """
        for block in blocks:
            if self._claim_counts[block] == 0:
                self.order.remove(block)  # A KeyError here means that a free block was shared, whose content is lost.
            self._claim_counts[block] += 1
            if self._owners[block] != owner:
                self._owners[block] = 0

    def owner(self, block: BlockIndex) -> int:
        """Return the only session whose requests have used a block.

        Args:
            block: any block.

        Returns:
            Serial number of the session. 0 if there is no such session.
        """
        return self._owners[block]

    def is_published(self, block: BlockIndex) -> bool:
        return self._published[block]

    def is_idle(self, block: BlockIndex) -> bool:
        """Return True if the block has no users and no holds.

        Args:
            block: a free, cached, used or held block. If it is idle, sharing it lowers available_count.
        """
        return self._claim_counts[block] == 0

    def hold(self, blocks: Iterable[BlockIndex]) -> None:
        """Add a hold to blocks that are used. The request that uses them must still release them.

        Args:
            blocks: blocks with at least one user each.
        """
        for block in blocks:
            assert self.user_count(block) > 0, f"block {block} gets a hold, but has no user"
            self._claim_counts[block] += 1
            self._hold_counts[block] = self._hold_counts.get(block, 0) + 1

    def unhold(self, blocks: Sequence[BlockIndex]) -> None:
        """Remove one hold from each block.

        Args:
            blocks: blocks with at least one hold each.
        """
        for block in blocks:
            count = self._hold_counts[block]  # A KeyError here means that the block has no hold.
            if count == 1:
                del self._hold_counts[block]
            else:
                self._hold_counts[block] = count - 1
        self.release(blocks)

    def release(self, blocks: Sequence[BlockIndex]) -> None:
        """Remove one user from each block.

        Args:
            blocks: consecutive blocks in the order of the block table. The last blocks are evicted first, because a
                block is useless without the blocks before it.
        """
        # If a user releases a block twice, the second release must not remove the claim of a connector.
        assert not self._hold_counts or all(self.user_count(block) > 0 for block in blocks), "released without a user"
        for block in reversed(blocks):
            assert self._claim_counts[block] > 0, f"block {block} is released without a user"
            self._claim_counts[block] -= 1
            if self._claim_counts[block] == 0:
                if block >= self.limit:
                    self._retire(block)
                elif self._published[block]:
                    self.order.add(block)
                else:
                    self._free.append(block)

    def set_limit(self, limit: int) -> None:
        """Retire the blocks from an index on, or make retired blocks free again.

        The content of these blocks cannot be found any more. Blocks without claims are retired at once, other blocks
        after their last release.

        Args:
            limit: 1 to block_count.

        Cost:
            O(blocks).
        """
        assert 1 <= limit <= self.block_count
        former, self.limit = self.limit, limit
        self.retiring_count = sum(map(bool, self._claim_counts[limit:]))
        if limit < former:
            self._free = [block for block in self._free if block < limit]
            for block in map(BlockIndex, range(limit, former)):
                if block in self.order:
                    self.order.remove(block)
                self._lose_content(block)
        else:
            retired = (block for block in reversed(range(former, limit)) if not self._claim_counts[block])
            self._free[:0] = map(BlockIndex, retired)  # Blocks that are in a CPU cache stay on top of the stack.

    def _retire(self, block: BlockIndex) -> None:
        self._lose_content(block)
        self.retiring_count -= 1
        if not self.retiring_count:
            self.on_retired()

    def _lose_content(self, block: BlockIndex) -> None:
        if self._published[block]:
            self._published[block] = False
            self.on_evict(block)
            self.order.forget(block)

    def publish(self, block: BlockIndex) -> None:
        """Mark the content of a used block as findable. Then the block is cached after its last release.

        Args:
            block: a block with a claim.
        """
        assert self._claim_counts[block] > 0
        self._published[block] = True

    def withdraw(self, block: BlockIndex) -> None:
        """Note that the prefix cache has no entry for a block any more.

        Args:
            block: a block that had an entry. It becomes free if it has no claims.
        """
        assert self._published[block]
        self._published[block] = False
        if self._claim_counts[block] == 0:
            self.order.remove(block)
            self._free.append(block)
        self.order.forget(block)

    def note_drafted(self, block: BlockIndex) -> None:
        """Note that a block also contains a draft model's KV for all of its tokens.

        The note is removed when the block is allocated again.

        Args:
            block: a used block.
        """
        assert self._claim_counts[block] > 0
        self._drafted[block] = True

    def is_drafted(self, block: BlockIndex) -> bool:
        return bool(self._drafted[block])

    def states(self) -> bytes:
        """Return the BlockState of every block, one byte each.

        Cost:
            O(blocks), nearly all of it in C. Intended for occasional inspection.
        """
        used = int.from_bytes(bytes(map(bool, self._claim_counts)), "big")
        published = int.from_bytes(bytes(self._published), "big")
        # Each block gets one byte: 2 if it is used, else 1 if it is published, else 0. These are values of BlockState.
        states = bytearray(((used << 1) | (published & ~used)).to_bytes(self.block_count, "big"))
        for block, count in self._hold_counts.items():
            if count == self._claim_counts[block]:
                states[block] = BlockState.HELD
        # No block above the limit is free or cached: without claims, it is retired.
        states[self.limit :] = states[self.limit :].replace(b"\0", bytes([BlockState.RETIRED]))
        return bytes(states)

    def check(self) -> None:
        """Assert that every block is in exactly one state. The cost is O(blocks), so only tests and simulations call
        this.
        """
        self.order.check()
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        for index in range(self.block_count):
            block = BlockIndex(index)
            states = (block in free) + (block in self.order) + (self._claim_counts[block] > 0)
            states += block >= self.limit and not self._claim_counts[block]
            assert states == 1, f"block {block} is in {states} states"
            held = self._hold_counts.get(block, 0)
            assert 0 <= held <= self._claim_counts[block], f"block {block} has more holds ({held}) than claims"
            assert held > 0 or block not in self._hold_counts
            assert self._published[block] or not (block in self.order or self.order.is_listed(block))
            assert block not in free or not self._published[block]
