"""Handles the images of a prompt: finds and reads their files, inserts text for them, and finds their tokens.

The text is that of the model's family (trioserve/vision/families). It has one token for each row of an image's
embeddings.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.media import ImageLimits, ImagePlan
from trioserve.vision.families.registry import ImageProcessing
from trioserve.vision.image_file import why_no_images
from trioserve.vision.image_header import read_header

__all__ = [
    "IMAGE_KINDS",
    "ImageReader",
    "ImageSource",
    "PromptImage",
    "ReadImage",
    "content_of",
    "image_count",
    "split_images",
]

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


_DIGEST_BYTES = 16


class ReadImage(msgspec.Struct, frozen=True):
    """An image whose header has been read and checked.

    Attributes:
        place: name of the image in error messages, such as messages[0].content[1].
        content: bytes of the file.
        digest: hash of the file, its plan and the model's image processing. Equal digests mean equal embeddings.
        plan: the tiles and the rows of the image.
    """

    place: str
    content: bytes
    digest: bytes
    plan: ImagePlan


class PromptImage(msgspec.Struct, frozen=True):
    """An image and the positions of its tokens in the prompt.

    Attributes:
        image: the image.
        runs: position of the first token and number of tokens of each run of image tokens.
    """

    image: ReadImage
    runs: tuple[tuple[int, int], ...]


class ImageReader:
    """Reads the images of prompts for one model, and locates them in the prompt. All methods are pure functions, so any
    thread may call them.

    Args:
        processing: how images are prepared for the model.
        limits: limits on the number and the size of images.
    """

    def __init__(self, processing: ImageProcessing, limits: ImageLimits) -> None:
        self.processing = processing
        self.limits = limits
        self._name = msgspec.json.encode(processing)

    def check_count(self, sources: Sequence[ImageSource]) -> None:
        """Raise an error if one prompt has too many images.

        Args:
            sources: the images.

        Raises:
            InvalidRequest: there are too many images.
        """
        images_max = self.limits.images_max
        if len(sources) > images_max:
            place = sources[images_max].place
            raise InvalidRequest(
                f"the messages contain {len(sources)} images, at most {images_max} are allowed in one prompt "
                "(--limit-mm-per-prompt): send fewer",
                param=place,
            )

    def read(self, sources: Sequence[ImageSource]) -> list[ReadImage]:
        """Read and check the headers of images. Does not decode the pixels.

        Args:
            sources: the images of one prompt.

        Raises:
            InvalidRequest: a source is not an image, or the image is too large.
        """
        # The reason is meant for operators and may name a path, so the client gets another message.
        if sources and why_no_images() is not None:
            raise InvalidRequest("this server cannot read images: Pillow is not installed", param=sources[0].place)
        read = []
        for source in sources:
            content = content_of(source, self.limits)
            header = read_header(content, self.limits, source.place)
            plan = self.processing.plan(*header.upright_size, len(sources))
            digest = blake2b(content, digest_size=_DIGEST_BYTES, key=blake2b(self._name, digest_size=32).digest())
            digest.update(msgspec.json.encode(plan))
            read.append(ReadImage(source.place, content, digest.digest(), plan))
        return read

    def expand_images(self, text: str, images: Sequence[ReadImage]) -> str:
        """Replace the sign of each image by the text that represents the image.

        Args:
            text: text that a chat template rendered, with one sign of the model's family for each image.
            images: the images, in the order of the text.

        Raises:
            InvalidRequest: the text has more or fewer signs than images.
        """
        sign = self.processing.sign
        pieces = text.split(sign)
        if len(pieces) != len(images) + 1:
            raise InvalidRequest(
                f"the prompt has {len(images)} images, but {sign} occurs {len(pieces) - 1} times. It marks the "
                "position of an image for the model: leave it out of the texts",
                param="messages",
            )
        whole = [pieces[0]]
        for image, piece in zip(images, pieces[1:], strict=True):
            whole += (self.processing.text(image.plan), piece)
        return "".join(whole)

    def locate_images(self, token_ids: Sequence[int], images: Sequence[ReadImage]) -> tuple[PromptImage, ...]:
        """Find the tokens of each image in the prompt.

        Args:
            token_ids: tokens of the text that `expand_images` returned.
            images: the images, in the order of the text.

        Raises:
            InvalidRequest: the runs of image tokens do not match the plans of the images.
        """
        image_token_id = self.processing.image_token_id
        positions = [position for position, token_id in enumerate(token_ids) if token_id == image_token_id]
        located, first = [], 0
        for image in images:
            runs: list[tuple[int, int]] = []
            for count in image.plan.runs:  # The runs of two images may be adjacent.
                own = positions[first : first + count]
                if len(own) == count and own[-1] - own[0] == count - 1:
                    runs.append((own[0], count))
                first += count
            located.append(PromptImage(image, tuple(runs)))
        if first != len(positions) or any(len(one.runs) != len(one.image.plan.runs) for one in located):
            raise InvalidRequest(
                f"the prompt has {len(positions)} tokens of images, but the images have {first}, or other tokens are "
                "between them: leave the model's special tokens out of the texts",
                param="messages",
            )
        return tuple(located)
