"""Who may use which latent slot, and when it is free again. Knows indices; never touches a tensor.

    an own slot   belongs to one running request, from the step that admits it until it ends or is preempted.
    a kept slot   belongs to one preempted request, until it goes on or ends: nothing is computed twice.

Both are counted by the same books as KV blocks are, and numbered through: own slots first, then kept ones. A slot that
a move reads or writes may be given to somebody else in the same plan: moves are done in their order, before the works.
"""

from __future__ import annotations

from trioserve.contracts.iterative import LatentMove
from trioserve.core.iterative.live_iteration import LiveIteration
from trioserve.core.kv_blocks import BlockPool

__all__ = ["LatentSlots"]


class LatentSlots:
    def __init__(self, slot_count: int, kept_slot_count: int) -> None:
        self.own = BlockPool(slot_count)
        self.kept = BlockPool(kept_slot_count)
        self._freed: set[int] = set()  # since the last plan, and nobody's by now

    @property
    def has_free(self) -> bool:
        return self.own.free_count > 0

    @property
    def can_keep(self) -> bool:
        """Whether one more latent can be kept."""
        return self.kept.free_count > 0

    def take(self, live: LiveIteration) -> None:
        """has_free must be so."""
        assert live.slot is live.kept_slot is None, f"{live.request.id} has a slot"
        (live.slot,) = self.own.allocate(1)
        self._freed.discard(live.slot)

    def keep(self, live: LiveIteration) -> LatentMove:
        """It leaves its slot, and what that holds is kept. can_keep must be so."""
        assert live.slot is not None, f"{live.request.id} has no slot to leave"
        (live.kept_slot,) = self.kept.allocate(1)
        move = LatentMove(live.slot, self._kept_index(live))
        self._freed.discard(move.target)
        self.own.release([live.slot])
        live.slot = None
        return move

    def restore(self, live: LiveIteration) -> LatentMove:
        """What was kept of it is in a slot again. has_free must be so."""
        assert live.kept_slot is not None, f"nothing is kept of {live.request.id}"
        (live.slot,) = self.own.allocate(1)
        move = LatentMove(self._kept_index(live), live.slot)
        self._freed.discard(move.target)
        self.kept.release([live.kept_slot])
        live.kept_slot = None
        return move

    def release(self, live: LiveIteration) -> None:
        """All that it has, if anything. What lies there is garbage from now on."""
        if live.slot is not None:
            self._freed.add(live.slot)
            self.own.release([live.slot])
            live.slot = None
        if live.kept_slot is not None:
            self._freed.add(self._kept_index(live))
            self.kept.release([live.kept_slot])
            live.kept_slot = None

    def freed(self) -> tuple[int, ...]:
        """Slots where garbage lies. Each is told once: whoever asks is to have it let go."""
        freed = tuple(sorted(self._freed))
        self._freed.clear()
        return freed

    def _kept_index(self, live: LiveIteration) -> int:
        assert live.kept_slot is not None
        return self.own.block_count + live.kept_slot
