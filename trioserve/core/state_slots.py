"""Ownership of state slots, for models with layers that keep one state per sequence.

KV exists for every token, so a shared prefix can be continued at any block. A state exists only after the last computed
token, and computing a token overwrites the state. So there are two kinds of slots:

    an own slot     belongs to one request, from the step that admits it until it ends or is preempted. Its content
                    matches the request's computed_count. No other request reads it.
    a snapshot      is a copy of a state at the end of a full block. It belongs to the request that writes it until
                    that step is back. Then it belongs to the prefix cache's entry for the block, and is dropped with
                    that entry. If slots are needed, least recently used snapshots are evicted first. A request that
                    starts from a snapshot holds it until its first chunk is back. It writes to its own slot.

A snapshot is written after the last full block of a prompt, for later requests that continue the whole prompt. Another
snapshot is written at the position where a prompt begins to differ from earlier prompts, for requests that share only
the prefix before that position. Decodes write no snapshots, because writing a snapshot costs as much as reading the
state.

Slots are numbered consecutively: own slots first, then snapshots. A BlockPool counts the claims on each kind.
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
    """The slots of one running request.

    Args:
        slot: index of the request's own slot.
        start: number of tokens that were computed when the request got the slot.
        source: the snapshot from which the request starts. None if there is none, or if it was already read.
        snapshot_ends: token counts after which a snapshot must be written, ascending.

    Attributes:
        being_written: snapshots that steps in flight write. Each is mapped to the number of tokens before it.
    """

    __slots__ = ("being_written", "slot", "snapshot_ends", "source", "start")

    def __init__(self, slot: BlockIndex, start: int, source: BlockIndex | None, snapshot_ends: tuple[int, ...]) -> None:
        self.slot = slot
        self.start = start
        self.source = source
        self.snapshot_ends = snapshot_ends
        self.being_written: list[tuple[int, BlockIndex]] = []

    def marks(self, block_size: int) -> Mapping[int, int] | None:
        """Return the marks for PrefixCache.publish. They map a number of blocks to the slot of a snapshot.

        Args:
            block_size: tokens per block.
        """
        return {end // block_size: slot for end, slot in self.being_written} if self.being_written else None


class StateSlots:
    """Allocates and releases the state slots of an engine.

    Args:
        settings: limits of the engine core.
        cache: the prefix cache. This class sets its callbacks on_content and on_forget.

    Attributes:
        own: own slots, numbered from 0.
        snapshots: snapshot slots, numbered from 0.
    """

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
        """Create the slots of an engine. Return None if the model has no layers with a state.

        Args:
            settings: limits of the engine core.
            cache: the prefix cache.
        """
        return StateSlots(settings, cache) if settings.state_slot_count else None

    @property
    def available_count(self) -> int:
        """Return how many more requests can get a slot."""
        return self.own.available_count

    @property
    def kept_count(self) -> int:
        """Return the number of snapshots that lookups can find."""
        return len(self._slot_of)

    def has_snapshot(self, content: ContentId) -> bool:
        return content in self._slot_of

    def take(self, chain: PrefixChain, token_count: int, computed_count: int) -> OwnState:
        """Allocate the slots of a request that starts. The caller must check that available_count is above 0.

        Args:
            chain: the request's chain. It ends with the last hit.
            token_count: number of known tokens.
            computed_count: number of known tokens that are hits. If it is above 0, a snapshot of the state after these
                tokens exists.
        """
        source = None
        if computed_count > 0:
            assert isinstance(chain.content, int), "hits without a content"
            source = self._slot_of[chain.content]  # A KeyError here means that a hit has no snapshot.
            self.snapshots.share([source])
        ends = {(token_count - 1) // self._block_size * self._block_size, chain.found_count * self._block_size}
        snapshot_ends = tuple(sorted(end for end in ends if end > computed_count))
        (slot,) = self.own.allocate(1)
        return OwnState(slot, computed_count, source, snapshot_ends if self.snapshots.block_count else ())

    def spans(self, state: OwnState, start: int, count: int) -> tuple[StateSpan, ...]:
        """Split a chunk into spans that each read and write a state. Allocate the snapshots that the chunk writes.

        Args:
            state: the request's slots.
            start: first position of the chunk.
            count: number of tokens in the chunk. The step must compute them.
        """
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
        """Release the slots that the request does not need any more, because a step has returned.

        Args:
            state: the request's slots.
            computed_count: number of computed tokens. Their full blocks are already published.
        """
        if state.source is not None:
            self.snapshots.release([state.source])
            state.source = None
        while state.being_written and state.being_written[0][0] <= computed_count:
            _end, slot = state.being_written.pop(0)
            self.snapshots.release([slot])  # The slot stays cached if the prefix cache has an entry for it.

    def release(self, state: OwnState) -> None:
        """Release all slots of a request. The caller must call this only once.

        Args:
            state: the request's slots.
        """
        self.own.release([state.slot])
        if state.source is not None:
            self.snapshots.release([state.source])
        for _end, slot in state.being_written:
            self.snapshots.release([slot])

    def check(self, contents: set[ContentId]) -> None:
        """Assert that the slots and the prefix cache agree. The cost is O(slots), so only tests and simulations call
        this.

        Args:
            contents: contents of all blocks in the prefix cache.
        """
        self.own.check()
        self.snapshots.check()
        assert self.own.cached_count == 0, "an own slot is published"
        assert {content: slot for slot, content in self._content_of.items()} == self._slot_of
        assert self._slot_of.keys() <= contents, "a snapshot has no entry in the prefix cache"

    def _snapshot_index(self, snapshot: BlockIndex) -> int:
        return self.own.block_count + snapshot

    def _enter(self, content: ContentId, mark: int) -> None:
        if content in self._slot_of:
            return  # Another request has already written a snapshot of the same content.
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
