"""What the core knows of a request that takes a known number of steps: how far it is, and where its latent lies.

It owns a slot while it is RUNNING, and while it is PREEMPTED one for kept latents. At no other time: so a slot is given
back by preempting, by going on, or by the one way out, and each time once.
"""

from __future__ import annotations

from trioserve.contracts.events import IterativePhase
from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.iterative import IterativeRequest
from trioserve.core.request_state import RequestLife, RequestStatus

__all__ = ["LiveIteration"]


class LiveIteration(RequestLife[IterativeRequest]):
    """last_turn: when it was computed or got its slot, in steps; whoever waited longest has the smallest.
    has_had_turn: it was computed since it got its slot."""

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
        """What is computed of it, or would be next."""
        if self.steps_done == self.request.step_count:
            return IterativePhase.DECODE
        if self.is_encoded:
            return IterativePhase.DENOISE
        return IterativePhase.QUEUED if self.status is RequestStatus.WAITING else IterativePhase.ENCODE

    @property
    def wants_partial(self) -> bool:
        """Behind its next denoising step. Behind the last one its output follows."""
        every, done = self.request.partial_every, self.steps_done + 1
        return every is not None and done % every == 0 and done < self.request.step_count
