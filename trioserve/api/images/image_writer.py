"""Writes events and responses with images as bytes. Methods that encode an image are called in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from trioserve.api.images import response_types as types
from trioserve.api.images.response_types import ImageUsage
from trioserve.api.sse import encode
from trioserve.api.surface import event
from trioserve.contracts.image_generation import ImageDelta, ImageModelDescription, RGBImage
from trioserve.vision.image_file import ImageFormat, encoded_image

__all__ = ["EventKind", "ImageWriter"]

EventKind = Literal["image_generation", "image_edit"]
"""First part of the names of events."""

EVENTS: dict[EventKind, tuple[type[types.Progress], type[types.Partial], type[types.Completed]]] = {
    "image_generation": (
        types.GenerationProgress,
        types.GenerationPartial,
        types.GenerationCompleted,
    ),
    "image_edit": (types.EditProgress, types.EditPartial, types.EditCompleted),
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
        return encode(types.ImageData(b64_json=self._file(delta), seed=self._seeds[delta.index], revised_prompt=None))

    def around(self, response_id: str, model: str, *, steps: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the images of a whole response.

        Args:
            response_id: Id of the response.
            model: Served name of the model.
            steps: Denoising steps of all images.
        """
        usage = self._usage(len(self._seeds), steps=steps)
        whole = encode(
            types.Images(
                id=response_id, model=model, created=self._created_at, **self._image_fields(), usage=usage, data=[]
            )
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
            input_tokens_details=types.ImageTokensDetails(image_tokens=image_tokens, text_tokens=model.encode_work),
            steps=steps,
        )


def _event(value: types.Progress) -> bytes:
    return event(str(value.__struct_config__.tag), value)
