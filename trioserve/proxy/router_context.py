"""One request of the router: the services that its handler needs, and the headers that the router forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import parse_qsl, quote, urlencode

import msgspec

from trioserve.api.caller import AccessRules
from trioserve.api.heartbeat import HEARTBEAT_HEADER, INSTANCE_HEADER
from trioserve.api.openai.request_types import decode_body
from trioserve.api.responder import TENANT_HEADER, Responder, outcome_of_error
from trioserve.api.responses.connection import ResponseConnections
from trioserve.api.session_fields import SESSION_HEADER
from trioserve.api.streams.cursors import KEEP_HEADER, KEPT_HEADER, SEED_HEADER
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.endpoint import CONTINUATION_BYTES_MAX, DISAGGREGATED_PROMPT_TOKENS_MIN, EndpointId, Stage
from trioserve.contracts.request import PRIORITY_MIN
from trioserve.contracts.tracing import NO_SPAN, Span
from trioserve.http.exchange import ClockAndIds
from trioserve.proxy.peers.kept_stream import ClientLeftNotices
from trioserve.proxy.peers.processes import KeptObjects, OneProcess
from trioserve.proxy.peers.retries import NoPeers
from trioserve.proxy.remote_endpoint import KEY_HEADERS, PATH_CHARACTERS
from trioserve.proxy.streams.client_events import ClientEvents, not_the_same
from trioserve.proxy.streams.continuation import LiveStreams
from trioserve.trio_tools.fair_slots import FairSlots

if TYPE_CHECKING:
    from trioserve.admission.model_runs import ModelRuns
    from trioserve.api.batches.batches import Batches
    from trioserve.api.page import Page
    from trioserve.http.exchange import Exchange, HeaderFields
    from trioserve.metrics.registry import Metrics
    from trioserve.proxy.fleet import EndpointSpec, Fleet
    from trioserve.proxy.remote_endpoint import RemoteResponse
    from trioserve.proxy.routed_body import PromptBlocks
    from trioserve.store.store import Store

__all__ = [
    "ENDPOINT_PARAMETER",
    "RouterContext",
    "RouterServices",
    "RoutingRules",
    "StoredServices",
    "endpoint_session",
    "owner_of",
    "request_headers",
    "response_headers",
]


ENDPOINT_HEADER = "x-trioserve-endpoint"
PREFILL_ENDPOINT_HEADER = "x-trioserve-prefill-endpoint"
# The router itself handles web pages of other origins, so it does not forward the headers of an endpoint.
CROSS_ORIGIN_PREFIX = "access-control-"
# The router has already checked what a browser reports about the page, so it does not forward these headers.
BROWSER_PREFIX = "sec-"
STAGE_HEADER = "x-trioserve-stage"
"""Distinguishes the two requests with one id that a disaggregated request consists of: "prefill" or "decode"."""

TRACE_HEADERS = frozenset(["traceparent", "tracestate"])
# The headers in this set concern one connection only (RFC 9110, 7.6.1), or the router sets them itself in both
# directions.
OF_ONE_CONNECTION = frozenset(
    [
        "connection",
        "content-length",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-request-id",
        HEARTBEAT_HEADER,
    ]
)
# The router sets or has processed these further headers itself.
NOT_FORWARDED = OF_ONE_CONNECTION | {
    "accept-encoding",
    "authorization",
    "content-encoding",
    "expect",
    "forwarded",
    "host",
    "origin",
    "proxy-authorization",
    "proxy-connection",
    "x-api-key",
    "x-queue-timeout",
    "x-ttft-timeout",
    "x-request-timeout",
    KEEP_HEADER,
    SEED_HEADER,
    STAGE_HEADER,
}
NOT_RETURNED = OF_ONE_CONNECTION | {"date", "proxy-authenticate", "server", KEPT_HEADER, INSTANCE_HEADER}


def owner_of(context: RouterContext) -> str | None:
    """Return the owner of the objects that this request creates. Tenants of a gateway are separate owners.

    Args:
        context: Request of the router's API.

    Returns:
        Name of the owner, or None if the router does not distinguish callers.
    """
    return None if context.owner is None else context.caller.tenant(context.named_tenant)


def endpoint_session(context: RouterContext, session: str) -> str:
    """Return the name of a session at endpoints. Sessions of different callers have different names.

    Args:
        context: Request of the router's API.
        session: Name that the client uses.
    """
    owner = owner_of(context)
    if owner is None or context.services.rules.passes_authorization:
        return session
    name = f"{len(owner)}/{owner}/{session}".encode("utf-8", "surrogatepass")
    return blake2b(name, digest_size=16).hexdigest()


def request_headers(context: RouterContext, stage: Stage | None, *, with_body: bool = True) -> list[tuple[str, str]]:
    """Make the headers of a request to an endpoint.

    Args:
        context: Request of the router's API.
        stage: Stage of a disaggregated request. None for other requests.
        with_body: Whether the client's body is forwarded. False for a request that the router makes itself.
    """
    tenant_header = context.services.rules.tenant_header
    # Without a trace, the client's trace headers are forwarded.
    trace = context.leg.headers() or context.span.headers()
    headers = [
        (name, endpoint_session(context, value) if name == SESSION_HEADER else value)
        for name, value in context.exchange.headers.items()
        if name not in NOT_FORWARDED
        and name != tenant_header
        and not name.startswith(BROWSER_PREFIX)
        and (with_body or not name.startswith("content-"))
        and not (trace and name in TRACE_HEADERS)
    ]
    headers += trace
    headers.append(("x-request-id", context.request_id))
    tenant = context.caller.tenant_for_endpoint(context.named_tenant)
    if tenant is not None:
        headers.append((tenant_header, tenant))
    if stage is not None:
        headers.append((STAGE_HEADER, stage.value))
    if context.services.rules.passes_authorization:
        for name in KEY_HEADERS:
            key = context.exchange.headers.get(name)
            if key is not None:
                headers.append((name, key))
    return headers


def response_headers(context: RouterContext, response: RemoteResponse) -> list[tuple[str, str]]:
    headers = [
        (name, value)
        for name, value in response.headers
        if name not in NOT_RETURNED and not name.startswith(CROSS_ORIGIN_PREFIX)
    ]
    headers += [("x-request-id", context.request_id), (ENDPOINT_HEADER, str(context.endpoint))]
    if context.prefill_endpoint is not None:
        headers.append((PREFILL_ENDPOINT_HEADER, context.prefill_endpoint))
    return headers


Body = TypeVar("Body", bound=msgspec.Struct)

ENDPOINT_PARAMETER = "id"
"""Query parameter that pins a request to one endpoint."""


class RoutingRules:
    """Settings for reading and forwarding requests.

    Args:
        deadlines: Deadlines of requests that set none. None: no deadlines.
        deadlines_max: Upper limits of all deadlines. None: no limits.
        tenant_header: Header with the tenant's name. `Caller` decides who may set it.
        session_header: Header with the name of a session.
        passes_authorization: Whether endpoints get the client's key. True if the router has no keys of its own.
        disaggregated_prompt_tokens_min: Shorter prompts are not disaggregated. The count is estimated from the length.
        continuation_bytes_max: Limit of the state that the router keeps to resume a stream at another endpoint, in
            bytes. 0: streams do not resume.
    """

    def __init__(
        self,
        *,
        deadlines: Deadlines | None = None,
        deadlines_max: Deadlines | None = None,
        tenant_header: str = TENANT_HEADER,
        session_header: str = "x-session-id",
        passes_authorization: bool = True,
        disaggregated_prompt_tokens_min: int = DISAGGREGATED_PROMPT_TOKENS_MIN,
        continuation_bytes_max: int = CONTINUATION_BYTES_MAX,
    ) -> None:
        self.deadlines = deadlines or Deadlines()
        self.deadlines_max = deadlines_max or Deadlines()
        self.tenant_header = tenant_header.lower()
        self.session_header = session_header.lower()
        self.passes_authorization = passes_authorization
        self.disaggregated_prompt_tokens_min = disaggregated_prompt_tokens_min
        self.continuation_bytes_max = continuation_bytes_max


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredServices:
    """Parts of a router that keeps files and batches itself, with the names that handlers of engines use.

    Attributes:
        batches: batches that have not ended.
        batch_endpoints: paths that a batch may use.
        uploads: bounds how many uploaded forms are parsed at a time.
    """

    batches: Batches
    batch_endpoints: tuple[str, ...]
    uploads: FairSlots


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterServices:
    """Services of a router that all of its requests share.

    Attributes:
        fleet: Endpoints of the router.
        rules: Settings for reading and forwarding requests.
        metrics: Metrics of the router.
        clock_and_ids: Source of times and request ids.
        more_metrics: Returns further metrics in Prometheus' text format.
        naming: Names the blocks of prompts. None: the routing policy does not need them.
        kept: Locations of stored objects.
        streams: Running streams that can resume at another endpoint.
        connections: Websocket connections of the Responses API.
        access: Keys and rights of callers.
        peers: Other routers, which can resume streams of this router.
        page: Live page. None: the router has none.
        processes: Other processes of this router.
        notices: Notifies endpoints when a client has left.
        models: Loads models on demand. None: all models belong to endpoints that run anyway.
        forms: Limits how many large forms are parsed at a time.
        store: Keeps files and batches. None: an endpoint keeps them.
        stored: Parts for files and batches, if there is a store.
    """

    fleet: Fleet
    rules: RoutingRules
    metrics: Metrics
    clock_and_ids: ClockAndIds
    more_metrics: Callable[[], bytes]
    naming: PromptBlocks | None
    kept: KeptObjects
    streams: LiveStreams
    connections: ResponseConnections
    access: AccessRules
    peers: NoPeers
    page: Page | None
    processes: OneProcess
    notices: ClientLeftNotices
    models: ModelRuns[EndpointSpec] | None
    forms: FairSlots
    store: Store | None
    stored: StoredServices


class RouterContext(Responder):
    """One request of the router's API. The request's handler sends exactly one response.

    Args:
        exchange: HTTP request and response.
        services: Parts of the router, shared by all requests.

    Attributes:
        client_events: Events that the client gets. They differ from the endpoint's events for a resumed stream.
        endpoint: Endpoint that got the request last.
        preferred: Endpoint that should get the request if it has a free slot. None: the routing policy chooses.
        leg: Trace span of the current request to an endpoint.
        endpoint_path: Path that endpoints see. None: the path of the request.
        prefill_endpoint: Endpoint that computed the prompt of a disaggregated request.
        priority_least: Lower bound for the priority number. A lower number runs sooner.
    """

    services: RouterServices
    priority_least = PRIORITY_MIN

    def __init__(self, exchange: Exchange, services: RouterServices) -> None:
        super().__init__(exchange, services)
        self.endpoint_path: str | None = None
        self.endpoint: EndpointId | None = None
        self.preferred: EndpointId | None = None
        self.prefill_endpoint: EndpointId | None = None
        self.leg: Span = NO_SPAN
        self.client_events = ClientEvents()
        self._held_head: tuple[int, HeaderFields] | None = None

    @property
    def server(self) -> StoredServices:
        return self.services.stored

    async def body(self, kind: type[Body]) -> Body:
        """Read and decode the request's JSON body.

        Args:
            kind: Type of the body.

        Raises:
            InvalidRequest: The body is not JSON of this type.
        """
        ignored: list[str] = []
        body = decode_body(await self.exchange.body(), kind, ignored=ignored)
        self.ignored_fields = tuple(ignored)
        return body

    def query(self, name: str) -> str | None:
        """Return the first value of a query parameter, or None.

        Args:
            name: Name of the parameter.
        """
        return next((value for key, value in parse_qsl(self.exchange.query) if key == name), None)

    @property
    def named_tenant(self) -> str | None:
        """Tenant that the request names. The caller's rights decide whether the name counts."""
        return self.exchange.headers.get(self.services.rules.tenant_header)

    @property
    def target(self) -> str:
        """Path and query that the endpoint gets."""
        rest = [(key, value) for key, value in parse_qsl(self.exchange.query) if key != ENDPOINT_PARAMETER]
        return quote(self.endpoint_path or self.exchange.path, safe=PATH_CHARACTERS) + (
            "?" + urlencode(rest) if rest else ""
        )

    @contextmanager
    def asking(self, id: EndpointId, stage: Stage | None) -> Iterator[None]:
        """Trace the block as a request to an endpoint. The endpoint's spans become children of the span of this
        request.

        Args:
            id: Endpoint that gets the request.
            stage: Stage of a disaggregated request. None for other requests.
        """
        if self.span is NO_SPAN:
            yield
            return
        address = self.services.fleet.remote(id).address
        attributes = {
            "http.request.method": self.exchange.method,
            "server.address": address.host,
            "server.port": address.port,
            "trioserve.endpoint": id,
            **({} if stage is None else {"trioserve.stage": stage.value}),
        }
        name = self.exchange.method if stage is None else f"{self.exchange.method} {stage.value}"
        self.leg = self.span.child(name, kind="client", attributes=attributes)
        error: str | None = None
        try:
            yield
        except Exception as failure:
            error = type(failure).__name__
            raise
        finally:
            self.leg.end(error)
            self.leg = NO_SPAN

    async def start(self, status: int, headers: HeaderFields, *, is_events: bool) -> None:
        """Send the head of an endpoint's response to the client.

        The head of a resumed event stream is delayed until the stream reaches the client's position.

        Args:
            status: HTTP status.
            headers: Response headers.
            is_events: Whether the body is a stream of server-sent events.
        """
        self._streaming = is_events
        if is_events:
            headers = self.client_events.head(headers)
        if is_events and self.client_events.is_behind:
            # The head is held back, because the stream may differ from the response of which the client has a part.
            self._held_head = status, headers
            return
        self.status = status
        await self.exchange.start(status, headers)

    async def start_early(self) -> None:
        """Send the head of an event stream before an endpoint has answered."""
        # Buffering proxies such as nginx would otherwise delay the comments.
        fields = (("cache-control", "no-cache"), ("x-accel-buffering", "no"))
        await self.start(200, self._head("text/event-stream; charset=utf-8", fields), is_events=True)

    async def send_events(self, events: bytes) -> None:
        """Send the events that the client has not received yet.

        Args:
            events: Complete events.

        Raises:
            Refusal: The stream differs from the part that the client has received (409).
        """
        new = self.client_events.convert(events)
        if not self.client_events.is_behind:
            await self._release_head()
        if new:
            await self.exchange.send(new)

    async def finish(self, last: bytes = b"") -> None:
        """End the response.

        Args:
            last: Error event at the end of the stream. The client gets it at any position.

        Raises:
            Refusal: The stream ends before the client's position (409).
        """
        last = last or self.client_events.error
        if self.client_events.is_behind and not last:
            raise not_the_same("it ends before the client's position")
        await self._release_head()
        await super().finish(self.client_events.last(last))

    async def _release_head(self) -> None:
        held, self._held_head = self._held_head, None
        if held is not None:
            self.status = held[0]
            await self.exchange.start(*held)

    def note_error(self, status: int, reason: str | None) -> None:
        """Record that the response is an endpoint's error, or ends with an endpoint's error.

        Args:
            status: HTTP status of the error.
            reason: Error code of the endpoint. None if it sent none.
        """
        self.reason = reason or f"status_{status}"
        self.outcome = outcome_of_error(status, reason, has_begun=self.exchange.started)

    async def respond(self, status: int, headers: HeaderFields, body: bytes) -> None:
        """Send a complete response of an endpoint to the client.

        Args:
            status: HTTP status.
            headers: Response headers.
            body: Bytes of the body.
        """
        self.status = status
        await self.exchange.respond(status, headers, body)
