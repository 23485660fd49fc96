"""The router's door: who waits, who holds a lease where, and who is refused. Knows neither sockets nor clocks.

    router.prepare(request, now)        count a request that has to be read before its endpoint can be chosen
    router.prepared(request)            it was read, or is given up
    router.enter(request, now)          -> Ticket: in the queue, or with a lease already; raises what refuses it
    router.leave(ticket, now)           the one way out: its place or lease is back; legal at any moment, ever again
    router.sent(ticket)                 the request goes to its endpoint
    router.first_token(ticket, now)     the endpoint answers, or goes on with a stream that another one began
    router.failed(ticket, fault, now)   -> whether the ticket is in the queue again, for another endpoint
    router.moved(ticket, now)           it has left an endpoint that is emptied, for the one where its next lease is
    router.stays(ticket, now)           or does not leave it
    router.prefilled(ticket, now)       one endpoint has computed the prompt of a disaggregated request
    router.hold_lost(ticket, now)       and keeps its blocks no longer
    router.note_load, note_health, ...  what endpoints tell
    router.tick(now)                    what only time brings; next_tick() says when

Whoever waits is told by `on_change(ticket)`, called once for each grant and each refusal, inside the call that caused
it. A lease is handed over in the very call that gives it back: nothing polls, and nobody is woken who gets nothing.
`on_gone(endpoint)` is called when a drained endpoint has nothing any more. `on_move(ticket)` is called when a ticket is
to leave an endpoint that is emptied: with a next lease, to which it goes by `moved`; or without one, at the deadline,
by `failed`.

A request that can be disaggregated is, if there are two endpoints for it when it enters: its stage is PREFILL, and then
DECODE. Each stage has a queue of its own. Roles are hints, so whatever does not come to pass that way, one endpoint
does whole: the stage becomes None, in the queue or at a failure, and whoever holds the ticket looks at it when it has a
lease.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, KeysView

from trioserve.contracts.endpoint import EndpointId, EndpointLoad, PairOutcome, RoutedRequest, Stage
from trioserve.contracts.errors import NoEndpoint, TrioserveError
from trioserve.contracts.kv_transfer import EngineRole
from trioserve.router import refusals
from trioserve.router.continuation import Continuations
from trioserve.router.disaggregation import Disaggregation, stage_fault
from trioserve.router.endpoint_state import DEATHS, LOST, EndpointHealth, EndpointState, Fault
from trioserve.router.endpoints import Endpoints
from trioserve.router.moving import Moving
from trioserve.router.policies import PolicyFactory, Rng
from trioserve.router.queue_deadlines import QueueDeadlines
from trioserve.router.queues import ModelQueues, Queue, Queues
from trioserve.router.refusals import Refusals
from trioserve.router.retry_budget import RetryBudget
from trioserve.router.settings import RouterSettings
from trioserve.router.stats import RouterStats
from trioserve.router.ticket import Lease, Ticket, TicketState

__all__ = ["Fault", "RouterCore", "RouterStats"]


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
        on_move: Callable[[Ticket], None] = lambda ticket: None,
    ) -> None:
        self.settings = settings
        self._on_change = on_change
        self._on_gone = on_gone
        self._on_move = on_move
        self.policy = policy(rng)
        self._queues = Queues()
        self._fleet = Endpoints(
            settings, self.policy, rng=rng, on_gone=self._note_gone, on_unserved=self._queues.forget_unused
        )
        self.endpoints = self._fleet.by_id
        self.is_draining = False
        self.sent_total = 0
        self._disaggregation = Disaggregation(settings, self._fleet, self._queues)
        self._refusals = Refusals()
        self._live: dict[int, Ticket] = {}
        self._deadlines = QueueDeadlines()
        self._next_index = 0
        self._budget = RetryBudget(settings.retry_share_max, settings.retries_per_second_min)
        self._continuations = Continuations(settings, self.endpoints)
        self._moving = Moving(settings, self._queues)
        self._admissions_total = 0
        self._retries_total = 0

    # --- requests ---

    def prepare(self, request: RoutedRequest, now: float) -> None:
        """Count a request that is read before it can enter, which costs something: so many may be as there is room for,
        in the queue and at the endpoints. The caller owes `prepared`. Raises as enter does, and then holds nothing."""
        self._check_open(request, now)
        model = self._queues.of_model(request.model)
        slots = self._fleet.of_model(request.model).free_count
        queue = model.queues[Stage.PREFILL if self.will_be_disaggregated(request) else None]
        count = queue.count + model.preparing
        if count >= self.settings.queue_requests_max + slots:
            requests_max = self.settings.queue_requests_max
            raise self._refusals.counted(refusals.preparing_is_full(queue, count, slots, requests_max, now))
        model.preparing += 1

    def prepared(self, request: RoutedRequest) -> None:
        """The end of what `prepare` began."""
        model = self._queues.of_model(request.model)
        assert model.preparing > 0
        model.preparing -= 1
        self._forget_unserved(request.model)

    def enter(self, request: RoutedRequest, now: float) -> Ticket:
        """Take a place in the queue, and a lease at once if there is one. The caller owes `leave`.

        In a full queue, a tenant with fewer waiters takes the place of the newest of the one with most. A pinned
        request never waits. While every endpoint of a model is ejected nobody joins its queues; those who are in one
        keep their place, since an ejection is short. Raises Overloaded, Draining or NoEndpoint, or InvalidRequest for
        too many sequences, and then holds nothing.
        """
        self._check_open(request, now)
        queue_deadline = min(now + self.settings.queue_seconds_max, request.queue_deadline)
        self._next_index += 1
        ticket = Ticket(request, self._next_index, now, queue_deadline)
        ticket.is_disaggregated = self.will_be_disaggregated(request)
        ticket.stage = Stage.PREFILL if ticket.is_disaggregated else None
        queue = self._queues.of(ticket)
        must_wait = bool(queue.count) and request.pinned is None and request.running_at is None
        if request.pinned is None and not must_wait and self._queues.of_model(request.model).is_anybody_waiting:
            self._hand_over(now)  # what it may get, those in other queues may have waited for
        if must_wait or not self._grant(ticket, now):
            if request.pinned is not None:
                pinned = self.endpoints[request.pinned]
                is_full = refusals.pinned_is_full(request, queue, now)
                raise self._refusals.counted(is_full if pinned.is_given else self._no_endpoint(request, now))
            queue.newcomers.add(ticket)
            if must_wait:
                self._hand_over(now)  # those before it may wait for what it does not need
            if ticket.state is TicketState.WAITING:
                refusal = refusals.queue_was_full(self.settings, queue, request, now)
                if refusal is not None:
                    pushed_out = self._pushed_out(queue, ticket)
                    if pushed_out is None:
                        queue.newcomers.remove(ticket)
                        raise self._refusals.counted(refusal)
                    self._refuse(pushed_out, refusal, now)
                self._deadlines.add(ticket, live_count=len(self._live))
        self._live[ticket.index] = ticket
        self._queues.of_model(request.model).live_count += 1
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
        self._fleet.of(ticket).sent[ticket.sent_index] = ticket.request.sequences

    def first_token(self, ticket: Ticket, now: float, *, can_go_on: bool = False) -> None:
        """The endpoint of its lease has begun to answer, or to go on. What fails after this is the client's to see, if
        it is not a stream that can go on elsewhere. can_go_on: that it can, so that it may be moved on purpose."""
        if ticket.state is not TicketState.LEASED or ticket.is_answered:
            return
        assert ticket.stage is not Stage.PREFILL, "the token of a prefill is nobody's"
        endpoint = self._fleet.of(ticket)
        if not ticket.has_token:
            ticket.has_token = True
            for id in sorted(ticket.refused_by):  # wrongly: another one serves it
                if (refusing := self.endpoints.get(id)) is not None:
                    refusing.failures_total["refused_wrongly"] += 1
                    refusing.note_failure(now)
            ticket.fingerprint = endpoint.fingerprint
            self._disaggregation.note_outcome(ticket, PairOutcome.PAIRED)
        ticket.is_answered, ticket.can_go_on = True, can_go_on
        self._moving.note_arrived(ticket)
        endpoint.note_success(now)
        self._fleet.end_probe(ticket)
        if self.settings.lease_until == "first_token":
            self._fleet.end_lease(ticket)
            ticket.move(TicketState.RUNNING_FREE)
        self._moving.join(ticket)
        self._hand_over(now)

    def moved(self, ticket: Ticket, now: float) -> None:
        """It has left its endpoint, and its next lease is the one in hand. Nothing to do when it has none any more."""
        next_lease = ticket.next_lease
        if next_lease is None:
            return
        ticket.next_lease = None
        self._let_go(ticket, now)
        self._take_up(ticket, next_lease)
        self._hand_over(now)

    def stays(self, ticket: Ticket, now: float) -> None:
        """It cannot leave its endpoint. Its next lease is back. Nothing to do when it has none any more."""
        ticket.can_go_on = False
        self._moving.leave(ticket)
        if ticket.next_lease is not None:
            self._drop_next_lease(ticket)
            self._moving.note_arrived(ticket)
            self._hand_over(now)

    def prefilled(self, ticket: Ticket, now: float, *, outcome: PairOutcome | None = None) -> None:
        """The endpoint has computed the prompt: its slot there is free, and the ticket waits for a decode endpoint, or
        has a lease there already. outcome: why one endpoint has to do the rest, if so; best the one that has the
        prompt in its prefix cache now."""
        if ticket.state is not TicketState.LEASED or ticket.stage is not Stage.PREFILL:
            return
        endpoint = self._fleet.of(ticket)
        endpoint.note_success(now)
        ticket.prefilled_by, ticket.prefilled_at, ticket.stage_fault = endpoint.id, now, None
        served_seconds = now - ticket.leased_at
        ticket.own_deadline += served_seconds
        ticket.queue_deadline += served_seconds
        self._let_go(ticket, now)
        ticket.stage, ticket.is_held = Stage.DECODE, outcome is None
        if outcome is not None:
            ticket.stage = None
            self._disaggregation.note_outcome(ticket, outcome)
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

    def failed(
        self,
        ticket: Ticket,
        fault: Fault,
        now: float,
        *,
        busy_seconds: float = 1.0,
        token_count: int = 0,
        is_certain: bool = False,
        reason: str | None = None,
    ) -> bool:
        """The endpoint failed a request that has no token yet, or a stream that can go on elsewhere; with a stream that
        cannot, the caller leaves. The lease is back before anything else happens. busy_seconds: of a BUSY or LEAVING
        endpoint, for how long it is left alone. token_count: what the stream's client has by now. is_certain: the
        endpoint has said itself that it is its fault. reason: for the counts, if it is another word than the fault's.

        Returns whether the ticket waits again (or has a lease elsewhere already); otherwise it has ended, and the
        caller tells the client the ticket's refusal, or if there is none what the endpoint said.
        """
        if ticket.state not in (TicketState.LEASED, TicketState.RUNNING_FREE):
            return False
        assert ticket.endpoint is not None
        endpoint = self._fleet.of(ticket)
        next_lease, ticket.next_lease = ticket.next_lease, None
        self._let_go(ticket, now)
        endpoint.failures_total[reason or fault.value] += 1
        if fault is Fault.UNREACHABLE:
            endpoint.note_lost(now)
        elif fault in (Fault.BROKE, Fault.FAILED, Fault.INVALID):
            endpoint.note_failure(now)
        elif fault in (Fault.BUSY, Fault.LEAVING):
            endpoint.note_busy(now, busy_seconds)
        ticket.tried = {**ticket.tried, ticket.endpoint: endpoint.checks_total}
        if ticket.has_token:
            self._continuations.broke_off(ticket, fault, endpoint, token_count, is_certain=is_certain)
            return self._goes_on(ticket, next_lease, now)
        assert next_lease is None, "what has not begun is not moved"
        self._note_failed(ticket, fault, endpoint, now, is_certain=is_certain)
        ticket.stage_fault = stage_fault(ticket.stage, fault)
        ticket.refusal = self._continuations.judge(ticket)
        if ticket.refusal is not None or not self._may_try_again(ticket, fault, now):
            if ticket.stage_fault is not None:
                self._disaggregation.note_outcome(ticket, ticket.stage_fault)
            self._end(ticket)
            self._hand_over(now)
            return False
        self._retries_total += 1
        self._wait_again(ticket)
        self._hand_over(now)
        return True

    def _note_failed(
        self, ticket: Ticket, fault: Fault, endpoint: EndpointState, now: float, *, is_certain: bool
    ) -> None:
        """Note what a fault means for a request without a token. The time that it was served was no wait."""
        served_seconds = now - ticket.leased_at
        ticket.own_deadline += served_seconds
        ticket.queue_deadline += served_seconds
        if fault in DEATHS:
            self._continuations.broke_off(ticket, fault, endpoint, 0, is_certain=is_certain)
        if fault in LOST:
            # It waits for an endpoint as long as a stream would, if its client lets it.
            ticket.is_lost = True
            patience = now + self.settings.continuation_seconds_max
            ticket.queue_deadline = min(ticket.own_deadline, max(ticket.queue_deadline, patience))
        elif fault is not Fault.BUSY:
            ticket.failed_by |= {endpoint.id}
            if fault is Fault.REFUSED:
                ticket.refused_by |= {endpoint.id}

    def _goes_on(self, ticket: Ticket, next_lease: Lease | None, now: float) -> bool:
        """Whether the stream waits again, or has a lease elsewhere already. next_lease: which it was to move to."""
        is_served = self._fleet.of_model(ticket.request.model).serving_count > 0
        ticket.refusal = self._continuations.refusal(ticket, is_served=is_served)
        if next_lease is not None and ticket.refusal is None and not ticket.is_on_trial:
            self._take_up(ticket, next_lease)
            self._continuations.note(ticket, now)
            self._hand_over(now)
            return True
        ticket.next_lease = next_lease
        self._drop_next_lease(ticket)
        if ticket.refusal is not None:
            self._end(ticket)
        else:
            ticket.stage = None  # whoever goes on does all of the rest
            # Its time in the queue was that before its first token.
            ticket.own_deadline, ticket.queue_deadline = math.inf, now + self.settings.continuation_seconds_max
            self._wait_again(ticket)
        self._hand_over(now)
        return ticket.refusal is None

    def _may_try_again(self, ticket: Ticket, fault: Fault, now: float) -> bool:
        """Whether a request without a token waits again.

        A request that lost its endpoint always does, also where all endpoints are ejected: one may come back in time.
        The retry budget bounds how often endpoints are asked again that answered with an error or were full. What all
        that are well refuse for want of room is told at once.
        """
        if ticket.request.pinned is not None:
            return False
        if fault in LOST:  # if the time for which it may wait is over, the queue tells its client so, and when to retry
            return self._fleet.is_any_left(ticket)
        if now >= ticket.queue_deadline:
            return False
        if fault is Fault.INVALID and not self.is_draining:
            return self._fleet.is_any_left(ticket)  # nothing of this was the request's fault
        if fault is Fault.REFUSED and not self.is_draining:
            return self._fleet.is_any_left(ticket, unejected=True)
        if self.is_draining or len(ticket.failed_by) >= self.settings.attempts_max:
            return False
        if fault is Fault.BUSY:
            return self._fleet.is_any_left(ticket, has_not_refused=True) and self._budget.take(now)
        return self._fleet.is_any_left(ticket, unejected=True) and self._budget.take(now)

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
        self._fleet.add(id, models, leases_max=leases_max, role=role)
        self._moving.end(id)

    def set_models(self, id: EndpointId, models: Iterable[str], now: float) -> None:
        """The endpoint says what it serves; one that is gone by now is ignored."""
        state = self.endpoints.get(id)
        if state is None:
            return
        self._fleet.set_models(state, frozenset(models))
        self._refuse_hopeless(now)
        self._hand_over(now)

    def set_role(self, id: EndpointId, role: EngineRole | None, now: float) -> None:
        """The endpoint says what it is meant for; one that is gone by now is ignored."""
        state = self.endpoints.get(id)
        if state is not None and state.role != role:
            state.set_role(role)
            self._hand_over(now)

    def drain_endpoint(self, id: EndpointId, now: float, *, move_seconds: float | None = None) -> None:
        """Give it nothing more. It is gone when its last request has ended; those that wait go to others. move_seconds:
        empty it: what can go on elsewhere is moved there as there is room, and after so long all that is left leaves.
        Legal for one that is being drained already."""
        state = self.endpoints[id]
        state.drain()
        self._fleet.note_drained(state)
        self._judge(now)
        if move_seconds is not None and state.in_flight:
            self._empty(id, now + move_seconds)
        self._refuse_hopeless(now)
        self._hand_over(now)

    def _empty(self, id: EndpointId, deadline: float) -> None:
        self._moving.begin(id, deadline)
        for ticket in self._live.values():
            if ticket.endpoint == id:
                self._moving.join(ticket)

    def is_endpoint_draining(self, id: EndpointId) -> bool:
        state = self.endpoints.get(id)
        return state is not None and state.health is EndpointHealth.DRAINING

    def note_fingerprint(self, id: EndpointId, fingerprint: str | None) -> None:
        """What computes there, by a name that is equal where the same tokens come of the same request. A stream that
        broke off goes on where that is the same as where it began, if there is room. One that is gone is ignored."""
        state = self.endpoints.get(id)
        if state is not None:
            state.fingerprint = fingerprint

    def note_load(self, id: EndpointId, load: EndpointLoad, now: float, *, sent_when_asked: int) -> None:
        """What the endpoint says of itself; one that is unknown by now is ignored.
        sent_when_asked: `sent_total` when it was asked."""
        state = self.endpoints.get(id)
        if state is not None:
            self._fleet.note_load(state, load, now, sent_when_asked=sent_when_asked)
            self._judge(now)
            self._hand_over(now)

    def note_client_fault(self, ticket: Ticket) -> bool:
        """Note that an endpoint refused a request as its client's fault.

        Returns:
            Whether another endpoint has to confirm it: this one has refused several in a row, and served none.
        """
        if ticket.state is not TicketState.LEASED:
            return False
        endpoint = self._fleet.of(ticket)
        endpoint.refusals_in_a_row += 1
        return endpoint.refusals_in_a_row > self.settings.failures_max

    def note_probe(self, id: EndpointId, is_well: bool, now: float) -> None:
        """A request of the router's own has shown whether an ejected endpoint serves requests again."""
        state = self.endpoints.get(id)
        if state is not None:
            state.note_probe(is_well, now)
            self._hand_over(now)

    def set_lease_share(self, id: EndpointId, share: int, now: float) -> None:
        """What of the endpoint's limit is for this router to give; one that is gone by now is ignored. More than that
        ends by itself."""
        state = self.endpoints.get(id)
        if state is not None and state.lease_share != share:
            state.set_lease_share(share)
            self._hand_over(now)

    def note_health(self, id: EndpointId, is_well: bool, now: float, *, is_hung: bool = False) -> None:
        """A health check ended. is_hung: it has not answered for so long, or says itself, that it is left at once."""
        state = self.endpoints.get(id)
        if state is None or state.health is EndpointHealth.DRAINING:
            return
        if is_hung:
            state.note_hung(now)
        else:
            state.note_check(is_well, now)
        if is_well:
            self._moving.end(id)
        self._hand_over(now)

    def note_leaving(self, id: EndpointId, now: float, *, move_seconds: float | None = None) -> None:
        """It says that it will stop, or takes no connections any more: it gets nothing until a check finds it well.
        move_seconds: and is emptied, as by drain_endpoint; said again, that changes nothing."""
        state = self.endpoints.get(id)
        if state is None or state.health is EndpointHealth.DRAINING:
            return
        if state.health is EndpointHealth.STARTING:
            self.note_health(id, False, now)  # it may be about to begin as well
            return
        state.note_leaving(now)
        if move_seconds is not None and state.in_flight and not self._moving.is_emptied(id):
            self._empty(id, now + move_seconds)
        self._hand_over(now)

    # --- time ---

    def next_tick(self, now: float) -> float:
        """When `tick` has something to do, if nothing else happens before; math.inf for never."""
        over_at = self._deadlines.first()
        moments = [self._fleet.next_moment(), self._moving.next_deadline()]
        if over_at is not None:
            moments.append(over_at)
        if any(model.continued for model in self._queues.models.values()):
            moments.append(self._continuations.next_turn(now))
        return min(moments)

    def tick(self, now: float) -> None:
        """Refuse those whose wait is over, and let endpoints be probed whose ejection is."""
        while (ticket := self._deadlines.take_over(now)) is not None:
            if ticket.is_on_trial:
                self._end_wait(ticket, self._continuations.poisoned(ticket), now)
            else:
                self._refuse(ticket, refusals.wait_over(ticket, self._queues.of(ticket), now), now)
        self._fleet.tick(now)
        self._hand_over(now)
        for id in self._moving.take_over(now):
            self._tell_to_leave(id)

    def drain(self, now: float) -> None:
        """Take nothing new and refuse all that were not sent anywhere; the others go on, also those whose prompt is
        computed, whose endpoint was lost or whose stream broke off, and that wait for the rest."""
        self.is_draining = True
        for ticket in list(self._live.values()):
            is_begun = ticket.is_sent or ticket.is_lost or ticket.has_token or ticket.prefilled_by is not None
            if not is_begun:
                self._refuse(ticket, refusals.draining(), now)
        self._hand_over(now)

    def stats(self) -> RouterStats:
        return RouterStats(
            waiting=sum(model.count + model.preparing for model in self._queues.models.values()),
            waiting_prompt_tokens=sum(model.prompt_tokens for model in self._queues.models.values()),
            leases={state.id: state.leases for state in self.endpoints.values()},
            health={state.id: state.health for state in self.endpoints.values()},
            admissions_total=self._admissions_total,
            retries_total=self._retries_total,
            rejections_total=dict(self._refusals.totals),
            continuing=sum(len(model.continued) for model in self._queues.models.values()),
            continuations_total=self._continuations.total,
            continuations_refused_total=dict(self._continuations.refused_total),
            moving=sum(len(model.moving) for model in self._queues.models.values()),
            moves_total=self._moving.total,
            pairs_total=dict(self._disaggregation.outcomes_total),
        )

    # --- giving and taking leases ---

    def _grant(self, ticket: Ticket, now: float) -> bool:
        """Give it a lease if an endpoint has room for it. It must not stand in any queue."""
        before = ticket.endpoint
        if not self._give(ticket, now):
            return False
        if ticket.has_token:
            self._continuations.note(ticket, now)
            self._fleet.note_moved(before, ticket)
        ticket.leased_at = now
        ticket.move(TicketState.LEASED)
        self._queues.of(ticket).drain_rate.note_begin(now)
        self._admissions_total += 1
        return True

    def _grant_next(self, ticket: Ticket, now: float) -> bool:
        """Give one that is to leave its endpoint a second lease, if another one has room."""
        in_hand = ticket.exchange(Lease(at=now))
        is_given = self._give(ticket, now)
        lease = ticket.exchange(in_hand)
        if is_given:
            ticket.next_lease = lease
            self._moving.note_leased(ticket)
            self._admissions_total += 1
        return is_given

    def _give(self, ticket: Ticket, now: float) -> bool:
        """Give it an endpoint that has room for it. Its state is the caller's to move."""
        if ticket.stage is Stage.PREFILL and self._disaggregation.is_handover_full(ticket.request.model):
            return False
        return self._fleet.give(ticket, now)

    def _take_up(self, ticket: Ticket, lease: Lease) -> None:
        """Go on with a lease that it has beside what it has given back."""
        before = ticket.exchange(lease).endpoint
        self._fleet.note_moved(before, ticket)
        ticket.is_answered, ticket.stage = False, None
        if ticket.state is not TicketState.LEASED:
            ticket.move(TicketState.LEASED)

    def _drop_next_lease(self, ticket: Ticket) -> None:
        """Give that one back, if it has one."""
        if ticket.next_lease is None:
            return
        in_hand = ticket.exchange(ticket.next_lease)
        ticket.next_lease = None
        self._fleet.end_lease(ticket)
        self._fleet.end_probe(ticket)
        self._fleet.end_flight(ticket)
        ticket.exchange(in_hand)

    def _hand_over(self, now: float) -> None:
        """Give what is free to those who have waited longest, in the order of their queues."""
        for name, model in self._queues.models.items():
            if model.is_anybody_waiting:
                self._disaggregation.make_whole_what_cannot_be_split(name, model)
                while self._serve_one(model, now):
                    pass

    def _serve_one(self, model: ModelQueues, now: float) -> bool:
        """Give a lease to the first who can have one. Asked again after each, from the first on: where a prompt is
        handed over, another one may begin."""
        newcomers = model.heads()
        for ticket, queue in self._in_turn(model, newcomers, now):
            if ticket.is_moving:
                if not self._grant_next(ticket, now):
                    continue
                model.note_stream(are_newcomers_waiting=bool(newcomers))
                self._on_move(ticket)
                return True
            if self._grant(ticket, now):
                if queue is None:
                    model.continued.remove(ticket)
                    model.note_stream(are_newcomers_waiting=bool(newcomers))
                elif ticket in queue.again:
                    queue.again.remove(ticket)
                    model.note_stream(are_newcomers_waiting=bool(newcomers))
                else:
                    queue.newcomers.take()
                    model.streams_in_a_row = 0
                self._on_change(ticket)
                return True
        return False

    def _in_turn(
        self, model: ModelQueues, newcomers: list[tuple[Queue, Ticket]], now: float
    ) -> list[tuple[Ticket, Queue | None]]:
        """List the requests that are next, first the one that goes first. Those with no queue are streams.

        Within a priority, requests and streams that wait again come first, in the order in which they began to: they
        lost their endpoints, or their prompts were computed for another one. Then come streams that are to be moved,
        then newcomers. After several of the former in a row it is a newcomer's turn.
        """
        again = model.waiting_again()
        continued = model.continued.heads() if model.continued and self._continuations.has_turn(now) else []
        moving = model.moving.heads() if model.moving and self._moving.has_room else []
        if not continued and not moving and not again:
            return [(ticket, queue) for queue, ticket in newcomers]
        newcomers_class = 0 if model.streams_in_a_row >= self.settings.continuations_in_a_row_max else 3
        turns: list[tuple[tuple[int, int, int], Ticket, Queue | None]] = []
        turns += [((ticket.request.priority, 1, ticket.again_index), ticket, queue) for queue, ticket in again]
        turns += [((ticket.request.priority, 1, ticket.again_index), ticket, None) for ticket in continued]
        turns += [((ticket.request.priority, 2, ticket.again_index), ticket, None) for ticket in moving]
        turns += [
            ((ticket.request.priority, newcomers_class, ticket.index), ticket, queue) for queue, ticket in newcomers
        ]
        return [(ticket, queue) for _, ticket, queue in sorted(turns, key=lambda turn: turn[0])]

    def _tell_to_leave(self, id: EndpointId) -> None:
        """The time has come in which the endpoint was to be emptied."""
        for ticket in list(self._live.values()):
            is_there = ticket.endpoint == id and ticket.is_sent and ticket.next_lease is None
            is_free = (ticket.can_go_on or not ticket.has_token) and ticket.request.pinned is None
            if is_there and is_free and self._fleet.of_model(ticket.request.model).serving_count:
                self._on_move(ticket)

    def _note_gone(self, id: EndpointId) -> None:
        self._moving.end(id)
        self._on_gone(id)

    def _let_go(self, ticket: Ticket, now: float) -> None:
        """Give back its place or its lease, whichever it has."""
        if ticket.state is TicketState.WAITING:
            self._queues.leave(ticket)
            return
        self._moving.leave(ticket)
        self._drop_next_lease(ticket)
        if ticket.state is TicketState.LEASED:
            self._fleet.end_lease(ticket)
            self._fleet.end_probe(ticket)
        is_idle = self._fleet.end_flight(ticket)
        drain_rate = self._queues.of(ticket).drain_rate
        drain_rate.note(now)
        if is_idle:
            drain_rate.note_idle(now)

    def _wait_again(self, ticket: Ticket) -> None:
        """It was elsewhere, and has given everything back."""
        ticket.move(TicketState.WAITING)
        self._moving.note_arrived(ticket)
        ticket.sent_index = None
        ticket.is_answered = False
        self._queues.wait_again(ticket)
        self._deadlines.add(ticket, live_count=len(self._live))

    def _end(self, ticket: Ticket) -> None:
        ticket.move(TicketState.ENDED)
        self._moving.note_arrived(ticket)
        del self._live[ticket.index]
        self._disaggregation.note_outcome(ticket, PairOutcome.LEFT)
        self._queues.of_model(ticket.request.model).live_count -= 1
        self._forget_unserved(ticket.request.model)

    def _forget_unserved(self, model: str) -> None:
        if model not in self._fleet.model_names():
            self._queues.forget_unused(model)

    # --- requests whose prompt is computed apart from their response ---

    def will_be_disaggregated(self, request: RoutedRequest) -> bool:
        """Whether it would be, if it entered now."""
        return self._disaggregation.will_be_disaggregated(request)

    def is_pair_there(self, model: str) -> bool:
        """Whether one endpoint may compute a prompt and another one make the response."""
        return self._fleet.is_pair_there(model)

    # --- which endpoints there are ---

    def model_names(self) -> KeysView[str]:
        """What the endpoints serve, those that leave counted."""
        return self._fleet.model_names()

    @property
    def is_any_nameless(self) -> bool:
        """Whether an endpoint has not told yet what it serves."""
        return self._fleet.is_any_nameless

    def has_choice(self, request: RoutedRequest) -> bool:
        """Whether there is more than one endpoint for it, or for one of its stages."""
        stages: tuple[Stage | None, ...] = tuple(Stage) if self.will_be_disaggregated(request) else (None,)
        return any(self._fleet.has_choice(request.model, stage) for stage in stages)

    # --- refusing ---

    def _check_open(self, request: RoutedRequest, now: float) -> None:
        """There is an endpoint that it may go to and that is not ejected. Raises Draining, NoEndpoint or
        InvalidRequest."""
        if self.is_draining:
            raise self._refusals.counted(refusals.draining())
        if not 1 <= request.sequences <= self.settings.sequences_max:
            raise refusals.too_many_sequences(request, self.settings.sequences_max)
        if request.pinned is None:
            is_any_usable = self._fleet.of_model(request.model).unejected_count > 0
        else:
            pinned = self._fleet.serves(request.pinned, request.model)
            is_any_usable = pinned is not None and pinned.health is not EndpointHealth.EJECTED
        if not is_any_usable:
            raise self._refusals.counted(self._no_endpoint(request, now))

    def _pushed_out(self, queue: Queue, ticket: Ticket) -> Ticket | None:
        """Whose place the one that has just joined a full queue gets, so that one tenant's burst does not keep others
        from the queue. At most one, and only if that makes room enough."""
        found = queue.newcomers.newest_of_most(ticket)
        if found is None or queue.count - 1 > self.settings.queue_requests_max:
            return None
        prompt_tokens = queue.prompt_tokens - found.request.prompt_tokens
        return found if prompt_tokens <= self.settings.queue_prompt_tokens_max else None

    def _refuse(self, ticket: Ticket, refusal: TrioserveError, now: float) -> None:
        """End one that was not sent anywhere, and tell it."""
        self._end_wait(ticket, self._refusals.counted(refusal), now)

    def _end_wait(self, ticket: Ticket, refusal: TrioserveError, now: float) -> None:
        self._let_go(ticket, now)
        ticket.refusal = refusal
        self._end(ticket)
        self._on_change(ticket)

    def _judge(self, now: float) -> None:
        """End trials as far as what endpoints have told is enough for that."""
        for model in list(self._queues.models.values()):  # one that ends may have been the last of its model
            for ticket in model.on_trial():
                refusal = self._continuations.judge(ticket)
                if refusal is not None:
                    self._end_wait(ticket, refusal, now)
                elif not ticket.is_on_trial:
                    self._queues.end_trial(ticket)

    def _refuse_hopeless(self, now: float) -> None:
        """Those who wait for a model that nobody else serves any more are told so at once."""
        for ticket in self._queues.everybody():
            self._refuse_if_hopeless(ticket, now)

    def _refuse_if_hopeless(self, ticket: Ticket, now: float) -> None:
        # A stream that is read already waits for endpoints to come back, for a time.
        if ticket.state is TicketState.WAITING and not self._fleet.is_any_left(ticket):
            self._refuse(ticket, self._no_endpoint(ticket.request, now), now)

    def _no_endpoint(self, request: RoutedRequest, now: float) -> NoEndpoint:
        back_at = self._fleet.of_model(request.model).first_back_at(now)
        if request.pinned is not None:
            pinned = self._fleet.serves(request.pinned, request.model)
            back_at = None if pinned is None else pinned.ejected_until
        return refusals.no_endpoint(request, back_at, now)
