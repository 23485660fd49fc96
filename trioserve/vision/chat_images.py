"""The images of a chat: where they stand in its messages, and their bytes as they were sent."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any, NamedTuple

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.images import ImageLimits

__all__ = ["IMAGE_KINDS", "ImageSource", "content_of", "image_count", "split_images"]

IMAGE_KINDS = ("image_url", "image")
_MARK = {"type": "image"}  # what chat templates look for; as chat_messages in text knows it


class ImageSource(NamedTuple):
    """place: such as messages[0].content[1]. sent: a URL, or the file's bytes."""

    place: str
    sent: str | bytes

    @property
    def is_elsewhere(self) -> bool:
        """Whether it has to be fetched first."""
        return isinstance(self.sent, str) and self.sent[:5].lower() != "data:"


def image_count(messages: Sequence[object]) -> int:
    """How many parts of the messages are images, whatever is in them."""
    return sum(
        isinstance(part, dict) and part.get("type") in IMAGE_KINDS
        for message in messages
        if isinstance(message, dict) and isinstance(content := message.get("content"), list)
        for part in content
    )


def split_images(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[ImageSource]]:
    """The messages with a mark in the place of each image, and the images in their order. Never long. Raises
    InvalidRequest, naming the place, for a part that says it is one and is not."""
    sources: list[ImageSource] = []
    marked: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and image_count([message]):
            parts = []
            for part_index, part in enumerate(content):
                if isinstance(part, dict) and part.get("type") in IMAGE_KINDS:
                    sources.append(_source(part, f"messages[{index}].content[{part_index}]"))
                    parts.append(_MARK)
                else:
                    parts.append(part)
            message = {**message, "content": parts}
        marked.append(message)
    return marked, sources


def content_of(source: ImageSource, limits: ImageLimits) -> bytes:
    """The file's bytes. Some milliseconds for a large one. Raises InvalidRequest."""
    place, sent = source
    if isinstance(sent, bytes):
        return sent
    if source.is_elsewhere:
        raise InvalidRequest(
            f"{place} is at {sent[:100]!r}, and nothing is fetched here: send data:image/png;base64,...", param=place
        )
    head, comma, body = sent.partition(",")
    kind, *parameters = head.removeprefix("data:").lower().split(";")
    if not comma or not kind.startswith("image/") or "base64" not in parameters:
        raise InvalidRequest(
            f"{place} begins with {sent[:40]!r}; an image is sent as data:image/png;base64,...", param=place
        )
    if len(body) * 3 // 4 > limits.image_bytes_max + 2:
        raise InvalidRequest(
            f"{place} has about {len(body) * 3 // 4} bytes, an image may have {limits.image_bytes_max}: send a smaller "
            "one",
            param=place,
        )
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{place} is no base64 ({error})", param=place) from error


def _source(part: dict[str, Any], place: str) -> ImageSource:
    if part["type"] == "image":
        sent = part.get("image")
        if not isinstance(sent, bytes):
            raise InvalidRequest(f"{place}.image must be the bytes of a file", param=place)
        return ImageSource(place, sent)
    url = part.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    if not isinstance(url, str):
        raise InvalidRequest(f'{place} has no image_url: send {{"url": "data:image/png;base64,..."}}', param=place)
    return ImageSource(place, url)
