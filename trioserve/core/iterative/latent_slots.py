"""Ownership of latent slots, and the state of a request that takes a known number of steps.

A slot is only an index. No code in this module touches a tensor.

    an own slot   belongs to one running request, from the step that admits it until it ends or is preempted.
    a kept slot   belongs to one preempted request until it resumes or ends, so nothing is computed twice.

In all other states, a request owns no slot. Each slot is released exactly once: when its request is preempted, resumed
or ended. A BlockPool counts the claims on each kind of slot. Slots are numbered consecutively: own slots first, then
kept slots. If a move reads or writes a slot, the same plan may give this slot to another request. This is safe, because
moves are done in order, and before the computation.
"""

from __future__ import annotations

from trioserve.contracts.events import IterativePhase
from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.iterative import IterativeRequest, LatentMove
from trioserve.core.kv_blocks import BlockPool
from trioserve.core.request_state import RequestLife, RequestStatus

__all__ = ["LiveIteration", "LatentSlots"]


class LiveIteration(RequestLife[IterativeRequest]):
    """State of one iterative request.

    Args:
        request: the request.
        arrival_index: number of requests that arrived at this core before.

    Attributes:
        last_turn: number of the step in which the request was last computed or got its slot. The smallest number
            belongs to the request that has waited longest.
        has_had_turn: True if the request was computed at least once since it got its slot.
        steps_done: number of completed denoising steps.
    """

    __slots__ = ("has_had_turn", "is_encoded", "kept_slot", "last_turn", "slot", "steps_done")

    def __init__(self, request: IterativeRequest, arrival_index: int) -> None:
        super().__init__(request, arrival_index)
        self.slot: BlockIndex | None = None
        self.kept_slot: BlockIndex | None = None
        self.is_encoded = False
        self.steps_done = 0
        self.last_turn = 0
        self.has_had_turn = False

    @property
    def phase(self) -> IterativePhase:
        """Return the phase of the current step, or else of the next step."""
        if self.steps_done == self.request.step_count:
            return IterativePhase.DECODE
        if self.is_encoded:
            return IterativePhase.DENOISE
        return IterativePhase.QUEUED if self.status is RequestStatus.WAITING else IterativePhase.ENCODE

    @property
    def wants_partial(self) -> bool:
        """Return True if the next denoising step must also produce a partial result.

        The last denoising step produces no partial result, because the complete output follows.
        """
        every, done = self.request.partial_every, self.steps_done + 1
        return every is not None and done % every == 0 and done < self.request.step_count


class LatentSlots:
    """Allocates and releases the latent slots of an engine.

    Args:
        slot_count: number of own slots.
        kept_slot_count: number of kept slots.
    """

    def __init__(self, slot_count: int, kept_slot_count: int) -> None:
        self.own = BlockPool(slot_count)
        self.kept = BlockPool(kept_slot_count)
        self._freed: set[int] = set()  # Slots that were released since the last plan and not allocated again.

    @property
    def has_free(self) -> bool:
        return self.own.free_count > 0

    @property
    def can_keep(self) -> bool:
        """Return True if a kept slot is free."""
        return self.kept.free_count > 0

    def take(self, live: LiveIteration) -> None:
        """Allocate an own slot. The caller must check has_free first.

        Args:
            live: a request without a slot.
        """
        assert live.slot is live.kept_slot is None, f"{live.request.id} has a slot"
        (live.slot,) = self.own.allocate(1)
        self._freed.discard(live.slot)

    def keep(self, live: LiveIteration) -> LatentMove:
        """Move a request's latent to a kept slot. The caller must check can_keep first.

        Args:
            live: a request with an own slot, which this call releases.

        Returns:
            The move, for the next plan.
        """
        assert live.slot is not None, f"{live.request.id} has no slot"
        (live.kept_slot,) = self.kept.allocate(1)
        move = LatentMove(live.slot, self._kept_index(live))
        self._freed.discard(move.target)
        self.own.release([live.slot])
        live.slot = None
        return move

    def restore(self, live: LiveIteration) -> LatentMove:
        """Move a kept latent back to an own slot. The caller must check has_free first.

        Args:
            live: a request with a kept slot, which this call releases.

        Returns:
            The move, for the next plan.
        """
        assert live.kept_slot is not None, f"{live.request.id} has no kept slot"
        (live.slot,) = self.own.allocate(1)
        move = LatentMove(self._kept_index(live), live.slot)
        self._freed.discard(move.target)
        self.kept.release([live.kept_slot])
        live.kept_slot = None
        return move

    def release(self, live: LiveIteration) -> None:
        """Release all slots of a request. The latents in them are lost.

        Args:
            live: any request.
        """
        if live.slot is not None:
            self._freed.add(live.slot)
            self.own.release([live.slot])
            live.slot = None
        if live.kept_slot is not None:
            self._freed.add(self._kept_index(live))
            self.kept.release([live.kept_slot])
            live.kept_slot = None

    def freed(self) -> tuple[int, ...]:
        """Return the slots whose content became invalid since the last call. The caller must make the model discard
        this content.
        """
        freed = tuple(sorted(self._freed))
        self._freed.clear()
        return freed

    def _kept_index(self, live: LiveIteration) -> int:
        assert live.kept_slot is not None
        return self.own.block_count + live.kept_slot
