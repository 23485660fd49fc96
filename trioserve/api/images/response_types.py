"""Types of the responses of a server that generates images, and of the events of its streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from trioserve.api.response import Response
from trioserve.contracts.events import IterativePhase
from trioserve.vision.image_file import ImageKind


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

    b64_json: bytes
    seed: int
    revised_prompt: None


class Images(Response):
    id: str
    created: int
    model: str
    background: Literal["opaque"]
    output_format: ImageKind
    quality: Literal["auto"]
    size: str
    usage: ImageUsage
    data: list[ImageData]


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
    b64_json: bytes
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


class GenerationProgress(Progress, tag_field="type", tag="image_generation.progress"):
    """Event of a step."""


class GenerationPartial(Partial, tag_field="type", tag="image_generation.partial_image"):
    """Event with a partial image."""


class GenerationCompleted(Completed, tag_field="type", tag="image_generation.completed"):
    """Event with a complete image."""


class EditProgress(Progress, tag_field="type", tag="image_edit.progress"):
    """Event of a step."""


class EditPartial(Partial, tag_field="type", tag="image_edit.partial_image"):
    """Event with a partial image."""


class EditCompleted(Completed, tag_field="type", tag="image_edit.completed"):
    """Event with a complete image."""


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
    samplers: Sequence[str]
    classes: Sequence[str] | None
    n_max: int
    takes_negative_prompt: bool
    takes_images: bool
    partial_images_max: int
    output_formats: Sequence[str]


class ImageModel(Response, tag_field="object", tag="model"):
    id: str
    created: int
    owned_by: str
    root: str
    parent: None
    family: str
    fingerprint: str | None
    image: ImageModelTakes


class ImageModels(Response, tag_field="object", tag="list"):
    data: list[ImageModel]


class LiveImageRequest(Response, tag_field="object", tag="request"):
    """A request that has not ended.

    Attributes:
        state: "waiting", "running" or "finished".
        phase: Phase of the image that has advanced furthest.
        steps_done: Finished denoising steps of all images.
        step_count: Denoising steps of all images.
    """

    id: str
    state: str
    phase: IterativePhase
    priority: int
    age_seconds: float
    pictures: int
    steps_done: int
    step_count: int


class LiveImageRequests(Response, tag_field="object", tag="list"):
    data: list[LiveImageRequest]
