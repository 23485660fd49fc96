"""Which endpoints there are at this moment: added, watched, drained. Where they come from is for discovery to know."""

from __future__ import annotations

import contextvars
import logging
import ssl
from collections.abc import Callable, Iterable, Mapping

import msgspec
import trio

from trioserve.admission.dispatch import AdmissionScope, Dispatch
from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import EndpointLost, NoEndpoint, StartupError, UnknownModel
from trioserve.contracts.kv_transfer import EngineRole
from trioserve.proxy.aborts import abort_left
from trioserve.proxy.endpoint_watch import MODELS_PATH, PeerReports, ServedModels, WatchSettings, watch_endpoint
from trioserve.proxy.hand_over import hand_over
from trioserve.proxy.remote_endpoint import EndpointAddress, RemoteEndpoint
from trioserve.proxy.residency_watch import watch_residency
from trioserve.router.settings import SilenceSettings
from trioserve.router.silence import LOOK_SECONDS

__all__ = ["EndpointSpec", "Fleet"]

logger = logging.getLogger(__name__)

MODELS_BYTES_MAX = 8 * 1024 * 1024  # thousands of adapters


class EndpointSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to be known of a remote endpoint before it is asked.

    url: where it is. id: its name here; the URL itself if none is given. api_key: sent to it as a bearer token.
    models: what it serves, under names of ours for names of its own; None: what it says itself.
    leases_max: how many sequences it gets at a time; None: the router's setting.
    role: which part of a disaggregated request it gets; None: what it says itself, and none if it says nothing.
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
        self.told_role: EngineRole | None = None
        self.is_vllm = False
        self.adapters: dict[str, str | None] = {}  # by name, their digests; None: it does not tell

    def note_adapters(self, adapters: dict[str, str | None]) -> None:
        self.adapters = adapters


class Fleet:
    """The remote endpoints of one router. Every method belongs to the thread of the Trio program that runs it.

    aliases: names that clients may use, for names that endpoints know. watch: also, in which time an endpoint that its
    source does not name any more is emptied. connect: makes the endpoint's client; for tests.
    peers: is told which other routers an endpoint has heard from. silence: bounds between the bytes of a response.
    on_silent: called with the reason when a response is given up since nothing comes over its connection.
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
        self._silence = silence or SilenceSettings()
        self._left: list[RemoteEndpoint] = []  # of members that came back as others, while responses are read
        self._reads = trio.Event()  # set: a response is read
        self.aliases = dict(aliases or {})
        self._watch_settings = watch or WatchSettings()
        self._ssl_context = ssl_context
        self._connect = connect or self._connected
        self._peers = peers
        self._members: dict[EndpointId, _Member] = {}
        self._nursery: trio.Nursery | None = None
        dispatch.on_gone = self._forget
        dispatch.on_move = self._begin_move

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch the endpoints until cancelled; then close what is idle."""
        try:
            async with trio.open_nursery() as self._nursery:
                for member in self._members.values():
                    self._begin_watch(member)
                task_status.started()
                await self._look_for_silence()
        finally:
            self._nursery = None
            for member in self._members.values():
                member.remote.close()

    # --- who belongs to it ---

    def add(
        self, spec: EndpointSpec, *, source: str = "configured", remote: RemoteEndpoint | None = None
    ) -> EndpointId:
        """remote: how it is reached, if not over the network. Raises StartupError for a URL that is none, or an id that
        is taken."""
        id = spec.endpoint_id
        remote = remote or self._connect(spec)
        self.dispatch.add_endpoint(id, spec.models or (), leases_max=spec.leases_max, role=spec.role)
        known = self._members.get(id)
        if known is not None:  # it comes back while it was being drained
            known.remote.close()
            self._left.append(known.remote)
        self._listen_to(remote)
        member = self._members[id] = _Member(spec, source, remote)
        self._begin_watch(member)
        return id

    def drain(self, id: EndpointId, *, move_seconds: float | None = None) -> bool:
        """Give it nothing more; it is gone when its last request has ended. move_seconds: and empty it: streams that
        can go on elsewhere are moved there as there is room, and what is left after so long is begun anew elsewhere, as
        far as its clients have seen nothing. Whether there was such an endpoint."""
        member = self._members.get(id)
        if member is None:
            return False
        if member.watch is not None:
            member.watch.cancel()
        logger.info("endpoint drains endpoint=%s move_seconds=%s", id, move_seconds)
        self.dispatch.drain_endpoint(id, move_seconds=move_seconds)
        return True

    def set_all(self, specs: Iterable[EndpointSpec], *, source: str) -> None:
        """These, and no others, are what `source` knows. Those of other sources stay, and what runs at others is moved
        elsewhere. One whose description has changed is made anew; what runs there goes on.

        Raises StartupError, before anything is changed, if two have the same id.
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
        """Those that this source has told, and that are not being drained."""
        return frozenset(
            id for id, member in self._members.items() if member.source == source and not self.is_draining(id)
        )

    def is_draining(self, id: EndpointId) -> bool:
        return self.dispatch.is_endpoint_draining(id)

    def remote(self, id: EndpointId) -> RemoteEndpoint:
        return self._members[id].remote

    def tells_role(self, id: EndpointId) -> bool:
        """Whether it said itself what it is meant for, as our servers do."""
        return self._members[id].told_role is not None

    def tells_token_ids(self, id: EndpointId) -> bool:
        """Whether it can be asked for the token ids of a stream, as vLLM's servers can."""
        return self._members[id].is_vllm

    def uses_own_key(self, id: EndpointId, *, passes_clients: bool) -> bool:
        """Whether requests to the endpoint bear a key of the router's own, or none, and not their client's.

        Args:
            passes_clients: clients' keys are passed on to endpoints.
        """
        return self._members[id].spec.api_key is not None or not passes_clients

    def specs(self) -> dict[EndpointId, EndpointSpec]:
        return {id: member.spec for id, member in self._members.items()}

    # --- how it is ---

    def unready_reason(self) -> str | None:
        """Why no request is taken now, in a word; None if requests are."""
        if self.dispatch.is_draining:
            return "draining"
        return None if any(state.accepts_requests for state in self.dispatch.endpoints) else "no_endpoint"

    def described(self) -> list[dict[str, object]]:
        """Every endpoint, for operators."""
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

    # --- models ---

    def models(self) -> list[str]:
        """Every name that clients may ask for, sorted."""
        served = self.dispatch.model_names()
        return sorted(served | {alias for alias, model in self.aliases.items() if model in served})

    def real_model(self, asked: str | None) -> str:
        """The name that endpoints go by. None is the only model that there is. Raises UnknownModel, and NoEndpoint for
        None as long as no endpoint has told what it serves."""
        served = self.dispatch.model_names()
        if asked is None:
            if not served and self.dispatch.is_any_nameless:
                raise NoEndpoint(
                    "the request names no model, and no endpoint has told yet what it serves: try again in 1 s",
                    reason="no_endpoint",
                    retry_after_seconds=1,
                )
            # Adapters come beside their model, which is what is meant where none is named.
            own = served - {name for member in self._members.values() for name in member.adapters}
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
        """Whether the model is a LoRA adapter, and the digest of its content, if all that serve it tell the same."""
        told = {member.adapters[model] for member in self._members.values() if model in member.adapters}
        return bool(told), told.pop() if len(told) == 1 else None

    def model_at(self, id: EndpointId, model: str) -> str:
        """How the endpoint itself calls it."""
        return (self._members[id].spec.models or {}).get(model, model)

    def is_adapter_of(self, id: EndpointId, model: str) -> bool:
        """Return True if the endpoint is in the fleet and lists the model among its LoRA adapters."""
        member = self._members.get(id)
        return member is not None and model in member.adapters

    def withdraw_model(self, id: EndpointId, model: str) -> None:
        """The endpoint is about to serve it no more: it gets no new request for it. Where names are given by hand, they
        stay."""
        if self._members[id].spec.models is None:
            state = self.dispatch.endpoint(id)
            assert state is not None, "it is a member"
            self.dispatch.set_models(id, state.models - {model})

    async def ask_models(self, id: EndpointId) -> None:
        """What the endpoint serves now, without waiting for the next check. Nothing changes if it does not say, or if
        names are given by hand."""
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
            member.note_adapters(served.adapters)
            self.dispatch.set_models(id, served.names)

    # --- inside ---

    def _listen_to(self, remote: RemoteEndpoint) -> None:
        """Be told when a response of it begins to be read, and when one is left over a silent connection."""

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

    async def _look_for_silence(self) -> None:
        """Until cancelled; also at endpoints that are drained, which nobody watches any more."""
        while True:
            await self._reads.wait()
            await trio.sleep(LOOK_SECONDS)
            now = trio.current_time()
            self._left = [remote for remote in self._left if remote.is_read]
            remotes = [*self._left, *(member.remote for member in self._members.values())]
            for remote in remotes:
                remote.look(now)
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
            # An empty context: the watch outlives the request that added the endpoint, and does not log its id.
            contextvars.Context().run(self._nursery.start_soon, self._watch, member, member.watch)

    async def _watch(self, member: _Member, scope: trio.CancelScope) -> None:
        policy = self.dispatch.policy
        learns = member.spec.models is None

        def note_role(role: EngineRole | None) -> None:
            member.told_role = role
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
                    on_adapters=member.note_adapters,
                    name_there=lambda model: (member.spec.models or {}).get(model, model),
                )

    def _begin_move(self, admission: AdmissionScope) -> None:
        """It has a lease elsewhere: its endpoint may give it away."""
        if self._nursery is None or admission.id is None or admission.endpoint is None:
            admission.withdraw()
        else:
            self._nursery.start_soon(hand_over, self._members[admission.endpoint].remote, admission)

    def _forget(self, id: EndpointId) -> None:
        self._members.pop(id).remote.close()
