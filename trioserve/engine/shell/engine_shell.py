"""How a request gets into an engine and out of it, whatever it asks for: a place in the queue, a lease, what the core
gets, its deadlines, an abort by its id. Every way out leads to one synchronous call.
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
from trioserve.admission.ended_ids import EndedIds
from trioserve.contracts.arguments import refuse, to_float, to_int, to_str
from trioserve.contracts.deadlines import NO_DEADLINES, Deadline, Deadlines, passed_message
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import AbortOutcome, FinishReason
from trioserve.contracts.tracing import NO_TRACER, Attributes, Span, Tracer
from trioserve.engine.request_preparation import instance_of, text_or_none
from trioserve.engine.settings import EngineSettings
from trioserve.engine.shell.engine_life import EngineLife
from trioserve.engine.shell.request_scope import RequestPart, RequestScope
from trioserve.engine.shell.request_trace import RequestTrace
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
    """What every request is told of who asks; see RequestScope."""

    request_id: str
    priority: int
    deadlines: Deadlines
    owner: str | None
    tenant: str
    part_of: Span


@uninterrupted
class EngineShell(EngineLife[ScopeT, PartT, AskedT, PartsT]):
    """Every method belongs to the thread of the Trio program that opened it. new_request_id: for requests whose caller
    gives none."""

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

    # --- what is other for each kind ---

    @abstractmethod
    def _check(self, request: ScopeT) -> None:
        """Raises InvalidRequest for what this engine does not do, before anything is held."""

    @abstractmethod
    def _new_choices(self, request: ScopeT) -> list[PartT]:
        """Its parts, each with an id of its own for the core; and what it has from entering on."""

    @abstractmethod
    async def _prepare(self, request: ScopeT) -> None:
        """It has its lease: make what the core's sequences are made of."""

    @abstractmethod
    def _sequences(self, request: ScopeT) -> Sequence[AskedT]:
        """Of each part that has not ended."""

    @abstractmethod
    def _trace(self, request: ScopeT) -> RequestTrace:
        """To be made when it has entered the queue."""

    def _make_way(self, request: ScopeT) -> None:
        """It waits in the queue now. Where it is not to wait until others are done, lend it a lease."""

    def _release(self, request: ScopeT) -> None:
        """The core has nothing of it any more: neither has what was acquired for it."""

    def _release_prepared(self, request: ScopeT) -> None:
        """It leaves, and the core has nothing of it any more: what was prepared meanwhile is of no use."""

    def _end_holds(self, request: ScopeT) -> None:
        """Nobody wants any more what is held of it."""

    def _leave_holds(self, request: ScopeT) -> None:
        """It leaves: what is held of it is held on, or is not."""
        self._end_holds(request)

    def _note_left(self, request: ScopeT) -> None:
        """Its scope is over: its trace is told."""
        request.trace.left(prompt_tokens=0, completion_tokens=0, cached_tokens=0)

    def _known(self, request_id: str) -> list[ScopeT]:
        """Those that bear the id and can be aborted."""
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
        """What a caller gave, with the engine's defaults and within its limits. Raises InvalidRequest for an argument
        of a wrong type."""
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
        """Take a place in the queue, wait for a lease, prepare, and hand the sequences to the core. Holds nothing when
        it raises."""
        count = request.sequence_count
        self._check(request)
        self._check_open(count)
        admission = self._admission.begin(request)
        request.on_gone = lambda: self._leave_queue(request, admission)
        self._requests.add(request)
        request.trace = self._trace(request)
        try:  # from here on there is something to be given back
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
                    if not request.is_finished:  # a response that is known whole wants nothing computed
                        await self._wait_until_admitted()
            finally:
                self._preparing_count -= count
                self._leased_count -= count if request.is_leased else 0
                self.load_changes.note()
            if request.is_finished:
                return  # aborted meanwhile; its reader finds the final delta
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
        """The one way out of a request's scope. Synchronous; nothing to do when it has finished and is not held."""
        self._delivery.end(request, FinishReason.ABORT)
        if not request.core_count:
            self._release_prepared(request)
        request.cancel_alarms()
        self._leave_holds(request)
        self._requests.remove(request)
        self._ended_ids.note(request.id, request.owner)
        if self.fault is not None:
            request.trace.freed()  # a core that broke says nothing any more
            self._release(request)
        self._note_left(request)
        self.load_changes.note()
        self._note_idle()

    def _leave_queue(self, request: ScopeT, admission: AdmissionScope) -> None:
        """The core has nothing of it any more: its place or its lease is another's."""
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
        """End requests by the ids their callers gave. Never waits. A reader gets what came before and a last delta with
        the reason; what they had is back at once, or right after the step in flight. What is held of one that had
        finished comes back when the connector lets it go, which it is told to do.

        request_ids: one id will do, too. owner: only theirs; those of others are unknown. No id is an error: what
        became of each is what is returned. Raises InvalidRequest, and has ended nothing, for arguments of another type.
        min_age_seconds: only requests that were entered at least so long ago; younger ones with the same id go on.
        """
        self._own_run.check("engine.abort")
        if isinstance(request_ids, str):  # otherwise each of its letters were an id
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
        """Have `function` called at a time of Trio's clock, by the engine's one task for this. It must not wait or
        raise. Raises InvalidRequest for what is no time or no function."""
        at = to_float("at", at)
        if math.isnan(at):
            refuse("at", at, "a time of Trio's clock")
        if not callable(function):
            refuse("function", function, "a function without parameters")
        return self._deadline_keeper.set(at, function)

    # --- inside ---

    async def _wait_until_open(self) -> None:
        """Raises what refuses a request if it does not compute any more."""
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
        """Begun now: it has entered the queue. operation: as in OpenTelemetry's conventions for generative AI."""
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
                ring = functools.partial(self._pass_deadline, request, deadline, seconds)
                request.alarms[deadline] = self._deadline_keeper.set(request.entered_at + seconds, ring)

    def _pass_deadline(self, request: ScopeT, deadline: Deadline, seconds: float) -> None:
        if not request.is_finished:
            self.metrics.deadlines_passed_total.labels(deadline.value).inc()
            message = passed_message(deadline, seconds, self._settings.deadlines_max)
            self._delivery.end_with_final_delta(request, FinishReason.DEADLINE, message, stop_reason=deadline.value)
