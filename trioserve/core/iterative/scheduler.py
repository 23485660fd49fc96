"""Fills one step of iterative requests: which phase is computed next, of whom, and who gets a slot for it.

A step is of one phase. Requests at different timesteps denoise together, within one budget of work; encoding and
decoding are steps of their own, so that an abort waits for one forward pass of one phase at most. The phases that have
something to compute take turns. Within one those go first that were computed longest ago, and as many as fit: so nobody
who has a slot starves, whatever it costs and whoever else comes. A partial result costs what decoding does, too.

A slot is given to the head of the line, by priority and arrival, and nobody overtakes it. It gets one when it is
encoded; one that was preempted gets it with the next step, whatever that computes. Where no slot is free the last in
order leaves its own to a better priority, if its latent can be kept. One that has nothing left but to be decoded is not
preempted: its slot is free soon, anyway. Nor is one that was not computed since it got its slot.

Priorities are strict, as in an engine of tokens. So the first in order of all always makes progress: it has a slot, or
gets the next one that is left or given up. Whoever is behind better priorities waits for as long as these come, with
its latent kept, and its deadline is what ends that. But no slot is given in vain: every time that a request has one, it
gets a step further, however much a step of it costs. So it is preempted no more often than it has steps.
"""

from __future__ import annotations

from typing import NamedTuple

from trioserve.contracts.events import IterativePhase
from trioserve.contracts.ids import RequestId
from trioserve.contracts.iterative import LatentMove
from trioserve.core.iterative.latent_slots import LatentSlots
from trioserve.core.iterative.live_iteration import LiveIteration
from trioserve.core.iterative.settings import IterativeSettings
from trioserve.core.request_state import RequestStatus
from trioserve.core.waiting_queue import WaitingQueue

__all__ = ["FilledStep", "IterativeScheduler"]

PHASES = (IterativePhase.ENCODE, IterativePhase.DENOISE, IterativePhase.DECODE)


class FilledStep(NamedTuple):
    phase: IterativePhase
    lives: list[LiveIteration]
    moves: list[LatentMove]
    admitted: list[RequestId]
    preempted: list[RequestId]


class IterativeScheduler:
    """Owns the line and whoever runs, and moves slots between them. O(running requests) a step, whatever waits."""

    def __init__(self, settings: IterativeSettings) -> None:
        self._settings = settings
        self.slots = LatentSlots(settings.slot_count, settings.kept_slot_count)
        self.waiting = WaitingQueue[LiveIteration]()
        self.running: dict[RequestId, LiveIteration] = {}
        self.preemptions_total = 0
        self._first_phase = 0  # the index of the one whose turn it is
        self._steps_total = 0

    def fill_step(self) -> FilledStep | None:
        """None: nobody lives. No step may be in flight."""
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
        assert not self.running, "requests run, and nothing can be computed"
        assert not self.waiting, "requests wait, and nobody runs"
        return None

    def release(self, live: LiveIteration) -> None:
        """Take a request out of whichever line it is in and give its slot back. Its state is the caller's to move."""
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
        """Seat the line from its head, as far as slots and the work of one step go. Returns those to be encoded."""
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
                cost += live.request.decode_work  # in the same step. Whoever is first goes, whatever that adds.
            if cost <= left or not lives:
                lives.append(live)
                left -= cost
        return lives

    def _seat(
        self, live: LiveIteration, moves: list[LatentMove], admitted: list[RequestId], preempted: list[RequestId]
    ) -> bool:
        """Give the head of the line a slot, if one is free or somebody has to leave one for it."""
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
        live.last_turn = self._steps_total  # behind those who have a slot: otherwise whoever comes back goes first
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
