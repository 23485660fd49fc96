"""How a request enters an engine and leaves it: queue, lease, preparation, deadlines, and abort by id.

Every way out of a request leads to one synchronous call, `_leave`.
"""

from __future__ import annotations

import functools
import math
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypedDict, TypeVar

import trio

from trioserve.admission.dispatch import AdmissionScope
from trioserve.admission.recent_requests import EndedIds
from trioserve.contracts.arguments import refuse, to_float, to_int, to_str
from trioserve.contracts.deadlines import NO_DEADLINES, Deadline, Deadlines, passed_message
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import AbortOutcome, FinishReason
from trioserve.contracts.tracing import NO_TRACER, Attributes, Span, Tracer
from trioserve.engine.lifecycle.engine_life import EngineLife
from trioserve.engine.lifecycle.request_scope import RequestPart, RequestScope
from trioserve.engine.lifecycle.request_trace import RequestTrace
from trioserve.engine.request_preparation import instance_of, text_or_none
from trioserve.engine.settings import EngineSettings
from trioserve.metrics.registry import Metrics
from trioserve.trio_tools.deadline_keeper import Alarm
from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["EngineShell", "new_request_id"]

ScopeT = TypeVar("ScopeT", bound=RequestScope[Any, Any, Any])
PartT = TypeVar("PartT", bound=RequestPart[Any])
AskedT = TypeVar("AskedT")
PartsT = TypeVar("PartsT")


def new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


class ScopeArguments(TypedDict):
    """Arguments that every request has, see `RequestScope`."""

    request_id: str
    priority: int
    deadlines: Deadlines
    owner: str | None
    tenant: str
    part_of: Span


@uninterrupted
class EngineShell(EngineLife[ScopeT, PartT, AskedT, PartsT]):
    """An engine that accepts requests. Every method belongs to the thread of the Trio program that opened the engine.

    Args:
        metrics: registry of the engine's metrics.
        settings: limits of the engine.
        sequences_max: most sequences that run at a time.
        new_request_id: makes the id of a request whose caller gives none.
        lent_max: further leases for requests that must not wait in the queue.
    """

    _part_name: ClassVar[str] = "sequences"

    def __init__(
        self,
        *,
        metrics: Metrics,
        settings: EngineSettings,
        sequences_max: int,
        new_request_id: Callable[[], str],
        lent_max: int = 0,
    ) -> None:
        super().__init__(metrics=metrics, settings=settings, sequences_max=sequences_max, lent_max=lent_max)
        self.tracer: Tracer = NO_TRACER
        self._new_request_id = new_request_id
        self._ended_ids = EndedIds()
        self._live_max = sequences_max + settings.waiting_requests_max

    # --- different for each kind of engine ---

    @abstractmethod
    def _check(self, request: ScopeT) -> None:
        """Raise InvalidRequest if this engine cannot serve the request. Called before anything is acquired."""

    @abstractmethod
    def _new_choices(self, request: ScopeT) -> list[PartT]:
        """Make the parts of a request, each with a unique id for the core. May acquire what the request has from the
        start.
        """

    @abstractmethod
    async def _prepare(self, request: ScopeT) -> None:
        """Make the input of the core's sequences. Called when the request has its lease."""

    @abstractmethod
    def _sequences(self, request: ScopeT) -> Sequence[AskedT]:
        """Return one sequence per part that has not ended."""

    @abstractmethod
    def _trace(self, request: ScopeT) -> RequestTrace:
        """Begin the trace of a request that has entered the queue."""

    def _make_way(self, request: ScopeT) -> None:
        """Note that a request waits in the queue. A subclass may lend a lease so that it need not wait."""

    def _release(self, request: ScopeT) -> None:
        """Release what was acquired for a request, because the core has no part of it any more."""

    def _release_prepared(self, request: ScopeT) -> None:
        """Release what was prepared for a request that leaves, because the core has no part of it."""

    def _end_holds(self, request: ScopeT) -> None:
        """End the holds of a request's blocks."""

    def _leave_holds(self, request: ScopeT) -> None:
        """Keep or end the holds of a request that leaves."""
        self._end_holds(request)

    def _note_left(self, request: ScopeT) -> None:
        """Note in the trace that the scope of a request is over."""
        request.trace.left(prompt_tokens=0, completion_tokens=0, cached_tokens=0)

    def _known(self, request_id: str) -> list[ScopeT]:
        """Return the requests with an id that can be aborted."""
        return self._requests.of(request_id)

    # --- requests ---

    def _scope_arguments(
        self,
        *,
        request_id: str | None,
        priority: int,
        deadlines: Deadlines | None,
        owner: str | None,
        tenant: str | None,
        part_of: Span,
    ) -> ScopeArguments:
        """Check the arguments of a caller, and apply the engine's defaults and limits. Raises InvalidRequest."""
        asked = instance_of(Deadlines, "deadlines", deadlines, NO_DEADLINES)
        owner = text_or_none("owner", owner)
        return ScopeArguments(
            request_id=text_or_none("request_id", request_id) or self._new_request_id(),
            priority=to_int("priority", priority),
            deadlines=asked.within(self._settings.deadlines, self._settings.deadlines_max),
            owner=owner,
            tenant=text_or_none("tenant", tenant) or owner or "",
            part_of=part_of,
        )

    async def _submit(self, request: ScopeT) -> None:
        """Enter the queue, wait for a lease, prepare, and hand the sequences to the core. If it raises, nothing is
        held.
        """
        count = request.sequence_count
        self._check(request)
        self._check_open(count)
        admission = self._admission.begin(request)
        request.on_gone = lambda: self._leave_queue(request, admission)
        self._requests.add(request)
        request.trace = self._trace(request)
        try:  # from here on an error must release something
            request.choices = self._new_choices(request)
            request.begin_next = lambda: self._begin_next(request)
            self._set_alarms(request)
            self._preparing_count += count
            self.load_changes.note()
            try:
                with request.preparation:
                    if admission.is_waiting:
                        self._make_way(request)
                    await self._admission.lease(request, admission)
                    request.is_leased = True
                    self._leased_count += count
                    request.trace.leased()
                    await self._prepare(request)
                    if not request.is_finished:  # a resumed response that is already complete needs no computation
                        await self._wait_until_admitted()
            finally:
                self._preparing_count -= count
                self._leased_count -= count if request.is_leased else 0
                self.load_changes.note()
            if request.is_finished:
                return  # It was aborted meanwhile, and its reader gets the final delta.
            if not self._is_open:
                raise self.fault or self._admission.refused_draining()
            sequences = self._sequences(request)
            choices = [choice for choice in request.choices if not choice.is_ended]
            request.upcoming.extend(zip(choices, sequences, strict=True))
            self._readmission.admit(request)
        except BaseException:
            self._leave(request)
            raise
        self._loop.wake()

    def _leave(self, request: ScopeT) -> None:
        """Leave a request's scope: abort what runs, end or keep its holds, and release what it has.

        This synchronous call is the only way out.
        """
        self._delivery.end(request, FinishReason.ABORT)
        if not request.core_count:
            self._release_prepared(request)
        request.cancel_alarms()
        self._leave_holds(request)
        self._requests.remove(request)
        self._ended_ids.note(request.id, request.owner)
        if self.fault is not None:
            request.trace.freed()  # a broken core reports nothing more
            self._release(request)
        self._note_left(request)
        self.load_changes.note()
        self._note_idle()

    def _leave_queue(self, request: ScopeT, admission: AdmissionScope) -> None:
        """Return the place in the queue or the lease, because the core has no part of the request any more."""
        if admission.is_queued:
            self._delivery.note_left_queue(request.sequence_count)
        self.dispatch.leave(admission)
        self._release(request)
        request.trace.freed()
        self._readmission.look()
        self._pausing.look()

    def abort(
        self,
        request_ids: Iterable[str],
        reason: FinishReason = FinishReason.ABORT,
        *,
        owner: str | None = None,
        min_age_seconds: float = 0.0,
    ) -> dict[str, AbortOutcome]:
        """End requests by the ids that their callers gave. Never waits.

        A reader gets the deltas that came before, and then a last delta with the reason. Blocks are free at once, or
        right after the step in flight. For a finished request whose blocks are held, the connector is notified, and
        releases the blocks in its own time.

        Args:
            request_ids: ids of requests. A single string is one id. An unknown id is not an error.
            reason: finish reason of the last delta.
            owner: abort only requests of this user. Requests of others are reported as unknown. None: all requests.
            min_age_seconds: abort only requests that were entered at least this long ago. Younger requests with the
                same id continue.

        Returns:
            The outcome per id.

        Raises:
            InvalidRequest: an argument has a wrong type. Then no request was ended.
        """
        self._own_run.check("engine.abort")
        if isinstance(request_ids, str):  # otherwise each letter would be an id
            request_ids = (request_ids,)
        request_ids = [to_str("request_ids", request_id, verb="holds") for request_id in request_ids]
        reason = instance_of(FinishReason, "reason", reason, FinishReason.ABORT)
        outcomes = {}
        entered_before = trio.current_time() - min_age_seconds
        for request_id in dict.fromkeys(request_ids):
            requests = [
                request
                for request in self._known(request_id)
                if owner in (None, request.owner) and (not min_age_seconds or request.entered_at <= entered_before)
            ]
            unfinished = [request for request in requests if not request.is_finished]
            for request in unfinished:
                self._delivery.end_with_final_delta(request, reason, "the request was aborted by its id")
            for request in requests:
                self._end_holds(request)
            if unfinished:
                outcomes[request_id] = AbortOutcome.ABORTED
            elif requests or self._ended_ids.knows(request_id, owner=owner):
                outcomes[request_id] = AbortOutcome.ALREADY_FINISHED
            else:
                outcomes[request_id] = AbortOutcome.UNKNOWN
        return outcomes

    def call_at(self, at: float, function: Callable[[], None]) -> Alarm:
        """Call a function at a given time, from the engine's task for deadlines.

        Args:
            at: time of Trio's clock.
            function: must not wait or raise.

        Returns:
            An alarm that can be cancelled.

        Raises:
            InvalidRequest: an argument has a wrong type.
        """
        at = to_float("at", at)
        if math.isnan(at):
            refuse("at", at, "a time of Trio's clock")
        if not callable(function):
            refuse("function", function, "a function without parameters")
        return self._deadline_keeper.set(at, function)

    # --- internal ---

    async def _wait_until_open(self) -> None:
        """Wait until new requests are admitted. Raises the refusal if the engine is closed."""
        await self._wait_until_admitted()
        if not self._is_open:
            raise self.fault or self._admission.refused_draining()

    def _check_open(self, count: int) -> None:
        if self.fault is not None:
            raise self.fault
        if self.reopens_at is not None and not self.draining:
            if not self.sleep_level:
                raise self._admission.refused_reopening()
        elif not self._is_open:
            raise self._admission.refused_draining()
        overdue = self.step_watch.overdue()
        if overdue is not None:
            raise self._admission.refused_overdue(overdue)
        if count > self._live_max:
            raise InvalidRequest(
                f"n is {count}, but at most {self._live_max} {self._part_name} may run and wait here", param="n"
            )

    def _span_of(
        self,
        request: ScopeT,
        operation: str,
        *,
        model_name: str,
        attributes: Attributes,
        traceparent: str | None = None,
    ) -> Span:
        """Begin a span for a request that has entered the queue now.

        Args:
            request: the request.
            operation: operation name from OpenTelemetry's conventions for generative AI.
            model_name: name of the model or adapter.
            attributes: further attributes.
            traceparent: trace context of another engine that gave the request away. None: none.
        """
        return self.tracer.begin(
            f"{operation} {model_name}",
            parent=request.part_of,
            traceparent=traceparent,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "trioserve",
                "gen_ai.request.model": model_name,
                "gen_ai.response.model": model_name,
                "trioserve.request.id": request.id,
                "trioserve.priority": request.priority,
                **attributes,
            },
        )

    def _set_alarms(self, request: ScopeT) -> None:
        for deadline in Deadline:
            seconds = request.deadlines.seconds(deadline)
            if seconds is not None:
                on_deadline = functools.partial(self._pass_deadline, request, deadline, seconds)
                request.alarms[deadline] = self._deadline_keeper.set(request.entered_at + seconds, on_deadline)

    def _pass_deadline(self, request: ScopeT, deadline: Deadline, seconds: float) -> None:
        if not request.is_finished:
            self.metrics.deadlines_passed_total.labels(deadline.value).inc()
            message = passed_message(deadline, seconds, self._settings.deadlines_max)
            self._delivery.end_with_final_delta(request, FinishReason.DEADLINE, message, stop_reason=deadline.value)
