"""Routes and app of a server that generates images."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import msgspec
import trio

from trioserve.api import page as page_files
from trioserve.api.app import BaseApp
from trioserve.api.caller import AccessRules, ApiKeys
from trioserve.api.error_responses import Refusal, refusal
from trioserve.api.images import image_responses
from trioserve.api.images.handlers import EDITS_PATH, GENERATIONS_PATH, create_images, edit_images
from trioserve.api.images.image_context import EditSlots, EncodingThreads, ImageContext, ImageServices, UnsentImages
from trioserve.api.images.request_types import RANGES, REFUSED, ImageEditBody, ImageGenerationBody
from trioserve.api.openai.models import MODEL_PATH
from trioserve.api.openapi import openapi_document
from trioserve.api.operations import health, kv_events, live_requests, pausing
from trioserve.api.operations.kv_events import stream_load
from trioserve.api.operations.live_requests import abort_request, abort_requests
from trioserve.api.page import PAGE_PATH, UI_PATH, PageSettings, is_of_page, show_image_page
from trioserve.api.request_context import RoutersHeard
from trioserve.api.responder import TENANT_HEADER
from trioserve.api.route_table import GENERATES, Forwarding, Handler, Operation, RouteTable, find_operation
from trioserve.api.sse import encode
from trioserve.contracts.image_generation import PARTIAL_IMAGES_MAX
from trioserve.contracts.tracing import NO_TRACER, Tracer
from trioserve.http.exchange import ClockAndIds
from trioserve.vision.image_file import IMAGE_FORMATS

if TYPE_CHECKING:
    from trioserve.admission.file_decoders import ImageDecoder
    from trioserve.engine.image_engine import ImageEngine
    from trioserve.http.exchange import Exchange

__all__ = ["OPERATIONS", "ImageApp"]


async def list_image_models(context: ImageContext) -> None:
    models = [_model(context, name) for name in context.served_names]
    await context.respond_json(image_responses.ImageModels(data=models))


async def read_image_model(context: ImageContext) -> None:
    """Answer with the description of the model named in the path.

    Args:
        context: The request.

    Raises:
        UnknownModel: The model is not served.
    """
    await context.respond_json(_model(context, context.model_name(context.exchange.path.removeprefix(MODEL_PATH))))


def _model(context: ImageContext, name: str) -> image_responses.ImageModel:
    model, limits = context.engine.model, context.engine.limits
    return image_responses.ImageModel(
        id=name,
        created=model.created_at,
        owned_by="trioserve",
        root=model.source,
        parent=None,
        family=model.family,
        fingerprint=model.fingerprint,
        image=image_responses.ImageModelLimits(
            size=f"{model.width}x{model.height}",
            side_multiple=model.side_multiple,
            side_min=model.side_min,
            side_max=model.side_max,
            pixels_max=limits.pixels_max,
            steps=min(model.steps, limits.steps_max),
            steps_max=limits.steps_max,
            guidance=model.guidance,
            takes_guidance=model.takes_guidance,
            samplers=model.samplers,
            classes=model.classes,
            n_max=limits.n_max,
            takes_negative_prompt=model.takes_negative,
            takes_images=model.takes_images,
            partial_images_max=PARTIAL_IMAGES_MAX,
            output_formats=IMAGE_FORMATS,
        ),
    )


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
    requests = [
        image_responses.LiveImageRequest(
            id=view.id,
            state=view.state,
            phase=view.phase,
            priority=view.priority,
            age_seconds=round(view.age_seconds, 3),
            pictures=view.image_count,
            steps_done=view.steps_done,
            step_count=view.step_count,
        )
        for view in views
    ]
    await context.respond_json(image_responses.LiveImageRequests(data=requests))


async def read_image_openapi(context: ImageContext) -> None:
    """Answer with the OpenAPI 3.1 document of all routes.

    Args:
        context: The request.
    """
    await context.respond_bytes(_openapi_json(), "application/json")


@functools.cache
def _openapi_json() -> bytes:
    return encode(openapi_document(OPERATIONS))


def _of_images(
    operations: Iterable[Operation[Any]], method: str, path: str, handler: Handler[ImageContext]
) -> Operation[ImageContext]:
    """Return an operation that servers with a language model also have, but with the handler of an image server."""
    return msgspec.structs.replace(find_operation(operations, method, path), handler=handler)


NOT_SHARED = ("/reset_prefix_cache", "/flush_cache", "/kv_cache", health.STEPS_PATH)
"""Paths of an engine with a KV cache and steps of tokens, among those that every server has."""
LIST = find_operation(live_requests.OPERATIONS, "GET", "/v1/requests")
OPERATIONS: tuple[Operation[ImageContext], ...] = (
    Operation(
        method="POST",
        path=GENERATIONS_PATH,
        handler=create_images,
        summary="Generate images from a prompt",
        forwarding=Forwarding.BY_MODEL,
        description="Fields are OpenAI's, and sampler options under the names of diffusers. Fields that are not listed "
        "here are ignored.",
        body=ImageGenerationBody,
        ranges=RANGES,
        refused=REFUSED,
        response=image_responses.Images,
        named_events=(
            image_responses.GenerationProgress,
            image_responses.GenerationPartial,
            image_responses.GenerationCompleted,
        ),
        errors=GENERATES,
        takes_deadlines=True,
    ),
    Operation(
        method="POST",
        path=EDITS_PATH,
        handler=edit_images,
        summary="Edit an image, as a whole or inside a mask",
        forwarding=Forwarding.BY_MODEL,
        description='The form has the image as the part "image" and an optional mask as the part "mask". The image '
        "may change where the mask is transparent.",
        body=ImageEditBody,
        body_media="multipart/form-data",
        ranges=RANGES,
        refused=REFUSED,
        response=image_responses.Images,
        named_events=(image_responses.EditProgress, image_responses.EditPartial, image_responses.EditCompleted),
        errors=GENERATES,
        takes_deadlines=True,
    ),
    Operation(
        method="GET",
        path="/v1/models",
        handler=list_image_models,
        summary="List the served names, with options and limits of the model",
        response=image_responses.ImageModels,
    ),
    Operation(
        method="GET",
        path="/v1/models/{model}",
        handler=read_image_model,
        summary="Find a model by its name",
        id_has_slashes=True,
        response=image_responses.ImageModel,
        errors=(400, 404),
        path_parameter="name of the model, slashes included",
    ),
    Operation(
        method="GET",
        path="/v1/requests",
        handler=list_image_requests,
        summary=LIST.summary,
        is_polled=True,
        description=LIST.description,
        response=image_responses.LiveImageRequests,
    ),
    _of_images(live_requests.OPERATIONS, "POST", "/v1/requests/abort", abort_requests),
    _of_images(live_requests.OPERATIONS, "DELETE", "/v1/requests/{request}", abort_request),
    *(
        cast("Operation[ImageContext]", operation)
        for operation in (*pausing.OPERATIONS, *health.OPERATIONS)
        if operation.path not in NOT_SHARED
    ),
    _of_images(kv_events.OPERATIONS, "GET", "/kv_events", stream_load),
    _of_images(page_files.OPERATIONS, "GET", PAGE_PATH, show_image_page),
    find_operation(page_files.OPERATIONS, "GET", UI_PATH + "{file}"),
    Operation(
        method="GET",
        path="/openapi.json",
        handler=read_image_openapi,
        summary="Read this description",
        needs_key=False,
    ),
)
"""All operations of a server that generates images."""


class ImageApp(BaseApp[ImageContext]):
    """The request handler of a server that generates images.

    Args:
        engine: The image engine.
        decoder: Decodes images that clients send. The caller must close the decoder.
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
        edits: EditSlots | None = None,
        unsent: UnsentImages | None = None,
        threads: EncodingThreads | None = None,
        page: PageSettings | None = None,
        tracer: Tracer = NO_TRACER,
        logs_requests: bool = False,
    ) -> None:
        page = page or PageSettings()
        super().__init__(
            RouteTable([operation for operation in OPERATIONS if page.is_shown or not is_of_page(operation.path)]),
            ApiKeys(api_keys, admin_key=admin_api_key, rules=access),
            engine.metrics,
            tracer=tracer,
            logs_requests=logs_requests,
        )
        self._services = ImageServices(
            engine=engine,
            clock_and_ids=clock_and_ids or ClockAndIds(),
            rules=self._keys.rules,
            routers_heard=RoutersHeard(trio.current_time),
            tenant_header=tenant_header.lower(),
            threads=threads or EncodingThreads(),
            decoder=decoder,
            edits=edits or EditSlots(),
            unsent=unsent or UnsentImages(),
        )

    def not_found(self, path: str) -> Refusal:
        if not path.startswith(TEXT_PATHS):
            return super().not_found(path)
        return refusal(
            "makes_pictures",
            f"there is nothing at {path}: the model {self._services.engine.model.name} generates images, not text. "
            f"Send the prompt to {GENERATIONS_PATH}",
        )

    def new_context(self, exchange: Exchange) -> ImageContext:
        return ImageContext(exchange, self._services)

    def end_fields(self, context: ImageContext) -> dict[str, object]:
        if not context.streams:
            return {}
        return {
            "pictures": sum(len(stream.seeds) for stream in context.streams),
            "steps": sum(context.steps_done.values()),
        }
