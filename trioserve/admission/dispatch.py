"""The Trio code around the router core: scopes in which a request waits, gets its lease and runs at its endpoint.

    with dispatch.enter(request) as admission:      # raises refusals; leaving returns the lease
        endpoint = await admission.lease()          # raises the refusals of requests that waited
        with admission.attempt():
            ...                                     # send the request; admission.first_token() once it answers

The router core makes all decisions (router/core). A disaggregated request first has a lease for its prefill, and then a
lease for its decode. admission.stage is the stage for which the current lease was granted. admission.prefilled()
returns the prefill lease to the router.
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView
from contextlib import contextmanager

import trio

from trioserve.admission.admission_scope import AdmissionScope, SentTimes
from trioserve.contracts.endpoint import EndpointId, EndpointLoad, RoutedRequest
from trioserve.contracts.errors import Draining, RequestAborted
from trioserve.contracts.events import AbortOutcome
from trioserve.contracts.kv_transfer import EngineRole
from trioserve.router.core import Fault, RouterCore, RouterStats
from trioserve.router.endpoint_state import EndpointState
from trioserve.router.policies import Policy, PolicyFactory, Rng
from trioserve.router.settings import RouterSettings
from trioserve.router.ticket import Ticket, TicketFollower, TicketState
from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["Dispatch", "EndedIds"]

RETRY_SECONDS = 5.0
POSITION_SECONDS = 1.0
ENDED_IDS_MAX = 10_000


@uninterrupted
class Dispatch:
    """Runs one router. All methods must be called in the thread of the Trio program that runs the router.

    Args:
        settings: Limits and timeouts.
        policy: Creates the policy that chooses endpoints.
        rng: Source of random numbers. Default: a new source.

    Attributes:
        on_gone: Called with the id of an endpoint that was drained and has no requests any more.
        on_move: Called with a request that runs at one endpoint and now also has a lease at a second endpoint. The
            first endpoint may hand the request over. The callee must make sure that `admission.withdraw()` is called,
            unless the attempt ends earlier.
        on_drain: Called when the router begins to drain.
        on_wait_over: Called when a request gets its lease or is refused in the queue, with the seconds that it has
            waited.
        on_paired: Called at the first token of a disaggregated request, with the seconds since the end of its prompt.
        sent_times: Times at which requests were sent to endpoints.
        load_reports_total: Number of load reports by kind: "asked" (the router requested the report) or "pushed" (the
            endpoint sent the report by itself).
    """

    def __init__(self, settings: RouterSettings, policy: PolicyFactory, *, rng: Rng | None = None) -> None:
        self.core = RouterCore(
            settings,
            policy,
            on_change=self._wake_admission,
            rng=rng or random.Random(),
            on_gone=self._note_gone,
            on_move=self._move_admission,
        )
        self.on_gone: Callable[[EndpointId], None] = lambda id: None
        self.on_move: Callable[[AdmissionScope], None] = lambda admission: admission.withdraw()
        self.on_drain: Callable[[], None] = lambda: None
        self.on_wait_over: Callable[[float], object] = lambda seconds: None
        self.on_paired: Callable[[float], object] = lambda seconds: None
        self._admissions: dict[int, AdmissionScope] = {}
        self._ended_ids = EndedIds()
        self.sent_times = SentTimes()
        self._positions: dict[int, int] = {}
        self._positions_at = -math.inf
        self.load_reports_total = {"asked": 0, "pushed": 0}
        self._ticks_at = math.inf
        self._tick_is_earlier = trio.Event()
        self._idle = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the timers of the router until cancelled. Requests are refused at their queue deadlines, and probes of
        endpoints are allowed.

        Args:
            task_status: The method `started` is called when the loop runs.
        """
        task_status.started()
        while True:
            self._tick_is_earlier = trio.Event()
            self._ticks_at = self.core.next_tick(trio.current_time())
            with trio.move_on_at(self._ticks_at):
                await self._tick_is_earlier.wait()
            self.core.tick(trio.current_time())

    def block_sizes(self, request: RoutedRequest) -> frozenset[int]:
        """Return the block sizes for which the policy needs the request's block hashes.

        Returns:
            Sizes in tokens. Empty if only one endpoint is possible.
        """
        sizes = self.core.policy.block_sizes()
        return sizes if sizes and self.core.has_choice(request) else frozenset()

    @contextmanager
    def preparing(self, request: RoutedRequest) -> Iterator[None]:
        """Count a request while the server reads its body, before the request enters the queue.

        Args:
            request: The properties of the request that are known before its body is read.

        Raises:
            Overloaded: see `enter`. A refused request is not counted.
        """
        self.core.prepare(request, trio.current_time())
        try:
            yield
        finally:
            self.core.prepared(request)

    @contextmanager
    def enter(
        self, request: RoutedRequest, *, id: str | None = None, owner: str | None = None
    ) -> Iterator[AdmissionScope]:
        """Put a request into the queue, or give it a lease at once. Leaving the scope frees the queue position, or
        returns the lease.

        Args:
            id: Id under which the owner or an operator may see and abort the request. None for a request without an id.
            owner: Owner of the request. None if clients are not distinguished.

        Raises:
            Overloaded: a limit is reached. Draining and NoEndpoint are subclasses. A refused request keeps no queue
                position and no lease.
        """
        admission = self.begin(request, id=id, owner=owner)
        try:
            yield admission
        finally:
            self.leave(admission)

    def begin(self, request: RoutedRequest, *, id: str | None = None, owner: str | None = None) -> AdmissionScope:
        """Enter a request without a `with` block. The caller must later call `leave`.

        Args:
            id: See `enter`.
            owner: See `enter`.

        Raises:
            Overloaded: see `enter`.
        """
        ticket = self.core.enter(request, trio.current_time())
        admission = self._admissions[ticket.index] = AdmissionScope(self, self.core, ticket, id=id, owner=owner)
        if ticket.state is TicketState.WAITING:
            self.retime()  # The request's queue deadline may be earlier than the next tick of `run`.
        return admission

    def leave(self, admission: AdmissionScope) -> None:
        """Remove a request: free its queue position, or return its lease. A second call has no effect.

        Args:
            admission: Result of `begin`.
        """
        if self._admissions.pop(admission.index, None) is not None:
            self.core.leave(admission.ticket, trio.current_time())
            if admission.id is not None:
                self._ended_ids.note(admission.id, admission.owner)
            if not self._admissions:
                self._idle.set()

    def abort(self, ids: Iterable[str], *, owner: str | None = None) -> dict[str, AbortOutcome]:
        """Abort requests by their ids, in the queue or at their endpoints. Never raises.

        Args:
            ids: Ids to abort.
            owner: Abort only requests of this owner. Ids of other owners' requests are reported as unknown. None for
                all owners.

        Returns:
            The outcome of each id.
        """
        admissions: dict[str | None, list[AdmissionScope]] = {}
        for admission in self.live_admissions(owner=owner):
            admissions.setdefault(admission.id, []).append(admission)
        outcomes = {}
        for id in dict.fromkeys(ids):
            found = admissions.get(id, [])
            unfinished = [admission for admission in found if not admission.is_ended]
            for admission in unfinished:
                admission.end(RequestAborted("the request was aborted by its id"))
            if unfinished:
                outcomes[id] = AbortOutcome.ABORTED
            elif found or self._ended_ids.has(id, owner=owner):
                outcomes[id] = AbortOutcome.ALREADY_FINISHED
            else:
                outcomes[id] = AbortOutcome.UNKNOWN
        return outcomes

    def live_admissions(self, *, owner: str | None = None) -> list[AdmissionScope]:
        """Return all requests that are in the queue or at an endpoint. The oldest request comes first.

        Args:
            owner: Return only requests of this owner. None for all owners.
        """
        return [admission for admission in self._admissions.values() if owner in (None, admission.owner)]

    def position(self, admission: AdmissionScope) -> int:
        """Return the place of a request among the requests that wait for the same model, in the order of arrival.

        All requests are counted at once, and at most once a second as long as the same requests wait.

        Args:
            admission: The request.

        Returns:
            The place, from 1 on. 0: the request does not wait any more.
        """
        if not admission.is_waiting:
            return 0
        now = trio.current_time()
        if now >= self._positions_at + POSITION_SECONDS or admission.index not in self._positions:
            self._positions_at, self._positions = now, {}
            counts = Counter[str]()
            for waiting in self._admissions.values():
                if waiting.is_waiting:
                    counts[waiting.model] += 1
                    self._positions[waiting.index] = counts[waiting.model]
        return self._positions[admission.index]

    def note_load(self, id: EndpointId, load: EndpointLoad, *, sent_when_asked: int, is_pushed: bool = False) -> None:
        """Note the load that an endpoint reported.

        Args:
            id: The endpoint.
            load: The reported load.
            sent_when_asked: Value of sent_total when the router asked for the load, or when the endpoint measured the
                load of a pushed report.
            is_pushed: True if the endpoint sent the report by itself.
        """
        self.load_reports_total["pushed" if is_pushed else "asked"] += 1
        self.core.note_load(id, load, trio.current_time(), sent_when_asked=sent_when_asked)
        self.retime()

    def stats(self) -> RouterStats:
        return self.core.stats()

    @property
    def endpoints(self) -> Collection[EndpointState]:
        """Return the states of all endpoints. The caller must not change them."""
        return self.core.endpoints.values()

    def host(self, models: Iterable[str], follower: TicketFollower) -> None:
        """Let requests wait for models that the server loads on demand, while no endpoint serves them.

        Args:
            models: Names of the models.
            follower: Follows all tickets. Its `check` may refuse requests before they enter.
        """
        self.core.host(models, follower)

    def set_hosted(self, models: Iterable[str]) -> None:
        """Set the names for which requests may wait while no endpoint serves them.

        Args:
            models: Names of models and adapters. Requests that wait for other names are refused.
        """
        self.core.set_hosted(models, trio.current_time())
        self.retime()

    @property
    def hosts_models(self) -> bool:
        """Return True if the server loads models on demand, so that it accepts requests without an endpoint."""
        return self.core.hosts_models

    def model_names(self) -> KeysView[str]:
        """Return the names of all models that the endpoints serve."""
        return self.core.model_names()

    @property
    def is_any_nameless(self) -> bool:
        """Return True if there is an endpoint whose model names are unknown so far."""
        return self.core.is_any_nameless

    @property
    def policy(self) -> Policy:
        """Return the policy that chooses between endpoints."""
        return self.core.policy

    @property
    def is_draining(self) -> bool:
        return self.core.is_draining

    def endpoint(self, id: EndpointId) -> EndpointState | None:
        """Return the state of one endpoint. The caller must not change it.

        Args:
            id: The endpoint.

        Returns:
            The state. None if there is no such endpoint.
        """
        return self.core.endpoints.get(id)

    def is_endpoint_draining(self, id: EndpointId) -> bool:
        return self.core.is_endpoint_draining(id)

    def has_pair(self, model: str) -> bool:
        """Return True if requests for a model can be disaggregated. This needs an endpoint for prefill and an endpoint
        for decode.

        Args:
            model: Name of the model.
        """
        return self.core.has_pair(model)

    def add_endpoint(
        self,
        id: EndpointId,
        models: Iterable[str] = (),
        *,
        leases_max: int | None = None,
        role: EngineRole | None = None,
    ) -> None:
        """Add an endpoint. It gets requests after its first successful health check.

        Args:
            id: Name of the endpoint.
            models: Names of the models that the endpoint serves. Empty if the names are unknown.
            leases_max: Highest number of leases that the endpoint may have at a time. None for the router's default.
            role: Role of the endpoint in disaggregated requests. None if the role is unknown.

        Raises:
            StartupError: the id is in use.
        """
        self.core.add_endpoint(id, models, trio.current_time(), leases_max=leases_max, role=role)

    @property
    def wants_prefix(self) -> bool:
        """Return True if the policy uses the prefix hashes of requests."""
        return self.core.policy.wants_prefix

    @property
    def sent_total(self) -> int:
        """Return the number of requests sent to endpoints. A caller that asks an endpoint for its load passes this
        number to `note_load`.
        """
        return self.core.sent_total

    def set_lease_share(self, id: EndpointId, share: int) -> None:
        self.core.set_lease_share(id, share, trio.current_time())
        self.retime()

    def lend(self, id: EndpointId, sequences: int) -> None:
        """Grant extra leases at an endpoint to the first requests of the queue, up to the endpoint's own limit.

        Several routers may share an endpoint. The number of leases that belong to this router does not change.

        Args:
            id: The endpoint.
            sequences: Highest number of sequences of the extra leases.
        """
        state, now = self.core.endpoints[id], trio.current_time()
        share = state.leases_own_max
        self.core.set_lease_share(id, max(share, min(state.claims + sequences, state.leases_max)), now)
        self.core.set_lease_share(id, share, now)
        self.retime()

    def set_models(self, id: EndpointId, models: Iterable[str]) -> None:
        self.core.set_models(id, models, trio.current_time())
        self.retime()

    def set_role(self, id: EndpointId, role: EngineRole | None) -> None:
        self.core.set_role(id, role, trio.current_time())
        self.retime()

    def drain_endpoint(self, id: EndpointId, *, move_seconds: float | None = None) -> None:
        """Send no further requests to an endpoint.

        Args:
            id: The endpoint.
            move_seconds: Seconds for moving the endpoint's streams. A stream that can resume moves when another
                endpoint has a free lease. After this time, all remaining streams that can resume leave the endpoint.
                None: no stream moves, and all requests finish at the endpoint.
        """
        self.core.drain_endpoint(id, trio.current_time(), move_seconds=move_seconds)
        self.retime()

    def note_health(self, id: EndpointId, is_well: bool, *, hangs: bool, is_hung: bool = False) -> None:
        """Note the result of a health check.

        If an endpoint is ejected because it hangs, its requests without a response are withdrawn, and the router
        retries them. Streams that can resume are also withdrawn, as soon as another endpoint is available.

        Args:
            id: The endpoint.
            is_well: True if the check succeeded.
            hangs: True if the check got no response, or if the endpoint reported that its current step hangs.
            is_hung: True if the endpoint hangs for so long that the router ejects it at once.
        """
        was_available = self._is_available(id)
        self.core.note_health(id, is_well, trio.current_time(), is_hung=is_hung)
        if hangs and not self._is_available(id):
            has_other = self._has_other(id)
            for admission in list(self._admissions.values()):
                admission.withdraw_from(id, Fault.HUNG, unbegun=was_available, streams=has_other)
        self.retime()

    def note_leaving(self, id: EndpointId, *, move_seconds: float | None) -> None:
        """Note that an endpoint will stop. The router drains the endpoint as in drain_endpoint, and sends it no
        requests until a health check succeeds.

        Args:
            id: The endpoint.
            move_seconds: See drain_endpoint.
        """
        self.core.note_leaving(id, trio.current_time(), move_seconds=move_seconds)
        self.retime()

    def wants_probe(self, id: EndpointId) -> bool:
        """Return True if requests have failed at the endpoint, so that it must answer a probe before it gets requests
        again.

        Args:
            id: The endpoint.
        """
        state = self.core.endpoints.get(id)
        return state is not None and state.wants_probe(trio.current_time())

    def note_probe(self, id: EndpointId, is_well: bool | None) -> None:
        """Note the result of a probe request.

        Args:
            id: The endpoint.
            is_well: True if the endpoint served the probe. None if the endpoint is alive but refused the probe.
        """
        self.core.note_probe(id, is_well, trio.current_time())
        self.retime()

    def note_fingerprint(self, id: EndpointId, fingerprint: str | None) -> None:
        self.core.note_fingerprint(id, fingerprint)

    def drain(self) -> None:
        """Accept no new requests, and refuse the waiting requests."""
        self.core.drain(trio.current_time())
        self.on_drain()

    def abort_all(self, message: str) -> None:
        """End all requests, in the queue and at endpoints.

        Args:
            message: Explanation for each client.
        """
        for admission in list(self._admissions.values()):
            admission.end(Draining(message, reason="draining", retry_after_seconds=RETRY_SECONDS))

    async def wait_until_idle(self) -> None:
        """Wait until the router has no requests any more. Intended for use after drain()."""
        while self._admissions:
            if self._idle.is_set():
                self._idle = trio.Event()
            await self._idle.wait()

    def retime(self) -> None:
        """Wake `run` if its next tick is now earlier than before. Call this method after each change that may make the
        tick earlier.
        """
        if self.core.next_tick(trio.current_time()) < self._ticks_at:
            self._tick_is_earlier.set()

    def _has_other(self, id: EndpointId) -> bool:
        """Return True if another endpoint accepts requests of one of this endpoint's models."""
        there = self.core.endpoints.get(id)
        return there is not None and any(
            state.accepts_requests and state.models & there.models for state in self.core.endpoints.values()
        )

    def _is_available(self, id: EndpointId) -> bool:
        state = self.core.endpoints.get(id)
        return state is not None and state.accepts_requests

    def _note_gone(self, id: EndpointId) -> None:
        self.on_gone(id)

    def _move_admission(self, ticket: Ticket) -> None:
        admission = self._admissions[ticket.index]
        if ticket.has_token and not admission.can_resume():
            self.core.stays(ticket, trio.current_time())
        elif ticket.next_lease is None:
            admission.withdraw()
        else:
            self.on_move(admission)

    def _wake_admission(self, ticket: Ticket) -> None:
        admission = self._admissions.get(ticket.index)
        # This field is None while the request enters, because `begin` reads the ticket itself.
        if admission is not None:
            admission.wake()


class EndedIds:
    """The latest ENDED_IDS_MAX ids of ended requests, with their owners. The owner is None for requests without an
    owner.
    """

    def __init__(self) -> None:
        self._owners: OrderedDict[str, set[str | None]] = OrderedDict()

    def note(self, id: str, owner: str | None) -> None:
        self._owners.setdefault(id, set()).add(owner)
        self._owners.move_to_end(id)
        if len(self._owners) > ENDED_IDS_MAX:
            self._owners.popitem(last=False)

    def has(self, id: str, *, owner: str | None) -> bool:
        """Return True if a request with this id ended recently.

        Args:
            id: Id of the request.
            owner: Consider only requests of this owner. None for all owners.
        """
        owners = self._owners.get(id, set())
        return bool(owners) if owner is None else owner in owners
