"""All endpoints of a router, their leases, and the choice of an endpoint that has a free slot.

Every value that is needed for each request is counted or indexed (see model_endpoints). So the cost per request is the
same for ten endpoints and for ten thousand.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, KeysView

from trioserve.contracts.endpoint import EndpointId, EndpointLoad, RoutedRequest, Stage
from trioserve.contracts.errors import StartupError
from trioserve.contracts.kv_transfer import EngineRole
from trioserve.router.candidates import Rng
from trioserve.router.endpoint_state import EndpointHealth, EndpointState, OwnShare
from trioserve.router.model_endpoints import (
    KINDS_OF_STAGE,
    UNEJECTED,
    Filing,
    Kind,
    ModelEndpoints,
    Search,
    counts_of,
    kinds_of,
)
from trioserve.router.policies import Policy
from trioserve.router.settings import RouterSettings
from trioserve.router.ticket import Moments, Ticket

__all__ = ["Endpoints"]

NO_ENDPOINTS = ModelEndpoints()
DRAWS = 1 << 16


class Endpoints:
    """All endpoints of a router.

    Args:
        settings: limits.
        policy: chooses between endpoints that have a free slot.
        rng: source of randomness.
        on_gone: called with the id of a drained endpoint when its last request has ended.
        on_unserved: called with a model name when the last endpoint that served the model is removed. Draining
            endpoints count as serving.

    Attributes:
        by_id: all endpoints that are not removed.
    """

    def __init__(
        self,
        settings: RouterSettings,
        policy: Policy,
        *,
        rng: Rng,
        on_gone: Callable[[EndpointId], None],
        on_unserved: Callable[[str], None],
    ) -> None:
        self.by_id: dict[EndpointId, EndpointState] = {}
        self._settings = settings
        self._policy = policy
        self._rng = rng
        self._on_gone = on_gone
        self._on_unserved = on_unserved
        self._models: dict[str, ModelEndpoints] = {}
        self._filings: dict[EndpointId, Filing] = {}
        # Counts how many endpoints serve each model. Draining endpoints count too.
        self._names: Counter[str] = Counter()
        self._hosted: frozenset[str] = frozenset()  # Models that the server loads on demand.
        self._nameless_count = 0
        self._openings = Moments()
        self._ejections = Moments()
        self._added_count = 0
        self._checks_of_gone = 0  # The highest `checks_total` of all removed endpoints.
        self._healthy_ids: set[EndpointId] = set()

    # --- methods for the set of endpoints ---

    def add(self, id: EndpointId, models: Iterable[str], *, leases_max: int | None, role: EngineRole | None) -> None:
        """Add an endpoint, or restart one that is draining.

        Args:
            id: name of the endpoint.
            models: model names that the endpoint serves.
            leases_max: number of sequences that the endpoint accepts. If None, the limit of the settings applies.
            role: stages of disaggregated requests that the endpoint should compute. None: no stage.

        Raises:
            StartupError: the id is in use, or `leases_max` is below 1.
        """
        known = self.by_id.get(id)
        if known is not None and known.health is not EndpointHealth.DRAINING:
            raise StartupError(f'there are two endpoints with the id "{id}": give each endpoint its own id')
        if leases_max is not None and leases_max < 1:
            raise StartupError(f'the endpoint "{id}" may take {leases_max} requests, it must be at least 1')
        leases_max = leases_max or self._settings.leases_max
        if known is not None:
            self._rename(known.models, frozenset(models))
            known.come_back(frozenset(models), leases_max=leases_max, role=role)
            return
        self._added_count += 1
        state = self.by_id[id] = EndpointState(
            id,
            frozenset(models),
            self._settings,
            leases_max=leases_max,
            slow_start=bool(self._healthy_ids),
            role=role,
            number=self._added_count,
            checks_total=self._checks_of_gone,
            on_change=self._changed,
        )
        self._filings[id] = Filing()
        self._count_names(state.models, 1)
        self._changed(state)

    def set_models(self, state: EndpointState, models: frozenset[str]) -> None:
        self._rename(state.models, models)
        state.set_models(models)

    def model_names(self) -> KeysView[str]:
        """Return the model names of all endpoints, including draining ones, and of models that are loaded on demand."""
        return self._names.keys()

    def host(self, models: Iterable[str]) -> None:
        """Set the models that the server loads on demand. Their names stay known while no endpoint serves them.

        Args:
            models: model names.
        """
        before, self._hosted = self._hosted, frozenset(models)
        for names, by in ((self._hosted - before, 1), (before - self._hosted, -1)):
            if names:
                self._count_names(names, by)

    @property
    def hosts_models(self) -> bool:
        """True if the server loads models on demand."""
        return bool(self._hosted)

    def is_awaited(self, model: str) -> bool:
        """Return whether no endpoint serves a model, but the server loads the model on demand.

        Args:
            model: model name.
        """
        return model in self._hosted and not self.of_model(model).serving_count

    def may_serve(self, request: RoutedRequest) -> bool:
        """Return whether an endpoint that is not ejected serves the request, or the server loads its model on demand.

        Args:
            request: the request. If it is pinned, only its endpoint counts.
        """
        if request.pinned is not None:
            pinned = self.serves(request.pinned, request.model)
            return pinned is not None and pinned.health is not EndpointHealth.EJECTED
        model = self._models.get(request.model, NO_ENDPOINTS)
        return model.totals[UNEJECTED] > 0 or self.is_awaited(request.model)

    @property
    def is_any_nameless(self) -> bool:
        """True if an endpoint has not reported its models yet."""
        return self._nameless_count > 0

    def of_model(self, model: str) -> ModelEndpoints:
        """Return the endpoints that serve a model and are not draining. The caller must not change them.

        Args:
            model: model name.
        """
        return self._models.get(model, NO_ENDPOINTS)

    def serving(self, model: str) -> list[EndpointState]:
        """List the endpoints that serve a model and are not draining.

        Args:
            model: model name.

        Cost:
            O(endpoints). Do not call it for every request.
        """
        return list(self.of_model(model).by_number.values())

    def serves(self, id: EndpointId | None, model: str) -> EndpointState | None:
        """Return the endpoint if it serves the model and is not draining, otherwise None.

        Args:
            id: name of the endpoint. If None, the result is None.
            model: model name.
        """
        state = None if id is None else self.by_id.get(id)
        return state if state is not None and state.number in self.of_model(model).by_number else None

    def is_any_left(self, ticket: Ticket, *, unejected: bool = False, has_not_refused: bool = False) -> bool:
        """Return whether any endpoint remains that may serve the request, now or later.

        Args:
            ticket: the request, with its failed endpoints.
            unejected: count only endpoints that are not ejected.
            has_not_refused: count only endpoints that are ejected, or that passed a check since they failed the
                request.
        """
        if self.is_awaited(ticket.request.model):
            return True
        model = self.of_model(ticket.request.model)
        count = model.unejected_count if unejected else model.serving_count
        for id in ticket.tried:
            state = self.serves(id, ticket.request.model)
            if state is None or (unejected and state.health is EndpointHealth.EJECTED):
                continue
            if has_not_refused and state.health is not EndpointHealth.EJECTED:
                count -= not may_try(state, ticket)
            else:
                count -= not ticket.has_token and id in ticket.failed_by
        return count > 0

    def has_pair(self, model: str, tried: Collection[EndpointId] = ()) -> bool:
        """Return whether one endpoint may compute a prompt, and a different endpoint may compute the response.

        Args:
            model: model name.
            tried: endpoints that are not considered.
        """
        filed = self.of_model(model)
        first, second = filed.count_of(Kind.PREFILL), filed.count_of(Kind.DECODE)
        both = filed.both_count
        for id in set(tried):
            state = self.serves(id, model)
            kinds = () if state is None else kinds_of(state)
            first -= Kind.PREFILL in kinds
            second -= Kind.DECODE in kinds
            both -= Kind.PREFILL in kinds and Kind.DECODE in kinds
        return first > 0 and second > 0 and first + second - both > 1

    def has_stage_endpoint(self, ticket: Ticket) -> bool:
        """Return whether some endpoint may do the next stage of the request. Endpoints that failed the request do not
        count.

        Args:
            ticket: the request.
        """
        model = ticket.request.model
        count = self.of_model(model).count_of(KINDS_OF_STAGE[ticket.stage][0])
        beside = {*ticket.tried, ticket.prefilled_by} if ticket.stage is Stage.DECODE else set(ticket.tried)
        for id in beside:
            state = self.serves(id, model)
            count -= state is not None and KINDS_OF_STAGE[ticket.stage][0] in kinds_of(state)
        return count > 0

    def has_choice(self, model: str, stage: Stage | None) -> bool:
        """Return whether more than one endpoint gets requests of this model and stage.

        Args:
            model: model name.
            stage: stage of the request. None: the whole request.
        """
        filed = self.of_model(model)
        return (filed.given_count if stage is None else filed.count_of(KINDS_OF_STAGE[stage][0])) > 1

    # --- methods for reports ---

    def note_load(self, state: EndpointState, load: EndpointLoad, now: float, *, sent_when_asked: int) -> None:
        """Accept a load report of an endpoint, and divide the endpoint's free slots between the routers.

        Args:
            state: the endpoint.
            load: the report.
            now: time in seconds.
            sent_when_asked: see EndpointState.note_load.
        """
        state.note_load(load, now, sent_when_asked=sent_when_asked)
        part = self._own_part(state)
        if part is not None:
            state.divide_room(part, now)

    def _own_part(self, state: EndpointState) -> OwnShare | None:
        """Return the fraction of the endpoint's free slots that this router may use. None if the router may use all of
        them.

        The result is the larger of two fractions: the router's fraction of the leases, and the router's fraction of the
        model's current work.
        """
        if state.lease_share is None or state.lease_share >= state.leases_max:
            return None
        shares = (self._models[name].own_share for name in self._filings[state.id].models)
        share = max((state.lease_share / state.leases_max, *shares))
        return OwnShare(share, self._rng.randrange(DRAWS) / DRAWS) if share < 1 else None

    # --- methods for time ---

    def next_moment(self) -> float:
        """Return the next time at which an endpoint accepts requests or a probe although no other event occurs.
        math.inf if there is none.
        """
        return min(self._openings.first(), self._ejections.first())

    def open_passed(self, now: float) -> None:
        """Mark endpoints as open if their `next_moment` has passed, because they may have free slots now.

        Args:
            now: time in seconds.
        """
        for id in self._openings.pop_passed(now):
            self._changed(self.by_id[id])

    def tick(self, now: float) -> None:
        self.open_passed(now)
        for id in self._ejections.pop_passed(now):
            self.by_id[id].tick(now)

    # --- methods for leases ---

    def of(self, ticket: Ticket) -> EndpointState:
        assert ticket.endpoint is not None
        return self.by_id[ticket.endpoint]

    def grant(self, ticket: Ticket, now: float) -> bool:
        """Give the request a lease at the endpoint that the policy chooses.

        The endpoint has a free slot for each of the request's sequences. If no endpoint has so many free slots, one
        free slot is enough, and the other sequences wait inside the endpoint. A stream that resumes goes to an endpoint
        with an equal fingerprint if one has a free slot. The caller updates `ticket.state`.

        Args:
            ticket: the request. Its endpoint and lease fields are updated.
            now: time in seconds.

        Returns:
            False if no endpoint has a free slot.
        """
        if self._openings.at:
            self.open_passed(now)
        request = ticket.request
        state = None if request.running_at is None else self._running_at(ticket)
        for sequences in (request.sequences, 1) if request.sequences > 1 else (1,):
            if state is None and ticket.has_token and ticket.fingerprint is not None:
                state = self._choose(ticket, sequences, now, fingerprint=ticket.fingerprint)
            state = state or self._choose(ticket, sequences, now)
            if state is not None:
                ticket.is_probe = state.take(request.sequences)
                ticket.endpoint = state.id
                ticket.is_suspect = bool(ticket.broken)
                if ticket.is_suspect:
                    state.note_suspect(1)
                self._policy.note_sent(request, state.id)
                return True
        return False

    def _running_at(self, ticket: Ticket) -> EndpointState | None:
        """Return the endpoint where the request runs already, unless that endpoint failed the request. A request needs
        no further slot where it runs.
        """
        id = ticket.request.running_at
        state = None if id is None or id in ticket.tried else self.by_id.get(id)
        return state if state is not None and state.accepts_requests else None

    def _choose(
        self, ticket: Ticket, sequences: int, now: float, *, fingerprint: str | None = None
    ) -> EndpointState | None:
        request = ticket.request
        stage = ticket.stage

        def fits(state: EndpointState) -> bool:
            if fingerprint is not None and state.fingerprint != fingerprint:
                return False
            if ticket.tried and not may_try(state, ticket):
                return False
            return stage is not Stage.DECODE or state.id != ticket.prefilled_by

        named: tuple[EndpointId | None, ...] = ()
        if request.pinned is not None:
            named = (request.pinned,)
        elif stage is None:
            named = (ticket.prefilled_by, request.preferred)
        for id in named:
            state = None if id is None else self.serves(id, request.model)
            if state is not None and fits(state) and state.has_room(sequences, now):
                return state
        if request.pinned is not None:
            return None
        model = self._models.get(request.model, NO_ENDPOINTS)
        for kind in KINDS_OF_STAGE[stage]:
            if not model.open[kind]:
                continue
            if len(model.by_number) == 1:
                # An engine's own queue has one endpoint, so this case is common. The policy has nothing to choose.
                state = model.by_number[model.open[kind][0]]
                if state.has_room(sequences, now):
                    return state if fits(state) else None
                if sequences == 1 or not state.has_room(1, now):
                    self._close(state, now)
                continue
            search = Search(
                model,
                self.by_id,
                kind,
                sequences=sequences,
                fits=fits,
                now=now,
                rng=self._rng,
                close=self._close,
            )
            if search.sample(1):
                id = self._policy.choose(request, search)
                assert search.named((id,)), f"{id} has no room"
                return self.by_id[id]
        return None

    def end_lease(self, ticket: Ticket) -> None:
        """Free the slots of a request, which may still run.

        Args:
            ticket: the request.
        """
        self.of(ticket).end_lease(ticket.request.sequences)

    def end_probe(self, ticket: Ticket) -> None:
        """Allow another probe if this request was a probe.

        Args:
            ticket: the request.
        """
        if ticket.is_probe:
            ticket.is_probe = False
            self.of(ticket).end_probe()

    def end_flight(self, ticket: Ticket) -> bool:
        """Stop counting a request at its endpoint.

        Args:
            ticket: the request.

        Returns:
            True if all endpoints of its model are idle now.
        """
        endpoint = self.of(ticket)
        endpoint.end_flight(ticket.request.sequences, ticket.sent_index)
        endpoint.note_suspect(-ticket.is_suspect)
        ticket.is_suspect = False
        is_idle = endpoint.in_flight == 0 and self.of_model(ticket.request.model).in_flight == 0
        self.note_drained(endpoint)
        return is_idle

    def note_moved(self, before: EndpointId | None, ticket: Ticket) -> None:
        """Count a stream that left an endpoint and resumes at the endpoint of its lease.

        Args:
            before: the endpoint that the stream left. It may have been removed by now.
            ticket: the stream's request.
        """
        left = None if before is None else self.by_id.get(before)
        if left is not None:
            left.moved_from_total += 1
        self.of(ticket).moved_to_total += 1

    def note_drained(self, state: EndpointState) -> None:
        if state.health is EndpointHealth.DRAINING and state.in_flight == 0:
            del self.by_id[state.id], self._filings[state.id]
            self._checks_of_gone = max(self._checks_of_gone, state.checks_total)
            self._openings.clear(state.id)
            self._count_names(state.models, -1)
            self._policy.forget(state.id)
            self._on_gone(state.id)

    # --- methods for the index by model ---

    def _changed(self, state: EndpointState) -> None:
        """Update the index after a change of an endpoint, and mark the endpoint as open."""
        filing = self._filings.get(state.id)
        if filing is None or self.by_id[state.id] is not state:
            return  # The endpoint was removed, but its last requests have not ended.
        if state.health is not filing.health:
            self._note_health(state, filing)
        kinds = kinds_of(state)
        models = frozenset() if state.health is EndpointHealth.DRAINING else state.models
        counts = counts_of(state, kinds)
        if models == filing.models and kinds == filing.kinds:
            for name in models:
                self._models[name].move(filing.counts, counts)
                if not filing.is_open:
                    self._models[name].set_open(state.number, kinds)
        else:
            self._file(state, filing, models, kinds, counts)
        filing.counts, filing.is_open = counts, True
        if self._openings.at:
            self._openings.clear(state.id)

    def _note_health(self, state: EndpointState, filing: Filing) -> None:
        filing.health = state.health
        self._ejections.set(state.id, state.ejected_until if state.has_ejection_end else math.inf)
        if state.health is EndpointHealth.HEALTHY:
            self._healthy_ids.add(state.id)
        else:
            self._healthy_ids.discard(state.id)

    def _file(
        self,
        state: EndpointState,
        filing: Filing,
        models: frozenset[str],
        kinds: tuple[Kind, ...],
        counts: tuple[int, ...],
    ) -> None:
        nothing = (0,) * len(counts)
        for name in filing.models:
            model = self._models[name]
            if filing.is_open:
                model.set_closed(state.number, filing.kinds)
            model.note_kinds(filing.kinds, ())
            model.move(filing.counts, nothing)
            model.leave(state)
            if not model.by_number:
                del self._models[name]
        for name in models:
            model = self._models.setdefault(name, ModelEndpoints())
            model.join(state)
            model.move(nothing, counts)
            model.note_kinds((), kinds)
            model.set_open(state.number, kinds)
        filing.models, filing.kinds = models, kinds

    def _close(self, state: EndpointState, now: float) -> None:
        """Mark an endpoint as closed: it has no free slot for any request."""
        filing = self._filings[state.id]
        for name in filing.models:
            self._models[name].set_closed(state.number, filing.kinds)
        filing.is_open = False
        self._openings.set(state.id, state.opens_at(now))

    def _rename(self, before: frozenset[str], after: frozenset[str]) -> None:
        # Names are added before names are removed, so that the count of a remaining name does not drop to 0.
        self._count_names(after, 1)
        self._count_names(before, -1)

    def _count_names(self, models: frozenset[str], by: int) -> None:
        self._nameless_count += 0 if models else by
        for name in models:
            self._names[name] += by
            if not self._names[name]:
                del self._names[name]
                self._on_unserved(name)


def may_try(state: EndpointState, ticket: Ticket) -> bool:
    """Return whether the request may be sent to this endpoint, after its earlier failures at this endpoint.

    If the endpoint was lost while it served the request, the endpoint may get the request again after passing a health
    check. If the endpoint answered the request with an error, it may get the request again only after the client has a
    token.

    Args:
        state: the endpoint.
        ticket: the request.
    """
    checks = ticket.tried.get(state.id)
    if checks is None:
        return True
    return state.checks_total > checks and (ticket.has_token or state.id not in ticket.failed_by)
