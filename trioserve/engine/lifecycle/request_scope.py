"""The engine's state of a request, from its creation until all its resources are released.

A request consists of choices or images. Each is one sequence or one image in the core. Deltas wait in this state until
the reader gets them. If a reader is slower than the engine, deltas are merged, so about one delta per choice waits.

`ScopeStream` is the caller's side. Entering its context puts the request into the queue before any expensive work.
Leaving is one synchronous call that aborts unfinished work.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Iterator
from os import getpid
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar

import outcome
import trio
from trio.lowlevel import current_task, reschedule

from trioserve.contracts.deadlines import Deadline, Deadlines
from trioserve.contracts.endpoint import RoutedRequest
from trioserve.contracts.errors import AlreadyEnded, DeadlinePassed, RequestAborted, RequestFailed, TrioserveError
from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.output import AnyDelta, hold_unread, pop_unread
from trioserve.contracts.tracing import NO_SPAN, Span
from trioserve.engine.lifecycle.request_trace import NO_TRACE, RequestTrace
from trioserve.trio_tools.deadline_keeper import Alarm
from trioserve.trio_tools.interrupts import uninterrupted
from trioserve.trio_tools.own_run import OwnRun

__all__ = [
    "AnyScope",
    "NONE_OUTCOME",
    "RequestPart",
    "RequestScope",
    "RequestsById",
    "ScopeState",
    "ScopeStream",
    "error_of",
]


class _NoneOutcome(outcome.Outcome[None]):
    """An outcome with the value None that can be used any number of times.

    Trio would create a new Value for each wake-up, because a Value can be unwrapped only once. Creating and unwrapping
    a Value takes a tenth of the event loop's time per token.
    """

    __slots__ = ()

    def unwrap(self) -> None:
        return None

    def send(self, gen: Generator[Any, None, Any]) -> NoReturn:
        raise AssertionError("this outcome is only for wait_task_rescheduled")

    def asend(self, agen: AsyncGenerator[Any, None]) -> NoReturn:
        raise AssertionError("this outcome is only for wait_task_rescheduled")


NONE_OUTCOME = _NoneOutcome()
"""The only instance. Use it as trio.lowlevel.reschedule(task, NONE_OUTCOME)."""


class ScopeState(enum.Enum):
    """States of the `async with` block in which the caller reads a request."""

    NEW = "new"
    ENTERED = "entered"
    LEFT = "left"


_ENTERED = ScopeState.ENTERED  # A global, because lookup of an enum member is slow before Python 3.12.


ScopeT = TypeVar("ScopeT", bound="RequestScope[Any, Any, Any]")
PartT = TypeVar("PartT", bound="RequestPart[Any]")
DeltaT = TypeVar("DeltaT", bound=AnyDelta)
AskedT = TypeVar("AskedT")


class RequestPart(ABC, Generic[ScopeT]):
    """One of a request's n results (a choice or an image), and its sequence in the core.

    Args:
        index: index of the choice.
        sequence_id: id of its sequence in the core.

    Attributes:
        is_ended: True if the last delta of this result was pushed, or the request failed.
        running_at: time at which the sequence was first in a step. It does not change after a preemption. None: it was
            in no step yet.
    """

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
        """Amount of computed output. It shrinks when the output must be computed again."""


@uninterrupted
class RequestScope(ABC, Generic[PartT, DeltaT, AskedT]):
    """State of a request. The engine writes deltas synchronously. The reader waits for them through its stream.

    Args:
        request_id: the caller's id of the request.
        priority: a lower number runs sooner.
        deadlines: deadlines of the request.
        owner: user who may see and abort the request. None: not restricted.
        tenant: the queue is fair between tenants.
        sequence_count: highest number of the request's sequences that are in the core at the same time.
        merge: merges two consecutive unread deltas of one choice. The older delta is the first argument.
        part_of: parent span of the request's trace.

    Attributes:
        choices: the choices or images of the request.
        core_count: number of its choices that are in the core.
        upcoming: sequences that are added to the core later, one whenever another one has ended. This limits the core's
            work for one request.
        begin_next: adds the next sequence of `upcoming` to the core.
        on_gone: called when no sequence of the request is in the core, and none will be added.
        preparation: cancel scope around the wait for a lease and the preparation of the sequences.
        fault_count: number of failed steps that computed this request since it last made progress.
        lone_fault_count: number of these steps that computed no other request.
        trace: receives the events of the request.
        is_resumable: True if the request can be resumed elsewhere after an abort or a deadline.
        cached_token_count: prompt tokens that the prefix cache had.
        on_released: called when none of the request's blocks is held any more.
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
        merge: Callable[[DeltaT, DeltaT], DeltaT],
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
        self.is_leased = False  # The request has a lease, and is being prepared.
        self.running_at: float | None = None
        self.ended_at: float | None = None
        self.choices: list[PartT] = []
        self.preparation = trio.CancelScope()
        self.core_count = 0
        self.sequence_count = sequence_count
        self.upcoming: deque[tuple[PartT, AskedT]] = deque()
        self.begin_next: Callable[[], None] = lambda: None
        self.on_gone: Callable[[], None] = lambda: None
        self.on_released: Callable[[], None] = lambda: None
        self.is_resumable = False
        self.cached_token_count = 0
        self._merge = merge
        self.fault_count = 0
        self.lone_fault_count = 0
        self.scope = ScopeState.NEW
        self._pending: dict[int, list[DeltaT]] = {}  # Unread deltas by choice, see `hold_unread`.
        self._unfinished_count = sequence_count
        self._run_count = 0  # Number of choices that run, or have run.
        self._first_end: DeltaT | None = None  # The last delta of the choice that ended first.
        self._error: Exception | None = None
        self._waiting: list[trio.lowlevel.Task] = []  # Usually only the reader waits.
        self._begun = trio.Event()

    # --- implemented by each engine type ---

    @abstractmethod
    def routed(self) -> RoutedRequest:
        """Return the request's description for the queue."""

    @abstractmethod
    def push_end(
        self, choice: PartT, reason: FinishReason, message: str | None = None, *, stop_reason: str | None = None
    ) -> None:
        """Push the last delta of a choice that was ended from outside.

        Args:
            choice: the choice or image that ends.
            reason: the finish reason.
            message: message for the reader.
            stop_reason: more specific reason that programs can compare.
        """

    def note_read(self, delta: DeltaT) -> None:
        """Note that the reader has received a delta."""

    # --- state ---

    @property
    def prompt_token_count(self) -> int:
        """Number of prompt tokens, or 0 if the request has no prompt tokens."""
        return 0

    @property
    def completion_token_count(self) -> int:
        """Number of tokens sampled so far, or 0 if the request samples no tokens."""
        return 0

    def use_weights(self, version: str | None) -> None:
        """Use a weight version for all sequences that are added to the core from now on.

        Args:
            version: the version. None: the weights with which the engine was opened.
        """

    @property
    def has_begun(self) -> bool:
        """True if the request is in flight: a sequence is in the core, or can be added without waiting."""
        return self.core_count > 0 or bool(self.upcoming)

    @property
    def has_run(self) -> bool:
        """True if at least one choice was in a step."""
        return self._run_count > 0

    @property
    def is_finished(self) -> bool:
        """True if every choice has ended with its last delta, or if the request failed."""
        for choice in self.choices:  # noqa: SIM110 (a generator would cost a call for each choice)
            if not choice.is_ended:
                return False
        return True

    @property
    def end_reason(self) -> FinishReason | None:
        """Finish reason of the choice that ended first.

        None if no choice has ended, or if the caller left the scope.
        """
        if self._error is not None:
            return FinishReason.ERROR
        return None if self._first_end is None else self._first_end.finish_reason

    def note_fault(self, *, is_alone: bool) -> None:
        """Count a failed step that computed this request.

        Args:
            is_alone: True if the step computed no other request.
        """
        self.fault_count += 1
        self.lone_fault_count += is_alone

    def clear_faults(self) -> None:
        """Reset the fault counts, because the request made progress in a reopened engine."""
        self.fault_count = self.lone_fault_count = 0

    # --- called by the reader ---

    def enter(self) -> None:
        """Begin the scope. Raises AlreadyEnded if the scope has begun before."""
        if self.scope is not ScopeState.NEW:
            raise AlreadyEnded(f"request {self.id} was entered before: make another request")
        self.scope = ScopeState.ENTERED
        self.entered_at = trio.current_time()

    def leave(self) -> None:
        """End the scope. Tasks that still wait for a delta get AlreadyEnded.

        Raises:
            AlreadyEnded: the scope was left before, or was never entered.
        """
        if self.scope is not ScopeState.ENTERED:
            how = "was left before" if self.scope is ScopeState.LEFT else "is left, and was not entered"
            raise AlreadyEnded(f"request {self.id} {how}: leave its scope once, after entering it")
        self.scope = ScopeState.LEFT
        self._begun.set()
        self._wake_readers()

    async def next_delta(self) -> DeltaT:
        """Wait for the next delta.

        Raises:
            StopAsyncIteration: each choice has ended with its last delta.
            AlreadyEnded: the scope was left, or was never entered.
            Exception: the error with which the request failed.
        """
        if self.scope is not _ENTERED:  # The check is inline, because it runs for every delta.
            self._check_entered()
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._pending:
            if self._unfinished_count == 0:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            # Tasks wait directly, because a Trio event or one more function call per token would cost too much time.
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
            delta = pop_unread(held, self._merge)
            if held:
                # The other choices of this request are read before this choice is read again.
                self._pending[index] = held
        self.note_read(delta)
        return delta

    async def wait_until_begun(self) -> DeltaT | None:
        """Wait until the request runs. See `ScopeStream.wait_until_begun`."""
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

    # --- called by the engine while it delivers, synchronous ---

    def carry(self, sequences: Iterable[tuple[PartT, AskedT]]) -> None:
        """Take unfinished sequences back from a broken core. They come before the sequences that were not in that core
        yet.

        Args:
            sequences: unfinished choices, each with its request to the next core.
        """
        self.core_count = 0
        self.upcoming.extendleft(reversed([*sequences]))

    def note_run(self, now: float) -> None:
        """Note that one more choice runs. When all choices run, the queue deadline is cancelled.

        Args:
            now: current time.
        """
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
        """Push a delta to the reader. The delta is merged with an unread delta of the same choice."""
        index, pending = delta.index, self._pending
        if delta.finish_reason is not None:
            delta = self.trace.ended(delta)
        if index in pending:
            hold_unread(pending[index], delta, self._merge)
        else:
            pending[index] = [delta]
        if delta.finish_reason is not None:
            self._unfinished_count -= 1
            self._first_end = self._first_end or delta
            if self._unfinished_count == 0:
                self.ended_at = trio.current_time()
            self._begun.set()
        while self._waiting:
            reschedule(self._waiting.pop(), NONE_OUTCOME)

    def fail(self, error: Exception) -> None:
        """Fail the request. The reader gets the earlier deltas first, and then the error."""
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


class RequestsById(Generic[ScopeT]):
    """The entered requests by id. Requests with the same id stay in the order in which they entered."""

    def __init__(self) -> None:
        self._requests: dict[str, list[ScopeT]] = {}

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __len__(self) -> int:
        return sum(len(requests) for requests in self._requests.values())

    def __iter__(self) -> Iterator[ScopeT]:
        """Iterate over a copy, so that requests may be removed during the iteration."""
        return iter([request for requests in self._requests.values() for request in requests])

    def of(self, request_id: str) -> list[ScopeT]:
        return list(self._requests.get(request_id, ()))

    def add(self, request: ScopeT) -> None:
        self._requests.setdefault(request.id, []).append(request)

    def clear(self) -> None:
        self._requests.clear()

    def remove(self, request: ScopeT) -> None:
        requests = self._requests[request.id]
        requests.remove(request)
        if not requests:
            del self._requests[request.id]


def error_of(delta: AnyDelta) -> TrioserveError | None:
    """Return the error for the last delta of a failed request, choice or image.

    Args:
        delta: any delta.

    Returns:
        The error. None if the delta has no finish reason, or a successful one.
    """
    if delta.finish_reason is FinishReason.DEADLINE:
        return DeadlinePassed(delta.message or "the request's deadline has passed")
    if delta.finish_reason is FinishReason.ABORT:
        return RequestAborted(delta.message or "the request was aborted")
    if delta.finish_reason is FinishReason.ERROR:
        return RequestFailed(delta.message or "the engine could not continue this request")
    return None


@uninterrupted
class ScopeStream(Generic[ScopeT, DeltaT]):
    """A stream of deltas: `async with engine.generate(...) as stream: async for delta in stream: ...`.

    Entering raises Overloaded, Draining or InvalidRequest if the request is refused. Then nothing needs to be released.

    Iteration yields deltas until each choice has had a delta with a finish_reason. It raises EngineFault if the engine
    broke. It raises Draining if the server shuts down before the request begins to run. If several tasks iterate over
    one stream, each delta goes to one of them, and all of them see the end.

    Read only inside the scope. A task that still waits when the scope is left gets AlreadyEnded.

    Args:
        request: the engine's state of the request.
        submit: admits the request, and adds it to the core.
        leave: aborts the request, and releases all its resources.
        own_run: checks that calls come from the right thread, Trio program and process.
    """

    def __init__(
        self,
        request: ScopeT,
        *,
        submit: Callable[[ScopeT], Awaitable[None]],
        leave: Callable[[ScopeT], None],
        own_run: OwnRun,
    ) -> None:
        self._request = request
        self._own_run = own_run
        self._process_id = getpid()
        self._submit = submit
        self._leave = leave

    async def __aenter__(self) -> Self:
        self._own_run.check("entering a request")
        self._request.enter()
        try:
            await self._submit(self._request)
        except BaseException:
            self._request.leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._own_run.check("leaving a request")
        self._request.leave()
        self._leave(self._request)

    def __aiter__(self) -> Self:
        return self

    # This function is not async, because one more call per delta takes measurable time.
    def __anext__(self) -> Awaitable[DeltaT]:
        if getpid() != self._process_id:
            self._own_run.check_process("reading a request")  # Without this check, a forked child would wait forever.
        return self._request.next_delta()

    @property
    def id(self) -> str:
        """Id of the request, which the caller chose or the engine generated."""
        return self._request.id

    @property
    def is_finished(self) -> bool:
        """True if every choice has ended with its last delta, or if the request failed."""
        return self._request.is_finished

    async def wait_until_begun(self) -> DeltaT | None:
        """Wait until the request runs. An HTTP handler can still choose the response status until then.

        Returns:
            None if the request runs. If the request ended in the queue, the last delta, which contains the reason.
            Iteration yields this delta, too.

        Raises:
            AlreadyEnded: the caller is outside of the scope.
            Exception: the error with which the request failed.
        """
        begun: DeltaT | None = await self._request.wait_until_begun()
        return begun
