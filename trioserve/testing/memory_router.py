"""A router and its front end in memory. Its endpoints are servers in memory, any streams, or scripted servers.

A test writes the responses of a scripted server, which the router uses as a prefill or decode endpoint. The server
answers health, model and load requests by itself. Every other request becomes an Ask, which waits for the test. The
test can answer the request, refuse it, break the connection, or do nothing. The test can also see if the client has
disconnected.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.admission.dispatch import Dispatch
from trioserve.admission.model_runs import ModelRuns
from trioserve.admission.router_metrics import show_router
from trioserve.api.caller import AccessRules
from trioserve.api.limits import ConnectionSettings
from trioserve.api.page import PageSettings
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
from trioserve.proxy.remote_endpoint import EndpointAddress, RemoteEndpoint
from trioserve.proxy.routed_body import PromptBlocks
from trioserve.proxy.router_app import RouterApp
from trioserve.proxy.router_context import RoutingRules
from trioserve.router.policies import POLICIES
from trioserve.router.settings import RouterSettings, SilenceSettings
from trioserve.testing.inline_work import InlineTexts, open_inline_store
from trioserve.testing.memory_client import MemoryClient, MemoryEnd, memory_connection
from trioserve.testing.memory_server import MemoryFrontend
from trioserve.text.tokenizer import Tokenizer
from trioserve.trio_tools.interrupts import uninterrupted_context

__all__ = [
    "Ask",
    "MemoryRouter",
    "ScriptedEndpoint",
    "ScriptedEndpoints",
    "open_memory_router",
    "open_scripted_endpoints",
]


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


RECEIVE_BYTES = 65_536
VLLM_METRICS = 'vllm:num_requests_running{model_name="fake"} 0.0\nvllm:num_requests_waiting{model_name="fake"} 0.0\n'
HAND_OVER_SUFFIX = "/hand-over"


class Ask:
    """A request at a scripted endpoint.

    Attributes:
        endpoint: the endpoint that received the request.
        path: request path.
        headers: headers, with names in lower case.
        body: the decoded JSON body.
        is_gone: True if the client closed the connection before the response was complete.
        is_over: True if the response is complete or can no longer become complete.
        is_held: True if blocks are held for this request.
    """

    def __init__(self, endpoint: ScriptedEndpoint, end: MemoryEnd, path: str, headers: dict[str, str], body: Any):
        self.endpoint = endpoint
        self.path = path
        self.headers = headers
        self.body = body
        self.is_gone = False
        self.is_over = False
        self.is_held = False
        self._end = end
        self._is_begun = False

    def respond(self, content: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Send a complete response.

        Args:
            content: the body. A str is sent unchanged, any other value as JSON.
            status: HTTP status.
            headers: additional headers.
        """
        body = (content if isinstance(content, str) else json.dumps(content)).encode()
        fields = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        fields += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self._send(f"HTTP/1.1 {status} Said\r\n{fields}\r\n".encode() + body)
        self.is_over = True

    def refuse(self, status: int, code: str = "said_so", *, headers: Mapping[str, str] | None = None) -> None:
        error = {"message": "no", "type": "server_error", "param": None, "code": code}
        self.respond({"error": error}, status=status, headers=headers)

    def begin(self, headers: Mapping[str, str] | None = None, *, content_type: str = "text/event-stream") -> None:
        """Send the head of an event stream with status 200.

        Args:
            headers: additional headers.
            content_type: media type of the stream.
        """
        self._is_begun = True
        fields = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        fields += f"content-type: {content_type}\r\ntransfer-encoding: chunked\r\n"
        self._send(f"HTTP/1.1 200 OK\r\n{fields}\r\n".encode())

    def begin_resumable(self, *, fingerprint: str = "same+exact", **state: object) -> None:
        """Send the head of a stream that another endpoint can resume.

        Args:
            fingerprint: fingerprint of the model.
            **state: fields of the resume header that override the defaults.
        """
        state = {"prompt_digest": "d", "seed": 7, **state}
        self.begin({"x-trioserve-resume": json.dumps(state), "x-trioserve-fingerprint": fingerprint})

    def group(self, id: str, text: str | None = None) -> None:
        """Send an event of a resumable stream.

        Args:
            id: event id, "choice:count". It identifies the output that the client has after this event.
            text: text of the event. The default is a space and the id.
        """
        choice = {"index": int(id.split(":")[0]), "text": f" {id}" if text is None else text, "finish_reason": None}
        self.say(f"id: {id}\ndata: {json.dumps({'id': 'cmpl-0', 'choices': [choice]})}\n\n")

    def finish_resumable(self) -> None:
        self.say("id: .\ndata: [DONE]\n\n")
        self.end()

    def fail(self, code: str) -> None:
        """Send an error event and end the stream.

        Args:
            code: error code.
        """
        self.event(error={"message": "said so", "type": "server_error", "param": None, "code": code})
        self.end()

    def say(self, text: str) -> None:
        """Send text of the stream. The text need not be a complete event.

        Args:
            text: text to send.
        """
        if not self._is_begun:
            self.begin()
        data = text.encode()
        self._send(b"%x\r\n%b\r\n" % (len(data), data))

    def event(self, **fields: object) -> None:
        self.say(f"data: {json.dumps(fields)}\n\n")

    def token(self, text: str = "x", *, finish_reason: str | None = None, **fields: object) -> None:
        """Send an event with a token.

        Args:
            text: text of the token.
            finish_reason: why the choice ends. None if the choice continues.
            **fields: additional fields of the event.
        """
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        self.event(id="cmpl-0", object="text_completion", choices=[choice], **fields)

    def finish(self) -> None:
        """Send [DONE] and end the stream. Held blocks are freed."""
        self.say("data: [DONE]\n\n")
        self.end()

    def end(self) -> None:
        """End the stream without [DONE]."""
        self._send(b"0\r\n\r\n")
        self.is_over, self.is_held = True, False

    def hold(self, **params: object) -> None:
        """Send the response to a prefill request: one token, and the parameters to read its blocks. The blocks are held
        after this call.

        Args:
            **params: fields of kv_transfer_params that override the endpoint's `params`.
        """
        self.is_held = True
        self.token(finish_reason="length", kv_transfer_params={**self.endpoint.params, **params})

    def hang_up(self) -> None:
        """Close the connection before the response is complete."""
        self._end.close()
        self.is_over, self.is_held = True, False

    def leave(self) -> None:
        """Record that the client closed the connection."""
        if not self.is_over:
            self.is_gone = True
        self.is_over, self.is_held = True, False

    def _send(self, data: bytes) -> None:
        if not self.is_over:
            self._end.send_nowait(data)


class ScriptedEndpoint:
    """A scripted endpoint in memory.

    Args:
        nursery: runs one task per connection.
        role: the role that the endpoint reports. None for no role, as in servers of other projects.
        model: name of the endpoint's model.

    Attributes:
        load: further fields of the load that the endpoint reports.
        asks: all requests so far, oldest first.
        is_reachable: if False, connections are refused.
        is_well: if False, health requests get status 503.
        is_silent: if True, the endpoint answers no requests by itself.
        unready_reason: reason in the response to /ready, with status 503. None if the endpoint is ready.
        hands_over: if True, the endpoint hands over a stream when the router requests this. Servers of other projects
            do not.
        is_vllm: if True, the endpoint reports its load as vLLM does.
        params: kv_transfer_params of held blocks.
    """

    def __init__(self, nursery: trio.Nursery, *, role: EngineRole | None = None, model: str = "fake") -> None:
        self.role = role
        self.model = model
        self.load: dict[str, object] = {"running": 0, "waiting": 0, "seats": 64}
        self.asks: list[Ask] = []
        self.is_reachable = True
        self.is_well = True
        self.is_silent = False
        self.unready_reason: str | None = None
        self.hands_over = False
        self.is_vllm = False
        self.params: dict[str, object] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "engine",
            "remote_block_ids": [3, 1, 4],
            "remote_host": "10.0.0.9",
            "remote_port": 9999,
            "something_else": {"kept": "as it came"},
        }
        self._nursery = nursery

    @property
    def open(self) -> list[Ask]:
        """Requests whose response is not complete."""
        return [ask for ask in self.asks if not ask.is_over]

    @property
    def held_count(self) -> int:
        return sum(ask.is_held for ask in self.asks)

    async def connect(self) -> MemoryEnd:
        if not self.is_reachable:
            raise ConnectionRefusedError(111, "Connection refused")
        client, end = memory_connection()
        self._nursery.start_soon(self._serve, end)
        return client

    async def _serve(self, end: MemoryEnd) -> None:
        received = b""
        ask: Ask | None = None
        try:
            while data := await end.receive_some(RECEIVE_BYTES):
                received += data
                while (parsed := _parsed(received)) is not None:
                    (method, path, headers, body), received = parsed
                    if method == "POST" and path.endswith(HAND_OVER_SUFFIX):
                        self._give_away(Ask(self, end, path, headers, None))
                    elif method == "POST":
                        ask = Ask(self, end, path, headers, json.loads(body))
                        self.asks.append(ask)
                    elif not self.is_reachable:
                        return  # The endpoint has become unreachable, and a stopped server closes idle connections.
                    elif not self.is_silent:
                        is_ready = self.unready_reason is None or path != "/ready"
                        status = 200 if self.is_well and is_ready else 503
                        content = (
                            self._own_response(path) if is_ready else {"ready": False, "reason": self.unready_reason}
                        )
                        Ask(self, end, path, headers, None).respond(content, status=status)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            if ask is not None:
                ask.leave()
            end.close()

    def _give_away(self, asked: Ask) -> None:
        if self.is_silent:
            return
        id = asked.path.removesuffix(HAND_OVER_SUFFIX).rsplit("/", 1)[1]
        found = [ask for ask in self.open if ask.headers["x-request-id"] == id]
        if not (
            self.hands_over and found and asked.headers.get("authorization") == found[0].headers.get("authorization")
        ):
            asked.refuse(404)
            return
        asked.respond({"id": id})
        event = {"object": "hand_over", "kv_transfer_params": self.params}
        found[0].say(f"data: {json.dumps(event)}\nid: >\n\n")
        found[0].end()

    def _own_response(self, path: str) -> object:
        if self.is_vllm and path in ("/load", "/metrics"):
            return {"server_load": 0} if path == "/load" else VLLM_METRICS
        if path == "/load":
            return {**self.load, **({} if self.role is None else {"role": self.role})}
        return {"object": "list", "data": [{"id": self.model, "object": "model"}]} if path == "/v1/models" else {}


def _parsed(received: bytes) -> tuple[tuple[str, str, dict[str, str], bytes], bytes] | None:
    """Return the first request and the bytes after it, or None if the request is not complete."""
    head, found, rest = received.partition(b"\r\n\r\n")
    if not found:
        return None
    line, *fields = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
    length = int(headers.get("content-length", "0"))
    if len(rest) < length:
        return None
    method, path, _ = line.split(" ", 2)
    return (method, path, headers, rest[:length]), rest[length:]


class ScriptedEndpoints:
    """A router and its scripted endpoints.

    Args:
        endpoints: the endpoints by id. The first letter of an id is the role: p for prefill, d for decode, b for both.
            Endpoints whose id begins with w or v report no role.
    """

    def __init__(self, router: MemoryRouter, endpoints: dict[str, ScriptedEndpoint]) -> None:
        self.router = router
        self.endpoints = endpoints

    def __getitem__(self, id: str) -> ScriptedEndpoint:
        return self.endpoints[id]

    def client(self, **options: Any) -> MemoryClient:
        return self.router.client(**options)

    async def ask_of(self, id: str) -> Ask:
        """Wait until all tasks are idle, then return the only open request at an endpoint.

        Args:
            id: the endpoint.
        """
        await wait_all_tasks_blocked()
        [ask] = self.endpoints[id].open
        return ask

    def leases(self) -> dict[EndpointId, int]:
        return dict(self.router.dispatch.core.stats().leases)

    def outcomes(self) -> dict[str, int]:
        return {
            outcome.value: count for outcome, count in self.router.dispatch.core.stats().pairs_total.items() if count
        }

    async def listed(self) -> list[tuple[str, str, str | None]]:
        response = await self.client().get("/v1/requests")
        return [(each["id"], each["state"], each["endpoint"]) for each in (await response.json())["data"]]

    async def assert_all_free(self) -> None:
        await self.router.assert_all_free()
        for id, endpoint in self.endpoints.items():
            assert not endpoint.open, f"{len(endpoint.open)} requests are open at {id}"
            assert endpoint.held_count == 0, f"blocks are held at {id}"


ROLES: dict[str, EngineRole | None] = {"p": "prefill", "d": "decode", "b": "both", "w": None, "v": None}


@asynccontextmanager
async def open_scripted_endpoints(ids: str = "p d", **options: Any) -> AsyncIterator[ScriptedEndpoints]:
    """Open a router with scripted endpoints. The context begins after each endpoint has reported its role.

    Args:
        ids: endpoint ids, separated by spaces. Ids that begin with v report their load as vLLM does.
        **options: options of open_memory_router.
    """
    async with trio.open_nursery() as nursery:
        endpoints = {id: ScriptedEndpoint(nursery, role=ROLES[id[0]]) for id in ids.split()}
        for id, endpoint in endpoints.items():
            endpoint.is_vllm = id.startswith("v")
        connects = {id: endpoint.connect for id, endpoint in endpoints.items()}
        async with open_memory_router(connects, **options) as router:
            await wait_all_tasks_blocked()
            yield ScriptedEndpoints(router, endpoints)
        nursery.cancel_scope.cancel()
