"""Handles the images and sounds of a prompt: finds and reads their files, inserts text for them, and finds their
tokens.

The text is that of the model's family (trioserve/vision/families, SoundProcessing). It has one token for each row of
the embeddings of an image or sound.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.media import AudioLimits, ImageLimits, ImagePlan, SoundPlan, SoundProcessing
from trioserve.vision.families.registry import ImageProcessing
from trioserve.vision.image_file import why_no_images
from trioserve.vision.image_header import read_header

__all__ = [
    "ImageReader",
    "ImageSource",
    "MediaReader",
    "PromptImage",
    "ReadImage",
    "SoundReader",
    "content_of",
    "media_count",
    "split_media",
]

# Chat templates look for these content parts, and trioserve.text.chat_messages must accept them.
_IMAGE_MARK, _SOUND_MARK = {"type": "image"}, {"type": "audio"}
_MARKS = {"image_url": _IMAGE_MARK, "image": _IMAGE_MARK, "input_audio": _SOUND_MARK, "audio": _SOUND_MARK}


class ImageSource(NamedTuple):
    """An image or a sound as the client sent it.

    Attributes:
        place: name of the image in error messages, such as messages[0].content[1].
        sent: the URL that the client sent, the base64 of a sound, or the bytes of the file.
        is_sound: True for a sound.
    """

    place: str
    sent: str | bytes
    is_sound: bool = False

    @property
    def is_elsewhere(self) -> bool:
        """True if the image must be fetched from a URL."""
        return isinstance(self.sent, str) and not self.is_sound and self.sent[:5].lower() != "data:"


def media_count(messages: Sequence[object]) -> int:
    """Count the content parts of messages that are images or sounds. Does not validate them.

    Args:
        messages: messages from a client, not validated yet.
    """
    return sum(
        _mark_of(part) is not None
        for message in messages
        if isinstance(message, dict) and isinstance(content := message.get("content"), list)
        for part in content
    )


def _mark_of(part: object) -> dict[str, str] | None:
    kind = part.get("type") if isinstance(part, dict) else None
    return _MARKS.get(kind) if isinstance(kind, str) else None


def split_media(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[ImageSource]]:
    """Separate the images and sounds from messages. This is fast, since it decodes no base64.

    Args:
        messages: messages of a chat.

    Returns:
        The messages with a marker instead of each image or sound, and these in the order of the markers.

    Raises:
        InvalidRequest: a part of a message has the type of an image or a sound, but contains none.
    """
    sources: list[ImageSource] = []
    marked: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and media_count([message]):
            parts = []
            for part_index, part in enumerate(content):
                if (mark := _mark_of(part)) is not None:
                    sources.append(_source(part, f"messages[{index}].content[{part_index}]"))
                parts.append(part if mark is None else mark)
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
    place, sent, _ = source
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
    return _decoded(body, place, limits.image_bytes_max, "an image")


def _decoded(body: str, place: str, bytes_max: int, what: str) -> bytes:
    if len(body) * 3 // 4 > bytes_max + 2:
        raise InvalidRequest(
            f"{place} has about {len(body) * 3 // 4} bytes, {what} may have {bytes_max}: send a smaller one",
            param=place,
        )
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{place} is not valid base64 ({error})", param=place) from error


def _source(part: dict[str, Any], place: str) -> ImageSource:
    if part["type"] == "audio":
        sound = part.get("audio")
        if not isinstance(sound, bytes):
            raise InvalidRequest(f"{place}.audio must be the bytes of a file", param=place)
        return ImageSource(place, sound, is_sound=True)
    if part["type"] == "input_audio":
        given = part.get("input_audio")
        sound = given.get("data") if isinstance(given, dict) else None
        if not isinstance(sound, str):
            raise InvalidRequest(
                f'{place} has no input_audio.data: send {{"data": "(base64 of the file)", "format": "wav"}}',
                param=place,
            )
        return ImageSource(place, sound, is_sound=True)
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
    """An image whose header has been read and checked, or a sound whose length is known.

    Attributes:
        place: name of the image or sound in error messages, such as messages[0].content[1].
        content: bytes of the file.
        digest: hash of the file, its plan and the model's processing. Equal digests mean equal embeddings.
        plan: the tiles or windows, and the rows.
    """

    place: str
    content: bytes
    digest: bytes
    plan: ImagePlan | SoundPlan


class PromptImage(msgspec.Struct, frozen=True):
    """An image or a sound, and the positions of its tokens in the prompt.

    Attributes:
        image: the image or sound.
        runs: position of the first token and number of tokens of each run of its tokens.
    """

    image: ReadImage
    runs: tuple[tuple[int, int], ...]


class MediaReader:
    """Locates the images or sounds of prompts. All methods are pure functions, so any thread may call them.

    Args:
        processing: how images or sounds are prepared for the model.
        token_id: placeholder token of their rows.
        count_max: largest number in one prompt.
    """

    _what: str  # Name of several in errors.

    def __init__(self, processing: ImageProcessing | SoundProcessing, token_id: int, count_max: int) -> None:
        self._processing = processing
        self._token_id = token_id
        self._count_max = count_max
        self._key = blake2b(msgspec.json.encode(processing), digest_size=32).digest()

    def check_count(self, sources: Sequence[ImageSource]) -> None:
        """Raise an error if one prompt has too many images or sounds.

        Args:
            sources: the images or sounds.

        Raises:
            InvalidRequest: there are too many.
        """
        if len(sources) > self._count_max:
            place = sources[self._count_max].place
            raise InvalidRequest(
                f"the messages contain {len(sources)} {self._what}, at most {self._count_max} are allowed in one "
                "prompt (--limit-mm-per-prompt): send fewer",
                param=place,
            )

    def _named(self, place: str, content: bytes, plan: ImagePlan | SoundPlan) -> ReadImage:
        digest = blake2b(content, digest_size=_DIGEST_BYTES, key=self._key)
        digest.update(msgspec.json.encode(plan))
        return ReadImage(place, content, digest.digest(), plan)

    def expand(self, text: str, images: Sequence[ReadImage]) -> str:
        """Replace the sign of each image or sound by the text that represents it.

        Args:
            text: text that a chat template rendered, with one sign of the model's family for each image or sound.
            images: the images or sounds, in the order of the text.

        Raises:
            InvalidRequest: the text has more or fewer signs than images or sounds.
        """
        sign = self._processing.sign
        pieces = text.split(sign)
        if len(pieces) != len(images) + 1:
            raise InvalidRequest(
                f"the prompt has {len(images)} {self._what}, but {sign} occurs {len(pieces) - 1} times. It marks their "
                "positions for the model: leave it out of the texts",
                param="messages",
            )
        whole = [pieces[0]]
        for image, piece in zip(images, pieces[1:], strict=True):
            whole += (self._processing.text(image.plan), piece)  # type: ignore[arg-type]  # it made the plan
        return "".join(whole)

    def locate(self, token_ids: Sequence[int], images: Sequence[ReadImage]) -> tuple[PromptImage, ...]:
        """Find the tokens of each image or sound in the prompt.

        Args:
            token_ids: tokens of the text that `expand` returned.
            images: the images or sounds, in the order of the text.

        Raises:
            InvalidRequest: the runs of tokens do not match the plans.
        """
        positions = [position for position, token_id in enumerate(token_ids) if token_id == self._token_id]
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
                f"the prompt has {len(positions)} tokens of {self._what}, but the {self._what} have {first}, or other "
                "tokens are between them: leave the model's special tokens out of the texts",
                param="messages",
            )
        return tuple(located)


class SoundReader(MediaReader):
    """Reads the sounds of prompts for one model.

    Args:
        processing: how the model hears sounds.
        limits: limits on the number and the size of sounds.
    """

    _what = "sounds"

    def __init__(self, processing: SoundProcessing, limits: AudioLimits) -> None:
        super().__init__(processing, processing.audio_token_id, limits.sounds_max)
        self.processing = processing
        self._limits = limits

    def content_of(self, source: ImageSource) -> bytes:
        """Return the bytes of a sound's file.

        Args:
            source: the sound.

        Raises:
            InvalidRequest: the sound is not valid base64, or too large.
        """
        place, sent, _ = source
        return sent if isinstance(sent, bytes) else _decoded(sent, place, self._limits.audio_bytes_max, "a sound")

    def read(self, place: str, content: bytes, seconds: float) -> ReadImage:
        """Plan a sound.

        Args:
            place: name of the sound in error messages.
            content: bytes of the file.
            seconds: length of the sound.

        Raises:
            InvalidRequest: the sound is too long for the model.
        """
        return self._named(place, content, self.processing.plan(seconds, place))


class ImageReader(MediaReader):
    """Reads the images of prompts for one model.

    Args:
        processing: how images are prepared for the model.
        limits: limits on the number and the size of images.
    """

    _what = "images"

    def __init__(self, processing: ImageProcessing, limits: ImageLimits) -> None:
        super().__init__(processing, processing.image_token_id, limits.images_max)
        self.processing = processing
        self.limits = limits

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
            read.append(self._named(source.place, content, plan))
        return read
