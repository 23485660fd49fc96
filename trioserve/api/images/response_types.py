"""Types of the responses of a server that generates images, for the OpenAPI document."""

from __future__ import annotations

from typing import Literal

from trioserve.api.openai.response_types import Response
from trioserve.vision.image_file import ImageKind

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
    """Usage of a request.

    `output_tokens` measures the size of the images, in the unit in which the server limits a batch. The cost of
    generating the images is this number times the steps.

    Attributes:
        input_tokens_details: image_tokens is the size of the edited image, text_tokens the size of the prompt.
        steps: Denoising steps of all images.
    """

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: ImageTokensDetails
    steps: int


class ImageData(Response):
    """One image.

    Attributes:
        b64_json: The image file as base64.
        seed: With this seed and otherwise the same request, the same image is generated again.
    """

    b64_json: str
    seed: int
    revised_prompt: None = None


class Images(Response):
    id: str
    created: int
    model: str
    data: list[ImageData]
    background: Literal["opaque"]
    output_format: ImageKind
    quality: Literal["auto"]
    size: str
    usage: ImageUsage


class Progress(Response):
    """Progress of one image.

    Attributes:
        index: Index of the image.
        created_at: Unix time in seconds at which the response began.
    """

    index: int
    steps_done: int
    step_count: int
    created_at: int
    seed: int


class ImageEvent(Progress):
    b64_json: str
    background: Literal["opaque"]
    output_format: ImageKind
    quality: Literal["auto"]
    size: str


class Partial(ImageEvent):
    """A partial image. `partial_image_index` counts the partial images of one image."""

    partial_image_index: int


class Completed(ImageEvent):
    """A complete image. `usage` is that of this image."""

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
    """Options and limits of the model.

    Attributes:
        size: Default size.
        side_multiple: Width and height must be multiples of this number.
        pixels_max: Limit of this server.
        steps: Default number of steps.
        steps_max: Limit of this server.
        guidance: Default guidance.
        samplers: Samplers. The first is the default.
        classes: Allowed prompts. Null: any text is allowed.
        n_max: Limit of this server.
    """

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
    """A request that has not ended.

    Attributes:
        state: "waiting", "running" or "finished".
        phase: Phase of the image that has advanced furthest.
        steps_done: Finished denoising steps of all images.
        step_count: Denoising steps of all images.
    """

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
