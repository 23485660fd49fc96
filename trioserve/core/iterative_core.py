"""IterativeCore makes the decisions of an engine for iterative models. It is synchronous, and has EngineCore's methods.

A step has the same order as in EngineCore: schedule, forward pass, pending aborts, update_from_output, delivery. Aborts
also work in the same way. If the step in flight does not compute the aborted request, the request ends at once.
Otherwise the request is marked, and ends in the update of the step. At most one step is in flight, and each step has
one phase.

If an aborted request was preempted before, its kept latent is released at once, even if the plan in flight still has to
move this latent to its slot. This is safe, because no other request can get the slot before that plan has returned.

IterativeScheduler plans a step: which phase is computed for which requests, and which requests get a slot. Requests at
different timesteps denoise together, within one budget of work per step. Encoding and decoding are separate steps, so
an abort waits for at most one forward pass of one phase. Phases that have requests take turns. Within a phase, the
requests that have waited longest are computed first, as many as fit into the budget. So every request with a slot makes
progress. A partial result costs the same amount of work as decoding, in addition to its denoising step.

Requests get free slots in order of priority and arrival, and no request overtakes another. A new request gets its slot
when it is encoded. A preempted request gets a slot in the next step of any phase. If no slot is free, the first waiting
request may preempt the running request that is last in order. This requires that the waiting request has a better
priority, and that the latent can be kept. Two kinds of requests are not preempted: requests that only need decoding,
because their slots will soon be free, and requests that were not computed since they got their slots.

Priorities are strict, as in an engine for text. So the request that is first in order always makes progress: it has a
slot, or gets the next free slot. As long as requests with better priorities arrive, the other requests wait with their
latents kept, until their deadlines. But a request progresses by at least one step each time it has a slot. So it is
preempted at most once per step.

`LatentSlots` owns the latent slots. A slot is only an index. No code in this module touches a tensor.

    an own slot   belongs to one running request, from the step that admits it until it ends or is preempted.
    a kept slot   belongs to one preempted request until it resumes or ends, so nothing is computed twice.

In all other states, a request owns no slot. Each slot is released exactly once: when its request is preempted, resumed
or ended. A BlockPool counts the claims on each kind of slot. Slots are numbered consecutively: own slots first, then
kept slots. If a move reads or writes a slot, the same plan may give this slot to another request. This is safe, because
moves are done in order, and before the computation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import AbortResult, FinishReason, IterativePhase, RequestFinished
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.image_generation import (
    IterativeEvent,
    IterativePlan,
    IterativeRequest,
    IterativeResult,
    IterativeStats,
    LatentMove,
    LatentWork,
    OutputReady,
    StepDone,
)
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.core.kv_blocks import BlockPool
from trioserve.core.request_state import RequestLife, RequestStatus
from trioserve.core.settings import IterativeSettings
from trioserve.core.steps_in_flight import RequestTable, StepsInFlight
from trioserve.core.waiting_queue import WaitingQueue

__all__ = ["IterativeCore", "LatentSlots", "LiveIteration"]


class LiveIteration(RequestLife[IterativeRequest]):
    """State of one iterative request.

    Args:
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


class IterativeCore:
    """Makes the decisions of one engine. Not thread-safe: all calls come from the thread of the event loop.

    Args:
        settings: limits of the core.
    """

    def __init__(self, settings: IterativeSettings) -> None:
        self.settings = settings
        self.scheduler = IterativeScheduler(settings)
        self.flights = StepsInFlight[IterativePlan, LiveIteration]()
        self._live = RequestTable[LiveIteration](self.flights, self._finish)
        self._steps_total = 0
        self._denoised_total = 0

    def add(self, request: IterativeRequest) -> None:
        """Add a request to the waiting queue.

        Args:
            request: the request. Its id must not be the id of a live request.

        Raises:
            InvalidRequest: this engine can never run the request. Nothing was changed.
        """
        assert request.id not in self._live, f"{request.id} is in use"
        assert min(request.encode_work, request.denoise_work, request.decode_work) >= 1, f"{request.id} has no cost"
        if request.step_count < 1:
            raise InvalidRequest(f"{request.step_count} steps are requested, at least 1 is needed", param="steps")
        if request.partial_every is not None and request.partial_every < 1:
            raise InvalidRequest(
                f"a partial result is requested every {request.partial_every} steps, it must be at least 1",
                param="partial_every",
            )
        if not PRIORITY_MIN <= request.priority <= PRIORITY_MAX:
            raise InvalidRequest(
                f"priority is {request.priority}, allowed is {PRIORITY_MIN} to {PRIORITY_MAX}", param="priority"
            )
        for phase in (IterativePhase.ENCODE, IterativePhase.DENOISE, IterativePhase.DECODE):
            if request.work(phase) > self.settings.step_work_max:
                raise InvalidRequest(
                    f"to {phase.value} it costs {request.work(phase)}, but a step allows only "
                    f"{self.settings.step_work_max}: request a smaller size",
                    param="size",
                )
        live = LiveIteration(request, self._live.arrivals_total)
        self._live.add(live)
        self.scheduler.waiting.add(live)

    def abort(
        self, request_ids: Iterable[RequestId], reason: FinishReason = FinishReason.ABORT, *, now: float
    ) -> dict[RequestId, AbortResult]:
        """End requests in any state. No result of an aborted request is delivered after this call.

        Args:
            request_ids: ids to abort. Unknown ids and ids of finished requests are allowed.
            reason: reported as the finish reason.
            now: time in seconds.

        Returns:
            The outcome for each id.

        Cost:
            O(1) per request.
        """
        return self._live.abort(request_ids, reason, now)

    def schedule(self, now: float) -> IterativePlan | None:
        """Plan the next step. No step may be in flight.

        Args:
            now: time in seconds. Not used.

        Returns:
            A plan that the caller must pass to update_from_output or drop_plan. None if there is no live request.
        """
        assert not self.flights, "a step is in flight"
        step = self.scheduler.fill_step()
        if step is None:
            return None
        works = tuple(self._work(live, step.phase) for live in step.lives)
        plan = IterativePlan(
            self._steps_total,
            step.phase,
            works,
            sum(work.request.work(step.phase) for work in works),
            tuple(step.moves),
            tuple(step.admitted),
            tuple(step.preempted),
            self.scheduler.slots.freed(),
        )
        self.flights.begin(plan, step.lives)
        self._steps_total += 1
        return plan

    # --- required by the step loop of any core, but this core has no connector and never plans ahead ---

    @property
    def plans_ahead(self) -> bool:
        return False

    @property
    def has_connector(self) -> bool:
        return False

    def schedule_ahead(self, now: float) -> IterativePlan | None:
        return None

    def progress(self, now: float) -> list[IterativeEvent]:
        return []

    def expire(self, now: float) -> list[IterativeEvent]:
        return []

    def next_deadline(self) -> float | None:
        return None

    # --- the step in flight ---

    def drop_plan(self, plan: IterativePlan, now: float) -> list[IterativeEvent]:
        """End an abandoned plan that has no result.

        Args:
            plan: a plan in flight that is abandoned.
            now: time in seconds.

        Returns:
            The ends of the plan's requests.
        """
        assert self.flights.is_abandoned(plan), "the plan is not in flight, or a request waits for it"
        return [*self._live.drop(self.flights.end(plan), now)]

    def update_from_output(self, plan: IterativePlan, result: IterativeResult, now: float) -> list[IterativeEvent]:
        """Apply the result of the plan in flight.

        First, end the requests that were aborted while the plan was computed. Then apply the results of the other
        requests.

        Args:
            plan: the plan in flight.
            result: the result of computing the plan.
            now: time in seconds.

        Returns:
            Progress, outputs and ends of requests, to be delivered.
        """
        events: list[IterativeEvent] = []
        staying: list[tuple[LatentWork, LiveIteration]] = []
        for work, live in zip(plan.works, self.flights.end(plan), strict=True):
            live.steps_in_flight -= 1
            if live.abort_reason is None:
                staying.append((work, live))
            else:
                events.append(self._finish(live, live.abort_reason, now))
        for work, live in staying:
            request_id = live.request.id
            if request_id in result.errors:
                events.append(self._finish(live, FinishReason.ERROR, now, message=result.errors[request_id]))
            elif plan.phase is IterativePhase.ENCODE:
                live.is_encoded = True
            elif plan.phase is IterativePhase.DENOISE:
                live.steps_done += 1
                self._denoised_total += 1
                partial = result.partials[request_id] if work.wants_partial else None
                events.append(StepDone(request_id, live.steps_done, partial))
            else:
                events.append(OutputReady(request_id, result.outputs[request_id]))
                events.append(self._finish(live, FinishReason.STOP, now))
        return events

    def stats(self) -> IterativeStats:
        scheduler, slots = self.scheduler, self.scheduler.slots
        return IterativeStats(
            running_count=len(scheduler.running),
            waiting_count=len(scheduler.waiting),
            slots_total=slots.own.block_count,
            slots_used=slots.own.used_count,
            kept_total=slots.kept.block_count,
            kept_used=slots.kept.used_count,
            steps_total=self._steps_total,
            denoised_total=self._denoised_total,
            preemptions_total=scheduler.preemptions_total,
        )

    def live_requests(self) -> Iterable[LiveIteration]:
        """Return every request that has not finished, in order of arrival. The caller must not change them."""
        return self._live.values()

    @staticmethod
    def _work(live: LiveIteration, phase: IterativePhase) -> LatentWork:
        assert live.slot is not None, f"{live.request.id} is computed without a slot"
        if phase is not IterativePhase.DENOISE:
            return LatentWork(live.request, live.slot, 0)
        return LatentWork(live.request, live.slot, live.steps_done, live.wants_partial)

    def _finish(
        self, live: LiveIteration, reason: FinishReason, now: float, *, message: str | None = None
    ) -> RequestFinished:
        """End a request and free its slot. Every request ends with a call of this method."""
        assert live.steps_in_flight == 0, f"{live.request.id} is read by a step"
        phase = live.phase
        self.scheduler.release(live)
        live.move(RequestStatus.FINISHED)
        self._live.forget(live.request.id)
        return RequestFinished(request_id=live.request.id, reason=reason, phase=phase, message=message)
