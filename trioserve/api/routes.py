"""Operations of a server with an engine, and the app that serves them."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from trioserve.api import page as page_files
from trioserve.api import transcriptions
from trioserve.api.anthropic import messages
from trioserve.api.app import BaseApp, other_path
from trioserve.api.batches import files
from trioserve.api.batches import handlers as batch_handlers
from trioserve.api.batches.batches import Batches
from trioserve.api.caller import AccessRules, ApiKeys, Caller
from trioserve.api.error_responses import Refusal, refusal
from trioserve.api.generation import usage_of
from trioserve.api.limits import ROUTER_GRACE, BackgroundSettings, BatchSettings, ConnectionSettings, DetachSettings
from trioserve.api.ollama import generation as ollama_generation
from trioserve.api.ollama import models as ollama_models
from trioserve.api.openai import chat, completions, decisions, embeddings, models, tokenize
from trioserve.api.openapi import openapi_document
from trioserve.api.operations import health, kv_events, live_requests, pausing, sessions, weights
from trioserve.api.page import (
    EVENTS_PATH,
    INTERVAL_SECONDS_MAX,
    INTERVAL_SECONDS_MIN,
    Page,
    PageSettings,
    is_of_page,
)
from trioserve.api.request_context import RoutersHeard
from trioserve.api.responder import TENANT_HEADER
from trioserve.api.responses import handlers as responses
from trioserve.api.responses.background import BackgroundResponses
from trioserve.api.responses.connection import ResponseConnections
from trioserve.api.responses.connection_turn import connection_turns, turn_headers
from trioserve.api.route_table import Handler, Operation, RouteTable
from trioserve.api.server_context import AppServices, ServerContext, ServerServices
from trioserve.api.sse import encode
from trioserve.api.streams import handlers as stream_handlers
from trioserve.api.streams.cursors import DETACH_HEADER, KEEP_HEADER
from trioserve.api.streams.detached_streams import DetachedStreams, RouterStreams, StreamRequest
from trioserve.api.whole_response import ResponseBudget
from trioserve.contracts.request import PRIORITY_MAX
from trioserve.contracts.tracing import NO_TRACER, Tracer
from trioserve.http.exchange import ClockAndIds
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.fair_slots import FairSlots

if TYPE_CHECKING:
    from trioserve.api.responses.background import BackgroundResponses
    from trioserve.api.responses.stored_responses import KeptMemory
    from trioserve.api.streams.detached_streams import DetachedStreams, RouterStreams
    from trioserve.engine.engine import Engine
    from trioserve.http.exchange import Exchange
    from trioserve.metrics.registry import Metrics
    from trioserve.store.store import Store

__all__ = ["App", "OPERATIONS", "show_stored"]

UPLOADS_MAX = 2  # At most this number of threads parse uploaded forms at a time.


async def stream_page_events(context: ServerContext) -> None:
    await context.server.page.stream(context)


async def read_openapi(context: ServerContext) -> None:
    await context.respond_bytes(_openapi_json(), "application/json")


@functools.cache
def _openapi_json() -> bytes:
    return encode(openapi_document(OPERATIONS))


OPERATIONS: tuple[Operation[ServerContext], ...] = (
    *chat.OPERATIONS,
    *completions.OPERATIONS,
    *messages.OPERATIONS,
    *decisions.OPERATIONS,
    *embeddings.OPERATIONS,
    *responses.OPERATIONS,
    *transcriptions.OPERATIONS,
    *files.OPERATIONS,
    *batch_handlers.OPERATIONS,
    *stream_handlers.OPERATIONS,
    *models.OPERATIONS,
    *tokenize.OPERATIONS,
    *live_requests.OPERATIONS,
    *sessions.OPERATIONS,
    *pausing.OPERATIONS,
    *weights.OPERATIONS,
    *kv_events.OPERATIONS,
    *health.OPERATIONS,
    *ollama_generation.OPERATIONS,
    *ollama_models.OPERATIONS,
    *page_files.OPERATIONS,
    Operation(
        method="GET",
        path=EVENTS_PATH,
        handler=stream_page_events,
        summary="Watch the server's blocks, requests and speed",
        is_polled=True,
        description='Each event is a line "event: snapshot" or "event: change" and a line "data: JSON". The first is a '
        "snapshot, and each later event has the changes since the previous one. An API key sees its own requests, and "
        "the admin's key all requests. The format may change with any version.",
        response="text/event-stream",
        errors=(400, 404, 429, 503),
        query={
            "interval": (
                "shortest time between two events, in seconds",
                {"type": "number", "minimum": INTERVAL_SECONDS_MIN, "maximum": INTERVAL_SECONDS_MAX},
            )
        },
    ),
    Operation(
        method="GET",
        path="/openapi.json",
        handler=read_openapi,
        summary="Read this description",
        needs_key=False,
    ),
)
"""All operations of a server with a language model."""
IMAGES_PATH = "/v1/images/"
"""Prefix of the paths of a server that generates images."""
OTHERS = frozenset({"/v1/responses/compact"})
"""Paths of other servers that would match a template here with a word in place of an id."""


class App(BaseApp[ServerContext]):
    """Request handler of a server with an engine.

    Args:
        engine: computes the responses.
        api_keys: each key opens the routes that need a key. Without keys, all routes are open.
        admin_api_key: a key that also sees the requests of all keys. Other keys see their own requests only.
        access: which fields callers may choose, and which further routes need a key.
        trust_request_chat_template: True: requests may bring their own chat template.
        tenant_header: name of the header that names a tenant. Tenants take turns in the queue. Without keys, every
            caller may set the header. With keys, only callers that the operator trusts may set it, and each of the
            other keys is one tenant.
        clock_and_ids: the time of day, and new ids.
        store: keeps responses, files and batches. None: nothing is kept, and nothing runs in the background.
        background: bounds of background responses, which run inside `async with app.running()`.
        connections: bounds of websocket connections of the Responses API.
        batches: bounds of batches, which run inside `async with app.running()`.
        detaching: whether a stream may continue without its client, and for how long.
        router_grace: whether a stream may continue without its router, and for how long.
        page: settings of the live page, which records its history inside `async with app.running()`.
        tracer: begins the span of each request.
        logs_requests: True: log each request at level INFO. False: at level DEBUG.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        api_keys: Iterable[str] = (),
        admin_api_key: str | None = None,
        access: AccessRules | None = None,
        trust_request_chat_template: bool = False,
        tenant_header: str = TENANT_HEADER,
        clock_and_ids: ClockAndIds | None = None,
        store: Store | None = None,
        background: BackgroundSettings | None = None,
        connections: ConnectionSettings | None = None,
        batches: BatchSettings | None = None,
        detaching: DetachSettings | None = None,
        router_grace: DetachSettings | None = None,
        page: PageSettings | None = None,
        tracer: Tracer = NO_TRACER,
        logs_requests: bool = False,
    ) -> None:
        page = page or PageSettings()
        super().__init__(
            RouteTable(
                [operation for operation in OPERATIONS if page.is_shown or not is_of_page(operation.path)],
                others=OTHERS,
            ),
            ApiKeys(api_keys, admin_key=admin_api_key, rules=access),
            engine.metrics,
            tracer=tracer,
            logs_requests=logs_requests,
        )
        self._engine = engine
        self._store = store
        rules = self._keys.rules
        self.responses = ResponseBudget(rules.responses_bytes_max)
        self.background = BackgroundResponses(store, background or BackgroundSettings())
        self.connections = ResponseConnections(
            connections or ConnectionSettings(),
            self.serve_turn,
            turn_headers,
            connection_turns,
        )
        self.batches = Batches(
            store,
            batches or BatchSettings(),
            serve_as=self._serve_as,
            caller_of=self._keys.caller_of,
            tenant_header=tenant_header,
            seats=engine.load().max_num_seqs,
            metrics=engine.metrics,
        )
        self.detached = DetachedStreams(detaching or DetachSettings())
        self.router_streams = RouterStreams(router_grace or ROUTER_GRACE)
        self.page = Page(lambda: engine.live_feed, page, metrics_need_key=rules.metrics_need_key)
        server = ServerServices(
            background=self.background,
            connections=self.connections,
            batches=self.batches,
            batch_endpoints=tuple(path for path in batch_handlers.BATCH_ENDPOINTS if path in self.table.routes),
            detached=self.detached,
            router_streams=self.router_streams,
            uploads=FairSlots(UPLOADS_MAX, what="uploads"),
            page=self.page,
        )
        self.services = AppServices(
            engine=engine,
            clock_and_ids=clock_and_ids or ClockAndIds(),
            rules=rules,
            routers_heard=RoutersHeard(trio.current_time),
            tenant_header=tenant_header.lower(),
            trust_chat_template=trust_request_chat_template,
            store=store,
            responses=self.responses,
            server=server,
        )
        show_stored(engine.metrics, store, self.background, self.connections.memory, self.detached, self.router_streams)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run all work that outlives a request. Leaving the context cancels this work."""
        async with (
            self._retrying_store_writes(),
            self.detached.running(),
            self.router_streams.running(),
            self.background.running(),
            self.batches.running(),
            self.page.running(),
        ):
            yield

    @asynccontextmanager
    async def _retrying_store_writes(self) -> AsyncIterator[None]:
        """Retry failed writes of the store until its disk has free space again."""
        if self._store is None:
            yield
            return
        with errors_unwrapped():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._store.keep_trying)
                try:
                    yield
                finally:
                    nursery.cancel_scope.cancel()

    def drain(self) -> None:
        """Refuse new work that would outlive its request."""
        self.background.drain()
        self.batches.drain()
        self.detached.drain()
        self.router_streams.drain()

    async def wait_until_idle(self) -> None:
        """Wait until no work that outlives its request is left. Call `drain` first."""
        await self.background.wait_until_idle()
        await self.batches.wait_until_idle()
        await self.detached.wait_until_idle()
        await self.router_streams.wait_until_idle()

    def operate(self, context: ServerContext, handler: Handler[ServerContext]) -> Awaitable[None]:
        headers = context.exchange.headers
        if headers.get(DETACH_HEADER) is None and headers.get(KEEP_HEADER) is None:
            return handler(context)
        # If both the client and its router ask to keep the stream, the client's request counts.
        for streams in (self.detached, self.router_streams):
            stream_request = streams.requested_stream(context)
            if stream_request is not None:
                return self._operate_in_stream(context, handler, streams, stream_request)
        return handler(context)

    async def _operate_in_stream(
        self,
        context: ServerContext,
        handler: Handler[ServerContext],
        streams: DetachedStreams,
        stream_request: StreamRequest,
    ) -> None:
        def handle(inner: ServerContext) -> Awaitable[None]:
            return self.handle(inner, handler)

        if not await streams.serve(context, stream_request, self.new_context, handle):
            await handler(context)

    def not_found(self, path: str) -> Refusal:
        if not path.startswith(IMAGES_PATH):
            return other_path(path) or super().not_found(path)
        return refusal(
            "makes_texts",
            f"there is nothing at {path}: the model {self._engine.model.name} generates text and no images. "
            "Ask a server with an image model; see docs/guides/image-generation.md",
        )

    def new_context(self, exchange: Exchange) -> ServerContext:
        return ServerContext(exchange, self.services)

    async def _serve_as(self, exchange: Exchange, caller: Caller) -> None:
        """Serve a request that the server makes in a caller's name. The request has the lowest priority."""
        context = self.new_context(exchange)
        context.caller = caller
        context.priority_least = PRIORITY_MAX
        await self._serve(context, is_own=True)

    def end_fields(self, context: ServerContext) -> dict[str, object]:
        usage = usage_of(context.streams)
        return {
            # The counts are unknown until the prompt has been tokenized.
            "prompt_tokens": usage.prompt_tokens or None,
            "completion_tokens": usage.completion_tokens if usage.prompt_tokens else None,
        }


def show_stored(
    metrics: Metrics,
    store: Store | None,
    background: BackgroundResponses,
    kept: KeptMemory,
    detached: DetachedStreams,
    router_streams: RouterStreams,
) -> None:
    """Register the metrics. Call once for each app.

    Args:
        metrics: metrics of the server.
        store: store of the server. None: no store.
        background: background responses.
        kept: responses that connections keep in memory.
        detached: streams that continue without their clients.
        router_streams: streams that continue without their routers.
    """
    shown = dict.fromkeys(
        (
            "store_evicted_total",
            "store_refused_total",
            "store_write_failures_total",
            "router_streams_taken_over_total",
            "router_streams_expired_total",
        ),
        0,
    )

    def count(totals: dict[str, int]) -> None:
        for name, value in totals.items():
            getattr(metrics, name).inc(value - shown[name])
            shown[name] = value

    def show() -> None:
        metrics.router_streams.set(router_streams.detached_count)
        metrics.router_stream_bytes_held.set(router_streams.kept_bytes)
        count(
            {
                "router_streams_taken_over_total": router_streams.taken_over_total,
                "router_streams_expired_total": router_streams.expired_total,
            }
        )
        metrics.background_responses.set(background.live_count)
        metrics.connection_bytes_held.set(kept.byte_count)
        metrics.detached_streams.set(detached.detached_count)
        metrics.detached_bytes_held.set(detached.kept_bytes)
        if store is None:
            return
        usage = store.usage()
        metrics.store_bytes_used.set(usage.bytes)
        metrics.store_objects.set(usage.objects)
        metrics.store_unwritten_bytes.set(usage.unwritten_bytes)
        count(
            {
                "store_evicted_total": usage.evicted_count,
                "store_refused_total": usage.refused_count,
                "store_write_failures_total": usage.failure_count,
            }
        )

    metrics.on_scrape(show)
