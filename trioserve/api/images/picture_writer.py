"""What a response with pictures is made of, as bytes. Whatever holds a picture is written in a thread."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from trioserve.api.sse import encode, one_line_json
from trioserve.contracts.image_generation import ImageDelta, ImageModelDescription, Picture
from trioserve.vision.picture_file import PictureFormat, encoded_picture

__all__ = ["EventKind", "PictureWriter", "usage_of_pictures"]

EventKind = Literal["image_generation", "image_edit"]


class PictureWriter:
    """kind: begins the names of events. seeds: of each picture."""

    def __init__(
        self,
        model: ImageModelDescription,
        kind: EventKind,
        form: PictureFormat,
        *,
        created_at: int,
        seeds: Sequence[int],
    ) -> None:
        self._model = model
        self._kind = kind
        self._form = form
        self._created_at = created_at
        self._seeds = seeds

    def progress(self, delta: ImageDelta) -> bytes:
        """The event of a step that brought no picture. Short, and may be written anywhere."""
        name = f"{self._kind}.progress"
        return _event(name, one_line_json({"type": name, **self._progress(delta)}))

    def partial(self, delta: ImageDelta, partial_index: int) -> bytes:
        """The event with what a picture is so far. partial_index: of those of this picture."""
        return self._picture_event("partial_image", delta, {"partial_image_index": partial_index})

    def completed(self, delta: ImageDelta, *, given: Picture | None) -> bytes:
        """The event with a picture. given: the image that was changed."""
        assert delta.picture is not None
        usage = usage_of_pictures(self._model, [delta.picture], steps=delta.steps_done, given=given)
        return self._picture_event("completed", delta, {"usage": usage})

    def entry(self, delta: ImageDelta) -> bytes:
        """A picture as one of a whole response."""
        assert delta.picture is not None
        said = encode({"seed": self._seeds[delta.index], "revised_prompt": None})
        return b'{"b64_json":"%b",%b' % (self._file(delta.picture), said[1:])

    def whole(self, head: Mapping[str, Any], picture: Picture) -> tuple[bytes, bytes]:
        """What stands before and behind the entries of a whole response, all of them as large as this picture."""
        fields = {**head, **self._look(picture), "created": self._created_at}
        return encode(fields)[:-1] + b',"data":[', b"]}"

    def _picture_event(self, what: str, delta: ImageDelta, more: Mapping[str, Any]) -> bytes:
        assert delta.picture is not None
        name = f"{self._kind}.{what}"
        fields = {"type": name, **self._progress(delta), **self._look(delta.picture), **more}
        said = one_line_json(fields)
        return _event(name, b'%b,"b64_json":"%b"}' % (said[:-1], self._file(delta.picture)))

    def _progress(self, delta: ImageDelta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "steps_done": delta.steps_done,
            "step_count": delta.step_count,
            "seed": self._seeds[delta.index],
            "created_at": self._created_at,
        }

    def _look(self, picture: Picture) -> dict[str, Any]:
        return {
            "size": f"{picture.width}x{picture.height}",
            "output_format": self._form.kind,
            "quality": "auto",
            "background": "opaque",
        }

    def _file(self, picture: Picture) -> bytes:
        return base64.b64encode(encoded_picture(picture, self._form))


class _TokensDetails(msgspec.Struct, frozen=True):
    image_tokens: int
    text_tokens: int


class _Usage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: _TokensDetails
    steps: int


def usage_of_pictures(
    model: ImageModelDescription, pictures: list[Picture], *, steps: int, given: Picture | None
) -> _Usage:
    """In units of the work that a batch is made of. steps: of all of them. given: the image that was changed."""
    text_tokens = model.encode_work
    image_tokens = 0 if given is None else model.picture_work(given.width, given.height)
    output_tokens = sum(model.picture_work(picture.width, picture.height) for picture in pictures)
    return _Usage(
        input_tokens=text_tokens + image_tokens,
        output_tokens=output_tokens,
        total_tokens=text_tokens + image_tokens + output_tokens,
        input_tokens_details=_TokensDetails(image_tokens, text_tokens),
        steps=steps,
    )


def _event(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
