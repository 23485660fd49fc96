"""Who may use which slot for the state of layers that keep one for a whole sequence, and when it is free again.

Keys and values are there for each token, so what a prefix left can be gone on with anywhere. A state is that behind the
last computed token, and no other: computing a token changes it for good. So

    an own slot     belongs to one request, from the step that admits it until it ends or is preempted. What it holds
                    counts as far as the request's computed_count does, and nobody else ever reads it.
    a snapshot      is a copy of a state as it was at the end of a full block. It belongs to the request that has it
                    written, until the step that does is back; then to the prefix cache's entry for that block, and is
                    gone with it. Least recently used ones go first when another is to be written. A request that starts
                    from one holds it until its first chunk is back, and writes its own slot.

Where a prompt gets snapshots: behind its last full block, for whoever goes on from all of it; and where it parts from
what others have computed, for whoever shares that much. Decodes take none: each costs as much as reading the state.

Slots are numbered through: own slots first, then snapshots. Both are counted by the same books as KV blocks are.
"""

from __future__ import annotations

from collections.abc import Mapping

from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.step import StateSpan
from trioserve.core.kv_blocks import BlockPool
from trioserve.core.prefix_cache import ContentId, PrefixCache, PrefixChain
from trioserve.core.settings import CoreSettings

__all__ = ["OwnState", "StateSlots"]


class OwnState:
    """What a running request has of the slots. start: how many tokens were computed when it got them. source: the
    snapshot that it starts from, until that is read. snapshot_ends: behind so many tokens a snapshot is to be taken, in
    order. being_written: the snapshots that steps in flight write, and the number of tokens before each."""

    __slots__ = ("being_written", "slot", "snapshot_ends", "source", "start")

    def __init__(self, slot: BlockIndex, start: int, source: BlockIndex | None, snapshot_ends: tuple[int, ...]) -> None:
        self.slot = slot
        self.start = start
        self.source = source
        self.snapshot_ends = snapshot_ends
        self.being_written: list[tuple[int, BlockIndex]] = []

    def marks(self, block_size: int) -> Mapping[int, int] | None:
        """For PrefixCache.publish."""
        return {end // block_size: slot for end, slot in self.being_written} if self.being_written else None


class StateSlots:
    """own, snapshots: the two kinds of slots, each counted from 0."""

    def __init__(self, settings: CoreSettings, cache: PrefixCache) -> None:
        self.own = BlockPool(settings.state_slot_count)
        self.snapshots = BlockPool(settings.snapshot_slot_count if settings.enable_prefix_caching else 0)
        self._block_size = settings.block_size
        self._slot_of: dict[ContentId, BlockIndex] = {}
        self._content_of: dict[BlockIndex, ContentId] = {}
        self.snapshots.on_evict = self._forget_slot
        cache.on_content = self._enter
        cache.on_forget = self._forget_content

    @staticmethod
    def made(settings: CoreSettings, cache: PrefixCache) -> StateSlots | None:
        """None where the model has no such layers."""
        return StateSlots(settings, cache) if settings.state_slot_count else None

    @property
    def available_count(self) -> int:
        """How many further requests can have a slot."""
        return self.own.available_count

    @property
    def kept_count(self) -> int:
        """Snapshots that can be found."""
        return len(self._slot_of)

    def has_snapshot(self, content: ContentId) -> bool:
        return content in self._slot_of

    def take(self, chain: PrefixChain, token_count: int, computed_count: int) -> OwnState:
        """For a request that is admitted with so many known tokens, of which the first computed_count are hits: its
        chain ends with them. available_count must be above 0."""
        source = None
        if computed_count > 0:
            assert isinstance(chain.content, int), "hits end with content"
            source = self._slot_of[chain.content]  # a KeyError here: a hit without a snapshot
            self.snapshots.share([source])
        ends = {(token_count - 1) // self._block_size * self._block_size, chain.found_count * self._block_size}
        snapshot_ends = tuple(sorted(end for end in ends if end > computed_count))
        (slot,) = self.own.allocate(1)
        return OwnState(slot, computed_count, source, snapshot_ends if self.snapshots.block_count else ())

    def spans(self, state: OwnState, start: int, count: int) -> tuple[StateSpan, ...]:
        """For the chunk of these tokens, which a step computes for sure."""
        reads: int | None = state.slot
        if start == state.start:
            reads = None if state.source is None else self._snapshot_index(state.source)
        if not state.snapshot_ends or start >= state.snapshot_ends[-1]:
            return (StateSpan(count, reads, state.slot),)
        spans = []
        position, end = start, start + count
        for snapshot_end in state.snapshot_ends:
            if start < snapshot_end <= end and self.snapshots.available_count > 0:
                (snapshot,) = self.snapshots.allocate(1)
                state.being_written.append((snapshot_end, snapshot))
                index = self._snapshot_index(snapshot)
                spans.append(StateSpan(snapshot_end - position, reads, index))
                position, reads = snapshot_end, index
        spans.append(StateSpan(end - position, reads, state.slot))
        return tuple(spans)

    def note_computed(self, state: OwnState, computed_count: int) -> None:
        """A step is back, and so many tokens of the request are computed; those of its blocks that are full have been
        published."""
        if state.source is not None:
            self.snapshots.release([state.source])
            state.source = None
        while state.being_written and state.being_written[0][0] <= computed_count:
            _end, slot = state.being_written.pop(0)
            self.snapshots.release([slot])  # kept if it was entered

    def release(self, state: OwnState) -> None:
        """All that a request has, once."""
        self.own.release([state.slot])
        if state.source is not None:
            self.snapshots.release([state.source])
        for _end, slot in state.being_written:
            self.snapshots.release([slot])

    def check(self, contents: set[ContentId]) -> None:
        """Assert that the books agree. contents: what the prefix cache holds. O(slots): for tests and simulations."""
        self.own.check()
        self.snapshots.check()
        assert self.own.cached_count == 0, "a state of one request's can be found"
        assert {content: slot for slot, content in self._content_of.items()} == self._slot_of
        assert self._slot_of.keys() <= contents, "a snapshot of what the prefix cache does not hold"

    def _snapshot_index(self, snapshot: BlockIndex) -> int:
        return self.own.block_count + snapshot

    def _enter(self, content: ContentId, mark: int) -> None:
        if content in self._slot_of:
            return  # another has written the same
        slot = BlockIndex(mark)
        self._slot_of[content] = slot
        self._content_of[slot] = content
        self.snapshots.publish(slot)

    def _forget_slot(self, slot: BlockIndex) -> None:
        del self._slot_of[self._content_of.pop(slot)]

    def _forget_content(self, content: ContentId) -> None:
        slot = self._slot_of.pop(content, None)
        if slot is not None:
            del self._content_of[slot]
            self.snapshots.withdraw(slot)
