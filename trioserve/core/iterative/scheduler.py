"""Planning of one step of iterative requests: which phase is computed for which requests, and which requests get a
slot.

A step has one phase. Requests at different timesteps denoise together, within one budget of work per step. Encoding and
decoding are separate steps, so an abort waits for at most one forward pass of one phase. Phases that have requests take
turns. Within a phase, the requests that have waited longest are computed first, as many as fit into the budget. So
every request with a slot makes progress. A partial result costs the same amount of work as decoding, in addition to its
denoising step.

Requests get free slots in order of priority and arrival, and no request overtakes another. A new request gets its slot
when it is encoded. A preempted request gets a slot in the next step of any phase. If no slot is free, the first waiting
request may preempt the running request that is last in order. This requires that the waiting request has a better
priority, and that the latent can be kept. Two kinds of requests are not preempted: requests that only need decoding,
because their slots will soon be free, and requests that were not computed since they got their slots.

Priorities are strict, as in an engine for text. So the request that is first in order always makes progress: it has a
slot, or gets the next free slot. As long as requests with better priorities arrive, the other requests wait with their
latents kept, until their deadlines. But a request progresses by at least one step each time it has a slot. So it is
preempted at most once per step.
"""

from __future__ import annotations

from typing import NamedTuple

from trioserve.contracts.events import IterativePhase
from trioserve.contracts.ids import RequestId
from trioserve.contracts.iterative import LatentMove
from trioserve.core.iterative.latent_slots import LatentSlots, LiveIteration
from trioserve.core.request_state import RequestStatus
from trioserve.core.settings import IterativeSettings
from trioserve.core.waiting_queue import WaitingQueue

__all__ = ["FilledStep", "IterativeScheduler"]

PHASES = (IterativePhase.ENCODE, IterativePhase.DENOISE, IterativePhase.DECODE)


class FilledStep(NamedTuple):
    """The content of a planned step.

    Attributes:
        lives: requests that the step computes.
        moves: moves of latents between slots, in order.
        admitted: requests that got a slot.
        preempted: requests that lost their slot.
    """

    phase: IterativePhase
    lives: list[LiveIteration]
    moves: list[LatentMove]
    admitted: list[RequestId]
    preempted: list[RequestId]


class IterativeScheduler:
    """Owns the queues of waiting and running requests, and assigns slots.

    Args:
        settings: limits of the core.

    Cost:
        O(running requests) per step. The number of waiting requests does not matter.
    """

    def __init__(self, settings: IterativeSettings) -> None:
        self._settings = settings
        self.slots = LatentSlots(settings.slot_count, settings.kept_slot_count)
        self.waiting = WaitingQueue[LiveIteration]()
        self.running: dict[RequestId, LiveIteration] = {}
        self.preemptions_total = 0
        self._first_phase = 0  # Index of the phase that is computed next if it has requests.
        self._steps_total = 0

    def fill_step(self) -> FilledStep | None:
        """Plan the next step. No step may be in flight. Return None if there is no live request."""
        moves: list[LatentMove] = []
        admitted: list[RequestId] = []
        preempted: list[RequestId] = []
        while (head := self._head()) is not None and head.is_encoded:
            if not self._seat(head, moves, admitted, preempted):
                break
        for turn in range(len(PHASES)):
            phase = PHASES[(self._first_phase + turn) % len(PHASES)]
            if phase is IterativePhase.ENCODE:
                lives = self._admit(moves, admitted, preempted)
            else:
                lives = self._in_turn(phase)
            if lives:
                self._first_phase = (PHASES.index(phase) + 1) % len(PHASES)
                self._steps_total += 1
                for live in lives:
                    live.last_turn = self._steps_total
                    live.has_had_turn = True
                return FilledStep(phase, lives, moves, admitted, preempted)
        assert not self.running, "requests run but nothing can be computed"
        assert not self.waiting, "requests wait but none runs"
        return None

    def release(self, live: LiveIteration) -> None:
        """Remove a request from its queue and free its slots. The caller must change the request's state.

        Args:
            live: a request that waits or runs.
        """
        if live.status is RequestStatus.RUNNING:
            del self.running[live.request.id]
        else:
            self.waiting.remove(live)
        self.slots.release(live)

    def _head(self) -> LiveIteration | None:
        return next(iter(self.waiting), None)

    def _admit(
        self, moves: list[LatentMove], admitted: list[RequestId], preempted: list[RequestId]
    ) -> list[LiveIteration]:
        """Give slots to waiting requests in order, as long as there are free slots and the work fits into one step.

        Returns:
            Requests that must be encoded.
        """
        lives = []
        left = self._settings.step_work_max
        while (head := self._head()) is not None:
            cost = 0 if head.is_encoded else head.request.encode_work
            if cost > left or not self._seat(head, moves, admitted, preempted):
                break
            if cost:
                lives.append(head)
                left -= cost
        return lives

    def _in_turn(self, phase: IterativePhase) -> list[LiveIteration]:
        due = [live for live in self.running.values() if live.phase is phase]
        due.sort(key=lambda live: live.last_turn)
        lives: list[LiveIteration] = []
        left = self._settings.step_work_max
        for live in due:
            cost = live.request.work(phase)
            if phase is IterativePhase.DENOISE and live.wants_partial:
                cost += live.request.decode_work  # The partial result is decoded in the same step.
            if cost <= left or not lives:  # The first request is always planned.
                lives.append(live)
                left -= cost
        return lives

    def _seat(
        self, live: LiveIteration, moves: list[LatentMove], admitted: list[RequestId], preempted: list[RequestId]
    ) -> bool:
        """Give the first waiting request a slot. If no slot is free, preempt a running request.

        Returns:
            True if the request got a slot.
        """
        if not self.slots.has_free:
            victim = self._victim(live)
            if victim is None:
                return False
            moves.append(self._preempt(victim))
            preempted.append(victim.request.id)
        self.waiting.remove(live)
        if live.is_encoded:
            moves.append(self.slots.restore(live))
        else:
            self.slots.take(live)
        # Requests that already have a slot come first. Otherwise a resumed request would go before them.
        live.last_turn = self._steps_total
        live.has_had_turn = False
        live.move(RequestStatus.RUNNING)
        self.running[live.request.id] = live
        admitted.append(live.request.id)
        return True

    def _victim(self, live: LiveIteration) -> LiveIteration | None:
        if not self.slots.can_keep:
            return None
        priority = live.request.priority
        worse = [
            other
            for other in self.running.values()
            if other.request.priority > priority and other.phase is IterativePhase.DENOISE and other.has_had_turn
        ]
        return max(worse, key=lambda other: other.order, default=None)

    def _preempt(self, victim: LiveIteration) -> LatentMove:
        move = self.slots.keep(victim)
        victim.move(RequestStatus.PREEMPTED)
        del self.running[victim.request.id]
        self.waiting.put_back(victim)
        self.preemptions_total += 1
        return move
