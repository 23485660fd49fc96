"""Types of the responses of a server that generates images, and their bytes. Responses may be streams of events.

Methods that encode an image are called in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from trioserve.api.response import Response
from trioserve.api.sse import encode
from trioserve.api.surface import event
from trioserve.contracts.events import IterativePhase
from trioserve.contracts.image_generation import ImageDelta, ImageModelDescription, RGBImage
from trioserve.vision.image_file import ImageFormat, ImageKind, encoded_image

__all__ = ["EventKind", "ImageWriter"]


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


class ImageModelLimits(Response):
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
    image: ImageModelLimits


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


EventKind = Literal["image_generation", "image_edit"]
"""First part of the names of events."""

EVENTS: dict[EventKind, tuple[type[Progress], type[Partial], type[Completed]]] = {
    "image_generation": (
        GenerationProgress,
        GenerationPartial,
        GenerationCompleted,
    ),
    "image_edit": (EditProgress, EditPartial, EditCompleted),
}


class ImageWriter:
    """Writes the events or the response of one request.

    Args:
        model: Description of the model.
        kind: First part of the names of events.
        image_format: File format of the images.
        created_at: Unix time in seconds at which the response began.
        seeds: Seed of each image.
        size: Width and height of each image in pixels.
        given: Image that is edited. None if the request has none.
    """

    def __init__(
        self,
        model: ImageModelDescription,
        kind: EventKind,
        image_format: ImageFormat,
        *,
        created_at: int,
        seeds: Sequence[int],
        size: tuple[int, int],
        given: RGBImage | None,
    ) -> None:
        self._model = model
        self._kind = kind
        self._image_format = image_format
        self._created_at = created_at
        self._seeds = seeds
        self._size = size
        self._given = given

    def progress(self, delta: ImageDelta) -> bytes:
        """Return the event of a step without an image. This method is fast, so it may run on the event loop.

        Args:
            delta: The step.
        """
        return _event(EVENTS[self._kind][0](**self._progress(delta)))

    def partial(self, delta: ImageDelta, partial_index: int) -> bytes:
        """Return the event with a partial image.

        Args:
            delta: The step.
            partial_index: Index among the partial images of this image.
        """
        kind = EVENTS[self._kind][1]
        return _event(kind(**self._image(delta), partial_image_index=partial_index))

    def completed(self, delta: ImageDelta) -> bytes:
        """Return the event with a complete image.

        Args:
            delta: The last step of the image.
        """
        kind = EVENTS[self._kind][2]
        return _event(kind(**self._image(delta), usage=self._usage(1, steps=delta.steps_done)))

    def entry(self, delta: ImageDelta) -> bytes:
        """Return the JSON object of an image in a whole response.

        Args:
            delta: The last step of the image.
        """
        return encode(ImageData(b64_json=self._file(delta), seed=self._seeds[delta.index], revised_prompt=None))

    def around(self, response_id: str, model: str, *, steps: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the images of a whole response.

        Args:
            model: Served name of the model.
            steps: Denoising steps of all images.
        """
        usage = self._usage(len(self._seeds), steps=steps)
        whole = encode(
            Images(id=response_id, model=model, created=self._created_at, **self._image_fields(), usage=usage, data=[])
        )
        return whole[:-2], whole[-2:]  # The list of images is the last field.

    def _progress(self, delta: ImageDelta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "steps_done": delta.steps_done,
            "step_count": delta.step_count,
            "seed": self._seeds[delta.index],
            "created_at": self._created_at,
        }

    def _image(self, delta: ImageDelta) -> dict[str, Any]:
        return {**self._progress(delta), **self._image_fields(), "b64_json": self._file(delta)}

    def _image_fields(self) -> dict[str, Any]:
        width, height = self._size
        return {
            "size": f"{width}x{height}",
            "output_format": self._image_format.kind,
            "quality": "auto",
            "background": "opaque",
        }

    def _file(self, delta: ImageDelta) -> bytes:
        assert delta.image is not None, f"the delta has no image (index {delta.index})"
        return encoded_image(delta.image, self._image_format)

    def _usage(self, image_count: int, *, steps: int) -> ImageUsage:
        """Return the usage. Tokens are the engine's units of work. See ImageUsage."""
        model, given = self._model, self._given
        image_tokens = 0 if given is None else model.image_work(given.width, given.height)
        input_tokens = model.encode_work + image_tokens
        output_tokens = image_count * model.image_work(*self._size)
        return ImageUsage(
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            total_tokens=input_tokens + output_tokens,
            input_tokens_details=ImageTokensDetails(image_tokens=image_tokens, text_tokens=model.encode_work),
            steps=steps,
        )


def _event(value: Progress) -> bytes:
    return event(str(value.__struct_config__.tag), value)
