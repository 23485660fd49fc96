"""Routes and app of a server that generates images."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import trio

from trioserve.api.api_keys import ApiKeys
from trioserve.api.app import BaseApp, Route, find_templated
from trioserve.api.caller import AccessRules
from trioserve.api.error_responses import Refusal, refusal
from trioserve.api.images.descriptions import OPERATIONS
from trioserve.api.images.edit_places import EditPlaces
from trioserve.api.images.encoding_threads import EncodingThreads
from trioserve.api.images.handlers import EDITS_PATH, GENERATIONS_PATH, create_images, edit_images
from trioserve.api.images.image_context import ImageContext
from trioserve.api.images.image_models import list_image_models, read_image_model
from trioserve.api.images.unsent_images import UnsentImages
from trioserve.api.openai.models import MODEL_PATH
from trioserve.api.openapi import openapi_document
from trioserve.api.operations.debug import TASKS_PATH, read_tasks
from trioserve.api.operations.health import read_health, read_load, read_metrics, read_ready, read_version
from trioserve.api.operations.kv_events import stream_load
from trioserve.api.operations.live_requests import REQUEST_PATH, abort_request, abort_requests
from trioserve.api.operations.pausing import continue_generation, pause, pause_generation, read_is_paused, resume
from trioserve.api.operations.routers_heard import RoutersHeard
from trioserve.api.operations.sleeping import read_is_sleeping, sleep, wake_up
from trioserve.api.page.files import PAGE_PATH, UI_PATH, is_of_page, show_file, show_image_page
from trioserve.api.page.settings import PageSettings
from trioserve.api.responder import TENANT_HEADER
from trioserve.api.sse import encode
from trioserve.contracts.tracing import NO_TRACER, Tracer
from trioserve.http.clock_and_ids import ClockAndIds

if TYPE_CHECKING:
    from trioserve.admission.image_decoder import ImageDecoder
    from trioserve.engine.images.image_engine import ImageEngine
    from trioserve.http.exchange import Exchange

__all__ = ["IMAGE_ROUTES", "IMAGE_TEMPLATES", "ImageApp"]

TEXT_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/decisions",
    "/tokenize",
    "/detokenize",
    "/api/chat",
    "/api/generate",
)
"""Paths that only servers with a language model have."""


async def list_image_requests(context: ImageContext) -> None:
    views = context.engine.live_requests(owner=context.caller.lists)
    await context.respond_json(
        {
            "object": "list",
            "data": [
                {
                    "id": view.id,
                    "object": "request",
                    "state": view.state,
                    "phase": view.phase.value,
                    "priority": view.priority,
                    "age_seconds": round(view.age_seconds, 3),
                    "pictures": view.picture_count,
                    "steps_done": view.steps_done,
                    "step_count": view.step_count,
                }
                for view in views
            ],
        }
    )


async def read_image_openapi(context: ImageContext) -> None:
    """Answer with the OpenAPI 3.1 document of all routes.

    Args:
        context: The request.
    """
    await context.respond_bytes(_openapi_json(), "application/json")


@functools.cache
def _openapi_json() -> bytes:
    return encode(openapi_document([*IMAGE_ROUTES.values(), *IMAGE_TEMPLATES, MODEL, REQUEST], OPERATIONS))


IMAGE_ROUTES = {
    route.path: route
    for route in (
        Route[ImageContext](path=GENERATIONS_PATH, operations={"POST": create_images}),
        Route[ImageContext](path=EDITS_PATH, operations={"POST": edit_images}),
        Route[ImageContext](path="/v1/models", operations={"GET": list_image_models}),
        Route[ImageContext](path="/v1/requests", operations={"GET": list_image_requests}, is_polled=True),
        Route[ImageContext](path="/v1/requests/abort", operations={"POST": abort_requests}),
        Route[ImageContext](path="/pause", operations={"POST": pause}, is_operators=True),
        Route[ImageContext](path="/resume", operations={"POST": resume}, is_operators=True),
        Route[ImageContext](path="/is_paused", operations={"GET": read_is_paused}),
        Route[ImageContext](path="/pause_generation", operations={"POST": pause_generation}, is_operators=True),
        Route[ImageContext](path="/continue_generation", operations={"POST": continue_generation}, is_operators=True),
        Route[ImageContext](path="/sleep", operations={"POST": sleep}, is_operators=True),
        Route[ImageContext](path="/wake_up", operations={"POST": wake_up}, is_operators=True),
        Route[ImageContext](path="/is_sleeping", operations={"GET": read_is_sleeping}),
        Route[ImageContext](path=TASKS_PATH, operations={"GET": read_tasks}, is_operators=True),
        Route[ImageContext](path="/health", operations={"GET": read_health}, needs_key=False, is_polled=True),
        Route[ImageContext](path="/ready", operations={"GET": read_ready}, needs_key=False, is_polled=True),
        Route[ImageContext](path="/load", operations={"GET": read_load}, needs_key=False, is_polled=True),
        Route[ImageContext](path="/kv_events", operations={"GET": stream_load}, is_polled=True),
        Route[ImageContext](path="/version", operations={"GET": read_version}, needs_key=False, is_polled=True),
        Route[ImageContext](path="/metrics", operations={"GET": read_metrics}, needs_key=False, is_polled=True),
        Route[ImageContext](path="/openapi.json", operations={"GET": read_image_openapi}, needs_key=False),
        Route[ImageContext](path=PAGE_PATH, operations={"GET": show_image_page}, needs_key=False),
    )
}
REQUEST = Route[ImageContext](path=REQUEST_PATH + "{request}", operations={"DELETE": abort_request})
MODEL = Route[ImageContext](path=MODEL_PATH + "{model}", operations={"GET": read_image_model})
IMAGE_TEMPLATES: tuple[Route[ImageContext], ...] = (
    Route(path=UI_PATH + "{file}", operations={"GET": show_file}, needs_key=False),
)
"""Paths that contain an id, which is one segment."""


class ImageApp(BaseApp[ImageContext]):
    """The request handler of a server that generates images.

    Args:
        engine: The image engine.
        decoder: Decodes images that clients send. Its owner closes it.
        api_keys: See App.
        admin_api_key: See App.
        access: See App.
        tenant_header: See App.
        clock_and_ids: See App.
        edits: Limits the edits that run at a time.
        unsent: Limits the memory of images that clients have not received.
        threads: Threads that encode images.
        page: See App.
        tracer: See App.
        logs_requests: See App.
    """

    def __init__(
        self,
        engine: ImageEngine,
        decoder: ImageDecoder,
        *,
        api_keys: Iterable[str] = (),
        admin_api_key: str | None = None,
        access: AccessRules | None = None,
        tenant_header: str = TENANT_HEADER,
        clock_and_ids: ClockAndIds | None = None,
        edits: EditPlaces | None = None,
        unsent: UnsentImages | None = None,
        threads: EncodingThreads | None = None,
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
        self._tenant_header = tenant_header
        self._clock_and_ids = clock_and_ids or ClockAndIds()
        self._decoder = decoder
        self._edits = edits or EditPlaces()
        self._unsent = unsent or UnsentImages()
        self._threads = threads or EncodingThreads()
        self._routers_heard = RoutersHeard(trio.current_time)
        self._page = page or PageSettings()

    def route(self, path: str) -> Route[ImageContext] | None:
        if not self._page.is_shown and is_of_page(path):
            return None
        if path.startswith(MODEL_PATH) and len(path) > len(MODEL_PATH):
            return MODEL
        if path.startswith(REQUEST_PATH) and len(path) > len(REQUEST_PATH) and path not in IMAGE_ROUTES:
            return REQUEST
        return IMAGE_ROUTES.get(path) or find_templated(IMAGE_TEMPLATES, path)

    def paths(self) -> Iterable[str]:
        paths = [*IMAGE_ROUTES, *(route.path for route in IMAGE_TEMPLATES), MODEL.path, REQUEST.path]
        return [path for path in paths if self._page.is_shown or not is_of_page(path)]

    def not_found(self, path: str) -> Refusal:
        if not path.startswith(TEXT_PATHS):
            return super().not_found(path)
        return refusal(
            "makes_pictures",
            f"there is nothing at {path}: the model {self._engine.model.name} generates images, not text. Send the "
            f"prompt to {GENERATIONS_PATH}",
        )

    def new_context(self, exchange: Exchange) -> ImageContext:
        return ImageContext(
            exchange,
            self._engine,
            self._clock_and_ids,
            threads=self._threads,
            decoder=self._decoder,
            edits=self._edits,
            unsent=self._unsent,
            rules=self._keys.rules,
            routers_heard=self._routers_heard,
            tenant_header=self._tenant_header,
        )

    def end_fields(self, context: ImageContext) -> dict[str, object]:
        if not context.streams:
            return {}
        return {
            "pictures": sum(len(stream.seeds) for stream in context.streams),
            "steps": sum(context.steps_done.values()),
        }
