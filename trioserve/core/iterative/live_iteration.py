"""State of one request that takes a known number of steps: its progress, and the slot of its latent.

The request owns an own slot while it is RUNNING, and a kept slot while it is PREEMPTED. In other states it owns none.
So each slot is released exactly once: by preempting, by resuming, or at the end.
"""

from __future__ import annotations

from trioserve.contracts.events import IterativePhase
from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.iterative import IterativeRequest
from trioserve.core.request_state import RequestLife, RequestStatus

__all__ = ["LiveIteration"]


class LiveIteration(RequestLife[IterativeRequest]):
    """State of one iterative request.

    Args:
        request: the request.
        arrival_index: number of requests that arrived at this core before.

    Attributes:
        last_turn: number of the step in which the request was last computed or got its slot. The request that has
            waited longest has the smallest number.
        has_had_turn: True if the request was computed at least once since it got its slot.
        steps_done: number of denoising steps that are done.
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
        """Return the phase that is being computed, or is computed next."""
        if self.steps_done == self.request.step_count:
            return IterativePhase.DECODE
        if self.is_encoded:
            return IterativePhase.DENOISE
        return IterativePhase.QUEUED if self.status is RequestStatus.WAITING else IterativePhase.ENCODE

    @property
    def wants_partial(self) -> bool:
        """Return True if the next denoising step must also produce a partial result.

        The last step produces no partial result, because the output follows.
        """
        every, done = self.request.partial_every, self.steps_done + 1
        return every is not None and done % every == 0 and done < self.request.step_count
