"""Tracks the sequences in the core and ends requests. Subclasses deliver the results of steps.

The tracked sequences include those whose reader has already left. All methods are synchronous. They run between two
steps, but a request may be ended at any time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import trio

from trioserve.contracts.events import AbortResult, FinishReason, IterativePhase, Phase, RequestFinished
from trioserve.contracts.ids import RequestId
from trioserve.engine.lifecycle.engine_loop import AnyPlan
from trioserve.engine.lifecycle.request_scope import AnyScope, RequestPart
from trioserve.engine.lifecycle.step_times import StepWatch
from trioserve.metrics.registry import Metrics

__all__ = [
    "Cancelled",
    "StepTimings",
    "AbortingCore",
    "CoreDelivery",
    "NoCancelWatch",
    "RequestCounts",
    "CancelWatch",
]


ScopeIn = TypeVar("ScopeIn", contravariant=True)
PartIn = TypeVar("PartIn", contravariant=True)
ScopeT = TypeVar("ScopeT", bound=AnyScope)
PartT = TypeVar("PartT", bound=RequestPart[Any])
PlanT = TypeVar("PlanT", bound=AnyPlan)
EventT = TypeVar("EventT")


class Cancelled(NamedTuple):
    """Records when a sequence was aborted.

    Attributes:
        at: time of the abort.
        step_count: number of steps that had ended before the abort.
    """

    at: float
    step_count: int


class StepTimings(ABC, Generic[PlanT]):
    """Observes steps and aborts. All times are seconds of Trio's clock.

    Args:
        metrics: receives the observations.

    Attributes:
        step_count: number of steps that have ended.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.step_count = 0

    @abstractmethod
    def note_step(self, plan: PlanT, step_seconds: float, now: float) -> None:
        """Count a step after its results are delivered.

        Args:
            plan: the plan of the step.
            step_seconds: duration of the step.
            now: time of delivery.
        """

    def cancelled(self, now: float) -> Cancelled:
        """Return the current moment as the time of an abort. The caller keeps it until the blocks of the sequence are
        free.

        Args:
            now: current time.
        """
        return Cancelled(now, self.step_count)

    def steps_since(self, cancelled: Cancelled) -> int:
        """Return how many steps have ended since an abort.

        Args:
            cancelled: moment of the abort.
        """
        return self.step_count - cancelled.step_count

    def note_abort(self, phase: Phase | IterativePhase, cancelled: Cancelled, now: float) -> None:
        """Observe how long an aborted sequence kept its blocks.

        Args:
            phase: phase of the sequence when it was aborted.
            cancelled: moment of the abort.
            now: time at which the blocks are free.
        """
        self._metrics.aborts_total.labels(phase.value).inc()
        self._metrics.cancel_to_free_seconds.labels(phase.value).observe(now - cancelled.at)
        self._metrics.cancel_to_free_steps.labels(phase.value).observe(self.steps_since(cancelled))

    def note_left_queue(self, count: int) -> None:
        """Count sequences that were aborted before they reached the core. They had no blocks.

        Args:
            count: number of sequences.
        """
        phase = Phase.QUEUED.value
        self._metrics.aborts_total.labels(phase).inc(count)
        for _ in range(count):
            self._metrics.cancel_to_free_seconds.labels(phase).observe(0.0)
            self._metrics.cancel_to_free_steps.labels(phase).observe(0)


class RequestCounts(Protocol[ScopeIn, PartIn]):
    """Counts the sequences and requests of an engine."""

    def note_run(self, choice: PartIn, now: float) -> None:
        """Count a sequence that runs in a step for the first time.

        Args:
            choice: the choice of the sequence.
            now: current time.
        """

    def note_end(self, choice: PartIn, reason: FinishReason, now: float) -> None:
        """Count the end of a sequence that was in the core.

        Args:
            choice: the choice of the sequence.
            reason: why the sequence ended.
            now: current time.
        """

    def note_all_ended(self, request: ScopeIn) -> None:
        """Count a request whose last sequence has ended."""


class AbortingCore(Protocol):
    """A core that can abort requests."""

    def abort(
        self, request_ids: Iterable[RequestId], reason: FinishReason = FinishReason.ABORT, *, now: float
    ) -> dict[RequestId, AbortResult]: ...


class CancelWatch(Protocol[ScopeIn]):
    """Observes cancelled sequences, and the blocks that become free because of them."""

    def note_cancelled(self, request: ScopeIn, ids: Sequence[RequestId], reason: FinishReason) -> None:
        """Note that a request was ended from outside. This has no effect if the request has already ended.

        Args:
            ids: the request's sequences in the core, which still have their blocks.
            reason: the finish reason.
        """

    def note_freed(self, sequence_id: RequestId, steps: int, seconds: float) -> None:
        """Note that all blocks of a cancelled sequence are free.

        Args:
            steps: steps that ended between cancel and release.
            seconds: time between cancel and release.
        """


class NoCancelWatch:
    """Ignores all cancelled sequences."""

    def note_cancelled(self, request: AnyScope, ids: Sequence[RequestId], reason: FinishReason) -> None:
        pass

    def note_freed(self, sequence_id: RequestId, steps: int, seconds: float) -> None:
        pass


class CoreDelivery(ABC, Generic[ScopeT, PartT, PlanT, EventT]):
    """Connects the sequences in the core with the requests that wait for their output.

    Args:
        core: aborts sequences.
        timings: observes step times and aborts.
        counts: counts sequences and requests.
        wake: called when the step loop may have new work.
        step_watch: receives the begin and end of each step. None: a watch of its own.
        cancels: observes cancelled sequences. None: no observer.

    Attributes:
        has_progress: True if at least one step of this core has produced an event.
    """

    def __init__(
        self,
        core: AbortingCore,
        timings: StepTimings[PlanT],
        counts: RequestCounts[ScopeT, PartT],
        *,
        wake: Callable[[], None],
        step_watch: StepWatch | None = None,
        cancels: CancelWatch[ScopeT] | None = None,
    ) -> None:
        self._aborting = core
        self._cancels = cancels or NoCancelWatch()
        self.wake = wake
        self._step_watch = step_watch or StepWatch()
        self._choices: dict[RequestId, PartT] = {}
        # Sequences that were aborted while a step reads their blocks. None means that their own output ended them.
        self._cancelled: dict[RequestId, Cancelled | None] = {}
        self._step_timings = timings
        self._counts = counts
        self._plans: deque[PlanT] = deque()  # Plans whose results are not delivered yet. The oldest plan comes first.
        self.has_progress = False

    # --- implemented by each engine type ---

    @abstractmethod
    def _deliver(self, events: list[EventT], now: float) -> None:
        """Deliver the events of a step, or events that happened between two steps."""

    @abstractmethod
    def _ids_of(self, plan: PlanT) -> Iterable[RequestId]:
        """Return the ids of the sequences that a plan computes."""

    def _push_last(
        self, request: ScopeT, choice: PartT, reason: FinishReason, message: str | None, stop_reason: str | None
    ) -> None:
        """Push the last delta of a choice that was ended from outside. The delta contains the reason."""
        request.push_end(choice, reason, message, stop_reason=stop_reason)

    # --- sequences in the core ---

    def __len__(self) -> int:
        """Return the number of sequences in the core."""
        return len(self._choices)

    def add(self, choice: PartT) -> None:
        """Note that the sequence of a choice was added to the core."""
        self._choices[choice.sequence_id] = choice
        choice.request.core_count += 1

    # --- ends from outside of the core ---

    def end(self, request: ScopeT, reason: FinishReason) -> None:
        """Abort all sequences of a request. Nothing more is delivered for the request, and no further sequence begins.

        Args:
            reason: the finish reason.
        """
        if not request.is_finished:
            request.trace.cancelled(reason.value)
        request.upcoming.clear()
        cancelled = self._step_timings.cancelled(trio.current_time())
        ids = [choice.sequence_id for choice in request.choices if choice.sequence_id in self._choices]
        self._cancels.note_cancelled(request, ids, reason)
        results = self._aborting.abort(ids, reason, now=cancelled.at)
        now = trio.current_time()
        for sequence_id, result in results.items():
            if result.finished is not None:
                self._note_sequence_end(result.finished, now, reason)
                self._note_abort(result.finished, cancelled, now)
            else:
                self._cancelled.setdefault(sequence_id, cancelled)
        if not request.core_count:
            request.on_gone()
        self.wake()  # Wake the loop, because a connector may still need the blocks until a deadline.

    def end_with_final_delta(
        self, request: ScopeT, reason: FinishReason, message: str | None, *, stop_reason: str | None = None
    ) -> None:
        """Abort all sequences of a request, and push a last delta with the reason for each unfinished choice.

        Args:
            reason: the finish reason.
            message: message for the reader.
            stop_reason: more specific reason that programs can compare.
        """
        request.preparation.cancel()
        unfinished = [choice for choice in request.choices if not choice.is_ended]
        self.end(request, reason)
        for choice in unfinished:
            self._push_last(request, choice, reason, message, stop_reason)

    def end_holds(self, request: ScopeT) -> None:
        """End the holds of a request's blocks."""

    def note_left_queue(self, count: int) -> None:
        """Count sequences that were aborted before they reached the core.

        Args:
            count: number of sequences.
        """
        self._step_timings.note_left_queue(count)

    # --- after a fault of the engine ---

    def ids_in_flight(self) -> frozenset[RequestId]:
        """Return the sequences of steps that have not ended, or whose results were not delivered."""
        return frozenset(request_id for plan in self._plans for request_id in self._ids_of(plan))

    def abandon(self) -> list[PartT]:
        """Forget all sequences, because the core has broken.

        Returns:
            The choices whose sequences were in the core, in the order in which they were added.
        """
        choices = list(self._choices.values())
        self._choices.clear()
        return choices

    def note_lost(self, request: ScopeT) -> None:
        """Count the unfinished choices of a request as lost, because the core has broken."""
        now = trio.current_time()
        for choice in request.choices:
            if not choice.is_ended:
                self._counts.note_end(choice, FinishReason.ERROR, now)
        self._counts.note_all_ended(request)

    # --- called by the step loop ---

    def on_plan(self, plan: PlanT) -> None:
        now = trio.current_time()
        self._plans.append(plan)
        self._step_watch.begin(now)
        for sequence_id in plan.admitted:
            choice = self._choices[sequence_id]
            if not choice.has_run:  # A preempted sequence is admitted again, and must not be counted twice.
                choice.running_at = now
                choice.request.note_run(now)
                self._counts.note_run(choice, now)

    def on_events(self, events: list[EventT], step_seconds: float) -> None:
        now = trio.current_time()
        self._step_watch.end(now)
        # Count this step before the delivery, because the delivery counts the steps since an abort.
        self._step_timings.step_count += 1
        self._deliver(events, now)
        self._step_timings.note_step(self._plans.popleft(), step_seconds, now)
        self.has_progress = self.has_progress or bool(events)

    def on_ended(self, events: list[EventT]) -> None:
        """Deliver events that happened between two steps. Called before each step of a core with a connector.

        Args:
            events: the events. May be empty.
        """
        if events:
            self._deliver(events, trio.current_time())

    def _is_cancelled(self, event: RequestFinished, now: float) -> bool:
        """Return True if the sequence was cancelled during its step, so no reader gets this end."""
        if event.request_id not in self._cancelled:
            return False
        cancelled = self._cancelled.pop(event.request_id)
        if cancelled is not None:
            self._note_abort(event, cancelled, now)
        return True

    def _note_abort(self, event: RequestFinished, cancelled: Cancelled, now: float) -> None:
        """Observe how long an aborted sequence kept its blocks after the abort."""
        self._step_timings.note_abort(event.phase, cancelled, now)
        self._cancels.note_freed(event.request_id, self._step_timings.steps_since(cancelled), now - cancelled.at)

    def _note_sequence_end(
        self, event: RequestFinished, now: float, reason: FinishReason, *, has_reader: bool = True
    ) -> None:
        """Process the end of a sequence in the core.

        Args:
            event: the end.
            now: current time.
            reason: finish reason that the reader gets. It may differ from the core's finish reason.
            has_reader: True if the reader gets the end. Subclasses hold blocks only then.
        """
        choice = self._choices.pop(event.request_id)
        request: ScopeT = choice.request
        request.core_count -= 1
        if request.upcoming:
            request.begin_next()
        if not request.core_count:
            request.on_gone()
        self._counts.note_end(choice, reason, now)
        if not request.core_count and not request.upcoming:
            self._counts.note_all_ended(request)
