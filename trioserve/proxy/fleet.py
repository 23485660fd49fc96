"""Remote endpoints of a router: adding, watching and draining them. The package `discovery` finds their addresses."""

from __future__ import annotations

import contextvars
import logging
import ssl
from collections.abc import Callable, Iterable, Mapping

import msgspec
import trio

from trioserve.admission.admission_scope import AdmissionScope
from trioserve.admission.dispatch import Dispatch
from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import EndpointLost, NoEndpoint, StartupError, UnknownModel
from trioserve.contracts.kv_transfer import EngineRole
from trioserve.proxy.early_ends import abort_left, hand_over
from trioserve.proxy.endpoint_watch import MODELS_PATH, PeerReports, ServedModels, WatchSettings, watch_endpoint
from trioserve.proxy.pushed_reports import watch_residency
from trioserve.proxy.remote_endpoint import EndpointAddress, RemoteEndpoint
from trioserve.router.settings import SilenceSettings
from trioserve.router.silence import LOOK_SECONDS

__all__ = ["EndpointSpec", "Fleet"]

logger = logging.getLogger(__name__)

MODELS_BYTES_MAX = 8 * 1024 * 1024  # The limit is enough for a list of thousands of adapters.


class EndpointSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of a remote endpoint.

    Attributes:
        url: Address of the endpoint.
        id: Name at this router. None: the URL.
        api_key: Key that the router sends as a bearer token. None: no key.
        models: Served models: the endpoint's names by the names at this router. None: the endpoint's own list.
        leases_max: Limit of sequences that run at the endpoint at a time. None: the router's setting.
        role: Stage of disaggregated requests that the endpoint computes. None: the role that the endpoint reports, or
            no role if it reports none.
    """

    url: str
    id: str | None = None
    api_key: str | None = None
    models: dict[str, str] | None = None
    leases_max: int | None = None
    role: EngineRole | None = None

    @property
    def endpoint_id(self) -> EndpointId:
        return EndpointId(self.id or str(EndpointAddress.parse(self.url)))


class _Member:
    def __init__(self, spec: EndpointSpec, source: str, remote: RemoteEndpoint) -> None:
        self.spec = spec
        self.source = source
        self.remote = remote
        self.watch: trio.CancelScope | None = None
        self.reported_role: EngineRole | None = None
        self.is_vllm = False
        # Maps the name of an adapter to its digest. None if the endpoint does not report the digest.
        self.adapters: dict[str, str | None] = {}
        self.unloaded: frozenset[str] = frozenset()  # Models that the endpoint would have to load first.

    def note_models(self, served: ServedModels) -> None:
        self.adapters, self.unloaded = served.adapters, served.unloaded


class Fleet:
    """Remote endpoints of one router. All methods run in the thread of the router's Trio program.

    Args:
        dispatch: Queue and router, which get the endpoints and their state.
        watch: Settings of the checks, and the time to move requests away from an endpoint that its source removed.
        aliases: Model names of endpoints by additional names for clients.
        ssl_context: TLS settings for https endpoints. None: the default settings.
        connect: Makes the client of an endpoint. For tests.
        peers: Receives the other routers that an endpoint knows. None: the router has no peers.
        silence: Time limits between the bytes of a response. None: the default limits.

    Attributes:
        dispatch: Queue and router.
        aliases: Model names of endpoints by additional names for clients.
        connect: Makes the client of an endpoint, which need not be in the fleet.
        hosted_adapters: LoRA adapters of models that this server loads on demand.
        on_silent: Called with the reason when a response is given up because its connection is silent.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        *,
        watch: WatchSettings | None = None,
        aliases: Mapping[str, str] | None = None,
        ssl_context: ssl.SSLContext | None = None,
        connect: Callable[[EndpointSpec], RemoteEndpoint] | None = None,
        peers: PeerReports | None = None,
        silence: SilenceSettings | None = None,
    ) -> None:
        self.dispatch = dispatch
        self.on_silent: Callable[[str], None] = lambda reason: None
        self.hosted_adapters: frozenset[str] = frozenset()
        self._silence = silence or SilenceSettings()
        # The list has the old HTTP clients of endpoints that were added again. An old client is kept while its
        # responses are read.
        self._left: list[RemoteEndpoint] = []
        self._reads = trio.Event()  # The event is set while a response is being read.
        self.aliases = dict(aliases or {})
        self._watch_settings = watch or WatchSettings()
        self._ssl_context = ssl_context
        self.connect = connect or self._connected
        self._peers = peers
        self._members: dict[EndpointId, _Member] = {}
        self._nursery: trio.Nursery | None = None
        dispatch.on_gone = self._forget
        dispatch.on_move = self._begin_move

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch the endpoints until cancelled, then close idle connections.

        Args:
            task_status: Reports the start of the checks to the parent task.
        """
        try:
            async with trio.open_nursery() as self._nursery:
                for member in self._members.values():
                    self._begin_watch(member)
                task_status.started()
                await self._find_silent_responses()
        finally:
            self._nursery = None
            for member in self._members.values():
                member.remote.close()

    # --- methods for members ---

    def add(
        self, spec: EndpointSpec, *, source: str = "configured", remote: RemoteEndpoint | None = None
    ) -> EndpointId:
        """Add an endpoint and begin to watch it.

        Args:
            spec: Configuration of the endpoint.
            source: Name of the source that knows the endpoint.
            remote: Client of the endpoint. None: a client over the network is made.

        Raises:
            StartupError: The URL is invalid, or another endpoint has the id.
        """
        id = spec.endpoint_id
        remote = remote or self.connect(spec)
        self.dispatch.add_endpoint(id, spec.models or (), leases_max=spec.leases_max, role=spec.role)
        known = self._members.get(id)
        if known is not None:  # The endpoint returns while it is being drained.
            known.remote.close()
            self._left.append(known.remote)
        self._listen_to(remote)
        member = self._members[id] = _Member(spec, source, remote)
        self._begin_watch(member)
        return id

    def drain(self, id: EndpointId, *, move_seconds: float | None = None) -> bool:
        """Send no new requests to an endpoint, and remove it when its last request has ended.

        Args:
            id: Endpoint to drain.
            move_seconds: Time in which streams that can resume are moved to other endpoints with free slots. After
                that, each remaining request is restarted at another endpoint if its client has not received output yet.
                None: all requests stay.

        Returns:
            False if there is no such endpoint.
        """
        member = self._members.get(id)
        if member is None:
            return False
        if member.watch is not None:
            member.watch.cancel()
        logger.info("endpoint drains endpoint=%s move_seconds=%s", id, move_seconds)
        self.dispatch.drain_endpoint(id, move_seconds=move_seconds)
        return True

    def set_all(self, specs: Iterable[EndpointSpec], *, source: str) -> None:
        """Replace all endpoints of one source.

        The requests at a removed endpoint are moved to other endpoints. An endpoint with a changed configuration is
        added again, and its requests continue.

        Args:
            specs: All endpoints that the source knows now.
            source: Name of the source. Endpoints of other sources stay.

        Raises:
            StartupError: Two endpoints have the same id. Nothing was changed.
        """
        wanted: dict[EndpointId, EndpointSpec] = {}
        for spec in specs:
            id = spec.endpoint_id
            other = self._members.get(id)
            if id in wanted or (other is not None and other.source != source):
                raise StartupError(f'there are two endpoints with the id "{id}": give each its own')
            wanted[id] = spec
        for id, member in list(self._members.items()):
            if member.source == source and wanted.get(id) != member.spec and not self.is_draining(id):
                self.drain(id, move_seconds=None if id in wanted else self._watch_settings.move_seconds)
        for id, spec in wanted.items():
            if id not in self._members or self.is_draining(id):
                self.add(spec, source=source)

    def ids_of(self, source: str) -> frozenset[EndpointId]:
        """Return the ids of the endpoints that a source has added and that are not being drained.

        Args:
            source: Name of the source.
        """
        return frozenset(
            id for id, member in self._members.items() if member.source == source and not self.is_draining(id)
        )

    def is_draining(self, id: EndpointId) -> bool:
        return self.dispatch.is_endpoint_draining(id)

    def remote(self, id: EndpointId) -> RemoteEndpoint:
        return self._members[id].remote

    def reports_role(self, id: EndpointId) -> bool:
        """Return True if the endpoint has reported a role, as trioserve servers do.

        Args:
            id: Endpoint of the fleet.
        """
        return self._members[id].reported_role is not None

    def reports_token_ids(self, id: EndpointId) -> bool:
        """Return True if the endpoint can add token ids to a stream, as vLLM's servers can.

        Args:
            id: Endpoint of the fleet.
        """
        return self._members[id].is_vllm

    def uses_own_key(self, id: EndpointId, *, passes_clients: bool) -> bool:
        """Return True if requests to the endpoint carry the router's key or no key, instead of the client's key.

        Args:
            id: Endpoint of the fleet.
            passes_clients: Whether the router passes keys of clients to endpoints.
        """
        return self._members[id].spec.api_key is not None or not passes_clients

    def specs(self) -> dict[EndpointId, EndpointSpec]:
        return {id: member.spec for id, member in self._members.items()}

    # --- methods for the state ---

    def unready_reason(self) -> str | None:
        """Return the reason why the router accepts no requests, as one word. None: it accepts requests."""
        if self.dispatch.is_draining:
            return "draining"
        if self.dispatch.hosts_models or any(state.accepts_requests for state in self.dispatch.endpoints):
            return None
        return "no_endpoint"

    def described(self) -> list[dict[str, object]]:
        """Return the state of every endpoint as JSON values, for operators."""
        now = trio.current_time()
        return [
            {
                "id": state.id,
                "object": "endpoint",
                "url": self._members[state.id].spec.url,
                "source": self._members[state.id].source,
                "health": state.health.value,
                "models": sorted(state.models),
                "role": state.role,
                "leases": state.leases,
                "leases_max": state.leases_max,
                "in_flight": state.in_flight,
                "waiting_depth": state.waiting_depth(now),
                "ejections": state.ejections_total,
                "moved_from": state.moved_from_total,
                "moved_to": state.moved_to_total,
                "resident_blocks": self.dispatch.policy.resident_count(state.id),
            }
            for state in self.dispatch.endpoints
        ]

    # --- methods for models ---

    def models(self) -> list[str]:
        """Return all model names that clients may use, sorted."""
        served = self.dispatch.model_names()
        return sorted(served | {alias for alias, model in self.aliases.items() if model in served})

    def real_model(self, asked: str | None) -> str:
        """Find the model name that endpoints use.

        Args:
            asked: Model name or alias from a request. None selects the only model.

        Raises:
            UnknownModel: No endpoint serves the model, or the request names none and there are several.
            NoEndpoint: The request names no model, and no endpoint has listed its models yet.
        """
        served = self.dispatch.model_names()
        if asked is None:
            if not served and self.dispatch.is_any_nameless:
                raise NoEndpoint(
                    "the request names no model, and no endpoint has listed its models yet: try again in 1 s",
                    reason="no_endpoint",
                    retry_after_seconds=1,
                )
            # Endpoints list adapters together with their base model. A request without a model name means the base
            # model.
            own = served - {name for member in self._members.values() for name in member.adapters}
            own -= self.hosted_adapters
            if len(own) == 1:
                return next(iter(own))
            if len(served) != 1:
                raise UnknownModel(
                    f"the request names no model, and {len(served)} are served here: name one of "
                    f"{', '.join(self.models()) or 'them'}",
                    param="model",
                )
            return next(iter(served))
        model = self.aliases.get(asked, asked)
        if model not in served and not self.dispatch.is_any_nameless:
            raise UnknownModel(
                f'the model "{asked}" is not served here; served are: {", ".join(self.models()) or "none"}',
                param="model",
            )
        return model

    def adapter_digest(self, model: str) -> tuple[bool, str | None]:
        """Find the digest of a LoRA adapter.

        Args:
            model: Model name that endpoints use.

        Returns:
            Whether the model is an adapter, and its digest. The digest is None if it is unknown or endpoints report
            different ones.
        """
        digests = {member.adapters[model] for member in self._members.values() if model in member.adapters}
        return bool(digests), digests.pop() if len(digests) == 1 else None

    def endpoint_with(self, model: str) -> EndpointId | None:
        """Find an endpoint that has loaded a model, if other endpoints would have to load it first.

        Args:
            model: Model name that endpoints use.

        Returns:
            The endpoint with the fewest requests. None if all endpoints have loaded the model, or none has.
        """
        if not any(model in member.unloaded for member in self._members.values()):
            return None
        states = [
            state
            for state in self.dispatch.endpoints
            if state.accepts_requests and model in state.models and model not in self._members[state.id].unloaded
        ]
        return min(states, key=lambda state: state.in_flight).id if states else None

    def model_at(self, id: EndpointId, model: str) -> str:
        """Return an endpoint's own name for a model.

        Args:
            id: Endpoint of the fleet.
            model: Name at this router.
        """
        return (self._members[id].spec.models or {}).get(model, model)

    def is_adapter_of(self, id: EndpointId, model: str) -> bool:
        """Return True if the endpoint is in the fleet and lists the model among its LoRA adapters.

        Args:
            id: Endpoint, which may have left.
            model: Name of the model.
        """
        member = self._members.get(id)
        return member is not None and model in member.adapters

    def withdraw_model(self, id: EndpointId, model: str) -> None:
        """Send no new requests for a model to an endpoint that is about to unload it. Configured names stay.

        Args:
            id: Endpoint of the fleet.
            model: Name of the model.
        """
        if self._members[id].spec.models is None:
            state = self.dispatch.endpoint(id)
            assert state is not None, "the endpoint is a member of the fleet"
            self.dispatch.set_models(id, state.models - {model})

    async def ask_models(self, id: EndpointId) -> None:
        """Ask an endpoint for its models at once, without waiting for the next check.

        The known models stay if the endpoint does not answer, or if its models are configured.

        Args:
            id: Endpoint of the fleet.
        """
        member = self._members[id]
        if member.spec.models is not None:
            return
        served = None
        with trio.move_on_after(self._watch_settings.response_seconds_max):
            try:
                async with member.remote.request("GET", MODELS_PATH, [], b"") as response:
                    served = ServedModels.read(await response.whole(MODELS_BYTES_MAX) or b"")
            except EndpointLost:
                pass
        if served is not None and self._members.get(id) is member:
            member.note_models(served)
            self.dispatch.set_models(id, served.names)

    # --- private methods ---

    def _listen_to(self, remote: RemoteEndpoint) -> None:
        """Subscribe to the events of an endpoint's connections."""

        def abort(headers: list[tuple[str, str]], seconds: float) -> None:
            if self._nursery is not None:
                self._nursery.start_soon(abort_left, remote, headers, seconds)

        def note_silent(reason: str) -> None:
            logger.warning("response given up endpoint=%s reason=%s", remote.id, reason)
            self.on_silent(reason)

        remote.on_read = self._note_read
        remote.on_left_silent = abort
        remote.on_silent = note_silent

    def _note_read(self) -> None:
        self._reads.set()

    async def _find_silent_responses(self) -> None:
        """Give up lost responses until cancelled. This includes endpoints that are being drained and are no longer
        checked.
        """
        while True:
            await self._reads.wait()
            await trio.sleep(LOOK_SECONDS)
            now = trio.current_time()
            self._left = [remote for remote in self._left if remote.is_read]
            remotes = [*self._left, *(member.remote for member in self._members.values())]
            for remote in remotes:
                remote.abandon_lost(now)
            if not any(remote.is_read for remote in remotes):
                self._reads = trio.Event()

    def _connected(self, spec: EndpointSpec) -> RemoteEndpoint:
        headers = () if spec.api_key is None else (("authorization", f"Bearer {spec.api_key}"),)
        return RemoteEndpoint(
            spec.endpoint_id,
            EndpointAddress.parse(spec.url),
            headers=headers,
            ssl_context=self._ssl_context,
            silence=self._silence,
        )

    def _begin_watch(self, member: _Member) -> None:
        if self._nursery is not None:
            member.watch = trio.CancelScope()
            # The context is empty, because the watch outlives the request that added the endpoint, and must not log the
            # id of that request.
            contextvars.Context().run(self._nursery.start_soon, self._watch, member, member.watch)

    async def _watch(self, member: _Member, scope: trio.CancelScope) -> None:
        policy = self.dispatch.policy
        learns = member.spec.models is None

        def note_role(role: EngineRole | None) -> None:
            member.reported_role = role
            if member.spec.role is None:
                self.dispatch.set_role(member.remote.id, role)

        def note_vllm() -> None:
            member.is_vllm = True

        with scope:
            async with trio.open_nursery() as nursery:
                if policy.wants_residency:
                    nursery.start_soon(watch_residency, member.remote, policy)
                await watch_endpoint(
                    member.remote,
                    self.dispatch,
                    self._watch_settings,
                    learns_models=learns,
                    on_role=note_role,
                    peers=self._peers,
                    on_vllm=note_vllm,
                    on_models=member.note_models,
                    name_there=lambda model: (member.spec.models or {}).get(model, model),
                )

    def _begin_move(self, admission: AdmissionScope) -> None:
        """Move a request away from its endpoint, because it has a lease at another endpoint."""
        if self._nursery is None or admission.id is None or admission.endpoint is None:
            admission.withdraw()
        else:
            self._nursery.start_soon(hand_over, self._members[admission.endpoint].remote, admission)

    def _forget(self, id: EndpointId) -> None:
        self._members.pop(id).remote.close()
