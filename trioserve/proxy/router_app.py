"""HTTP API of a router: routes that are forwarded to an endpoint, and routes that the router answers itself."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import trio
from msgspec import UNSET, UnsetType

from trioserve.admission.admission_scope import AdmissionScope
from trioserve.api.app import BaseApp
from trioserve.api.batches.batches import Batches
from trioserve.api.batches.files import OPERATIONS as FILE_OPERATIONS
from trioserve.api.batches.handlers import BATCH_ENDPOINTS
from trioserve.api.batches.handlers import OPERATIONS as BATCH_OPERATIONS
from trioserve.api.caller import AccessRules, ApiKeys, Caller
from trioserve.api.error_responses import REASON_HEADER, Refusal, refusal
from trioserve.api.images.image_routes import OPERATIONS as IMAGE_OPERATIONS
from trioserve.api.limits import BatchSettings, ConnectionSettings
from trioserve.api.ollama.models import read_api_version
from trioserve.api.openai.models import Models
from trioserve.api.openai.request_types import decode_body
from trioserve.api.operations.health import Alive, NotReady, Ready, Version, read_tasks
from trioserve.api.page import (
    EVENTS_PATH,
    PAGE_PATH,
    ROUTER_PATH,
    UI_PATH,
    Page,
    PageSettings,
    is_of_page,
    show_file,
    show_page,
)
from trioserve.api.response import Listing, Response
from trioserve.api.responses.connection import ResponseConnections
from trioserve.api.route_table import Forwarding, Handler, Operation, RouteTable
from trioserve.api.routes import OPERATIONS as ENGINE_OPERATIONS
from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import InvalidRequest, StartupError
from trioserve.contracts.extras import VERSION
from trioserve.contracts.request import PRIORITY_MAX
from trioserve.contracts.tracing import NO_TRACER, Tracer
from trioserve.http.exchange import ClockAndIds
from trioserve.metrics.registry import joined_pages
from trioserve.proxy.aborts import abort_for_vllm, abort_one_or_all, abort_request, abort_requests
from trioserve.proxy.adapters import load_adapter, unload_adapter
from trioserve.proxy.fleet import EndpointSpec
from trioserve.proxy.forwarding import forward
from trioserve.proxy.model_routes import (
    ModelChanged,
    NamedModel,
    list_models,
    list_running,
    list_tags,
    load_model,
    read_is_sleeping,
    read_model,
    sleep_model,
    unload_model,
    wake_model,
)
from trioserve.proxy.peers.kept_stream import ClientLeftNotices
from trioserve.proxy.peers.peer_watch import PEER_PATH
from trioserve.proxy.peers.processes import Answer, KeptObjects, OneProcess
from trioserve.proxy.peers.retries import NoPeers
from trioserve.proxy.response_turn import routed_turns, turn_headers
from trioserve.proxy.router_context import RouterContext, RouterServices, RoutingRules, StoredServices
from trioserve.proxy.router_feed import RouterFeed
from trioserve.proxy.streams.continuation import LiveStreams
from trioserve.proxy.unqueued_requests import (
    forward_anywhere,
    forward_batch,
    forward_control,
    forward_home,
    forward_kept,
    forward_stream,
)
from trioserve.trio_tools.fair_slots import FairSlots

if TYPE_CHECKING:
    from trioserve.admission.model_runs import ModelRuns
    from trioserve.http.exchange import Exchange
    from trioserve.metrics.registry import Metrics
    from trioserve.proxy.fleet import EndpointSpec, Fleet
    from trioserve.proxy.routed_body import PromptBlocks
    from trioserve.store.store import Store

__all__ = ["OPERATIONS", "RouterApp"]

OF_STORE = frozenset((operation.method, operation.path) for operation in (*FILE_OPERATIONS, *BATCH_OPERATIONS))
FORMS_MAX = 2  # At most this many large forms are parsed at the same time, each in a thread.
ENDPOINTS_PATH = "/endpoints"
ENDPOINT_PATH = "/endpoints/"
"""The rest of the path is the endpoint's id, which may contain slashes."""
DRAIN_SUFFIX = "/drain"
COUNTED_TOGETHER = ("leases", "in_flight", "moved_from", "moved_to")
"""Fields of an endpoint that are added up over all processes of this router."""
MOVE_SECONDS = 30.0
"""Default time to move requests away from an endpoint. Requests wait there until another endpoint is free."""
MOVE_SECONDS_MAX = 86_400


async def read_health(context: RouterContext) -> None:
    """GET /health: 200 as long as the event loop runs.

    Args:
        context: Request of the router's API.
    """
    await context.respond_json(Alive())


async def read_ready(context: RouterContext) -> None:
    """GET /ready: 200 if an endpoint accepts requests.

    Args:
        context: Request of the router's API.
    """
    reason = context.services.fleet.unready_reason()
    if reason is None:
        await context.respond_json(Ready(ready=True))
    else:
        not_ready = NotReady(ready=False, reason=reason)
        await context.respond_json(not_ready, status=503, headers=((REASON_HEADER, reason),))


async def read_version(context: RouterContext) -> None:
    await context.respond_json(Version(version=VERSION))


async def list_endpoints(context: RouterContext) -> None:
    described = context.services.fleet.described()
    for answer in await context.services.processes.ask(context):
        counts = {each["id"]: each for each in _listed(answer)}
        for endpoint in described:
            for name in COUNTED_TOGETHER:
                endpoint[name] += counts.get(endpoint["id"], {}).get(name, 0)
    await context.respond_json(Listing(data=described))


def _listed(answer: Answer) -> list[dict[str, Any]]:
    """Return the list of another process, or nothing if its response is an error."""
    if answer.status != 200:
        return []
    return msgspec.json.decode(answer.body, type=_List).data


class _List(msgspec.Struct):
    data: list[dict[str, Any]]


class EndpointChange(Response, tag_field="object", tag="endpoint"):
    """An endpoint that was added or is drained.

    Attributes:
        draining: True: it gets no more requests.
        moving: True: its requests are moved.
        seconds: Time to move them.
    """

    id: str
    draining: bool | UnsetType = UNSET
    moving: bool | UnsetType = UNSET
    seconds: float | UnsetType = UNSET


async def add_endpoint(context: RouterContext) -> None:
    """POST /endpoints: add an endpoint. It gets requests as soon as it is healthy.

    Args:
        context: Request of the router's API.

    Raises:
        InvalidRequest: The URL is invalid, or another endpoint has the id.
    """
    body = await context.exchange.body()
    spec = decode_body(body, EndpointSpec)

    def add() -> None:
        try:
            context.services.fleet.add(spec)
        except StartupError as error:
            raise InvalidRequest(str(error)) from None

    decided = await context.services.processes.change(context, body, add)
    if decided is None:
        await context.respond_json(EndpointChange(id=spec.endpoint_id), status=201)
    else:
        await _respond_as(context, decided)


async def _respond_as(context: RouterContext, decided: Answer) -> None:
    headers = [("content-type", "application/json"), ("x-request-id", context.request_id)]
    await context.respond(decided.status, headers, decided.body)


async def drain_endpoint(context: RouterContext) -> None:
    """Drain an endpoint. The endpoint gets no more requests, and is removed when its last request has ended.

    With `move=true` in the query, its requests are moved to other endpoints, within `seconds`.

    Args:
        context: Request of the router's API.

    Raises:
        Refusal: There is no such endpoint (404).
        InvalidRequest: The query is invalid.
    """
    path = context.exchange.path.removeprefix(ENDPOINT_PATH)
    if context.exchange.method == "POST":
        if not path.endswith(DRAIN_SUFFIX):
            raise _endpoint_not_found(
                f"POST {ENDPOINT_PATH}ID{DRAIN_SUFFIX} drains an endpoint, but this path has another end"
            )
        path = path.removesuffix(DRAIN_SUFFIX)
    id = EndpointId(path)
    move_seconds = _move_seconds(context)

    def drain() -> None:
        if not context.services.fleet.drain(id, move_seconds=move_seconds):
            raise _endpoint_not_found(f'there is no endpoint with the id "{id}"; GET {ENDPOINTS_PATH} lists them')

    decided = await context.services.processes.change(context, b"", drain)
    if decided is not None:
        await _respond_as(context, decided)
        return
    changed = EndpointChange(id=id, draining=True)
    if move_seconds is not None:
        changed.moving, changed.seconds = True, move_seconds
    await context.respond_json(changed)


def _endpoint_not_found(message: str) -> Refusal:
    return refusal("endpoint_not_found", message)


def _move_seconds(context: RouterContext) -> float | None:
    """Read the query of a drain request.

    Returns:
        Time to move requests, or None if they are not moved.

    Raises:
        InvalidRequest: The query is invalid.
    """
    move, seconds = context.query("move"), context.query("seconds")
    if move not in (None, "true", "false"):
        raise InvalidRequest(f'move is "{move[:80]}", it must be true or false', param="move")
    if seconds is not None and move != "true":
        raise InvalidRequest("seconds limits the time of moving: send move=true with it", param="seconds")
    if move != "true":
        return None
    try:
        number = MOVE_SECONDS if seconds is None else float(seconds)
    except ValueError:
        number = math.nan
    if not 0 <= number <= MOVE_SECONDS_MAX:
        raise InvalidRequest(
            f'seconds is "{(seconds or "")[:80]}", it must be a number from 0 to {MOVE_SECONDS_MAX}', param="seconds"
        )
    return number


async def greet(context: RouterContext) -> None:
    """GET /peer: name and instance of this router, for other routers that check it twice a second.

    Args:
        context: Request of the router's API.
    """
    await context.respond_json(context.services.peers.greeting())


async def list_peers(context: RouterContext) -> None:
    await context.respond_json(Listing(data=context.services.peers.described()))


async def list_requests(context: RouterContext) -> None:
    """GET /v1/requests: running and queued requests, of all processes of this router.

    Args:
        context: Request of the router's API.
    """
    now = trio.current_time()
    live: list[dict[str, object]] = [
        {
            "id": admission.id,
            "object": "request",
            "state": _state(context, admission),
            "endpoint": None if admission.is_queued else admission.endpoint,
            "prefill_endpoint": admission.prefilled_by,
            "priority": admission.priority,
            "age_seconds": round(now - admission.entered_at, 3),
        }
        for admission in context.services.fleet.dispatch.live_admissions(owner=context.owner)
    ]
    for answer in await context.services.processes.ask(context):
        live += _listed(answer)
    await context.respond_json(Listing(data=live))


def _state(context: RouterContext, admission: AdmissionScope) -> str:
    models = context.services.models
    if models is None or not admission.is_queued or admission.model not in models:
        return admission.state
    return admission.state if models.status(admission.model).state == "loaded" else "loading"


async def control_request(context: RouterContext) -> None:
    """POST /v1/requests/ID/...: forward a control request to the endpoint that runs the controlled request.

    Args:
        context: Request of the router's API.

    Raises:
        Refusal: No process has the request (404), or the action is not allowed.
    """
    try:
        await forward_control(context)
    except Refusal as refusal:
        if refusal.response.code == "request_not_found":
            for answer in await context.services.processes.ask(context, await context.exchange.body()):
                if answer.status != refusal.response.status:
                    await context.respond_bytes(answer.body, "application/json", status=answer.status)
                    return
        raise


async def serve_connection(context: RouterContext) -> None:
    await context.services.connections.serve(context)


async def stream_page_events(context: RouterContext) -> None:
    assert context.services.page is not None, "the route exists only with the page"
    await context.services.page.stream(context)


async def read_metrics(context: RouterContext) -> None:
    metrics = context.services.metrics
    page = metrics.expose() + context.services.more_metrics()
    answers = await context.services.processes.ask(context)
    if context.services.processes.count > 1 and not context.services.processes.is_asking(context):
        pages = {context.services.processes.number: page}
        pages |= {answer.number: answer.body for answer in answers if answer.status == 200}
        page = joined_pages({str(number): pages[number] for number in sorted(pages)}, label="process")
    await context.respond_bytes(page, metrics.content_type)


FORWARDERS: dict[Forwarding, Handler[RouterContext]] = {
    Forwarding.BY_MODEL: forward,
    Forwarding.ANYWHERE: forward_anywhere,
    Forwarding.HOME: forward_home,
    Forwarding.BATCH: forward_batch,
    Forwarding.KEPT: forward_kept,
    Forwarding.STREAM: forward_stream,
}
OWN_HANDLERS: dict[tuple[str, str], Handler[RouterContext]] = {
    ("POST", "/v1/load_lora_adapter"): load_adapter,
    ("POST", "/v1/unload_lora_adapter"): unload_adapter,
    ("POST", "/sleep"): sleep_model,
    ("POST", "/wake_up"): wake_model,
    ("GET", "/is_sleeping"): read_is_sleeping,
    ("GET", "/v1/responses"): serve_connection,
    ("GET", "/v1/models"): list_models,
    ("GET", "/v1/models/{model}"): read_model,
    ("GET", "/api/tags"): list_tags,
    ("GET", "/api/ps"): list_running,
    ("GET", "/api/version"): read_api_version,
    ("GET", "/v1/requests"): list_requests,
    ("DELETE", "/v1/requests/{request}"): abort_request,
    ("POST", "/v1/requests/{request}"): control_request,
    ("POST", "/v1/requests/abort"): abort_requests,
    ("POST", "/abort_request"): abort_one_or_all,
    ("POST", "/abort_requests"): abort_for_vllm,
    ("GET", "/debug/tasks"): read_tasks,
    ("GET", "/health"): read_health,
    ("GET", "/ready"): read_ready,
    ("GET", "/version"): read_version,
    ("GET", "/metrics"): read_metrics,
    ("GET", PAGE_PATH): show_page,
    ("GET", UI_PATH + "{file}"): show_file,
    ("GET", EVENTS_PATH): stream_page_events,
}
"""Operations of engines that a router answers itself."""


def _kept_here(handler: Handler[Any], forwarder: Handler[RouterContext]) -> Handler[RouterContext]:
    """Make a handler that uses the router's own files and batches if it has a store, and those of an endpoint else."""

    @functools.wraps(handler)
    async def handle(context: RouterContext) -> None:
        await (forwarder if context.services.store is None else handler)(context)

    return handle


def _as_in_engines(operations: Iterable[Operation[Any]]) -> Iterator[Operation[RouterContext]]:
    """Yield the engine operations that a router also has, with the router's handlers."""
    for operation in operations:
        own = OWN_HANDLERS.get((operation.method, operation.path))
        if operation.forwarding is not None:
            own = FORWARDERS[operation.forwarding]
            if (operation.method, operation.path) in OF_STORE:
                own = _kept_here(operation.handler, own)
        if own is not None:
            yield msgspec.structs.replace(operation, handler=own)


OPERATIONS: tuple[Operation[RouterContext], ...] = (
    *_as_in_engines(ENGINE_OPERATIONS),
    *_as_in_engines(each for each in IMAGE_OPERATIONS if each.forwarding is not None),
    Operation(method="GET", path=ENDPOINTS_PATH, handler=list_endpoints, summary="List the endpoints"),
    Operation(
        method="POST",
        path=ENDPOINTS_PATH,
        handler=add_endpoint,
        summary="Add an endpoint",
        is_operators=True,
        admin_action="adding and draining endpoints",
    ),
    Operation(
        method="DELETE",
        path=ENDPOINT_PATH + "{endpoint}",
        handler=drain_endpoint,
        summary="Drain and remove an endpoint",
        is_operators=True,
        admin_action="adding and draining endpoints",
        id_has_slashes=True,
    ),
    Operation(
        method="POST",
        path=ENDPOINT_PATH + "{endpoint}",
        handler=drain_endpoint,
        summary="Drain an endpoint, if the path ends with /drain",
        is_operators=True,
        admin_action="adding and draining endpoints",
        id_has_slashes=True,
    ),
    Operation(
        method="GET",
        path="/models",
        handler=list_models,
        summary="List models and adapters, as llama-server's router does",
        response=Models,
    ),
    *(
        Operation(
            method="POST",
            path=path,
            handler=handler,
            summary=summary,
            response=ModelChanged,
            body=NamedModel,
            is_operators=True,
            admin_action="loading and unloading models",
        )
        for path, handler, summary in (
            ("/models/load", load_model, "Load a model"),
            ("/models/unload", unload_model, "Unload a model after its last request"),
        )
    ),
    Operation(
        method="GET",
        path=PEER_PATH,
        handler=greet,
        summary="Name this router, for other routers",
        needs_key=False,
        is_polled=True,
    ),
    Operation(
        method="GET",
        path="/peers",
        handler=list_peers,
        summary="List the other routers",
        is_operators=True,
        admin_action="listing the other routers",
    ),
    Operation(
        method="GET",
        path=ROUTER_PATH,
        handler=show_page,
        summary="Show the live page of the router",
        response="text/html",
        needs_key=False,
    ),
)
"""All operations of a router."""


class RouterApp(BaseApp[RouterContext]):
    """HTTP handler of a router.

    Args:
        fleet: Endpoints of the router.
        metrics: Metrics of the router.
        rules: Settings for reading and forwarding requests. None: the default settings.
        api_keys: Keys of clients. Empty: no key is needed.
        admin_api_key: Key of the operator.
        access: Rights of callers.
        more_metrics: Returns further metrics in Prometheus' text format.
        clock_and_ids: Source of times and request ids. None: the real ones.
        naming: Names the blocks of prompts, for routing policies that need them.
        peers: Other routers in front of the same endpoints. None: there are none.
        processes: Other processes of this router. None: there are none.
        notices: Notifies endpoints when a client has left. None: endpoints notice by themselves.
        models: Loads models on demand. None: all models belong to endpoints that run anyway.
        store: Keeps files and batches. None: an endpoint keeps them.
        batch_settings: Limits of batches, if there is a store. None: the default limits.
        connections: Limits of websocket connections of the Responses API. None: the default limits.
        page: Settings of the live page.
        tracer: Receives trace spans, see BaseApp.
        logs_requests: Whether each request is logged, see BaseApp.

    Attributes:
        kept: Stored objects that were created through this router.
        page: Live page.
        batches: Batches that have not ended. They need the scope `batches.running()`.
    """

    def __init__(
        self,
        fleet: Fleet,
        metrics: Metrics,
        *,
        rules: RoutingRules | None = None,
        api_keys: Iterable[str] = (),
        admin_api_key: str | None = None,
        access: AccessRules | None = None,
        more_metrics: Callable[[], bytes] = bytes,
        clock_and_ids: ClockAndIds | None = None,
        naming: PromptBlocks | None = None,
        peers: NoPeers | None = None,
        processes: OneProcess | None = None,
        notices: ClientLeftNotices | None = None,
        models: ModelRuns[EndpointSpec] | None = None,
        store: Store | None = None,
        batch_settings: BatchSettings | None = None,
        connections: ConnectionSettings | None = None,
        page: PageSettings | None = None,
        tracer: Tracer = NO_TRACER,
        logs_requests: bool = False,
    ) -> None:
        page = page or PageSettings()
        super().__init__(
            RouteTable([operation for operation in OPERATIONS if page.is_shown or not is_of_page(operation.path)]),
            ApiKeys(api_keys, admin_key=admin_api_key, rules=access),
            metrics,
            tracer=tracer,
            logs_requests=logs_requests,
        )
        processes = processes or OneProcess()
        of_many = processes.count > 1
        process = f"{processes.number} of {processes.count}" if of_many else None
        feed = RouterFeed(fleet, metrics, process=process, models=models)
        self.page = Page(lambda: feed, page, metrics_need_key=self._keys.rules.metrics_need_key)
        self.kept = KeptObjects()
        rules = rules or RoutingRules()
        self.batches = Batches(
            store,
            batch_settings or BatchSettings(),
            serve_as=self._serve_as,
            caller_of=self._keys.caller_of,
            tenant_header=rules.tenant_header,
            seats=None,
            metrics=metrics,
        )
        streams = LiveStreams()
        notices = notices or ClientLeftNotices()
        notices.on_dropped = metrics.farewells_dropped_total.inc
        self._services = RouterServices(
            fleet=fleet,
            rules=rules,
            metrics=metrics,
            clock_and_ids=clock_and_ids or ClockAndIds(),
            more_metrics=more_metrics,
            naming=naming,
            kept=self.kept,
            streams=streams,
            connections=ResponseConnections(
                connections or ConnectionSettings(), self.serve_turn, turn_headers, routed_turns
            ),
            access=self._keys.rules,
            peers=peers or NoPeers(),
            page=self.page,
            processes=processes,
            notices=notices,
            models=models,
            forms=FairSlots(FORMS_MAX, what="forms"),
            store=store,
            stored=StoredServices(
                batches=self.batches,
                batch_endpoints=BATCH_ENDPOINTS,
                uploads=FairSlots(FORMS_MAX, what="uploads"),
            ),
        )
        metrics.on_scrape(lambda: metrics.continuation_bytes_held.set(streams.kept_bytes))

    def new_context(self, exchange: Exchange) -> RouterContext:
        return RouterContext(exchange, self._services)

    async def _serve_as(self, exchange: Exchange, caller: Caller) -> None:
        """Serve a line of a batch in a caller's name, with the lowest priority."""
        context = self.new_context(exchange)
        context.caller = caller
        context.priority_least = PRIORITY_MAX
        await self._serve(context, is_own=True)

    def end_fields(self, context: RouterContext) -> dict[str, object]:
        fields: dict[str, object] = {"endpoint": context.endpoint}
        return fields if context.prefill_endpoint is None else {**fields, "prefill_endpoint": context.prefill_endpoint}
