"""Finds the images in chat messages, and reads image bytes from data URLs."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any, NamedTuple

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.images import ImageLimits

__all__ = ["IMAGE_KINDS", "ImageSource", "content_of", "image_count", "split_images"]

IMAGE_KINDS = ("image_url", "image")
# Chat templates look for this content part, and trioserve.text.chat_messages must accept this part.
_MARK = {"type": "image"}


class ImageSource(NamedTuple):
    """An image as the client sent it.

    Attributes:
        place: name of the image in error messages, such as messages[0].content[1].
        sent: the URL that the client sent, or the bytes of the file.
    """

    place: str
    sent: str | bytes

    @property
    def is_elsewhere(self) -> bool:
        """True if the image must be fetched from a URL."""
        return isinstance(self.sent, str) and self.sent[:5].lower() != "data:"


def image_count(messages: Sequence[object]) -> int:
    """Count the content parts of messages that are images. Does not validate the images.

    Args:
        messages: messages from a client, not validated yet.
    """
    return sum(
        isinstance(part, dict) and part.get("type") in IMAGE_KINDS
        for message in messages
        if isinstance(message, dict) and isinstance(content := message.get("content"), list)
        for part in content
    )


def split_images(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[ImageSource]]:
    """Separate the images from messages. This is fast, since it decodes no base64.

    Args:
        messages: messages of a chat.

    Returns:
        The messages with a marker instead of each image, and the images in the order of the markers.

    Raises:
        InvalidRequest: a part of a message has the type of an image, but contains no image.
    """
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
    """Return the bytes of an image file. This takes some milliseconds for a large image.

    Args:
        source: the image.
        limits: limits on the size of the file.

    Raises:
        InvalidRequest: the source is neither bytes nor a base64 data URL, or the file is too large.
    """
    place, sent = source
    if isinstance(sent, bytes):
        return sent
    if source.is_elsewhere:
        raise InvalidRequest(
            f"{place} is at {sent[:100]!r}, but this server fetches no URLs: send data:image/png;base64,...",
            param=place,
        )
    head, comma, body = sent.partition(",")
    kind, *parameters = head.removeprefix("data:").lower().split(";")
    if not comma or not kind.startswith("image/") or "base64" not in parameters:
        raise InvalidRequest(
            f"{place} begins with {sent[:40]!r}: send an image as data:image/png;base64,...", param=place
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
        raise InvalidRequest(f"{place} is not valid base64 ({error})", param=place) from error


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
