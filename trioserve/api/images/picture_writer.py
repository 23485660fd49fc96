"""What a response with pictures is made of, as bytes. Whatever holds a picture is written in a thread."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from trioserve.api.sse import encode, one_line_json
from trioserve.contracts.image_generation import ImageDelta, ImageModelDescription, Picture
from trioserve.vision.picture_file import PictureFormat, encoded_picture

__all__ = ["EventKind", "PictureWriter"]

EventKind = Literal["image_generation", "image_edit"]


class PictureWriter:
    """kind: begins the names of events. seeds: of each picture. size: width and height of each. given: the image that
    is changed."""

    def __init__(
        self,
        model: ImageModelDescription,
        kind: EventKind,
        form: PictureFormat,
        *,
        created_at: int,
        seeds: Sequence[int],
        size: tuple[int, int],
        given: Picture | None,
    ) -> None:
        self._model = model
        self._kind = kind
        self._form = form
        self._created_at = created_at
        self._seeds = seeds
        self._size = size
        self._given = given

    def progress(self, delta: ImageDelta) -> bytes:
        """The event of a step that brought no picture. Short, and may be written anywhere."""
        name = f"{self._kind}.progress"
        return _event(name, one_line_json({"type": name, **self._progress(delta)}))

    def partial(self, delta: ImageDelta, partial_index: int) -> bytes:
        """The event with what a picture is so far. partial_index: of those of this picture."""
        return self._picture_event("partial_image", delta, {"partial_image_index": partial_index})

    def completed(self, delta: ImageDelta) -> bytes:
        """The event with a picture."""
        return self._picture_event("completed", delta, {"usage": self._usage(1, steps=delta.steps_done)})

    def entry(self, delta: ImageDelta) -> bytes:
        """A picture as one of a whole response."""
        said = encode({"seed": self._seeds[delta.index], "revised_prompt": None})
        return b'{"b64_json":"%b",%b' % (self._file(delta), said[1:])

    def around(self, head: Mapping[str, Any], *, steps: int) -> tuple[bytes, bytes]:
        """What stands before and behind the entries of a whole response. head: fields that it has besides. steps: of
        all pictures together."""
        usage = self._usage(len(self._seeds), steps=steps)
        fields = {**head, "created": self._created_at, **self._look(), "usage": usage}
        return encode(fields)[:-1] + b',"data":[', b"]}"

    def _picture_event(self, what: str, delta: ImageDelta, more: Mapping[str, Any]) -> bytes:
        name = f"{self._kind}.{what}"
        said = one_line_json({"type": name, **self._progress(delta), **self._look(), **more})
        return _event(name, b'%b,"b64_json":"%b"}' % (said[:-1], self._file(delta)))

    def _progress(self, delta: ImageDelta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "steps_done": delta.steps_done,
            "step_count": delta.step_count,
            "seed": self._seeds[delta.index],
            "created_at": self._created_at,
        }

    def _look(self) -> dict[str, Any]:
        width, height = self._size
        return {
            "size": f"{width}x{height}",
            "output_format": self._form.kind,
            "quality": "auto",
            "background": "opaque",
        }

    def _file(self, delta: ImageDelta) -> bytes:
        assert delta.picture is not None, f"picture {delta.index} is to be written, and is not there"
        return base64.b64encode(encoded_picture(delta.picture, self._form))

    def _usage(self, picture_count: int, *, steps: int) -> dict[str, Any]:
        """In units of the work that a batch is made of."""
        model, given = self._model, self._given
        image_tokens = 0 if given is None else model.picture_work(given.width, given.height)
        input_tokens = model.encode_work + image_tokens
        output_tokens = picture_count * model.picture_work(*self._size)
        return {
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
            "total_tokens": input_tokens + output_tokens,
            "input_tokens_details": {"image_tokens": image_tokens, "text_tokens": model.encode_work},
            "steps": steps,
        }


def _event(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
