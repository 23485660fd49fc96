"""Who may use which KV block, and when it is free again. Knows indices; never touches a tensor.

Every block is in exactly one state:

    free     nobody uses it and nothing in it can be found
    cached   nobody uses it, but its content can be found again; taken last, least recently used first
    used     by one live request, or by several that share a prefix, whoever else holds it
    held     by a connector, for one finished request or several, and used by nobody

    free ──allocate──► used ──last release──► free, or cached if its content is published
    cached ──share──► used                    cached ──allocate (evicted)──► used
    used ──last release, with a hold on it──► held ──share──► used
    held ──last let_go──► free, or cached if its content is published

Users and holds are claims on a block, each given back by whoever took it. A block with a claim is never allocated. One
rule names the state: with a user it is used; with holds alone it is held. Published content of a held block can still
be found and shared, since its holder only reads it; a block that a connector may write to is not published.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.page import BlockState

__all__ = ["BlockPool"]


class BlockPool:
    """Counts the claims on every block. All calls are O(1) per block; held_count and used_count are O(held blocks)."""

    def __init__(self, block_count: int) -> None:
        self._claim_counts = [0] * block_count
        self._hold_counts: dict[BlockIndex, int] = {}  # how many of the claims are holds, where there are any
        self._published = [False] * block_count
        self._drafted = bytearray(block_count)
        # A stack: the block that was freed last is the one most likely still in a CPU cache.
        self._free = [BlockIndex(index) for index in reversed(range(block_count))]
        self._cached: OrderedDict[BlockIndex, None] = OrderedDict()  # least recently used first
        self.on_evict: Callable[[BlockIndex], None] = lambda block: None

    @property
    def block_count(self) -> int:
        return len(self._claim_counts)

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def cached_count(self) -> int:
        return len(self._cached)

    @property
    def held_count(self) -> int:
        return sum(1 for block, count in self._hold_counts.items() if count == self._claim_counts[block])

    @property
    def used_count(self) -> int:
        return len(self._claim_counts) - len(self._free) - len(self._cached) - self.held_count

    @property
    def available_count(self) -> int:
        """Blocks that allocate() can hand out: free ones, then cached ones."""
        return len(self._free) + len(self._cached)

    def user_count(self, block: BlockIndex) -> int:
        return self._claim_counts[block] - self._hold_counts.get(block, 0)

    def hold_count(self, block: BlockIndex) -> int:
        return self._hold_counts.get(block, 0)

    def allocate(self, count: int) -> list[BlockIndex]:
        """Take `count` blocks with one user each; at most available_count. Evicts cached ones when none is free."""
        assert 0 <= count <= self.available_count
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _none = self._cached.popitem(last=False)
                self._published[block] = False
                self.on_evict(block)
            assert self._claim_counts[block] == 0
            self._claim_counts[block] = 1
            self._drafted[block] = False
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[BlockIndex]) -> None:
        """Add a user to blocks that are cached, used or held."""
        for block in blocks:
            if self._claim_counts[block] == 0:
                del self._cached[block]  # a KeyError here: a free block was shared, its content is gone
            self._claim_counts[block] += 1

    def is_idle(self, block: BlockIndex) -> bool:
        """Whether nobody uses or holds the block, so that sharing it takes it out of available_count."""
        return self._claim_counts[block] == 0

    def hold(self, blocks: Iterable[BlockIndex]) -> None:
        """Add a hold to blocks that are used; their user still has to release them."""
        for block in blocks:
            assert self.user_count(block) > 0, f"block {block} is held, and its user has gone before"
            self._claim_counts[block] += 1
            self._hold_counts[block] = self._hold_counts.get(block, 0) + 1

    def let_go(self, blocks: Sequence[BlockIndex]) -> None:
        """Take one hold off each block."""
        for block in blocks:
            count = self._hold_counts[block]  # a KeyError here: let go without a hold
            if count == 1:
                del self._hold_counts[block]
            else:
                self._hold_counts[block] = count - 1
        self.release(blocks)

    def release(self, blocks: Sequence[BlockIndex]) -> None:
        """Take one user off each block. A chain is later evicted from its end: without parents a block is of no use."""
        # A user that is released twice must not take the claim of a holder.
        assert not self._hold_counts or all(self.user_count(block) > 0 for block in blocks), "released without a user"
        for block in reversed(blocks):
            assert self._claim_counts[block] > 0, f"block {block} is released without a user"
            self._claim_counts[block] -= 1
            if self._claim_counts[block] == 0:
                if self._published[block]:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def publish(self, block: BlockIndex) -> None:
        """The content of a used block can be found from now on, so it is kept when its last user leaves."""
        assert self._claim_counts[block] > 0
        self._published[block] = True

    def withdraw(self, block: BlockIndex) -> None:
        """The content of a published block can no longer be found."""
        assert self._published[block]
        self._published[block] = False
        if self._claim_counts[block] == 0:
            del self._cached[block]
            self._free.append(block)

    def note_drafted(self, block: BlockIndex) -> None:
        """A draft model has its KV, too, of every token of a used block: until it is allocated anew."""
        assert self._claim_counts[block] > 0
        self._drafted[block] = True

    def is_drafted(self, block: BlockIndex) -> bool:
        return bool(self._drafted[block])

    def states(self) -> bytes:
        """The BlockState of every block, a byte each. O(blocks), nearly all of it in C: for a look now and then."""
        used = int.from_bytes(bytes(map(bool, self._claim_counts)), "big")
        published = int.from_bytes(bytes(self._published), "big")
        # A byte of 1 for each block that is used or published: twice the one, and the other where that is not.
        states = bytearray(((used << 1) | (published & ~used)).to_bytes(self.block_count, "big"))
        for block, count in self._hold_counts.items():
            if count == self._claim_counts[block]:
                states[block] = BlockState.HELD
        return bytes(states)

    def check(self) -> None:
        """Assert that every block is in exactly one state. O(blocks): for tests and simulations."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        for index in range(self.block_count):
            block = BlockIndex(index)
            states = (block in free) + (block in cached) + (self._claim_counts[block] > 0)
            assert states == 1, f"block {block} is in {states} states"
            held = self._hold_counts.get(block, 0)
            assert 0 <= held <= self._claim_counts[block], f"block {block}: {held} holds are more than all claims"
            assert held > 0 or block not in self._hold_counts
            assert block not in cached or self._published[block]
            assert block not in free or not self._published[block]
