"""What responses with pictures look like, as types: for the API's description."""

from __future__ import annotations

from typing import Literal

from trioserve.api.openai.response_types import Response
from trioserve.vision.picture_file import PictureKind

__all__ = [
    "EditCompleted",
    "EditPartial",
    "EditProgress",
    "GenerationCompleted",
    "GenerationPartial",
    "GenerationProgress",
    "ImageModel",
    "ImageModels",
    "ImageUsage",
    "Images",
    "LiveImageRequests",
]


class ImageTokensDetails(Response):
    image_tokens: int
    text_tokens: int


class ImageUsage(Response):
    """Tokens are what a picture counts as in a batch, by its size, and not what it costs to make: that is this, times
    steps. text_tokens: what encoding a prompt counts as. steps: denoising steps of all pictures."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: ImageTokensDetails
    steps: int


class ImageData(Response):
    """b64_json: the file. seed: with it, and with everything else as it was, the same picture comes again."""

    b64_json: str
    seed: int
    revised_prompt: None = None


class Images(Response):
    id: str
    created: int
    model: str
    data: list[ImageData]
    background: Literal["opaque"]
    output_format: PictureKind
    quality: Literal["auto"]
    size: str
    usage: ImageUsage


class Progress(Response):
    """index: of the picture. created_at: when the response began, in seconds since 1970."""

    index: int
    steps_done: int
    step_count: int
    created_at: int
    seed: int


class PictureEvent(Progress):
    b64_json: str
    background: Literal["opaque"]
    output_format: PictureKind
    quality: Literal["auto"]
    size: str


class Partial(PictureEvent):
    """partial_image_index: counts those of one picture."""

    partial_image_index: int


class Completed(PictureEvent):
    """usage: of this picture."""

    usage: ImageUsage


class GenerationProgress(Progress):
    type: Literal["image_generation.progress"]


class GenerationPartial(Partial):
    type: Literal["image_generation.partial_image"]


class GenerationCompleted(Completed):
    type: Literal["image_generation.completed"]


class EditProgress(Progress):
    type: Literal["image_edit.progress"]


class EditPartial(Partial):
    type: Literal["image_edit.partial_image"]


class EditCompleted(Completed):
    type: Literal["image_edit.completed"]


class ImageModelTakes(Response):
    """What may be asked of the model. size, steps, guidance: what it does by itself. side_multiple: width and height
    are multiples of it. samplers: the first is what it does by itself. classes: names that a prompt may be; null: it
    is a text. pixels_max, steps_max, n_max: limits of this server."""

    size: str
    side_multiple: int
    side_min: int
    side_max: int
    pixels_max: int
    steps: int
    steps_max: int
    guidance: float
    takes_guidance: bool
    samplers: list[str]
    classes: list[str] | None
    n_max: int
    takes_negative_prompt: bool
    takes_images: bool
    partial_images_max: int
    output_formats: list[str]


class ImageModel(Response):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    family: str
    fingerprint: str | None
    image: ImageModelTakes


class ImageModels(Response):
    object: Literal["list"]
    data: list[ImageModel]


class LiveImageRequest(Response):
    """state: "waiting", "running" or "finished". phase: of the picture that has come furthest. steps_done of
    step_count denoising steps, of all its pictures together."""

    id: str
    object: Literal["request"]
    state: str
    phase: str
    priority: int
    age_seconds: float
    pictures: int
    steps_done: int
    step_count: int


class LiveImageRequests(Response):
    object: Literal["list"]
    data: list[LiveImageRequest]
