"""The form that asks for a changed picture, read: its texts as a body, its files as they were sent."""

from __future__ import annotations

from typing import Any

import msgspec

from trioserve.api.form import parsed_form
from trioserve.api.images.request_types import ImageEditBody
from trioserve.api.openai.request_types import wrong_field
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.image_generation import PROMPT_CHARACTERS_MAX

__all__ = ["EditForm", "parsed_edit"]

IMAGE, MASK = "image", "mask"
IMAGE_NAMES = (IMAGE, "image[]", "image[0]")  # as OpenAI's clients call one, and the first of a list
STREAM_OPTIONS = "stream_options["
TEXT_BYTES_MAX = 4 * PROMPT_CHARACTERS_MAX  # of a prompt in UTF-8


class EditForm(msgspec.Struct, frozen=True):
    """image, mask: files."""

    body: ImageEditBody
    image: bytes
    mask: bytes | None


def parsed_edit(raw: bytes, content_type: str | None) -> EditForm:
    """Raises InvalidRequest, naming the field."""
    form = parsed_form(raw, content_type, files=(*IMAGE_NAMES, MASK), field_bytes_max=TEXT_BYTES_MAX)
    several = [name for name in (*form.files, *form.texts) if name.startswith("image[")]
    images = [form.files[name] for name in IMAGE_NAMES if name in form.files]
    if len(images) > 1 or len(several) > 1:
        raise InvalidRequest("image came more than once, and one is changed at a time: send one", param=IMAGE)
    if not images or not images[0].content:
        raise InvalidRequest('the form has no image: send a PNG, JPEG or WebP file as the part "image"', param=IMAGE)
    mask = form.files.get(MASK)
    return EditForm(_body(form.texts), images[0].content, mask.content if mask and mask.content else None)


def _body(texts: dict[str, str]) -> ImageEditBody:
    """In a form every value is a text, and one that is empty was not filled in."""
    values: dict[str, Any] = {name: text for name, text in texts.items() if text}
    options = {
        name.removeprefix(STREAM_OPTIONS).rstrip("]"): values.pop(name)
        for name in list(values)
        if name.startswith(STREAM_OPTIONS)
    }
    if options:
        values["stream_options"] = options
    if "prompt" not in values:
        raise InvalidRequest("prompt is missing: say what the picture is to become", param="prompt")
    try:
        return msgspec.convert(values, ImageEditBody, strict=False)
    except msgspec.ValidationError as error:
        raise wrong_field(error) from error
