"""`python -m trioserve route`: runs a router in front of other servers. It imports no torch and loads no model."""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import trio

from trioserve.admission.dispatch import Dispatch
from trioserve.admission.router_metrics import show_router
from trioserve.commands.log_lines import show_dropped_lines
from trioserve.commands.prompt_naming import open_prompt_naming
from trioserve.commands.serving import (
    NativeFrontEnd,
    Places,
    access_rules,
    around_app,
    check_front,
    frontend_limits,
    open_places,
    open_tracing,
    page_settings,
    run_until_signal,
    server_tls,
    server_urls,
)
from trioserve.config import Config
from trioserve.contracts.errors import StartupError
from trioserve.contracts.kv_transfer import EngineRole
from trioserve.contracts.tracing import NO_TRACER, Tracer
from trioserve.http.listener import inherited_listener
from trioserve.http.server import FrontendServer
from trioserve.metrics.registry import Metrics
from trioserve.options.router import RouterOptions
from trioserve.proxy.discovery.kubernetes import in_cluster
from trioserve.proxy.discovery.ray import RaySource, check_ray_is_installed
from trioserve.proxy.discovery.source import FileSource, Source, read_endpoints
from trioserve.proxy.endpoint_watch import WatchSettings
from trioserve.proxy.fleet import EndpointSpec, Fleet
from trioserve.proxy.model_host import ModelHost
from trioserve.proxy.peers.kept_stream import ClientLeftNotices
from trioserve.proxy.peers.peer_watch import PeerWatch, parse_peers
from trioserve.proxy.peers.processes import OneProcess, OtherProcesses, ProcessDoor, ProcessPeers, ProcessPlace
from trioserve.proxy.peers.retries import NoPeers, PeerStreams, show_peers
from trioserve.proxy.router_app import RouterApp
from trioserve.proxy.router_context import RoutingRules
from trioserve.router.policies import POLICIES, PolicyFactory
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.service import Service

if TYPE_CHECKING:
    from trioserve.api.batches.batches import Batches
    from trioserve.api.limits import BatchSettings
    from trioserve.commands.hosting import Hosting
    from trioserve.proxy.routed_body import PromptBlocks
    from trioserve.store.store import Store

__all__ = ["InheritedPlace", "Routing", "checked_routing", "run_router", "serve_router"]

POLICY_ENTRY_POINTS = "trioserve.policies"


class InheritedPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Listening sockets that a router process inherits from its parent process.

    Attributes:
        place: name of this process, and addresses of the other router processes.
        listeners: file descriptors of listening sockets for clients.
        door: file descriptor of the listening socket for the other router processes.
    """

    place: ProcessPlace
    listeners: tuple[int, ...]
    door: int


def run_router(config: RouterOptions) -> int:
    """Route in one process until Ctrl-C or SIGTERM, then drain.

    Args:
        config: options of the router. The number of processes is ignored.

    Returns:
        Exit code of the program.

    Raises:
        StartupError: the router cannot start.
    """

    async def serve(orders: trio.MemoryReceiveChannel[object], announce: Callable[[list[str]], None]) -> None:
        await serve_router(config, orders, on_serving=announce)

    return run_until_signal(config, serve, what="a router")


def checked_routing(
    config: RouterOptions, place: ProcessPlace | None = None, hosting: Hosting | None = None
) -> Routing:
    """Check the options of a router and create its parts, before it listens.

    Args:
        config: options of the router.
        place: name and peers of this process. None if the router has only one process.
        hosting: models that are loaded on demand. None if there are none.

    Raises:
        StartupError: an option is wrong, or no endpoint is configured.
    """
    check_front(config)
    routing = Routing(config, place, hosting)
    if not routing.has_endpoints and routing.models is None:
        raise StartupError(
            "no endpoint is configured: set one with --endpoint http://HOST:PORT, or a way to find endpoints with "
            "--endpoints-file, --endpoints-dns, --endpoints-kubernetes or --endpoints-ray"
        )
    return routing


async def serve_router(
    config: RouterOptions,
    orders: trio.MemoryReceiveChannel[object],
    *,
    on_serving: Callable[[list[str]], None] = lambda urls: None,
    inherited: InheritedPlace | None = None,
    hosting: Hosting | None = None,
) -> None:
    """Run the whole router in the caller's scope, until `orders` yields an item and the router has drained.

    Installs no signal handlers. If this function is cancelled, the router ends at once.

    Args:
        config: options of the router.
        orders: stops the router. See `Service.run` for its items.
        on_serving: receives the URLs once the router accepts requests.
        inherited: sockets of this process, if the router has several processes. None listens at the configured address.
        hosting: models that are loaded on demand. None if there are none.

    Raises:
        StartupError: an option is wrong, or the router cannot listen.
    """
    place = None if inherited is None else inherited.place
    limits = frontend_limits(config)
    routing = checked_routing(config, place, hosting)
    ssl_context = server_tls(config)
    async with (
        open_tracing(config) as tracing,
        routing.naming(config.tokenizer) as naming,
        nullcontext() if hosting is None else hosting.open_store() as store,
    ):
        batch_settings = None if hosting is None else hosting.batch_settings
        app = routing.app(naming=naming, tracer=tracing.tracer, store=store, batch_settings=batch_settings)
        tracing.show(routing.metrics)
        show_dropped_lines(routing.metrics)
        async with (
            open_places(config, limits) if inherited is None else _inherited_places(config, inherited) as (
                listeners,
                urls,
            )
        ):
            front_end = NativeFrontEnd(
                FrontendServer(
                    around_app(app, config), limits=limits, ssl_context=ssl_context, knows_caller=app.knows_caller
                ),
                listeners,
                routing.metrics,
                config,
            )
            work = _RouterWork(routing.dispatch, app.batches)
            service = Service(work, front_end, config.stopping_settings(), wait_for_rest=app.batches.wait_until_idle)
            with errors_unwrapped():
                async with (
                    _open_door(app, inherited),
                    nullcontext() if hosting is None else hosting.running(),
                    routing.running(),
                    app.batches.running(),
                    app.page.running(),
                    trio.open_nursery() as nursery,
                ):
                    await nursery.start(service.run, orders)
                    on_serving(urls)


class _RouterWork:
    """The work of a router: requests, and batches that continue after their requests."""

    def __init__(self, dispatch: Dispatch, batches: Batches) -> None:
        self._dispatch = dispatch
        self._batches = batches

    def drain(self) -> None:
        self._batches.drain()
        self._dispatch.drain()

    def abort_all(self, message: str) -> None:
        self._dispatch.abort_all(message)


@asynccontextmanager
async def _inherited_places(config: RouterOptions, inherited: InheritedPlace) -> AsyncIterator[Places]:
    listeners = [inherited_listener(each) for each in inherited.listeners]
    try:
        yield Places(listeners, server_urls(config, listeners))
    finally:
        for listener in listeners:
            listener.socket.close()


@asynccontextmanager
async def _open_door(app: RouterApp, inherited: InheritedPlace | None) -> AsyncIterator[None]:
    """Answer the other router processes inside of the scope, even while this process drains.

    So a client of another process can still abort a request that is running in this process.
    """
    if inherited is None:
        yield
        return
    server = FrontendServer(ProcessDoor(app, app.kept, inherited.place.secret))
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, [inherited_listener(inherited.door)])
        yield
        nursery.cancel_scope.cancel()


class Routing:
    """The parts of a router. They are inactive until `running` is entered.

    Args:
        config: options of the router.
        place: name and peers of this process. None if the router has only one process.
        hosting: models that are loaded on demand. None if there are none.

    Raises:
        StartupError: an option is wrong.
    """

    def __init__(
        self, config: RouterOptions, place: ProcessPlace | None = None, hosting: Hosting | None = None
    ) -> None:
        self._config = config
        self._place = place
        self._processes = OneProcess() if place is None else OtherProcesses(place)
        self.dispatch = Dispatch(config.router_settings(), _policy(config.policy))
        self._peer_watch = self._watched_peers()
        self._notices = ClientLeftNotices()
        self.fleet = Fleet(
            self.dispatch,
            watch=WatchSettings(
                health_seconds=config.health_interval,
                load_seconds=config.load_interval,
                hang_seconds_max=config.hang_timeout,
                move_seconds=config.move_timeout or None,
            ),
            aliases={**_aliases(config.model_alias), **({} if hosting is None else hosting.aliases)},
            ssl_context=_endpoint_tls(config),
            peers=self._peer_watch,
            silence=config.silence_settings(),
        )
        self._specs = [
            *(_spec(text, config.endpoint_api_key, None) for text in config.endpoint),
            *(_spec(text, config.endpoint_api_key, "prefill") for text in config.prefill_endpoint),
            *(_spec(text, config.endpoint_api_key, "decode") for text in config.decode_endpoint),
        ]
        self._sources = _sources(config)
        for id, count in Counter(spec.endpoint_id for spec in self._specs).items():
            if count > 1:
                raise StartupError(f'there are {count} endpoints with the id "{id}": ids must be unique')
        self.models = None if hosting is None else hosting.runs()
        self.settings = config.engine_settings()
        self.metrics = Metrics(None, parts=("frontend", "router"))
        show_router(self.metrics, self.dispatch)
        if self.models is not None:
            ModelHost(self.fleet, self.models).show(self.metrics)
        self.fleet.on_silent = lambda reason: self.metrics.silent_responses_total.labels(reason).inc()
        self._peers: NoPeers = NoPeers()
        if self._peer_watch is not None and place is not None:
            self._peers = ProcessPeers(self._peer_watch)
        elif self._peer_watch is not None:
            streams = self._peers = PeerStreams(self.fleet, self._notices, self._peer_watch)
            show_peers(self.metrics, self._peer_watch, streams)

    def _watched_peers(self) -> PeerWatch | None:
        config, place = self._config, self._place
        if place is not None:
            return PeerWatch(self.dispatch, place.specs(), own=place.name, connect=place.connected)
        if not config.router_peers:
            if config.router_name is not None:
                raise StartupError("--router-name is set, but --router-peers is not: set both, or neither")
            return None
        specs, sources = parse_peers(config.router_peers)
        return PeerWatch(self.dispatch, specs, sources, own=config.router_name, ssl_context=_endpoint_tls(config))

    @property
    def has_endpoints(self) -> bool:
        """True if an endpoint, or a source of endpoints, is configured."""
        return bool(self._specs or self._sources)

    @asynccontextmanager
    async def naming(self, tokenizer: str | None) -> AsyncIterator[PromptBlocks | None]:
        """Open the object that hashes the blocks of prompts, for policies that compare these hashes with KV caches.

        Args:
            tokenizer: directory or name of a model. Only its tokenizer is loaded. None if it is not configured.

        Returns:
            The object, or None if the policy does not need the hashes.

        Raises:
            StartupError: the policy needs a tokenizer and none is configured, or one is configured but not needed.
            ModelLoadError: the tokenizer cannot be read.
        """
        name = self._config.policy
        if not self.dispatch.policy.wants_residency:
            if self._config.tokenizer is not None and not isinstance(self._config, Config):
                raise StartupError(
                    f"the policy {name} does not use tokens: remove --tokenizer, or use --policy kv_aware"
                )
            yield None
            return
        if tokenizer is None:
            raise StartupError(
                f"the policy {name} compares a prompt's tokens with the blocks that endpoints have: use "
                "--tokenizer MODEL with the --model of the endpoints, and start the endpoints with --kv-events"
            )
        parses_chat_texts = self._config.control_tokens_in_text == "parse"
        async with open_prompt_naming(tokenizer, parses_chat_texts=parses_chat_texts) as naming:
            yield naming

    def app(
        self,
        *,
        naming: PromptBlocks | None = None,
        more_metrics: Callable[[], bytes] = bytes,
        tracer: Tracer = NO_TRACER,
        store: Store | None = None,
        batch_settings: BatchSettings | None = None,
    ) -> RouterApp:
        """Create the router's HTTP app.

        Args:
            naming: hashes the KV blocks of prompts. None: the policy needs no hashes. See the method `naming`.
            more_metrics: returns metrics text that follows the router's own metrics.
            tracer: records spans of requests, and of loads of models.
            store: keeps files and batches. None: an endpoint keeps them.
            batch_settings: limits of batches, if there is a store.
        """
        config = self._config
        if self.models is not None:
            self.models.tracer = tracer
        return RouterApp(
            self.fleet,
            self.metrics,
            rules=RoutingRules(
                deadlines=self.settings.deadlines,
                deadlines_max=self.settings.deadlines_max,
                tenant_header=config.tenant_header,
                session_header=config.session_header,
                passes_authorization=not (config.api_key or config.gateway_api_key) and config.endpoint_api_key is None,
                disaggregated_prompt_tokens_min=config.split_min_tokens,
                continuation_bytes_max=config.max_continuation_bytes,
            ),
            api_keys=config.api_key,
            admin_api_key=config.admin_api_key,
            access=access_rules(config),
            more_metrics=more_metrics,
            naming=naming,
            peers=self._peers,
            processes=self._processes,
            notices=self._notices,
            models=self.models,
            store=store,
            batch_settings=batch_settings,
            connections=config.connection_settings(),
            page=page_settings(config),
            tracer=tracer,
            logs_requests=config.access_log,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Grant leases and watch endpoints inside of the scope."""
        async with trio.open_nursery() as nursery:
            self.fleet.set_all(self._specs, source="configured")
            await nursery.start(self.dispatch.run)
            await nursery.start(self.fleet.run)
            await nursery.start(self._notices.run)
            if self.models is not None:
                await nursery.start(self.models.run)
            if self._peer_watch is not None:
                await nursery.start(self._peer_watch.run)
            for source in self._sources:
                nursery.start_soon(source.run, self.fleet)
            try:
                yield
            finally:
                self._processes.close()
            nursery.cancel_scope.cancel()


def _policy(name: str) -> PolicyFactory:
    if name in POLICIES:
        return POLICIES[name]
    installed = {entry.name: entry for entry in entry_points(group=POLICY_ENTRY_POINTS)}
    if name not in installed:
        known = ", ".join([*POLICIES, *sorted(installed)])
        raise StartupError(f'there is no policy "{name}". Policies: {known}')
    loaded: PolicyFactory = installed[name].load()
    return loaded


def _aliases(texts: tuple[str, ...]) -> dict[str, str]:
    aliases = {}
    for text in texts:
        name, equals, model = text.partition("=")
        if not (name and equals and model):
            raise StartupError(f'--model-alias is "{text}", it must be NAME=MODEL')
        aliases[name] = model
    return aliases


def _spec(text: str, api_key: str | None, role: EngineRole | None) -> EndpointSpec:
    """Parse `URL` or `NAME=URL`."""
    name, equals, url = text.partition("=")
    if equals and "/" not in name:
        return EndpointSpec(url=url, id=name, api_key=api_key, role=role)
    return EndpointSpec(url=text, api_key=api_key, role=role)


def _sources(config: RouterOptions) -> list[Source]:
    """Create the sources of endpoints. Raise StartupError if an option is wrong or a file cannot be read."""

    def template(url: str) -> EndpointSpec:
        return EndpointSpec(url=url, api_key=config.endpoint_api_key)

    sources: list[Source] = []
    if config.endpoints_file is not None:
        path = Path(config.endpoints_file)
        read_endpoints(path)
        sources.append(FileSource(path, api_key=config.endpoint_api_key))
    if config.endpoints_dns is not None:
        name, colon, port = config.endpoints_dns.partition(":")
        if colon and not (port.isdecimal() and 0 < int(port) < 65536):
            raise StartupError(f'--endpoints-dns is "{config.endpoints_dns}", it must be NAME or NAME:PORT')
        from trioserve.proxy.discovery.dns import DnsSource  # This import is late, because it takes 0.3 s.

        sources.append(DnsSource(name, port=int(port or 80), template=template))
    if config.endpoints_kubernetes is not None:
        sources.append(in_cluster(config.endpoints_kubernetes, template=template))
    if config.endpoints_ray is not None:
        check_ray_is_installed()
        sources.append(RaySource(config.endpoints_ray, address=config.ray_address, template=template))
    return sources


def _endpoint_tls(config: RouterOptions) -> ssl.SSLContext | None:
    if config.endpoint_ca_certs is None:
        return None
    path = Path(config.endpoint_ca_certs)
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:
        raise StartupError(f"the CA certificates in {path} cannot be read: {error}") from None
