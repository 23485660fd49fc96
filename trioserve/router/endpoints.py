"""Which endpoints there are, what each has been given, and which is chosen of those that have room."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from trioserve.contracts.endpoint import EndpointId, Stage
from trioserve.contracts.errors import StartupError
from trioserve.contracts.kv_transfer import EngineRole
from trioserve.router.endpoint_state import EndpointHealth, EndpointState
from trioserve.router.policies import Candidate, Policy
from trioserve.router.settings import RouterSettings
from trioserve.router.ticket import Ticket

__all__ = ["Endpoints", "may_do", "may_try"]


class Endpoints:
    """by_id: all that are not gone. on_gone: called when a drained one has nothing any more."""

    def __init__(self, settings: RouterSettings, policy: Policy, *, on_gone: Callable[[EndpointId], None]) -> None:
        self.by_id: dict[EndpointId, EndpointState] = {}
        self._settings = settings
        self._policy = policy
        self._on_gone = on_gone

    def add(self, id: EndpointId, models: Iterable[str], *, leases_max: int | None, role: EngineRole | None) -> None:
        """One that is being drained is taken back. Raises StartupError for an id that is taken, or a limit below 1."""
        known = self.by_id.get(id)
        if known is not None and known.health is not EndpointHealth.DRAINING:
            raise StartupError(f'there are two endpoints with the id "{id}": give each its own')
        if leases_max is not None and leases_max < 1:
            raise StartupError(f'the endpoint "{id}" may take {leases_max} requests, it must be at least 1')
        if known is not None:
            known.come_back(frozenset(models), leases_max=leases_max or self._settings.leases_max, role=role)
            return
        self.by_id[id] = EndpointState(
            id,
            frozenset(models),
            self._settings,
            leases_max=leases_max or self._settings.leases_max,
            slow_start=any(state.health is EndpointHealth.HEALTHY for state in self.by_id.values()),
            role=role,
        )

    def serving(self, model: str) -> list[EndpointState]:
        """Those that serve the model and do not leave."""
        return [
            state
            for state in self.by_id.values()
            if model in state.models and state.health is not EndpointHealth.DRAINING
        ]

    def free_count(self, model: str) -> int:
        """Sequences that find a slot at those that are given requests."""
        return sum(max(0, state.leases_max - state.leases) for state in self.serving(model) if state.is_given)

    def of(self, ticket: Ticket) -> EndpointState:
        assert ticket.endpoint is not None
        return self.by_id[ticket.endpoint]

    def candidates(self, ticket: Ticket, now: float) -> list[Candidate]:
        """The endpoints that are there for what is next of it, and which of them has room: for all of its sequences, or
        where none has, for one of them. These need not start together: the others wait there for their slots."""
        candidates = self._with_room_for(ticket, ticket.request.sequences, now)
        if ticket.request.sequences > 1 and not any(candidate.has_room for candidate in candidates):
            candidates = self._with_room_for(ticket, 1, now)
        return candidates

    def alike(self, ticket: Ticket, candidates: list[Candidate]) -> list[Candidate]:
        """Those of them that compute what began its stream, if any has room; else all."""
        if ticket.fingerprint is None:
            return candidates
        alike = [one for one in candidates if self.by_id[one.id].fingerprint == ticket.fingerprint]
        return alike if any(candidate.has_room for candidate in alike) else candidates

    def give(self, ticket: Ticket, candidates: list[Candidate]) -> None:
        """Give it the one that the policy chooses. Its state is the caller's to move."""
        request = ticket.request
        id = self._policy.choose(request, candidates)
        assert any(candidate.has_room and candidate.id == id for candidate in candidates), f"{id} has no room"
        endpoint = self.by_id[id]
        if endpoint.health is EndpointHealth.PROBING:
            endpoint.probe_out = ticket.is_probe = True
        endpoint.claims += request.sequences
        endpoint.in_flight += request.sequences
        ticket.endpoint = id
        self._policy.note_sent(request, id)

    def end_lease(self, ticket: Ticket) -> None:
        """Its slots are another's, and it may still run."""
        self.of(ticket).claims -= ticket.request.sequences

    def end_probe(self, ticket: Ticket) -> None:
        """If it was one, another may probe."""
        if ticket.is_probe:
            self.of(ticket).probe_out = ticket.is_probe = False

    def end_flight(self, ticket: Ticket) -> bool:
        """Nothing of it is there any more. Returns whether its model's endpoints have nothing at all to do now."""
        endpoint = self.of(ticket)
        if ticket.sent_index is not None:
            del endpoint.sent[ticket.sent_index]
        endpoint.in_flight -= ticket.request.sequences
        assert 0 <= endpoint.claims <= endpoint.in_flight
        is_idle = endpoint.in_flight == 0 and not any(state.in_flight for state in self.serving(ticket.request.model))
        self.note_drained(endpoint)
        return is_idle

    def note_drained(self, state: EndpointState) -> None:
        if state.health is EndpointHealth.DRAINING and state.in_flight == 0:
            del self.by_id[state.id]
            self._policy.forget(state.id)
            self._on_gone(state.id)

    def _with_room_for(self, ticket: Ticket, sequences: int, now: float) -> list[Candidate]:
        request = ticket.request
        if (running := self._running(ticket)) is not None:
            return [Candidate(id=running.id, load=0.0, has_room=True)]
        return [
            Candidate(
                id=state.id,
                load=state.in_flight / state.leases_max,
                has_room=(
                    request.pinned in (None, state.id) and may_try(state, ticket) and state.has_room(sequences, now)
                ),
            )
            for state in self.serving(request.model)
            if state.is_given and (ticket.stage is None or may_do(state, ticket))
        ]

    def _running(self, ticket: Ticket) -> EndpointState | None:
        """Where it runs already, as long as that has not failed it, too."""
        id = ticket.request.running_at
        state = None if id is None or id in ticket.tried else self.by_id.get(id)
        return state if state is not None and state.is_given else None


def may_do(state: EndpointState, ticket: Ticket) -> bool:
    """Whether it is for this endpoint to do what is next."""
    return state.is_meant_for(ticket.stage) and (ticket.stage is not Stage.DECODE or state.id != ticket.prefilled_by)


def may_try(state: EndpointState, ticket: Ticket) -> bool:
    """Whether it may go there, so far as its own failures tell. Where a request has failed it does not go again; a
    stream that a client reads already does, once the endpoint has been found well since."""
    checks = ticket.tried.get(state.id)
    return checks is None or (ticket.has_token and state.checks_total > checks)
