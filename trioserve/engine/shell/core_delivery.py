"""What the core has of requests, and the end of each of them, however it comes. What a step has brought is told by
those who know what it is made of.

Knows every sequence that the core knows, also those whose reader has left already. Everything here is synchronous and
runs between two steps, or, ending a request, at any moment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import trio

from trioserve.contracts.events import AbortResult, FinishReason, RequestFinished
from trioserve.contracts.ids import RequestId
from trioserve.engine.shell.request_scope import AnyScope, RequestPart
from trioserve.engine.shell.step_timings import Cancelled, StepTimings
from trioserve.engine.shell.step_watch import StepWatch
from trioserve.engine.shell.stepped_core import AnyPlan

__all__ = ["AbortingCore", "CoreDelivery", "NobodyWatches", "WatchesCancels"]

ScopeIn = TypeVar("ScopeIn", contravariant=True)
ScopeT = TypeVar("ScopeT", bound=AnyScope)
PartT = TypeVar("PartT", bound=RequestPart[Any])
PlanT = TypeVar("PlanT", bound=AnyPlan)
EventT = TypeVar("EventT")


class AbortingCore(Protocol):
    """A core, to end requests in."""

    def abort(
        self, request_ids: Iterable[RequestId], reason: FinishReason = FinishReason.ABORT, *, now: float
    ) -> dict[RequestId, AbortResult]: ...


class WatchesCancels(Protocol[ScopeIn]):
    """Who wants to know what cancels free."""

    def note_cancelled(self, request: ScopeIn, ids: Sequence[RequestId], reason: FinishReason) -> None:
        """A request ends by another hand than its own; ids: of its sequences that the core has, still with their
        blocks. To be called also for one that is over; nothing to do then."""

    def note_freed(self, sequence_id: RequestId, steps: int, seconds: float) -> None:
        """A sequence that was cancelled has no blocks any more: how many steps ended meanwhile, and how long it
        took."""


class NobodyWatches:
    """The same for nobody."""

    def note_cancelled(self, request: AnyScope, ids: Sequence[RequestId], reason: FinishReason) -> None:
        pass

    def note_freed(self, sequence_id: RequestId, steps: int, seconds: float) -> None:
        pass


class CoreDelivery(ABC, Generic[ScopeT, PartT, PlanT, EventT]):
    """wake: called when the step loop may have something new to see to. step_watch: told of each step. cancels: told
    of each cancel. has_brought: a step has brought somebody something."""

    def __init__(
        self,
        core: AbortingCore,
        timings: StepTimings,
        *,
        wake: Callable[[], None],
        step_watch: StepWatch | None = None,
        cancels: WatchesCancels[ScopeT] | None = None,
    ) -> None:
        self._aborting = core
        self._cancels = cancels or NobodyWatches()
        self._wake = wake
        self._step_watch = step_watch or StepWatch()
        self._choices: dict[RequestId, PartT] = {}
        # Aborted while a step reads what they have; None: it was their own output that ended them.
        self._cancelled: dict[RequestId, Cancelled | None] = {}
        self._step_timings = timings
        self._plans: deque[PlanT] = deque()  # that have not been delivered, the oldest first
        self.has_brought = False

    # --- what is other for each kind ---

    @abstractmethod
    def _deliver(self, events: list[EventT], now: float) -> None:
        """A step, or what came to pass without one, has brought this."""

    @abstractmethod
    def _ids_of(self, plan: PlanT) -> Iterable[RequestId]:
        """The sequences that it computes."""

    @abstractmethod
    def _count_run(self, choice: PartT, now: float) -> None:
        """It is in a step for the first time."""

    @abstractmethod
    def _count_step(self, plan: PlanT, now: float) -> None:
        """It was delivered."""

    @abstractmethod
    def _count_end(self, choice: PartT, reason: FinishReason, now: float) -> None:
        """A sequence that the core had is over."""

    def _count_all_ended(self, request: ScopeT) -> None:
        """That was the last of a request's sequences."""

    def _push_last(
        self, request: ScopeT, choice: PartT, reason: FinishReason, message: str | None, stop_reason: str | None
    ) -> None:
        """The reader of a choice is told why another's hand has ended it."""
        request.push_end(choice, reason, message, stop_reason=stop_reason)

    # --- what the core has ---

    def __len__(self) -> int:
        """Sequences that the core has."""
        return len(self._choices)

    def add(self, choice: PartT) -> None:
        """The core has the choice's sequence now."""
        self._choices[choice.sequence_id] = choice
        choice.request.core_count += 1

    # --- ends that come from outside ---

    def end(self, request: ScopeT, reason: FinishReason) -> None:
        """Abort what of a request the core still has. From here on nothing of it is delivered, and no more begun."""
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
                self._let_go(result.finished, now, reason)
                self._note_abort(result.finished, cancelled, now)
            else:
                self._cancelled.setdefault(sequence_id, cancelled)
        if not request.core_count:
            request.on_gone()
        self._wake()  # what a connector still needs of them has a deadline

    def end_with_final_delta(
        self, request: ScopeT, reason: FinishReason, message: str | None, *, stop_reason: str | None = None
    ) -> None:
        """The same, and the reader gets, for each choice, why it ended."""
        request.preparation.cancel()
        unfinished = [choice for choice in request.choices if not choice.is_ended]
        self.end(request, reason)
        for choice in unfinished:
            self._push_last(request, choice, reason, message, stop_reason)

    def note_left_queue(self, count: int) -> None:
        """So many sequences were aborted before the core had them: nothing had to be freed."""
        self._step_timings.note_left_queue(count)

    # --- when the engine broke ---

    def ids_in_flight(self) -> frozenset[RequestId]:
        """Sequences of the steps that did not come back, or were not delivered."""
        return frozenset(request_id for plan in self._plans for request_id in self._ids_of(plan))

    def give_up(self) -> list[PartT]:
        """The core is gone. Returns the choices whose sequences it had, in the order in which it got them; nothing of
        them is known here any more."""
        choices = list(self._choices.values())
        self._choices.clear()
        return choices

    def note_lost(self, request: ScopeT) -> None:
        """What has not ended of a request ends with the core that was given up."""
        now = trio.current_time()
        for choice in request.choices:
            if not choice.is_ended:
                self._count_end(choice, FinishReason.ERROR, now)
        self._count_all_ended(request)

    # --- called by the step loop ---

    def on_plan(self, plan: PlanT) -> None:
        now = trio.current_time()
        self._plans.append(plan)
        self._step_watch.begin(now)
        for sequence_id in plan.admitted:
            choice = self._choices[sequence_id]
            if not choice.has_run:  # a preempted one is admitted again
                choice.running_at = now
                choice.request.note_run(now)
                self._count_run(choice, now)

    def on_events(self, events: list[EventT], step_seconds: float) -> None:
        now = trio.current_time()
        self._step_watch.end(now)
        self._step_timings.note_step(step_seconds)
        self._deliver(events, now)
        self._count_step(self._plans.popleft(), now)
        self.has_brought = self.has_brought or bool(events)

    def on_ended(self, events: list[EventT]) -> None:
        """Before each step: what came to pass while none did."""
        if events:
            self._deliver(events, trio.current_time())

    def _is_cancelled(self, event: RequestFinished, now: float) -> bool:
        """Whether nobody is to be told of this end, since it was cancelled while a step had it."""
        if event.request_id not in self._cancelled:
            return False
        cancelled = self._cancelled.pop(event.request_id)
        if cancelled is not None:
            self._note_abort(event, cancelled, now)
        return True

    def _note_abort(self, event: RequestFinished, cancelled: Cancelled, now: float) -> None:
        """What a sequence had that was aborted is back."""
        self._step_timings.note_abort(event.phase, cancelled, now)
        self._cancels.note_freed(event.request_id, self._step_timings.steps_since(cancelled), now - cancelled.at)

    def _let_go(self, event: RequestFinished, now: float, reason: FinishReason, *, has_reader: bool = True) -> None:
        """The core has let a sequence go. reason: the one its reader is given, since that may be another one than the
        core's. has_reader: who gets to know of it."""
        choice = self._choices.pop(event.request_id)
        request: ScopeT = choice.request
        request.core_count -= 1
        if request.upcoming:
            request.begin_next()
        if not request.core_count:
            request.on_gone()
        self._count_end(choice, reason, now)
        if not request.core_count and not request.upcoming:
            self._count_all_ended(request)
