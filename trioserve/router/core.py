"""Entry point of the router: requests enter, wait, get leases and leave. Uses no sockets and no clocks.

    router.prepare(request, now)        count a request that is read before its endpoint can be chosen
    router.prepared(request)            the request was read, or its client left
    router.enter(request, now)          -> Ticket, waiting or with a lease; raises if the request is refused
    router.leave(ticket, now)           the only exit: gives up position and lease; allowed at any time, repeatedly
    router.sent(ticket)                 the request is sent to its endpoint
    router.first_token(ticket, now)     the endpoint begins to answer, or to resume a stream
    router.failed(ticket, fault, now)   -> whether the ticket waits for another endpoint
    router.moved(ticket, now)           a stream left an endpoint that is being emptied, and uses its next lease
    router.stays(ticket, now)           a stream cannot leave an endpoint that is being emptied
    router.prefilled(ticket, now)       an endpoint has computed the prompt of a disaggregated request
    router.hold_lost(ticket, now)       the prefill endpoint no longer holds the blocks of the prompt
    router.note_load, note_health, ...  reports of endpoints
    router.tick(now)                    handle deadlines that have passed; next_tick() returns when to call it

`on_change(ticket)` reports each grant and each refusal of a waiting ticket, once, inside the call that caused it. A
released lease is granted again in the same call. So no caller polls, and no task is woken without a reason.
`on_gone(endpoint)` is called when the last request of a drained endpoint has ended. `on_move(ticket)` asks a stream to
leave an endpoint that is being emptied. If the ticket has a next lease, the caller moves the stream and calls `moved`.
If the deadline has passed and the ticket has no next lease, the caller ends the stream at its endpoint and calls
`failed`.

A request that can be disaggregated is split if two endpoints can serve it when it enters: its stage is PREFILL, and
then DECODE. Each stage has a queue of its own. Roles are hints. If a split cannot be completed, one endpoint does the
whole request: the stage becomes None, while the request waits or when an endpoint fails. The holder of a ticket reads
the stage when the ticket gets a lease.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, KeysView

import msgspec

from trioserve.contracts.endpoint import EndpointId, EndpointLoad, PairOutcome, RoutedRequest, Stage
from trioserve.contracts.errors import NoEndpoint, TrioserveError
from trioserve.contracts.kv_transfer import EngineRole
from trioserve.router import refusals
from trioserve.router.continuation import Continuations
from trioserve.router.endpoint_state import EndpointHealth, Fault
from trioserve.router.endpoints import Endpoints
from trioserve.router.leases import Disaggregation, Leases, Moving, stage_fault
from trioserve.router.policies import PolicyFactory, Rng
from trioserve.router.queues import Queue, Queues
from trioserve.router.refusals import Refusals
from trioserve.router.settings import RouterSettings
from trioserve.router.ticket import Lease, QueueDeadlines, Ticket, TicketFollower, TicketState

__all__ = ["Fault", "RouterCore", "RouterStats"]


class RouterCore:
    """All state of the router. Times are seconds of one monotonic clock and never decrease.

    Args:
        settings: limits.
        policy: creates the policy that chooses between endpoints.
        on_change: called when a waiting ticket gets a lease or is refused.
        rng: source of randomness.
        on_gone: called with the id of a drained endpoint when its last request has ended.
        on_move: called when a stream has to leave an endpoint that is being emptied.
    """

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
        self._continuations = Continuations(settings, self._fleet)
        self._moving = Moving(settings, self._queues)
        self._leases = Leases(
            settings,
            self._fleet,
            self._queues,
            self._continuations,
            self._moving,
            self._disaggregation,
            on_change=on_change,
            on_move=on_move,
        )
        self._retries_total = 0

    # --- methods for requests ---

    def prepare(self, request: RoutedRequest, now: float) -> None:
        """Count a request whose body is being read before the request enters, because reading costs memory and time.

        The number of such requests is limited to the free positions in the queue plus the free slots. The caller must
        call `prepared` afterwards.

        Args:
            now: time in seconds.

        Raises:
            Overloaded, Draining, NoEndpoint, InvalidRequest: the request is refused, and is not counted.
        """
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
        """Stop counting a request that `prepare` counted."""
        model = self._queues.of_model(request.model)
        assert model.preparing > 0
        model.preparing -= 1
        self._forget_unserved(request.model)

    def enter(self, request: RoutedRequest, now: float) -> Ticket:
        """Put a request into the queue, and grant a lease at once if an endpoint has a free slot. The caller must call
        `leave` at the end.

        If the queue is full, the newest request of the tenant with most waiting requests is refused instead, provided
        that the tenant of the new request has fewer. A pinned request never waits. While every endpoint of a model is
        ejected, no request joins its queues. Requests that already wait keep their positions, because an ejection is
        short.

        Args:
            now: time in seconds.

        Raises:
            Overloaded: the queue is full, or the pinned endpoint has no free slot.
            Draining: the router accepts no new requests.
            NoEndpoint: no endpoint accepts requests for the model now.
            InvalidRequest: the request has too many sequences.
            TrioserveError: the follower of the tickets refuses the request.
        """
        self._leases.follower.check(request)
        self._check_open(request, now)
        queue_deadline = min(now + self.settings.queue_seconds_max, request.queue_deadline)
        self._next_index += 1
        ticket = Ticket(request, self._next_index, now, queue_deadline)
        ticket.is_disaggregated = request.can_be_disaggregated and self.will_be_disaggregated(request)
        ticket.stage = Stage.PREFILL if ticket.is_disaggregated else None
        model = self._queues.of_model(request.model)
        queue = model.queues[ticket.stage]
        must_wait = False
        if request.pinned is None and model.has_waiting:
            must_wait = bool(queue.count) and request.running_at is None
            if not must_wait:
                self._leases.hand_over(now)  # Requests in other queues may have waited longer for the free slots.
        if must_wait or not self._leases.grant(ticket, queue, now):
            if request.pinned is not None:
                pinned = self.endpoints[request.pinned]
                is_full = refusals.pinned_is_full(request, queue, now)
                raise self._refusals.counted(is_full if pinned.accepts_requests else self._no_endpoint(request, now))
            queue.newcomers.add(ticket)
            if must_wait:
                self._leases.hand_over(now)  # Earlier requests may wait for endpoints that this one does not need.
            if ticket.state is TicketState.WAITING:
                refusal = refusals.queue_was_full(self.settings, queue, request, now)
                if refusal is not None:
                    pushed_out = self._pushed_out(queue, ticket)
                    if pushed_out is None:
                        queue.newcomers.remove(ticket)
                        raise self._refusals.counted(refusal)
                    self._refuse(pushed_out, refusal, now)
                self._deadlines.add(ticket, live_count=len(self._live))
                self._leases.follower.waits(ticket)
        self._live[ticket.index] = ticket
        model.live_count += 1
        self._continuations.budget.note_request()
        return ticket

    def leave(self, ticket: Ticket, now: float) -> None:
        """Release the queue position or the leases of a request. Does nothing if the request has already ended.

        Args:
            ticket: the request.
            now: time in seconds.
        """
        if ticket.state is TicketState.ENDED:
            return
        self._leases.release(ticket, now)
        self._end(ticket)
        self._leases.hand_over(now)

    def sent(self, ticket: Ticket) -> None:
        """Record that the request is sent to its endpoint. Before this call, a drain may refuse the request.

        Args:
            ticket: the request, with a lease.
        """
        assert ticket.state is TicketState.LEASED
        assert ticket.sent_index is None
        self.sent_total += 1
        ticket.sent_index = self.sent_total
        self._fleet.of(ticket).sent[ticket.sent_index] = ticket.request.sequences

    def first_token(self, ticket: Ticket, now: float, *, can_resume: bool = False) -> None:
        """Record that the endpoint has begun to answer, or to resume a stream.

        After this, a failure is visible to the client unless the stream can resume at another endpoint.

        Args:
            ticket: the request.
            now: time in seconds.
            can_resume: True if the stream can resume at another endpoint. Then the router may move it on purpose.
        """
        if ticket.state is not TicketState.LEASED or ticket.is_answered:
            return
        assert ticket.stage is not Stage.PREFILL, "a prefill stage has no token for the client"
        endpoint = self._fleet.of(ticket)
        if not ticket.has_token:
            ticket.has_token = True
            for id in sorted(ticket.refused_by):
                # An endpoint that refused the request was wrong, because another endpoint serves the request.
                if (refusing := self.endpoints.get(id)) is not None:
                    refusing.failures_total["refused_wrongly"] += 1
                    refusing.note_failure(now)
            ticket.fingerprint = endpoint.fingerprint
            self._disaggregation.note_outcome(ticket, PairOutcome.PAIRED)
        ticket.is_answered, ticket.can_resume = True, can_resume
        self._moving.note_arrived(ticket)
        endpoint.note_success(now)
        self._fleet.end_probe(ticket)
        if self.settings.lease_until == "first_token":
            self._fleet.end_lease(ticket)
            ticket.move(TicketState.RUNNING_FREE)
        self._moving.join(ticket)
        self._leases.hand_over(now)

    def moved(self, ticket: Ticket, now: float) -> None:
        """Record that a stream left its endpoint and uses its next lease. Does nothing if the stream has no next lease.

        Args:
            ticket: the stream's request.
            now: time in seconds.
        """
        next_lease = ticket.next_lease
        if next_lease is None:
            return
        ticket.next_lease = None
        self._leases.release(ticket, now)
        self._leases.use_next(ticket, next_lease)
        self._leases.hand_over(now)

    def stays(self, ticket: Ticket, now: float) -> None:
        """Record that a stream cannot leave its endpoint, and release its next lease if there is one.

        Args:
            ticket: the stream's request.
            now: time in seconds.
        """
        ticket.can_resume = False
        self._moving.leave(ticket)
        if ticket.next_lease is not None:
            self._leases.drop_next(ticket)
            self._moving.note_arrived(ticket)
            self._leases.hand_over(now)

    def prefilled(self, ticket: Ticket, now: float, *, outcome: PairOutcome | None = None) -> None:
        """Record that the endpoint has computed the prompt. Its slot is free, and the ticket waits for a decode
        endpoint.

        The ticket may get that lease in this call.

        Args:
            ticket: the request, in its prefill stage.
            now: time in seconds.
            outcome: why a single endpoint has to do the rest of the request, preferably the endpoint that has the
                prompt in its prefix cache. If None, a decode endpoint does the rest.
        """
        if ticket.state is not TicketState.LEASED or ticket.stage is not Stage.PREFILL:
            return
        endpoint = self._fleet.of(ticket)
        endpoint.note_success(now)
        ticket.prefilled_by, ticket.prefilled_at, ticket.stage_fault = endpoint.id, now, None
        served_seconds = now - ticket.leased_at
        ticket.own_deadline += served_seconds
        ticket.queue_deadline += served_seconds
        self._leases.release(ticket, now)
        ticket.stage, ticket.is_held = Stage.DECODE, outcome is None
        if outcome is not None:
            ticket.stage = None
            self._disaggregation.note_outcome(ticket, outcome)
        self._wait_again(ticket)
        self._refuse_if_hopeless(ticket, now)
        self._leases.hand_over(now)

    def hold_lost(self, ticket: Ticket, now: float) -> None:
        """Record that the prefill endpoint no longer holds the blocks of the prompt. Does nothing if the request does
        not wait for these blocks.

        Args:
            ticket: the request.
            now: time in seconds.
        """
        ticket.is_held = False
        if ticket.stage is Stage.DECODE and not ticket.is_sent:
            if ticket.state is TicketState.LEASED:
                self._leases.release(ticket, now)
                self._wait_again(ticket)
            self._refuse_if_hopeless(ticket, now)
            self._leases.hand_over(now)

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
        """Record that an endpoint failed while it served a request without output, or a stream that can resume at
        another endpoint.

        The caller ends other streams with `leave`. The lease is released before anything else happens.

        Args:
            ticket: the request.
            fault: how the endpoint failed.
            now: time in seconds.
            busy_seconds: time during which a BUSY or LEAVING endpoint gets no requests.
            token_count: tokens that the stream's client has received.
            is_certain: the endpoint reported that the failure is its own fault.
            reason: name of the failure in the counters. If None, the name of the fault is used.

        Returns:
            True if the ticket waits again or already has another lease. False if the ticket has ended. Then the caller
            sends `ticket.refusal` to the client, or the endpoint's response if `ticket.refusal` is None.
        """
        if ticket.state not in (TicketState.LEASED, TicketState.RUNNING_FREE):
            return False
        assert ticket.endpoint is not None
        endpoint = self._fleet.of(ticket)
        next_lease, ticket.next_lease = ticket.next_lease, None
        self._leases.release(ticket, now)
        endpoint.failures_total[reason or fault.value] += 1
        if fault is Fault.UNREACHABLE:
            endpoint.note_lost(now)
        elif fault in (Fault.BROKE, Fault.FAILED, Fault.INVALID):
            endpoint.note_failure(now)
        elif fault in (Fault.BUSY, Fault.LEAVING):
            endpoint.note_busy(now, busy_seconds)
        ticket.tried = {**ticket.tried, ticket.endpoint: endpoint.checks_total}
        if ticket.has_token:
            self._continuations.note_break(ticket, fault, endpoint, token_count, is_certain=is_certain)
            return self._resume_or_end(ticket, next_lease, now)
        assert next_lease is None, "only streams that have begun are moved"
        self._continuations.note_failed(ticket, fault, endpoint, now, is_certain=is_certain)
        ticket.stage_fault = stage_fault(ticket.stage, fault)
        ticket.refusal = self._continuations.judge(ticket)
        if ticket.refusal is not None or not self._continuations.may_try_again(
            ticket, fault, now, is_draining=self.is_draining
        ):
            if ticket.stage_fault is not None:
                self._disaggregation.note_outcome(ticket, ticket.stage_fault)
            self._end(ticket)
            self._leases.hand_over(now)
            return False
        self._retries_total += 1
        self._wait_again(ticket)
        self._leases.hand_over(now)
        return True

    def _resume_or_end(self, ticket: Ticket, next_lease: Lease | None, now: float) -> bool:
        """Let a stream resume with its next lease, or wait again, or end. Return False if the stream ended."""
        model = ticket.request.model
        is_served = self._fleet.of_model(model).serving_count > 0 or self._fleet.is_awaited(model)
        ticket.refusal = self._continuations.refusal(ticket, is_served=is_served)
        if next_lease is not None and ticket.refusal is None and not ticket.is_on_trial:
            self._leases.use_next(ticket, next_lease)
            self._continuations.note(ticket, now)
            self._leases.hand_over(now)
            return True
        ticket.next_lease = next_lease
        self._leases.drop_next(ticket)
        if ticket.refusal is not None:
            self._end(ticket)
        else:
            ticket.stage = None  # The next endpoint computes the whole rest of the response.
            # The old queue deadline applied only to the wait before the first token.
            ticket.own_deadline, ticket.queue_deadline = math.inf, now + self.settings.continuation_seconds_max
            self._wait_again(ticket)
        self._leases.hand_over(now)
        return ticket.refusal is None

    # --- methods for endpoints ---

    def add_endpoint(
        self,
        id: EndpointId,
        models: Iterable[str],
        now: float,
        *,
        leases_max: int | None = None,
        role: EngineRole | None = None,
    ) -> None:
        """Add an endpoint, or restart one that is draining.

        Args:
            id: name of the endpoint.
            models: model names that it serves.
            now: time in seconds.
            leases_max: sequences that the endpoint accepts. If None, the limit of the settings applies.
            role: stages of disaggregated requests that the endpoint should compute. None: no stage.

        Raises:
            StartupError: the id is in use, or `leases_max` is below 1.
        """
        self._fleet.add(id, models, leases_max=leases_max, role=role)
        self._moving.end(id)

    def set_models(self, id: EndpointId, models: Iterable[str], now: float) -> None:
        """Set the models that an endpoint serves. Does nothing if the endpoint was removed.

        Args:
            id: name of the endpoint.
            models: model names.
            now: time in seconds.
        """
        state = self.endpoints.get(id)
        if state is None:
            return
        self._fleet.set_models(state, frozenset(models))
        self._refuse_hopeless(now)
        self._leases.hand_over(now)

    def set_role(self, id: EndpointId, role: EngineRole | None, now: float) -> None:
        """Set the stages of disaggregated requests that an endpoint should compute. Does nothing if the endpoint was
        removed.

        Args:
            id: name of the endpoint.
            role: the role. None: no stage of disaggregated requests.
            now: time in seconds.
        """
        state = self.endpoints.get(id)
        if state is not None and state.role != role:
            state.set_role(role)
            self._leases.hand_over(now)

    def drain_endpoint(self, id: EndpointId, now: float, *, move_seconds: float | None = None) -> None:
        """Send no more requests to an endpoint, and remove it when its last request has ended.

        May be called again while the endpoint drains.

        Args:
            id: name of the endpoint.
            now: time in seconds.
            move_seconds: also empty the endpoint: streams that can resume at another endpoint are moved as soon as one
                has a free slot. After this many seconds, all remaining requests must leave. If None, requests stay
                until they end.
        """
        state = self.endpoints[id]
        state.drain()
        self._fleet.note_drained(state)
        self._judge(now)
        if move_seconds is not None and state.in_flight:
            self._empty(id, now + move_seconds)
        self._refuse_hopeless(now)
        self._leases.hand_over(now)

    def _empty(self, id: EndpointId, deadline: float) -> None:
        self._moving.begin(id, deadline)
        for ticket in self._live.values():
            if ticket.endpoint == id:
                self._moving.join(ticket)

    def is_endpoint_draining(self, id: EndpointId) -> bool:
        state = self.endpoints.get(id)
        return state is not None and state.health is EndpointHealth.DRAINING

    def note_fingerprint(self, id: EndpointId, fingerprint: str | None) -> None:
        """Set the fingerprint of an endpoint. Does nothing if the endpoint was removed.

        A stream that breaks off resumes at an endpoint with an equal fingerprint if one has a free slot.

        Args:
            id: name of the endpoint.
            fingerprint: endpoints with equal fingerprints compute equal tokens for a request. None: unknown.
        """
        state = self.endpoints.get(id)
        if state is not None:
            state.fingerprint = fingerprint

    def note_load(self, id: EndpointId, load: EndpointLoad, now: float, *, sent_when_asked: int) -> None:
        """Accept a load report. Does nothing if the endpoint was removed.

        Args:
            id: name of the endpoint.
            load: the report.
            now: time in seconds.
            sent_when_asked: value of `sent_total` when the router asked for the report.
        """
        state = self.endpoints.get(id)
        if state is not None:
            self._fleet.note_load(state, load, now, sent_when_asked=sent_when_asked)
            self._judge(now)
            self._leases.hand_over(now)

    def note_client_fault(self, ticket: Ticket) -> bool:
        """Record that an endpoint refused a request and blamed its client.

        Args:
            ticket: the request.

        Returns:
            True if another endpoint has to confirm the refusal, because this endpoint refused several requests in a row
            and served none.
        """
        if ticket.state is not TicketState.LEASED:
            return False
        endpoint = self._fleet.of(ticket)
        endpoint.refusals_in_a_row += 1
        return endpoint.refusals_in_a_row > self.settings.failures_max

    def note_probe(self, id: EndpointId, is_well: bool | None, now: float) -> None:
        """Record the result of a probe request. Does nothing if the endpoint was removed.

        Args:
            id: name of the ejected endpoint.
            is_well: True if the endpoint served the probe. None if the endpoint is alive but refused the probe.
            now: time in seconds.
        """
        state = self.endpoints.get(id)
        if state is not None:
            state.note_probe(is_well, now)
            self._leases.hand_over(now)

    def set_lease_share(self, id: EndpointId, share: int, now: float) -> None:
        """Set how many leases this router may grant at an endpoint. Does nothing if the endpoint was removed.

        Leases beyond the share stay until they end.

        Args:
            id: name of the endpoint.
            share: number of leases.
            now: time in seconds.
        """
        state = self.endpoints.get(id)
        if state is not None and state.lease_share != share:
            state.set_lease_share(share)
            self._leases.hand_over(now)

    def note_health(self, id: EndpointId, is_well: bool, now: float, *, is_hung: bool = False) -> None:
        """Record the result of a health check.

        Args:
            id: name of the endpoint.
            is_well: True if the endpoint passed.
            now: time in seconds.
            is_hung: True if the endpoint has not answered for very long, or reports a hung step. Then the endpoint gets
                no more requests from now on.
        """
        state = self.endpoints.get(id)
        if state is None or state.health is EndpointHealth.DRAINING:
            return
        if is_hung:
            state.note_hung(now)
        else:
            state.note_check(is_well, now)
        if is_well:
            self._moving.end(id)
        self._leases.hand_over(now)

    def note_leaving(self, id: EndpointId, now: float, *, move_seconds: float | None = None) -> None:
        """Record that an endpoint shuts down or refuses connections. The endpoint gets no requests until it passes a
        health check.

        Args:
            id: name of the endpoint.
            now: time in seconds.
            move_seconds: also empty the endpoint, see `drain_endpoint`. Ignored if the endpoint is already being
                emptied. If None, requests stay until they end.
        """
        state = self.endpoints.get(id)
        if state is None or state.health is EndpointHealth.DRAINING:
            return
        if state.health is EndpointHealth.STARTING:
            self.note_health(id, False, now)  # The endpoint may still be starting.
            return
        state.note_leaving(now)
        if move_seconds is not None and state.in_flight and not self._moving.is_emptied(id):
            self._empty(id, now + move_seconds)
        self._leases.hand_over(now)

    # --- methods for time ---

    def next_tick(self, now: float) -> float:
        """Return the time in seconds at which `tick` has to be called next, or math.inf for never.

        Args:
            now: time in seconds.
        """
        over_at = self._deadlines.first()
        moments = [self._fleet.next_moment(), self._moving.next_deadline()]
        if over_at is not None:
            moments.append(over_at)
        if any(model.continued for model in self._queues.models.values()):
            moments.append(self._continuations.next_turn(now))
        return min(moments)

    def tick(self, now: float) -> None:
        """Refuse requests whose queue deadline has passed, and allow a probe of each endpoint whose ejection has ended.

        Args:
            now: time in seconds.
        """
        while (ticket := self._deadlines.pop_passed(now)) is not None:
            if ticket.is_on_trial:
                self._end_wait(ticket, self._continuations.poisoned(ticket), now)
            else:
                self._refuse(ticket, refusals.wait_over(ticket, self._queues.of(ticket), now), now)
        self._fleet.tick(now)
        self._leases.hand_over(now)
        for id in self._moving.pop_passed(now):
            self._ask_to_leave(id)

    def drain(self, now: float) -> None:
        """Accept no new requests, and refuse all that were not sent to any endpoint.

        Other requests continue, including requests that wait again: for a decode endpoint, or because their endpoint
        failed.

        Args:
            now: time in seconds.
        """
        self.is_draining = True
        for ticket in list(self._live.values()):
            is_begun = ticket.is_sent or ticket.is_lost or ticket.has_token or ticket.prefilled_by is not None
            if not is_begun:
                self._refuse(ticket, refusals.draining(), now)
        self._leases.hand_over(now)

    def stats(self) -> RouterStats:
        return RouterStats(
            waiting=sum(model.count + model.preparing for model in self._queues.models.values()),
            waiting_prompt_tokens=sum(model.prompt_tokens for model in self._queues.models.values()),
            leases={state.id: state.leases for state in self.endpoints.values()},
            health={state.id: state.health for state in self.endpoints.values()},
            admissions_total=self._leases.granted_total,
            retries_total=self._retries_total,
            rejections_total=dict(self._refusals.totals),
            continuing=sum(len(model.continued) for model in self._queues.models.values()),
            continuations_total=self._continuations.total,
            continuations_refused_total=dict(self._continuations.refused_total),
            moving=sum(len(model.moving) for model in self._queues.models.values()),
            moves_total=self._moving.total,
            pairs_total=dict(self._disaggregation.outcomes_total),
        )

    # --- methods for the state of requests ---

    def _ask_to_leave(self, id: EndpointId) -> None:
        """Ask all requests to leave an endpoint that is being emptied and whose deadline has passed."""
        for ticket in list(self._live.values()):
            is_there = ticket.endpoint == id and ticket.is_sent and ticket.next_lease is None
            is_free = (ticket.can_resume or not ticket.has_token) and ticket.request.pinned is None
            if is_there and is_free and self._fleet.of_model(ticket.request.model).serving_count:
                self._on_move(ticket)

    def _note_gone(self, id: EndpointId) -> None:
        self._moving.end(id)
        self._on_gone(id)

    def _wait_again(self, ticket: Ticket) -> None:
        """Queue a request again. Its ticket must have left its endpoint and released its leases."""
        ticket.move(TicketState.WAITING)
        self._leases.follower.waits(ticket)
        self._moving.note_arrived(ticket)
        ticket.sent_index = None
        ticket.is_answered = False
        self._queues.wait_again(ticket)
        self._deadlines.add(ticket, live_count=len(self._live))

    def _end(self, ticket: Ticket) -> None:
        ticket.move(TicketState.ENDED)
        self._leases.follower.ended(ticket)
        self._moving.note_arrived(ticket)
        del self._live[ticket.index]
        self._disaggregation.note_outcome(ticket, PairOutcome.LEFT)
        self._queues.of_model(ticket.request.model).live_count -= 1
        self._forget_unserved(ticket.request.model)

    def _forget_unserved(self, model: str) -> None:
        if model not in self._fleet.model_names():
            self._queues.forget_unused(model)

    # --- methods for disaggregated requests ---

    def will_be_disaggregated(self, request: RoutedRequest) -> bool:
        """Return whether the request would be disaggregated if it entered now.

        Args:
            request: a request that has not entered.
        """
        return self._disaggregation.will_be_disaggregated(request)

    def has_pair(self, model: str) -> bool:
        """Return whether one endpoint may compute a prompt, and a different endpoint may compute the response.

        Args:
            model: model name.
        """
        return self._fleet.has_pair(model)

    # --- methods for the set of endpoints ---

    def model_names(self) -> KeysView[str]:
        """Return the model names of all endpoints, including draining ones, and of models that are loaded on demand."""
        return self._fleet.model_names()

    def host(self, models: Iterable[str], follower: TicketFollower) -> None:
        """Let requests wait for models that the server loads on demand, while no endpoint serves them.

        Args:
            models: model names.
            follower: follows all tickets from now on.
        """
        self._fleet.host(models)
        self._leases.follower = follower

    def set_hosted(self, models: Iterable[str], now: float) -> None:
        """Replace the names of the models that the server loads on demand, and refuse requests that wait for others.

        Args:
            models: model names.
            now: time in seconds.
        """
        self._fleet.host(models)
        self._refuse_hopeless(now)

    @property
    def hosts_models(self) -> bool:
        """True if the server loads models on demand."""
        return self._fleet.hosts_models

    @property
    def is_any_nameless(self) -> bool:
        """True if an endpoint has not reported its models yet."""
        return self._fleet.is_any_nameless

    def has_choice(self, request: RoutedRequest) -> bool:
        """Return whether more than one endpoint could serve the request, or a stage of the request.

        Args:
            request: a request that has not entered.
        """
        stages: tuple[Stage | None, ...] = tuple(Stage) if self.will_be_disaggregated(request) else (None,)
        return any(self._fleet.has_choice(request.model, stage) for stage in stages)

    # --- methods for refusals ---

    def _check_open(self, request: RoutedRequest, now: float) -> None:
        """Raise Draining, NoEndpoint or InvalidRequest unless an endpoint that is not ejected may serve the request."""
        if self.is_draining:
            raise self._refusals.counted(refusals.draining())
        if not 1 <= request.sequences <= self.settings.sequences_max:
            raise refusals.too_many_sequences(request, self.settings.sequences_max)
        if not self._fleet.may_serve(request):
            raise self._refusals.counted(self._no_endpoint(request, now))

    def _pushed_out(self, queue: Queue, ticket: Ticket) -> Ticket | None:
        """Return the ticket that must leave a full queue so that `ticket` can join, or None.

        With this rule, the burst of one tenant does not keep other tenants out of the queue. At most one ticket must
        leave, and only if the queue then has space for `ticket`.
        """
        found = queue.newcomers.newest_of_most(ticket)
        if found is None or queue.count - 1 > self.settings.queue_requests_max:
            return None
        prompt_tokens = queue.prompt_tokens - found.request.prompt_tokens
        return found if prompt_tokens <= self.settings.queue_prompt_tokens_max else None

    def _refuse(self, ticket: Ticket, refusal: TrioserveError, now: float) -> None:
        """End a request that was not sent to any endpoint, and report its refusal."""
        self._end_wait(ticket, self._refusals.counted(refusal), now)

    def _end_wait(self, ticket: Ticket, refusal: TrioserveError, now: float) -> None:
        self._leases.release(ticket, now)
        ticket.refusal = refusal
        self._end(ticket)
        self._on_change(ticket)

    def _judge(self, now: float) -> None:
        """Refuse or clear the requests whose failed endpoints have been checked since they failed."""
        for model in list(self._queues.models.values()):
            # The loop uses a copy, because ending a ticket may delete the queues of its model.
            for ticket in model.on_trial():
                refusal = self._continuations.judge(ticket)
                if refusal is not None:
                    self._end_wait(ticket, refusal, now)
                elif not ticket.is_on_trial:
                    self._queues.end_trial(ticket)

    def _refuse_hopeless(self, now: float) -> None:
        """Refuse waiting requests whose model is no longer served by any endpoint."""
        for ticket in self._queues.all_waiting():
            self._refuse_if_hopeless(ticket, now)

    def _refuse_if_hopeless(self, ticket: Ticket, now: float) -> None:
        # For a stream whose client has tokens, is_any_left also counts endpoints that failed the stream, because they
        # may recover.
        if ticket.state is TicketState.WAITING and not self._fleet.is_any_left(ticket):
            self._refuse(ticket, self._no_endpoint(ticket.request, now), now)

    def _no_endpoint(self, request: RoutedRequest, now: float) -> NoEndpoint:
        back_at = self._fleet.of_model(request.model).first_back_at(now)
        if request.pinned is not None:
            pinned = self._fleet.serves(request.pinned, request.model)
            back_at = None if pinned is None else pinned.ejected_until
        return refusals.no_endpoint(request, back_at, now)


class RouterStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the router's counters. Totals count since the start of the router.

    Attributes:
        waiting: requests in the queue, and requests whose body is being read before they enter.
        waiting_prompt_tokens: prompt tokens of the requests in the queue.
        leases: sequences that have a slot, by endpoint.
        health: health of each endpoint.
        admissions_total: leases that were granted.
        retries_total: requests that waited again after an endpoint failed them before their first token.
        rejections_total: refused requests, by reason.
        continuing: streams that wait to resume at another endpoint. The attribute `waiting` includes these streams.
        continuations_total: streams that got a lease to resume with.
        continuations_refused_total: streams that were not allowed to resume, by reason.
        moving: streams that run at an endpoint that is being emptied, and wait for a slot at another endpoint.
        moves_total: streams that got a lease to move to.
        pairs_total: requests that should have been disaggregated, by outcome.
    """

    waiting: int
    waiting_prompt_tokens: int
    leases: dict[EndpointId, int]
    health: dict[EndpointId, EndpointHealth]
    admissions_total: int
    retries_total: int
    rejections_total: dict[str, int]
    continuing: int
    continuations_total: int
    continuations_refused_total: dict[str, int]
    moving: int
    moves_total: int
    pairs_total: dict[PairOutcome, int]
