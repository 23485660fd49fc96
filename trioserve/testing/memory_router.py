"""A router and its front end in memory. Its endpoints are servers in memory, or any streams."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.admission.dispatch import Dispatch
from trioserve.admission.model_runs import ModelRuns
from trioserve.admission.router_metrics import show_router
from trioserve.api.caller import AccessRules
from trioserve.api.limits import ConnectionSettings
from trioserve.api.page.page import PageSettings
from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.kv_transfer import EngineRole
from trioserve.contracts.tracing import NO_TRACER, Tracer
from trioserve.http.limits import FrontendLimits
from trioserve.http.server import FrontendServer
from trioserve.metrics.registry import Metrics
from trioserve.proxy.endpoint_watch import WatchSettings
from trioserve.proxy.fleet import EndpointSpec, Fleet
from trioserve.proxy.model_host import ModelHost
from trioserve.proxy.peers.kept_stream import ClientLeftNotices
from trioserve.proxy.peers.peer_watch import Peer, PeerWatch
from trioserve.proxy.peers.retries import PeerStreams
from trioserve.proxy.prompt_blocks import PromptBlocks
from trioserve.proxy.remote_endpoint import EndpointAddress, RemoteEndpoint
from trioserve.proxy.router_app import RouterApp
from trioserve.proxy.router_context import RoutingRules
from trioserve.router.policies import POLICIES
from trioserve.router.settings import RouterSettings, SilenceSettings
from trioserve.testing.inline_work import InlineTexts, open_inline_store
from trioserve.testing.memory_server import MemoryFrontend
from trioserve.text.tokenizer import Tokenizer
from trioserve.trio_tools.interrupts import uninterrupted_context

__all__ = ["MemoryRouter", "open_memory_router"]

Connect = Callable[[], Awaitable[trio.abc.Stream]]
SELDOM_SECONDS = 3600.0
SEED = 1590
"""With this seed, the policies try equal endpoints named a to f in that order."""


class MemoryRouter(MemoryFrontend):
    """A router in memory. `open_memory_router` creates it.

    Attributes:
        dispatch: the queue and the leases.
        fleet: the endpoints.
        server: the front end.
        metrics: the metrics.
        peer_watch: the other routers, or None.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        fleet: Fleet,
        server: FrontendServer,
        metrics: Metrics,
        nursery: trio.Nursery,
        peer_watch: PeerWatch | None = None,
    ) -> None:
        super().__init__(server, nursery)
        self.peer_watch = peer_watch
        self.dispatch = dispatch
        self.fleet = fleet
        self.metrics = metrics

    def announce_drain(self) -> None:
        """Begin to stop, as the router does at SIGTERM. It still answers HTTP, but refuses new and queued requests."""
        self.dispatch.drain()
        self.server.announce_drain()

    def drain(self) -> None:
        """Stop, as the router does after its last request."""
        self.dispatch.drain()
        self.server.drain()

    async def assert_all_free(self) -> None:
        """Assert that no request waits, has a lease or is open. First, wait until all other tasks are idle.

        Raises:
            AssertionError: a request still exists.
        """
        await wait_all_tasks_blocked()
        stats = self.dispatch.core.stats()
        assert stats.waiting == 0, f"{stats.waiting} requests wait in the queue"
        assert not any(stats.leases.values()), f"leases were not returned: {stats.leases}"
        in_flight = {state.id: state.in_flight for state in self.dispatch.core.endpoints.values()}
        assert not any(in_flight.values()), f"requests are in flight: {in_flight}"
        counters = self.server.counters()
        assert counters.exchanges_open == 0, f"{counters.exchanges_open} requests are still open in the front end"


@uninterrupted_context
async def open_memory_router(
    endpoints: Mapping[str, Connect],
    *,
    policy: str = "least_loaded",
    watch: WatchSettings | None = None,
    rules: RoutingRules | None = None,
    models: dict[str, str] | None = None,
    roles: Mapping[str, EngineRole] | None = None,
    api_keys: tuple[str, ...] = (),
    admin_api_key: str | None = None,
    access: AccessRules | None = None,
    connections: ConnectionSettings | None = None,
    page: PageSettings | None = None,
    endpoint_api_key: str | None = None,
    aliases: Mapping[str, str] | None = None,
    leases_max: int | None = None,
    tokenizer: Tokenizer | None = None,
    has_peers: bool = False,
    peers: Mapping[str, Connect] | None = None,
    own_name: str | None = "router",
    tracer: Tracer = NO_TRACER,
    logs_requests: bool = False,
    limits: FrontendLimits | None = None,
    silence: SilenceSettings | None = None,
    hosted: ModelRuns[EndpointSpec] | None = None,
    **settings: Any,
) -> AsyncIterator[MemoryRouter]:
    """Open a router in memory. The context begins after the router has polled the state of each endpoint.

    Args:
        endpoints: for each endpoint id, a function that opens a stream to the endpoint.
        policy: name of the routing policy.
        watch: how often the router polls the health and load of endpoints. The default is once an hour, because an
            autojump clock would otherwise advance from poll to poll.
        rules: rules of the router for requests and headers.
        models: names of the models that all endpoints serve. None lets the router get the names from the endpoints.
        roles: roles of endpoints by id. They override the roles that endpoints report.
        api_keys, admin_api_key, access, connections, page, logs_requests: as the router's flags.
        endpoint_api_key: key that the router sends to the endpoints.
        aliases: other names of models.
        leases_max: maximum number of leases of each endpoint. None uses the number that the endpoint reports.
        tokenizer: tokenizer for the policy kv_aware. None: the router does not hash the blocks of prompts.
        has_peers: if True, other routers use the same endpoints, but this router does not poll their state.
        peers: other routers by name, each with a function that opens a stream. This router polls their state.
        own_name: name of this router. None lets the router find its name itself.
        tracer: receives the spans of requests.
        limits: limits of the front end.
        silence: limits for the time without bytes from an endpoint. With None, the router requests no heartbeats.
        hosted: models that are loaded on demand. The URL of a loaded model is http:// and its endpoint id, and the test
            adds the id to `endpoints`. None: the router loads no models.
        **settings: fields of RouterSettings.
    """
    dispatch = Dispatch(
        RouterSettings(**{"slow_start_seconds": 0, **settings}), POLICIES[policy], rng=random.Random(SEED)
    )

    def connect(spec: EndpointSpec) -> RemoteEndpoint:
        return RemoteEndpoint(
            spec.endpoint_id,
            EndpointAddress(scheme="http", host=spec.endpoint_id, port=80),
            headers=() if spec.api_key is None else (("authorization", f"Bearer {spec.api_key}"),),
            open_stream=streams.get(spec.url) or endpoints[spec.endpoint_id],
            silence=silence or SilenceSettings(beat_seconds=0),
        )

    def connect_peer(peer: Peer) -> RemoteEndpoint:
        assert peers is not None
        address = EndpointAddress.parse(peer.url)
        return RemoteEndpoint(EndpointId(peer.name), address, open_stream=peers[peer.name])

    peer_watch = None
    if has_peers or peers is not None:
        specs = [EndpointSpec(url=f"http://{peer}", id=peer) for peer in peers or ()]
        peer_watch = PeerWatch(dispatch, specs, own=own_name, connect=connect_peer, rng=random.Random(0))
    streams = {f"http://{id}": opened for id, opened in endpoints.items()}
    fleet = Fleet(
        dispatch,
        watch=watch or WatchSettings(health_seconds=SELDOM_SECONDS, load_seconds=SELDOM_SECONDS, listens=False),
        aliases=aliases,
        connect=connect,
        peers=peer_watch,
    )
    rules = rules or RoutingRules(passes_authorization=not api_keys and endpoint_api_key is None)
    metrics = Metrics(None, parts=("frontend", "router"))
    show_router(metrics, dispatch)
    fleet.on_silent = lambda reason: metrics.silent_responses_total.labels(reason).inc()
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        naming = None
        if tokenizer is not None:
            naming = PromptBlocks(tokenizer, await stack.enter_async_context(InlineTexts()))
        notices = ClientLeftNotices()
        await nursery.start(notices.run)
        if peer_watch is not None and peers is not None:
            nursery.start_soon(peer_watch.run)
        store = None
        if hosted is not None:
            store = stack.enter_context(open_inline_store(None, None))
            ModelHost(fleet, hosted).show(metrics)
            await nursery.start(hosted.run)
        app = RouterApp(
            fleet,
            metrics,
            models=hosted,
            store=store,
            rules=rules,
            api_keys=api_keys,
            admin_api_key=admin_api_key,
            access=access,
            connections=connections,
            page=page or PageSettings(history_seconds=0, pauses_per_cost=0),
            naming=naming,
            peers=None if peer_watch is None else PeerStreams(fleet, notices, peer_watch),
            notices=notices,
            tracer=tracer,
            logs_requests=logs_requests,
        )
        for url, id in zip(streams, endpoints, strict=True):
            role = (roles or {}).get(id)
            fleet.add(
                EndpointSpec(url=url, id=id, models=models, leases_max=leases_max, role=role, api_key=endpoint_api_key)
            )
        await nursery.start(dispatch.run)
        await nursery.start(fleet.run)
        server = FrontendServer(app, limits=limits, knows_caller=app.knows_caller)
        router = MemoryRouter(dispatch, fleet, server, metrics, nursery, peer_watch)
        while not all(dispatch.core.endpoints[EndpointId(id)].is_settled for id in endpoints):
            await wait_all_tasks_blocked()  # The router must have polled the state of each endpoint.
        async with app.batches.running():
            yield router
        nursery.cancel_scope.cancel()
