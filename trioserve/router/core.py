"""The router's door: who waits, who holds a lease where, and who is refused. Knows neither sockets nor clocks.

    router.prepare(request, now)        count a request that has to be read before its endpoint can be chosen
    router.prepared(request)            it was read, or is given up
    router.enter(request, now)          -> Ticket: in the queue, or with a lease already; raises what refuses it
    router.leave(ticket, now)           the one way out: its place or lease is back; legal at any moment, ever again
    router.sent(ticket)                 the request goes to its endpoint
    router.first_token(ticket, now)     the endpoint responses: from here on it is not tried elsewhere
    router.failed(ticket, fault, now)   -> whether the ticket is in the queue again, for another endpoint
    router.prefilled(ticket, now)       one endpoint has computed the prompt of a disaggregated request
    router.hold_lost(ticket, now)       and keeps its blocks no longer
    router.note_load, note_health, ...  what endpoints tell
    router.tick(now)                    what only time brings; next_tick() says when

Whoever waits is told by `on_change(ticket)`, called once for each grant and each refusal, inside the call that caused
it. A lease is handed over in the very call that gives it back: nothing polls, and nobody is woken who gets nothing.
`on_gone(endpoint)` is called when a drained endpoint has nothing any more.

A request that can be disaggregated is, if there are two endpoints for it when it enters: its stage is PREFILL, and then
DECODE. Each stage has a queue of its own. Roles are hints, so whatever does not come to pass that way, one endpoint
does whole: the stage becomes None, in the queue or at a failure, and whoever holds the ticket looks at it when it has a
lease.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from trioserve.contracts.endpoint import EndpointId, EndpointLoad, PairOutcome, RoutedRequest, Stage
from trioserve.contracts.errors import (
    Draining,
    InvalidRequest,
    NoEndpoint,
    Overloaded,
    QueueWaitOver,
    StartupError,
    TrioserveError,
)
from trioserve.contracts.kv_transfer import EngineRole
from trioserve.router.drain_rate import DrainRate
from trioserve.router.endpoint_state import EndpointHealth, EndpointState
from trioserve.router.policies import Candidate, PolicyFactory, Rng
from trioserve.router.retry_budget import RetryBudget
from trioserve.router.settings import RouterSettings
from trioserve.router.ticket import Ticket, TicketState
from trioserve.router.waiting_queue import FairQueue

__all__ = ["Fault", "RouterCore", "RouterStats"]

DRAIN_RETRY_SECONDS = 5.0
SPARE_DEADLINES_MAX = 64


class Fault(enum.Enum):
    """How an endpoint failed a request before its first token."""

    UNREACHABLE = "unreachable"  # no connection: the request never got there
    BUSY = "busy"  # it said so itself (429, 503): its load is other than we thought; it is not ill
    BROKE = "broke"  # it broke off, or answered 500, 502, 504
    TRANSFER = "transfer"  # it could not get at the blocks of a prompt: whose fault that is, nobody knows


class RouterStats(msgspec.Struct, frozen=True, kw_only=True):
    """waiting: requests in the queue, and those that are being read before. leases: sequences that have a seat, by
    endpoint. pairs_total: requests that were to be disaggregated, by what became of that. Totals count since the
    start."""

    waiting: int
    waiting_prompt_tokens: int
    leases: dict[EndpointId, int]
    health: dict[EndpointId, EndpointHealth]
    admissions_total: int
    retries_total: int
    rejections_total: dict[str, int]
    pairs_total: dict[PairOutcome, int]


class _Queue:
    """One model's queue for one stage."""

    def __init__(self) -> None:
        self.newcomers = FairQueue()
        # Requests that were elsewhere, where they failed or had their prompt computed, and wait again: they have stood
        # in the queue already, and come before it.
        self.again: OrderedDict[int, Ticket] = OrderedDict()
        self._again_prompt_tokens = 0
        self.drain_rate = DrainRate()

    @property
    def count(self) -> int:
        return self.newcomers.count + len(self.again)

    @property
    def prompt_tokens(self) -> int:
        return self.newcomers.prompt_tokens + self._again_prompt_tokens

    def wait_again(self, ticket: Ticket) -> None:
        self.again[ticket.index] = ticket
        self._again_prompt_tokens += ticket.request.prompt_tokens

    def end_wait_again(self, ticket: Ticket) -> None:
        del self.again[ticket.index]
        self._again_prompt_tokens -= ticket.request.prompt_tokens


class _Model:
    """One model's queues. preparing: requests that are read before they enter."""

    def __init__(self) -> None:
        self.queues: dict[Stage | None, _Queue] = {stage: _Queue() for stage in (Stage.DECODE, Stage.PREFILL, None)}
        self.preparing = 0

    @property
    def count(self) -> int:
        return sum(queue.count for queue in self.queues.values())

    @property
    def is_anybody_waiting(self) -> bool:
        """Asked at every event, and mostly not so."""
        decode, prefill, whole = self.queues.values()
        return bool(
            whole.newcomers.count
            or whole.again
            or prefill.newcomers.count
            or prefill.again
            or decode.newcomers.count
            or decode.again
        )

    def waiting_again(self) -> list[Ticket]:
        """Who waits again, in the order in which that began. It is one for all stages: those whose prompt is computed
        never cease to come, and would keep an endpoint that does both from those that it is the last hope of."""
        again = [ticket for queue in self.queues.values() for ticket in queue.again.values()]
        return sorted(again, key=lambda ticket: ticket.again_index)

    def heads(self) -> list[tuple[_Queue, Ticket]]:
        """Who is next in each queue. Where queues want the same endpoint, the one who came first goes first."""
        heads = [(queue, head) for queue in self.queues.values() if (head := queue.newcomers.head()) is not None]
        return sorted(heads, key=lambda entry: (entry[1].request.priority, entry[1].index))


class RouterCore:
    """All state of the router. Times are seconds of one monotonic clock, and never go back."""

    def __init__(
        self,
        settings: RouterSettings,
        policy: PolicyFactory,
        *,
        on_change: Callable[[Ticket], None],
        rng: Rng,
        on_gone: Callable[[EndpointId], None] = lambda id: None,
    ) -> None:
        self.settings = settings
        self._on_change = on_change
        self._on_gone = on_gone
        self.policy = policy(rng)
        self.endpoints: dict[EndpointId, EndpointState] = {}
        self.is_draining = False
        self.sent_total = 0
        self._models: dict[str, _Model] = {}
        self._live: dict[int, Ticket] = {}
        self._deadlines: list[tuple[float, int, Ticket]] = []
        self._next_index = 0
        self._again_total = 0
        self._budget = RetryBudget(settings.retry_share_max, settings.retries_per_second_min)
        self._admissions_total = 0
        self._retries_total = 0
        self._rejections_total: dict[str, int] = {}
        self._pairs_total = dict.fromkeys(PairOutcome, 0)

    # --- requests ---

    def prepare(self, request: RoutedRequest, now: float) -> None:
        """Count a request that is read before it can enter, which costs something: so many may be as there is room for,
        in the queue and at the endpoints. The caller owes `prepared`. Raises as enter does, and then holds nothing."""
        self._check_open(request, now)
        model = self._model(request.model)
        seats = sum(max(0, state.leases_max - state.leases) for state in self._serving(request.model) if state.is_given)
        queue = model.queues[Stage.PREFILL if self.will_be_disaggregated(request) else None]
        count = queue.count + model.preparing
        if count >= self.settings.queue_requests_max + seats:
            seconds = queue.drain_rate.seconds_for(count + 1, now)
            raise self._refusal(
                Overloaded(
                    f"{count} requests wait for the model, {self.settings.queue_requests_max} may and {seats} find "
                    f"room at an endpoint: try again in {math.ceil(seconds)} s",
                    reason="queue_full",
                    retry_after_seconds=seconds,
                )
            )
        model.preparing += 1

    def prepared(self, request: RoutedRequest) -> None:
        """The end of what `prepare` began."""
        model = self._model(request.model)
        assert model.preparing > 0
        model.preparing -= 1

    def enter(self, request: RoutedRequest, now: float) -> Ticket:
        """Take a place in the queue, and a lease at once if there is one. The caller owes `leave`.

        In a full queue, a tenant with fewer waiters takes the place of the newest of the one with most. A pinned
        request never waits. While every endpoint of a model is ejected nobody joins its queues; those who are in one
        keep their place, since an ejection is short. Raises Overloaded, Draining or NoEndpoint, or InvalidRequest for
        too many sequences, and then holds nothing.
        """
        usable = self._check_open(request, now)
        queue_deadline = min(now + self.settings.queue_seconds_max, request.queue_deadline)
        self._next_index += 1
        ticket = Ticket(request, self._next_index, now, queue_deadline)
        ticket.is_disaggregated = self.will_be_disaggregated(request)
        ticket.stage = Stage.PREFILL if ticket.is_disaggregated else None
        queue = self._queue_of(ticket)
        must_wait = bool(queue.count) and request.pinned is None
        if request.pinned is None and not must_wait and self._model(request.model).is_anybody_waiting:
            self._hand_over(now)  # what it may get, those in other queues may have waited for
        if must_wait or not self._grant(ticket, now):
            if request.pinned is not None:
                is_given = usable[0].is_given
                raise self._refusal(self._pinned_is_full(request, now) if is_given else self._no_endpoint(request, now))
            queue.newcomers.add(ticket)
            if must_wait:
                self._hand_over(now)  # those before it may wait for what it does not need
            if ticket.state is TicketState.WAITING:
                refusal = self._queue_was_full(queue, request, now)
                if refusal is not None:
                    pushed_out = self._pushed_out(queue, ticket)
                    if pushed_out is None:
                        queue.newcomers.remove(ticket)
                        raise self._refusal(refusal)
                    self._refuse(pushed_out, refusal, now)
                self._set_deadline(ticket)
        self._live[ticket.index] = ticket
        self._budget.note_request()
        return ticket

    def leave(self, ticket: Ticket, now: float) -> None:
        """The one way out of a request's scope. Whatever it holds is back; nothing to do when it has ended."""
        if ticket.state is TicketState.ENDED:
            return
        self._let_go(ticket, now)
        self._end(ticket)
        self._hand_over(now)

    def sent(self, ticket: Ticket) -> None:
        """The request goes to its endpoint now; until then a drain may still refuse it."""
        assert ticket.state is TicketState.LEASED
        assert ticket.sent_index is None
        self.sent_total += 1
        ticket.sent_index = self.sent_total
        self._endpoint_of(ticket).sent[ticket.sent_index] = ticket.request.sequences

    def first_token(self, ticket: Ticket, now: float) -> None:
        """The endpoint has begun to answer. What fails after this is the client's to see."""
        if ticket.state is not TicketState.LEASED or ticket.has_token:
            return
        assert ticket.stage is not Stage.PREFILL, "the token of a prefill is nobody's"
        ticket.has_token = True
        self._note_pair(ticket, PairOutcome.PAIRED)
        endpoint = self._endpoint_of(ticket)
        endpoint.note_success(now)
        if ticket.is_probe:
            endpoint.probe_out = False
            ticket.is_probe = False
        if self.settings.lease_until == "first_token":
            endpoint.claims -= ticket.request.sequences
            ticket.move(TicketState.RUNNING_FREE)
        self._hand_over(now)

    def prefilled(self, ticket: Ticket, now: float, *, outcome: PairOutcome | None = None) -> None:
        """The endpoint has computed the prompt: its seat there is free, and the ticket waits for a decode endpoint, or
        has a lease there already. outcome: why one endpoint has to do the rest, if so; best the one that has the
        prompt in its prefix cache now."""
        if ticket.state is not TicketState.LEASED or ticket.stage is not Stage.PREFILL:
            return
        endpoint = self._endpoint_of(ticket)
        endpoint.note_success(now)
        ticket.prefilled_by, ticket.prefilled_at, ticket.stage_fault = endpoint.id, now, None
        served_seconds = now - ticket.leased_at
        ticket.own_deadline += served_seconds
        ticket.queue_deadline += served_seconds
        self._let_go(ticket, now)
        ticket.stage, ticket.is_held = Stage.DECODE, outcome is None
        if outcome is not None:
            ticket.stage = None
            self._note_pair(ticket, outcome)
        self._wait_again(ticket)
        self._refuse_if_hopeless(ticket, now)
        self._hand_over(now)

    def hold_lost(self, ticket: Ticket, now: float) -> None:
        """The blocks of its prompt are not kept any more. Nothing to do when it does not wait for them."""
        ticket.is_held = False
        if ticket.stage is Stage.DECODE and not ticket.is_sent:
            if ticket.state is TicketState.LEASED:
                self._let_go(ticket, now)
                self._wait_again(ticket)
            self._refuse_if_hopeless(ticket, now)
            self._hand_over(now)

    def failed(self, ticket: Ticket, fault: Fault, now: float, *, busy_seconds: float = 1.0) -> bool:
        """The endpoint failed a request that has no token yet. The lease is back before anything else happens.
        busy_seconds: of a BUSY endpoint, for how long it is left alone.

        Returns whether the ticket waits again (or has a lease elsewhere already); otherwise it has ended, and the
        caller tells the client what the endpoint said.
        """
        if ticket.state is not TicketState.LEASED:
            return False
        assert not ticket.has_token, "a request is never tried again once its client has seen a token"
        assert ticket.endpoint is not None
        endpoint = self._endpoint_of(ticket)
        self._let_go(ticket, now)
        if fault is Fault.UNREACHABLE:
            endpoint.note_lost(now)
        elif fault is Fault.BROKE:
            endpoint.note_failure(now)
        elif fault is Fault.BUSY:
            endpoint.note_busy(now, busy_seconds)
        ticket.tried = (*ticket.tried, ticket.endpoint)
        ticket.stage_fault = _stage_fault(ticket.stage, fault)
        if not self._may_try_again(ticket, now):
            if ticket.stage_fault is not None:
                self._note_pair(ticket, ticket.stage_fault)
            self._end(ticket)
            self._hand_over(now)
            return False
        self._retries_total += 1
        self._wait_again(ticket)
        self._hand_over(now)
        return True

    def _may_try_again(self, ticket: Ticket, now: float) -> bool:
        if self.is_draining or ticket.request.pinned is not None or now >= ticket.queue_deadline:
            return False
        if len(ticket.tried) >= self.settings.attempts_max or not self._others(ticket):
            return False
        return self._budget.take(now)

    def _others(self, ticket: Ticket) -> list[EndpointState]:
        """Endpoints that may still take a request that failed."""
        return [
            state
            for state in self._serving(ticket.request.model)
            if state.id not in ticket.tried and state.health is not EndpointHealth.EJECTED
        ]

    # --- endpoints ---

    def add_endpoint(
        self,
        id: EndpointId,
        models: Iterable[str],
        now: float,
        *,
        leases_max: int | None = None,
        role: EngineRole | None = None,
    ) -> None:
        """One that is being drained is taken back. Raises StartupError for an id that is taken, or a limit below 1."""
        known = self.endpoints.get(id)
        if known is not None and known.health is not EndpointHealth.DRAINING:
            raise StartupError(f'there are two endpoints with the id "{id}": give each its own')
        if leases_max is not None and leases_max < 1:
            raise StartupError(f'the endpoint "{id}" may take {leases_max} requests, it must be at least 1')
        if known is not None:
            known.come_back(frozenset(models), leases_max=leases_max or self.settings.leases_max, role=role)
            return
        self.endpoints[id] = EndpointState(
            id,
            frozenset(models),
            self.settings,
            leases_max=leases_max or self.settings.leases_max,
            slow_start=any(state.health is EndpointHealth.HEALTHY for state in self.endpoints.values()),
            role=role,
        )

    def set_models(self, id: EndpointId, models: Iterable[str], now: float) -> None:
        """The endpoint says what it serves; one that is gone by now is ignored."""
        state = self.endpoints.get(id)
        if state is None:
            return
        state.models = frozenset(models)
        self._refuse_hopeless(now)
        self._hand_over(now)

    def set_role(self, id: EndpointId, role: EngineRole | None, now: float) -> None:
        """The endpoint says what it is meant for; one that is gone by now is ignored."""
        state = self.endpoints.get(id)
        if state is not None and state.role != role:
            state.role = role
            self._hand_over(now)

    def drain_endpoint(self, id: EndpointId, now: float) -> None:
        """Give it nothing more. It is gone when its last request has ended; those that wait go to others."""
        state = self.endpoints[id]
        state.drain()
        self._note_drained(state)
        self._refuse_hopeless(now)
        self._hand_over(now)

    def is_endpoint_draining(self, id: EndpointId) -> bool:
        state = self.endpoints.get(id)
        return state is not None and state.health is EndpointHealth.DRAINING

    def note_load(self, id: EndpointId, load: EndpointLoad, now: float, *, sent_when_asked: int) -> None:
        """What the endpoint says of itself; one that is unknown by now is ignored.
        sent_when_asked: `sent_total` when it was asked."""
        state = self.endpoints.get(id)
        if state is not None:
            state.note_load(load, now, sent_when_asked=sent_when_asked)
            self._hand_over(now)

    def note_health(self, id: EndpointId, is_well: bool, now: float) -> None:
        """A health check ended."""
        state = self.endpoints.get(id)
        if state is None or state.health is EndpointHealth.DRAINING:
            return
        state.note_check(is_well, now)
        self._hand_over(now)

    # --- time ---

    def next_tick(self, now: float) -> float:
        """When `tick` has something to do, if nothing else happens before; math.inf for never."""
        moments = [state.next_tick(now) for state in self.endpoints.values()]
        while self._deadlines and self._deadlines[0][2].state is not TicketState.WAITING:
            heapq.heappop(self._deadlines)
        if self._deadlines:
            moments.append(self._deadlines[0][0])
        return min(moments, default=math.inf)

    def tick(self, now: float) -> None:
        """Refuse those whose wait is over, and let endpoints be probed whose ejection is."""
        while self._deadlines and self._deadlines[0][0] <= now:
            ticket = heapq.heappop(self._deadlines)[2]
            if ticket.state is TicketState.WAITING and ticket.queue_deadline <= now:
                self._refuse(ticket, self._wait_over(ticket, now), now)
        for state in self.endpoints.values():
            state.tick(now)
        self._hand_over(now)

    def drain(self, now: float) -> None:
        """Take nothing new and refuse all that were not sent anywhere; the others go on, also those whose prompt is
        computed and that wait for the rest."""
        self.is_draining = True
        for ticket in list(self._live.values()):
            if not ticket.is_sent and ticket.prefilled_by is None:
                self._refuse(ticket, self._draining(), now)
        self._hand_over(now)

    def stats(self) -> RouterStats:
        return RouterStats(
            waiting=sum(model.count + model.preparing for model in self._models.values()),
            waiting_prompt_tokens=sum(
                queue.prompt_tokens for model in self._models.values() for queue in model.queues.values()
            ),
            leases={state.id: state.leases for state in self.endpoints.values()},
            health={state.id: state.health for state in self.endpoints.values()},
            admissions_total=self._admissions_total,
            retries_total=self._retries_total,
            rejections_total=dict(self._rejections_total),
            pairs_total=dict(self._pairs_total),
        )

    # --- giving and taking leases ---

    def _grant(self, ticket: Ticket, now: float) -> bool:
        """Give it a lease if an endpoint has room for it. It must not stand in any queue."""
        request, stage = ticket.request, ticket.stage
        if stage is Stage.PREFILL and self._is_handover_full(request.model):
            return False
        candidates = self._candidates(ticket, request.sequences, now)
        if request.sequences > 1 and not any(candidate.has_room for candidate in candidates):
            # Its sequences need not start together: the others wait for their seats at the endpoint.
            candidates = self._candidates(ticket, 1, now)
        if not any(candidate.has_room for candidate in candidates):
            return False
        if stage is None:
            candidates = self._nearest(ticket, candidates)
        id = self.policy.choose(request, candidates)
        assert any(candidate.has_room and candidate.id == id for candidate in candidates), f"{id} has no room"
        endpoint = self.endpoints[id]
        if endpoint.health is EndpointHealth.PROBING:
            endpoint.probe_out = ticket.is_probe = True
        endpoint.claims += request.sequences
        endpoint.in_flight += request.sequences
        ticket.endpoint = id
        ticket.leased_at = now
        ticket.move(TicketState.LEASED)
        self.policy.note_sent(request, id)
        self._queue_of(ticket).drain_rate.note_begin(now)
        self._admissions_total += 1
        return True

    def _candidates(self, ticket: Ticket, sequences: int, now: float) -> list[Candidate]:
        """The endpoints that are there for what is next of it, and which of them has room for so many sequences."""
        request, tried = ticket.request, ticket.tried
        return [
            Candidate(
                id=state.id,
                load=state.in_flight / state.leases_max,
                has_room=(
                    request.pinned in (None, state.id) and state.id not in tried and state.has_room(sequences, now)
                ),
            )
            for state in self._serving(request.model)
            if state.is_given and (ticket.stage is None or _may_do(state, ticket))
        ]

    def _hand_over(self, now: float) -> None:
        """Give what is free to those who have waited longest, in the order of their queues."""
        for name, model in self._models.items():
            if model.is_anybody_waiting:
                self._disaggregate_what_can_be(name, model)
                while self._serve_one(model, now):
                    pass

    def _serve_one(self, model: _Model, now: float) -> bool:
        """Give a lease to the first who can have one. Asked again after each, from the first on: where a prompt is
        handed over, another one may begin."""
        for ticket in model.waiting_again():
            if self._grant(ticket, now):
                self._queue_of(ticket).end_wait_again(ticket)
                self._on_change(ticket)
                return True
        for queue, head in model.heads():
            if self._grant(head, now):
                queue.newcomers.take()
                self._on_change(head)
                return True
        return False

    def _let_go(self, ticket: Ticket, now: float) -> None:
        """Give back its place or its lease, whichever it has."""
        if ticket.state is TicketState.WAITING:
            self._leave_queue(ticket)
            return
        endpoint = self._endpoint_of(ticket)
        if ticket.state is TicketState.LEASED:
            endpoint.claims -= ticket.request.sequences
            if ticket.is_probe:
                endpoint.probe_out = ticket.is_probe = False
        if ticket.sent_index is not None:
            del endpoint.sent[ticket.sent_index]
        endpoint.in_flight -= ticket.request.sequences
        assert 0 <= endpoint.claims <= endpoint.in_flight
        drain_rate = self._queue_of(ticket).drain_rate
        drain_rate.note(now)
        if endpoint.in_flight == 0 and not any(state.in_flight for state in self._serving(ticket.request.model)):
            drain_rate.note_idle(now)
        self._note_drained(endpoint)

    def _leave_queue(self, ticket: Ticket) -> None:
        queue = self._queue_of(ticket)
        if ticket.index in queue.again:
            queue.end_wait_again(ticket)
        else:
            queue.newcomers.remove(ticket)

    def _wait_again(self, ticket: Ticket) -> None:
        """It was elsewhere, and has given everything back."""
        ticket.move(TicketState.WAITING)
        ticket.sent_index = None
        self._again_total += 1
        ticket.again_index = self._again_total
        self._queue_of(ticket).wait_again(ticket)
        self._set_deadline(ticket)

    def _end(self, ticket: Ticket) -> None:
        ticket.move(TicketState.ENDED)
        del self._live[ticket.index]
        self._note_pair(ticket, PairOutcome.LEFT)

    def _note_drained(self, state: EndpointState) -> None:
        if state.health is EndpointHealth.DRAINING and state.in_flight == 0:
            del self.endpoints[state.id]
            self.policy.forget(state.id)
            self._on_gone(state.id)

    # --- requests whose prompt is computed apart from their response ---

    def will_be_disaggregated(self, request: RoutedRequest) -> bool:
        """Whether it would be, if it entered now."""
        return request.can_be_disaggregated and request.pinned is None and self.is_pair_there(request.model)

    def is_pair_there(self, model: str, tried: tuple[EndpointId, ...] = ()) -> bool:
        """Whether one endpoint may compute a prompt and another one response."""
        there = [state for state in self._serving(model) if state.is_given and state.id not in tried]
        first = {state.id for state in there if state.is_meant_for(Stage.PREFILL)}
        second = {state.id for state in there if state.is_meant_for(Stage.DECODE)}
        return bool(first and second) and len(first | second) > 1

    def _is_next_stage_there(self, ticket: Ticket) -> bool:
        if ticket.stage is Stage.PREFILL:
            return self.is_pair_there(ticket.request.model, ticket.tried)
        return ticket.is_held and any(
            state.is_given and _may_do(state, ticket) and state.id not in ticket.tried
            for state in self._serving(ticket.request.model)
        )

    def _is_handover_full(self, model: str) -> bool:
        return self._model(model).queues[Stage.DECODE].count >= self.settings.handover_waiting_max

    def _disaggregate_what_can_be(self, name: str, model: _Model) -> None:
        """Nobody waits for a part that no endpoint may do now: those one endpoint does whole."""
        for stage in Stage:
            queue = model.queues[stage]
            for ticket in list(queue.again.values()):
                if not self._is_next_stage_there(ticket):
                    self._make_whole(ticket)
            if queue.newcomers.count and not self.is_pair_there(name):
                for ticket in sorted(queue.newcomers, key=lambda ticket: ticket.index):
                    self._make_whole(ticket)

    def _make_whole(self, ticket: Ticket) -> None:
        was_elsewhere = ticket.index in self._queue_of(ticket).again
        self._leave_queue(ticket)
        fallback = ticket.stage_fault
        if fallback is None:
            is_lost = ticket.stage is Stage.DECODE and not ticket.is_held
            fallback = PairOutcome.HOLD_LOST if is_lost else PairOutcome.NO_ENDPOINT
        self._note_pair(ticket, fallback)
        ticket.stage = None
        if was_elsewhere:
            self._queue_of(ticket).wait_again(ticket)
        else:
            self._queue_of(ticket).newcomers.add(ticket)

    def _nearest(self, ticket: Ticket, candidates: list[Candidate]) -> list[Candidate]:
        """Of those that may do all of a request, the ones to choose from: the one that has computed its prompt already,
        or else those that are not kept for prompts, as long as they have room."""
        there = [candidate for candidate in candidates if candidate.has_room and candidate.id == ticket.prefilled_by]
        if there:
            return there
        beside = [candidate for candidate in candidates if self.endpoints[candidate.id].role != "prefill"]
        return beside if any(candidate.has_room for candidate in beside) else candidates

    def _note_pair(self, ticket: Ticket, outcome: PairOutcome) -> None:
        """Once for each request that was to be disaggregated."""
        if ticket.is_disaggregated and ticket.pair_outcome is None:
            ticket.pair_outcome = outcome
            self._pairs_total[outcome] += 1

    # --- refusing ---

    def _check_open(self, request: RoutedRequest, now: float) -> list[EndpointState]:
        """The endpoints that it may go to, one of which is not ejected. Raises Draining, NoEndpoint or
        InvalidRequest."""
        if self.is_draining:
            raise self._refusal(self._draining())
        if not 1 <= request.sequences <= self.settings.sequences_max:
            raise InvalidRequest(
                f"the request asks for {request.sequences} responses, its n times its prompts, and one request may "
                f"have 1 to {self.settings.sequences_max}: ask for fewer of them, or in several requests",
                param="n",
            )
        usable = [state for state in self._serving(request.model) if request.pinned in (None, state.id)]
        if all(state.health is EndpointHealth.EJECTED for state in usable):
            raise self._refusal(self._no_endpoint(request, now))
        return usable

    def _queue_was_full(self, queue: _Queue, request: RoutedRequest, now: float) -> Overloaded | None:
        """Whether the queue that the request has just joined had no place for it."""
        settings = self.settings
        count, prompt_tokens = queue.count - 1, queue.prompt_tokens - request.prompt_tokens
        if count >= settings.queue_requests_max:
            message = f"{count} requests wait for the model, {settings.queue_requests_max} may"
        elif prompt_tokens + request.prompt_tokens > settings.queue_prompt_tokens_max and count:
            message = (
                f"requests with {prompt_tokens} prompt tokens wait for the model, and with the "
                f"{request.prompt_tokens} of this one there would be more than {settings.queue_prompt_tokens_max}"
            )
        else:
            return None
        seconds = queue.drain_rate.seconds_for(count + 1, now)
        return Overloaded(
            f"{message}: try again in {math.ceil(seconds)} s", reason="queue_full", retry_after_seconds=seconds
        )

    def _pushed_out(self, queue: _Queue, ticket: Ticket) -> Ticket | None:
        """Whose place the one that has just joined a full queue gets, so that one tenant's burst does not keep others
        from the queue. At most one, and only if that makes room enough."""
        found = queue.newcomers.newest_of_most(ticket)
        if found is None or queue.count - 1 > self.settings.queue_requests_max:
            return None
        prompt_tokens = queue.prompt_tokens - found.request.prompt_tokens
        return found if prompt_tokens <= self.settings.queue_prompt_tokens_max else None

    def _refuse(self, ticket: Ticket, refusal: TrioserveError, now: float) -> None:
        """End one that was not sent anywhere, and tell it."""
        self._let_go(ticket, now)
        ticket.refusal = self._refusal(refusal)
        self._end(ticket)
        self._on_change(ticket)

    def _refuse_hopeless(self, now: float) -> None:
        """Those who wait for a model that nobody else serves any more are told so at once."""
        queues = [queue for model in self._models.values() for queue in model.queues.values()]
        for queue in queues:
            for ticket in [*queue.again.values(), *queue.newcomers]:
                self._refuse_if_hopeless(ticket, now)

    def _refuse_if_hopeless(self, ticket: Ticket, now: float) -> None:
        is_waiting = ticket.state is TicketState.WAITING
        if is_waiting and all(state.id in ticket.tried for state in self._serving(ticket.request.model)):
            self._refuse(ticket, self._no_endpoint(ticket.request, now), now)

    def _refusal(self, error: TrioserveError) -> TrioserveError:
        """Count it."""
        reason = error.reason if isinstance(error, Overloaded) else "queue_timeout"
        self._rejections_total[reason] = self._rejections_total.get(reason, 0) + 1
        return error

    def _wait_over(self, ticket: Ticket, now: float) -> TrioserveError:
        waited = now - ticket.entered_at
        if ticket.own_deadline <= now:
            return QueueWaitOver(f"the request waited {waited:.1f} s in the queue, and that was all the time it had")
        queue = self._queue_of(ticket)
        return Overloaded(
            f"the request waited {waited:.1f} s in the queue, nobody waits longer: try again",
            reason="queue_wait_over",
            retry_after_seconds=queue.drain_rate.seconds_for(queue.count + 1, now),
        )

    def _pinned_is_full(self, request: RoutedRequest, now: float) -> Overloaded:
        return Overloaded(
            f'the endpoint "{request.pinned}" that the request asks for has no room: try again, or ask for none',
            reason="pinned_endpoint_overloaded",
            retry_after_seconds=self._model(request.model).queues[None].drain_rate.seconds_for(1, now),
        )

    def _draining(self) -> Draining:
        return Draining(
            "the server is leaving and takes no new requests: ask another one",
            reason="draining",
            retry_after_seconds=DRAIN_RETRY_SECONDS,
        )

    def _no_endpoint(self, request: RoutedRequest, now: float) -> NoEndpoint:
        if request.pinned is not None:
            message = f'no endpoint "{request.pinned}" takes requests for the model "{request.model}" now'
        else:
            message = f'no endpoint takes requests for the model "{request.model}" now'
        ends = [state.ejected_until - now for state in self._serving(request.model)]
        seconds = max(1.0, min((end for end in ends if end > 0), default=DRAIN_RETRY_SECONDS))
        return NoEndpoint(
            f"{message}: try again in {math.ceil(seconds)} s", reason="no_endpoint", retry_after_seconds=seconds
        )

    # --- looking up ---

    def _serving(self, model: str) -> list[EndpointState]:
        """Endpoints that serve the model and do not leave."""
        return [
            state
            for state in self.endpoints.values()
            if model in state.models and state.health is not EndpointHealth.DRAINING
        ]

    def _model(self, name: str) -> _Model:
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = _Model()
        return model

    def _queue_of(self, ticket: Ticket) -> _Queue:
        """Of the queue in which it is, or was before it got its lease."""
        return self._model(ticket.request.model).queues[ticket.stage]

    def _endpoint_of(self, ticket: Ticket) -> EndpointState:
        assert ticket.endpoint is not None
        return self.endpoints[ticket.endpoint]

    def _set_deadline(self, ticket: Ticket) -> None:
        heapq.heappush(self._deadlines, (ticket.queue_deadline, ticket.index, ticket))
        if len(self._deadlines) > 2 * len(self._live) + SPARE_DEADLINES_MAX:
            # Those who left must not be remembered for as long as they might have waited.
            self._deadlines = [entry for entry in self._deadlines if entry[2].state is TicketState.WAITING]
            heapq.heapify(self._deadlines)


def _may_do(state: EndpointState, ticket: Ticket) -> bool:
    """Whether it is for this endpoint to do what is next."""
    return state.is_meant_for(ticket.stage) and (ticket.stage is not Stage.DECODE or state.id != ticket.prefilled_by)


def _stage_fault(stage: Stage | None, fault: Fault) -> PairOutcome | None:
    """What becomes of a disaggregated request if nobody else takes the stage over that an endpoint has failed."""
    if stage is Stage.DECODE:
        return PairOutcome.TRANSFER_FAILED if fault is Fault.TRANSFER else PairOutcome.DECODE_FAILED
    return PairOutcome.PREFILL_FAILED if stage is Stage.PREFILL else None
