"""Routes of a server with an engine: a table from paths to handlers, and the app that serves it."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from trioserve.api.anthropic.messages import count_message_tokens, create_message
from trioserve.api.api_keys import ApiKeys
from trioserve.api.app import BaseApp, Operation, Route, find_templated
from trioserve.api.batches.batches import Batches
from trioserve.api.batches.handlers import BATCH_ENDPOINTS, cancel_batch, create_batch, list_batches, retrieve_batch
from trioserve.api.batches.message_batches import (
    cancel_message_batch,
    create_message_batch,
    delete_message_batch,
    list_message_batches,
    read_message_batch,
    read_message_results,
)
from trioserve.api.caller import AccessRules, Caller
from trioserve.api.decisions.decisions import create_decisions
from trioserve.api.embeddings.descriptions import RERANK_PATHS, SCORE_PATHS
from trioserve.api.embeddings.embeddings import create_embeddings
from trioserve.api.embeddings.scoring import rerank, score
from trioserve.api.error_responses import Refusal, refusal
from trioserve.api.files.files import create_file, delete_file, list_files, read_file_content, retrieve_file
from trioserve.api.generation import usage_of
from trioserve.api.lasting_metrics import show_lasting
from trioserve.api.limits import ROUTER_GRACE, BackgroundSettings, BatchSettings, DetachSettings
from trioserve.api.ollama.embeddings import embed, embed_one
from trioserve.api.ollama.generation import chat, generate
from trioserve.api.ollama.models import list_running, list_tags, read_api_version, show_model
from trioserve.api.openai.chat import create_chat_completion
from trioserve.api.openai.completions import create_completion
from trioserve.api.openai.models import MODEL_PATH, list_models, read_model
from trioserve.api.openai.tokenize import detokenize, read_tokenizer_info, tokenize
from trioserve.api.openapi import openapi_document
from trioserve.api.operations.adapters import load_adapter, unload_adapter
from trioserve.api.operations.debug import STEPS_PATH, TASKS_PATH, read_steps, read_tasks
from trioserve.api.operations.hand_over import HAND_OVER, HAND_OVER_PATH, hand_over_stream
from trioserve.api.operations.health import read_health, read_load, read_metrics, read_ready, read_version
from trioserve.api.operations.kv_events import stream_kv_events
from trioserve.api.operations.live_requests import REQUEST_PATH, abort_request, list_requests
from trioserve.api.operations.other_paths import other_path
from trioserve.api.operations.partial_aborts import abort_for_sglang, abort_for_vllm, abort_with_partials
from trioserve.api.operations.pausing import continue_generation, pause, pause_generation, read_is_paused, resume
from trioserve.api.operations.prefix_cache import flush_cache, reset_prefix_cache
from trioserve.api.operations.reasoning import control_request
from trioserve.api.operations.routers_heard import RoutersHeard
from trioserve.api.operations.sleeping import read_is_sleeping, sleep, wake_up
from trioserve.api.operations.weights import (
    destroy_weights_update_group,
    init_weights_update_group,
    read_weight_version,
    read_world_size,
    update_weights_from_disk,
    update_weights_from_distributed,
    update_weights_from_shared_memory,
)
from trioserve.api.page.files import PAGE_PATH, UI_PATH, is_of_page, show_file, show_page
from trioserve.api.page.page import EVENTS_PATH, Page
from trioserve.api.page.settings import PageSettings
from trioserve.api.request_context import RequestServices
from trioserve.api.responder import TENANT_HEADER
from trioserve.api.responses.background import BackgroundResponses
from trioserve.api.responses.response_run import count_input_tokens, create_response
from trioserve.api.responses.stored_responses import cancel_response, delete_response, list_input_items, read_response
from trioserve.api.server_context import ServerContext, ServerServices
from trioserve.api.sse import encode
from trioserve.api.streams.detached_streams import DetachedStreams, RouterStreams, StreamRequest
from trioserve.api.streams.handlers import delete_stream, end_kept_stream, read_kept_stream, read_stream
from trioserve.api.whole_response import ResponseBudget
from trioserve.contracts.request import PRIORITY_MAX
from trioserve.contracts.tracing import NO_TRACER, Tracer
from trioserve.http.clock_and_ids import ClockAndIds
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.fair_places import FairPlaces

if TYPE_CHECKING:
    from trioserve.engine.engine import Engine
    from trioserve.http.exchange import Exchange
    from trioserve.store.store import Store

__all__ = ["ROUTES", "TEMPLATES", "App"]

UPLOADS_MAX = 2  # forms that are parsed in threads at a time


async def stream_page_events(context: ServerContext) -> None:
    await context.server.page.stream(context)


async def read_openapi(context: ServerContext) -> None:
    await context.respond_bytes(_openapi_json(), "application/json")


@functools.cache
def _openapi_json() -> bytes:
    return encode(openapi_document([*ROUTES.values(), *TEMPLATES, MODEL, REQUEST, REQUEST_HAND_OVER]))


_WITHOUT_IDS: tuple[Route[ServerContext], ...] = (
    Route(path="/v1/chat/completions", operations={"POST": create_chat_completion}),
    Route(path="/v1/completions", operations={"POST": create_completion}),
    Route(path="/v1/messages", operations={"POST": create_message}),
    Route(path="/v1/messages/count_tokens", operations={"POST": count_message_tokens}),
    Route(path="/v1/decisions", operations={"POST": create_decisions}),
    Route(path="/v1/messages/batches", operations={"GET": list_message_batches, "POST": create_message_batch}),
    Route(path="/v1/embeddings", operations={"POST": create_embeddings}),
    *(Route[ServerContext](path=path, operations={"POST": rerank}) for path in RERANK_PATHS),
    *(Route[ServerContext](path=path, operations={"POST": score}) for path in SCORE_PATHS),
    Route(path="/v1/responses", operations={"POST": create_response}),
    Route(path="/v1/responses/input_tokens", operations={"POST": count_input_tokens}),
    Route(path="/v1/files", operations={"GET": list_files, "POST": create_file}),
    Route(path="/v1/batches", operations={"GET": list_batches, "POST": create_batch}),
    Route(path="/v1/models", operations={"GET": list_models}),
    Route(path="/v1/requests", operations={"GET": list_requests}, is_operators=True),
    Route(path=TASKS_PATH, operations={"GET": read_tasks}, is_operators=True),
    Route(path=STEPS_PATH, operations={"GET": read_steps}, is_operators=True),
    Route(path="/v1/load_lora_adapter", operations={"POST": load_adapter}, is_operators=True),
    Route(path="/v1/unload_lora_adapter", operations={"POST": unload_adapter}, is_operators=True),
    Route(path="/v1/requests/abort", operations={"POST": abort_with_partials}),
    Route(path="/abort_request", operations={"POST": abort_for_sglang}),
    Route(path="/abort_requests", operations={"POST": abort_for_vllm}),
    Route(path="/pause", operations={"POST": pause}, is_operators=True),
    Route(path="/resume", operations={"POST": resume}, is_operators=True),
    Route(path="/is_paused", operations={"GET": read_is_paused}),
    Route(path="/reset_prefix_cache", operations={"POST": reset_prefix_cache}, is_operators=True),
    Route(path="/flush_cache", operations={"POST": flush_cache}, is_operators=True),
    Route(path="/update_weights_from_disk", operations={"POST": update_weights_from_disk}, is_operators=True),
    Route(
        path="/update_weights_from_shared_memory",
        operations={"POST": update_weights_from_shared_memory},
        is_operators=True,
    ),
    Route(
        path="/update_weights_from_distributed",
        operations={"POST": update_weights_from_distributed},
        is_operators=True,
    ),
    Route(path="/init_weights_update_group", operations={"POST": init_weights_update_group}, is_operators=True),
    Route(path="/destroy_weights_update_group", operations={"POST": destroy_weights_update_group}, is_operators=True),
    Route(path="/get_weight_version", operations={"GET": read_weight_version}),
    Route(path="/weight_info", operations={"GET": read_weight_version}),
    Route(path="/get_world_size", operations={"GET": read_world_size}),
    Route(path="/sleep", operations={"POST": sleep}, is_operators=True),
    Route(path="/wake_up", operations={"POST": wake_up}, is_operators=True),
    Route(path="/is_sleeping", operations={"GET": read_is_sleeping}),
    Route(path="/pause_generation", operations={"POST": pause_generation}, is_operators=True),
    Route(path="/continue_generation", operations={"POST": continue_generation}, is_operators=True),
    Route(path="/kv_events", operations={"GET": stream_kv_events}, is_polled=True),
    Route(path="/tokenize", operations={"POST": tokenize}),
    Route(path="/detokenize", operations={"POST": detokenize}),
    Route(path="/tokenizer_info", operations={"GET": read_tokenizer_info}),
    Route(path="/health", operations={"GET": read_health}, needs_key=False, is_polled=True),
    Route(path="/ready", operations={"GET": read_ready}, needs_key=False, is_polled=True),
    Route(path="/load", operations={"GET": read_load}, needs_key=False, is_polled=True),
    Route(path="/version", operations={"GET": read_version}, needs_key=False, is_polled=True),
    Route(path="/metrics", operations={"GET": read_metrics}, needs_key=False, is_polled=True),
    Route(path="/openapi.json", operations={"GET": read_openapi}, needs_key=False),
    Route(path="/api/chat", operations={"POST": chat}),
    Route(path="/api/generate", operations={"POST": generate}),
    Route(path="/api/embed", operations={"POST": embed}),
    Route(path="/api/embeddings", operations={"POST": embed_one}),
    Route(path="/api/tags", operations={"GET": list_tags}),
    Route(path="/api/ps", operations={"GET": list_running}),
    Route(path="/api/show", operations={"POST": show_model}),
    Route(path="/api/version", operations={"GET": read_api_version}, needs_key=False, is_polled=True),
    Route(path=PAGE_PATH, operations={"GET": show_page}, needs_key=False),
    Route(path=EVENTS_PATH, operations={"GET": stream_page_events}, is_polled=True),
)
ROUTES = {route.path: route for route in _WITHOUT_IDS}
REQUEST = Route[ServerContext](
    path=REQUEST_PATH + "{request}", operations={"DELETE": abort_request, "POST": control_request}
)
REQUEST_HAND_OVER = Route[ServerContext](path=HAND_OVER_PATH, operations={"POST": hand_over_stream})
MODEL = Route[ServerContext](path=MODEL_PATH + "{model}", operations={"GET": read_model})
TEMPLATES: tuple[Route[ServerContext], ...] = (
    Route(path="/v1/responses/{response}", operations={"GET": read_response, "DELETE": delete_response}),
    Route(path="/v1/responses/{response}/cancel", operations={"POST": cancel_response}),
    Route(path="/v1/responses/{response}/input_items", operations={"GET": list_input_items}),
    Route(path="/v1/files/{file}", operations={"GET": retrieve_file, "DELETE": delete_file}),
    Route(path="/v1/files/{file}/content", operations={"GET": read_file_content}),
    Route(path="/v1/messages/batches/{batch}", operations={"GET": read_message_batch, "DELETE": delete_message_batch}),
    Route(path="/v1/messages/batches/{batch}/cancel", operations={"POST": cancel_message_batch}),
    Route(path="/v1/messages/batches/{batch}/results", operations={"GET": read_message_results}),
    Route(path="/v1/batches/{batch}", operations={"GET": retrieve_batch}),
    Route(path="/v1/batches/{batch}/cancel", operations={"POST": cancel_batch}),
    Route(path="/v1/streams/{stream}", operations={"GET": read_stream, "DELETE": delete_stream}),
    Route(path=UI_PATH + "{file}", operations={"GET": show_file}, needs_key=False),
    Route(path="/v1/kept_streams/{stream}", operations={"GET": read_kept_stream, "DELETE": end_kept_stream}),
)
"""Paths with an id. A segment in braces matches any text of one segment."""
IMAGES_PATH = "/v1/images/"
"""Prefix of the paths of a server that generates images."""
NOT_HERE = frozenset({"/v1/responses/compact"})
"""Paths of other servers that would match a template here with a word in place of an id."""


class App(BaseApp[ServerContext]):
    """Request handler of a server with an engine.

    Args:
        engine: computes the responses.
        api_keys: each of them opens the routes that need a key. Without keys, all routes are open.
        admin_api_key: a key that also sees the requests of all keys. Other keys see their own requests only.
        access: which fields callers may choose, and which further routes need a key.
        trust_request_chat_template: True: requests may bring their own chat template.
        tenant_header: name of the header that names a tenant. Tenants take turns in the queue. The header counts for
            all callers if there are no keys, and otherwise for callers that the operator trusts. Each other key is one
            tenant.
        clock_and_ids: the time of day, and new ids.
        store: keeps responses, files and batches. None: nothing is kept, and nothing runs in the background.
        background: bounds of background responses, which run inside `async with app.running()`.
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
        batches: BatchSettings | None = None,
        detaching: DetachSettings | None = None,
        router_grace: DetachSettings | None = None,
        page: PageSettings | None = None,
        tracer: Tracer = NO_TRACER,
        logs_requests: bool = False,
    ) -> None:
        super().__init__(
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
        self._services = RequestServices(
            engine=engine,
            clock_and_ids=clock_and_ids or ClockAndIds(),
            rules=rules,
            routers_heard=RoutersHeard(trio.current_time),
            tenant_header=tenant_header,
            trust_chat_template=trust_request_chat_template,
            store=store,
            responses=self.responses,
        )
        self.server = ServerServices(
            background=self.background,
            batches=self.batches,
            batch_endpoints=tuple(path for path in BATCH_ENDPOINTS if path in ROUTES),
            detached=self.detached,
            router_streams=self.router_streams,
            uploads=FairPlaces(UPLOADS_MAX, what="uploads"),
            page=self.page,
        )
        show_lasting(engine.metrics, store, self.background, self.detached, self.router_streams)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run all work that outlives a request. Leaving cancels it."""
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

    def operate(self, context: ServerContext, operation: Operation[ServerContext]) -> Awaitable[None]:
        # A stream that the client wants to leave takes precedence over one that its router wants to keep.
        for streams in (self.detached, self.router_streams):
            wish = streams.requested_stream(context)
            if wish is not None:
                return self._operate_in_stream(context, operation, streams, wish)
        return operation(context)

    async def _operate_in_stream(
        self, context: ServerContext, operation: Operation[ServerContext], streams: DetachedStreams, wish: StreamRequest
    ) -> None:
        def handle(inner: ServerContext) -> Awaitable[None]:
            return self.handle(inner, operation)

        if not await streams.serve(context, wish, self.new_context, handle):
            await operation(context)

    def route(self, path: str) -> Route[ServerContext] | None:
        if not self.page.settings.is_shown and is_of_page(path):
            return None
        if path.startswith(MODEL_PATH) and len(path) > len(MODEL_PATH):
            return MODEL
        if path.startswith(REQUEST_PATH) and len(path) > len(REQUEST_PATH) and path not in ROUTES:
            return REQUEST_HAND_OVER if path.endswith(HAND_OVER) else REQUEST
        return ROUTES.get(path) or (None if path in NOT_HERE else find_templated(TEMPLATES, path))

    def paths(self) -> Iterable[str]:
        paths = [*ROUTES, *(route.path for route in TEMPLATES), MODEL.path, REQUEST.path, REQUEST_HAND_OVER.path]
        return [path for path in paths if self.page.settings.is_shown or not is_of_page(path)]

    def not_found(self, path: str) -> Refusal:
        if not path.startswith(IMAGES_PATH):
            return other_path(path) or super().not_found(path)
        return refusal(
            "makes_texts",
            f"there is nothing at {path}: the model {self._engine.model.name} generates text and no images. "
            "Ask a server with an image model; see docs/guides/image-generation.md",
        )

    def new_context(self, exchange: Exchange) -> ServerContext:
        return ServerContext(exchange, self._services, self.server)

    async def _serve_as(self, exchange: Exchange, caller: Caller) -> None:
        """Serve a request that the server makes in a caller's name. It runs after all other requests."""
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
