"""Reads the form that edits an image: text fields become a body, and files stay as they were sent."""

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
IMAGE_NAMES = (IMAGE, "image[]", "image[0]")  # OpenAI's clients use all three names for a single image
STREAM_OPTIONS = "stream_options["
TEXT_BYTES_MAX = 4 * PROMPT_CHARACTERS_MAX  # the longest prompt, in UTF-8


class EditForm(msgspec.Struct, frozen=True):
    """A form that edits an image.

    Attributes:
        body: The text fields.
        image: Image file.
        mask: Mask file. None if the form has none.
    """

    body: ImageEditBody
    image: bytes
    mask: bytes | None


def parsed_edit(raw: bytes, content_type: str | None) -> EditForm:
    """Parse a form.

    Args:
        raw: Body of the request.
        content_type: Header Content-Type, which has the boundary of the form.

    Raises:
        InvalidRequest: The form is invalid. The error names the field.
    """
    form = parsed_form(raw, content_type, files=(*IMAGE_NAMES, MASK), field_bytes_max=TEXT_BYTES_MAX)
    several = [name for name in (*form.files, *form.texts) if name.startswith("image[")]
    images = [form.files[name] for name in IMAGE_NAMES if name in form.files]
    if len(images) > 1 or len(several) > 1:
        raise InvalidRequest("the form has more than one image: send one", param=IMAGE)
    if not images or not images[0].content:
        raise InvalidRequest('the form has no image: send a PNG, JPEG or WebP file as the part "image"', param=IMAGE)
    mask = form.files.get(MASK)
    return EditForm(_body(form.texts), images[0].content, mask.content if mask and mask.content else None)


def _body(texts: dict[str, str]) -> ImageEditBody:
    """Return the body for the text fields. All values are strings. An empty string means "not given"."""
    values: dict[str, Any] = {name: text for name, text in texts.items() if text}
    options = {
        name.removeprefix(STREAM_OPTIONS).rstrip("]"): values.pop(name)
        for name in list(values)
        if name.startswith(STREAM_OPTIONS)
    }
    if options:
        values["stream_options"] = options
    if "prompt" not in values:
        raise InvalidRequest("prompt is missing: describe the image that you want", param="prompt")
    try:
        return msgspec.convert(values, ImageEditBody, strict=False)
    except msgspec.ValidationError as error:
        raise wrong_field(error) from error
