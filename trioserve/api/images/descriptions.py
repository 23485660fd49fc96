"""Descriptions of the operations of a server that generates images, for the OpenAPI document."""

from __future__ import annotations

import msgspec

from trioserve.api.described_operation import GENERATES, DescribedOperation
from trioserve.api.images import response_types
from trioserve.api.images.request_types import RANGES, REFUSED, ImageEditBody, ImageGenerationBody
from trioserve.api.openai.descriptions import OPERATIONS as OPENAI_OPERATIONS
from trioserve.api.page.descriptions import OPERATIONS as PAGE_OPERATIONS
from trioserve.api.page.files import PAGE_PATH, UI_PATH

__all__ = ["OPERATIONS"]

SHARED = (
    ("POST", "/v1/requests/abort"),
    ("DELETE", "/v1/requests/{request}"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("POST", "/pause_generation"),
    ("POST", "/continue_generation"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("GET", "/debug/tasks"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/load"),
    ("GET", "/kv_events"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
)
"""Operations that a server with a language model also has."""

OPERATIONS: dict[tuple[str, str], DescribedOperation] = {
    ("POST", "/v1/images/generations"): DescribedOperation(
        summary="Generate images from a prompt",
        description="Fields are OpenAI's, and sampler options under the names of diffusers. Fields that are not listed "
        "here are ignored.",
        body=ImageGenerationBody,
        ranges=RANGES,
        refused=REFUSED,
        response=response_types.Images,
        named_events=(
            response_types.GenerationProgress,
            response_types.GenerationPartial,
            response_types.GenerationCompleted,
        ),
        errors=GENERATES,
        takes_deadlines=True,
    ),
    ("POST", "/v1/images/edits"): DescribedOperation(
        summary="Edit an image, as a whole or inside a mask",
        description='The form has the image as the part "image" and an optional mask as the part "mask". The image '
        "may change where the mask is transparent.",
        body=ImageEditBody,
        body_media="multipart/form-data",
        ranges=RANGES,
        refused=REFUSED,
        response=response_types.Images,
        named_events=(response_types.EditProgress, response_types.EditPartial, response_types.EditCompleted),
        errors=GENERATES,
        takes_deadlines=True,
    ),
    ("GET", "/v1/models"): DescribedOperation(
        summary="List the served names, with options and limits of the model",
        response=response_types.ImageModels,
    ),
    ("GET", "/v1/models/{model}"): DescribedOperation(
        summary="Find a model by its name",
        response=response_types.ImageModel,
        errors=(400, 404),
        path_parameter="name of the model, slashes included",
    ),
    ("GET", "/v1/requests"): msgspec.structs.replace(
        OPENAI_OPERATIONS["GET", "/v1/requests"], response=response_types.LiveImageRequests
    ),
    **{key: OPENAI_OPERATIONS[key] for key in SHARED},
    **{key: PAGE_OPERATIONS[key] for key in (("GET", PAGE_PATH), ("GET", UI_PATH + "{file}"))},
}
