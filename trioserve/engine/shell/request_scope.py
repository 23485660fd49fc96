"""The engine's side of a request, from asking for it to the end of all that it holds, whatever it asks for: who asked,
its parts, each of which is one sequence or one picture in the core, and what its reader has not fetched yet.

A reader that is slower than the engine finds several deltas merged into one: what is kept for it is one delta a part.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import trio
from trio.lowlevel import current_task, reschedule

from trioserve.contracts.deadlines import Deadline, Deadlines
from trioserve.contracts.endpoint import RoutedRequest
from trioserve.contracts.errors import AlreadyEnded
from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.output import AnyDelta, hold_unread, take_unread
from trioserve.contracts.tracing import NO_SPAN, Span
from trioserve.engine.shell.request_trace import NO_TRACE, RequestTrace
from trioserve.trio_tools.deadline_keeper import Alarm
from trioserve.trio_tools.interrupts import uninterrupted
from trioserve.trio_tools.none_outcome import NONE_OUTCOME

__all__ = ["AnyScope", "RequestPart", "RequestScope", "ScopeState"]


class ScopeState(enum.Enum):
    """Of the caller's `async with`."""

    NEW = "new"
    ENTERED = "entered"
    LEFT = "left"


_ENTERED = ScopeState.ENTERED  # until Python 3.12 looking up a member of an enum is slow


ScopeT = TypeVar("ScopeT", bound="RequestScope[Any, Any, Any]")
PartT = TypeVar("PartT", bound="RequestPart[Any]")
DeltaT = TypeVar("DeltaT", bound=AnyDelta)
AskedT = TypeVar("AskedT")


class RequestPart(ABC, Generic[ScopeT]):
    """One of a request's n responses, and its sequence in the core. is_ended: its last delta was pushed, or its request
    failed. running_at: when it first was in a step, whether or not it lost its place again."""

    __slots__ = ("index", "is_ended", "request", "running_at", "sequence_id")

    def __init__(self, request: ScopeT, index: int, sequence_id: RequestId) -> None:
        self.request = request
        self.index = index
        self.sequence_id = sequence_id
        self.is_ended = False
        self.running_at: float | None = None

    @property
    def has_run(self) -> bool:
        return self.running_at is not None

    @property
    @abstractmethod
    def progress(self) -> int:
        """How far it is; where it is less than before, it is computed anew."""


@uninterrupted
class RequestScope(ABC, Generic[PartT, DeltaT, AskedT]):
    """The engine writes, synchronously; the reader, through its stream, waits and fetches.

    on_gone: called when the core has none of it, and gets none any more. preparation: the scope around waiting for a
    lease and making what the core gets. choices: its parts. core_count: of these, the ones that the core has.
    upcoming: what the core gets one by one, each when it is done with another, so that what it has of this request at a
    time is bounded. begin_next: hands it the next of them. sequence_count: as many are with the core at a time, at
    most. fault_count: failed steps that had this request since it last made progress. lone_fault_count: how many of
    them had no other request. part_of: the span of what it is made for. trace: is told what becomes of it.
    """

    def __init__(
        self,
        *,
        request_id: str,
        priority: int,
        deadlines: Deadlines,
        owner: str | None,
        tenant: str,
        sequence_count: int,
        part_of: Span = NO_SPAN,
    ) -> None:
        self.id = request_id
        self.priority = priority
        self.deadlines = deadlines
        self.owner = owner
        self.tenant = tenant
        self.part_of = part_of
        self.trace: RequestTrace = NO_TRACE
        self.alarms: dict[Deadline, Alarm] = {}
        self.entered_at = 0.0
        self.is_leased = False  # its turn has come, and it is prepared
        self.running_at: float | None = None
        self.ended_at: float | None = None
        self.choices: list[PartT] = []
        self.preparation = trio.CancelScope()
        self.core_count = 0
        self.sequence_count = sequence_count
        self.upcoming: deque[tuple[PartT, AskedT]] = deque()
        self.begin_next: Callable[[], None] = lambda: None
        self.on_gone: Callable[[], None] = lambda: None
        self.fault_count = 0
        self.lone_fault_count = 0
        self.scope = ScopeState.NEW
        self._pending: dict[int, list[DeltaT]] = {}  # of each choice, see hold_unread
        self._unfinished_count = sequence_count
        self._run_count = 0  # choices that run, or have run
        self._first_end: DeltaT | None = None  # the last delta of the choice that ended first
        self._error: Exception | None = None
        self._waiting: list[trio.lowlevel.Task] = []  # most often one, the reader
        self._begun = trio.Event()

    # --- what is other for each kind ---

    @abstractmethod
    def routed(self) -> RoutedRequest:
        """What the queue is told of it."""

    @abstractmethod
    def merged(self, pending: DeltaT, delta: DeltaT) -> DeltaT:
        """What is left to be read of two deltas of one part that follow each other."""

    @abstractmethod
    def push_end(
        self, choice: PartT, reason: FinishReason, message: str | None = None, *, stop_reason: str | None = None
    ) -> None:
        """The last delta of a part that ended by another's hand."""

    def note_read(self, delta: DeltaT) -> None:
        """Its reader has it."""

    # --- how it stands ---

    @property
    def has_begun(self) -> bool:
        """Whether the core has some of it, or is to get some without anything being waited for."""
        return self.core_count > 0 or bool(self.upcoming)

    @property
    def has_run(self) -> bool:
        """Whether one of its choices was in a step."""
        return self._run_count > 0

    @property
    def is_finished(self) -> bool:
        """Every choice has had its last delta, or the request failed."""
        return all(choice.is_ended for choice in self.choices)

    @property
    def end_reason(self) -> FinishReason | None:
        """Of the choice that ended first; None: none has, unless it was by its scope."""
        if self._error is not None:
            return FinishReason.ERROR
        return None if self._first_end is None else self._first_end.finish_reason

    def note_fault(self, *, is_alone: bool) -> None:
        """A step that had this request failed. is_alone: it had no other request."""
        self.fault_count += 1
        self.lone_fault_count += is_alone

    def clear_faults(self) -> None:
        """The request made progress in an engine that was opened again."""
        self.fault_count = self.lone_fault_count = 0

    # --- the reader's side ---

    def enter(self) -> None:
        """The scope begins. Raises AlreadyEnded if it has begun before."""
        if self.scope is not ScopeState.NEW:
            raise AlreadyEnded(f"request {self.id} was entered before: ask for another one")
        self.scope = ScopeState.ENTERED
        self.entered_at = trio.current_time()

    def check_may_leave(self) -> None:
        """Raises AlreadyEnded if the scope was left before, or was never entered."""
        if self.scope is not ScopeState.ENTERED:
            how = "was left before" if self.scope is ScopeState.LEFT else "is left, and was not entered"
            raise AlreadyEnded(f"request {self.id} {how}: leave its scope once, after entering it")

    def leave(self) -> None:
        """The scope is over: whoever still waits for something of it is told so."""
        self.scope = ScopeState.LEFT
        self._begun.set()
        self._wake_readers()

    async def next_delta(self) -> DeltaT:
        """Raises StopAsyncIteration when each choice has had its last one, and what the request failed with."""
        if self.scope is not _ENTERED:  # and no call: this is done for every delta
            self._check_entered()
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._pending:
            if self._unfinished_count == 0:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            # An event for each token would cost more than all else here, and so would a call more.
            task = current_task()
            self._waiting.append(task)

            def stop_waiting(_raise_cancel: object, task: trio.lowlevel.Task = task) -> trio.lowlevel.Abort:
                self._waiting.remove(task)
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(stop_waiting)
            if self.scope is not _ENTERED:
                self._check_entered()
        index, held = next(iter(self._pending.items()))
        del self._pending[index]
        if len(held) == 1:
            delta = held[0]
        else:
            delta = take_unread(held, self.merged)
            if held:
                self._pending[index] = held  # behind the other choices
        self.note_read(delta)
        return delta

    async def wait_until_begun(self) -> DeltaT | None:
        """See RequestStream."""
        self._check_entered()
        await self._begun.wait()
        self._check_entered()
        if self.has_run or (self._unfinished_count == 0 and self._first_end is None):
            return None
        if self._error is not None:
            raise self._error
        return self._first_end

    def _check_entered(self) -> None:
        if self.scope is not ScopeState.ENTERED:
            raise AlreadyEnded(f"request {self.id} can be read only inside its `async with`")

    # --- the engine's side: synchronous, called while delivering ---

    def carry(self, sequences: Iterable[tuple[PartT, AskedT]]) -> None:
        """The core is gone, and what it had is still to come: these, before those that it did not have yet."""
        self.core_count = 0
        self.upcoming.extendleft(reversed([*sequences]))

    def note_run(self, now: float) -> None:
        """One more choice of it runs; when all do, the queue is over."""
        if self.running_at is None:
            self.running_at = now
        self._run_count += 1
        self._begun.set()
        self.trace.runs()
        if self._run_count == self.sequence_count:
            self._cancel_alarm(Deadline.QUEUE)

    def note_first_token(self) -> None:
        self.trace.first_token()
        self._cancel_alarm(Deadline.FIRST_TOKEN)

    def cancel_alarms(self) -> None:
        for deadline in self.alarms:
            self._cancel_alarm(deadline)

    def _cancel_alarm(self, deadline: Deadline) -> None:
        alarm = self.alarms.get(deadline)
        if alarm is not None:
            alarm.cancel()

    def push(self, delta: DeltaT) -> None:
        """Hand a delta to the reader, joined to the one it has not fetched yet."""
        index, pending = delta.index, self._pending
        if delta.finish_reason is not None:
            delta = self.trace.told(delta)
        if index in pending:
            hold_unread(pending[index], delta, self.merged)
        else:
            pending[index] = [delta]
        if delta.finish_reason is not None:
            self._unfinished_count -= 1
            self._first_end = self._first_end or delta
            if self._unfinished_count == 0:
                self.ended_at = trio.current_time()
            self._begun.set()
        self._wake_readers()

    def fail(self, error: Exception) -> None:
        """The reader gets `error` once it has fetched what came before, unless that was all."""
        self.preparation.cancel()
        for choice in self.choices:
            choice.is_ended = True
        self._error = error
        self.ended_at = trio.current_time()
        self.trace.failed(error)
        self._begun.set()
        self._wake_readers()

    def _wake_readers(self) -> None:
        while self._waiting:
            reschedule(self._waiting.pop(), NONE_OUTCOME)


AnyScope = RequestScope[Any, Any, Any]
