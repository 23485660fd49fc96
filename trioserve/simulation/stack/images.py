"""Prompts with images in a simulation of the stack: the client's request, and the model's input."""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Collection
from typing import Any

from trioserve.contracts.given_rows import GivenRows
from trioserve.contracts.images import ImageLimits
from trioserve.contracts.prompt import ChatPrompt, Prompt
from trioserve.simulation.stack.plan import Client
from trioserve.testing.byte_tokenizer import byte_tokenizer
from trioserve.testing.fake_image_encoder import FAKE_IMAGES, rows_of
from trioserve.text.tokenizer import Tokenizer
from trioserve.vision.chat_images import ImageSource
from trioserve.vision.image_prompt import IMAGE_SIGN, ImageReader
from trioserve.vision.tiles import tiles_of

__all__ = ["bytes_of", "encoded_prompt", "image_tokenizer", "prompt_of"]

TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
SIGNS = (
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)
HEIGHTS = (8, 16, 8, 16)  # of the images, which are 16 pixels wide
TILES = (3, 5, 3, 5)  # tiles of each image


def prompt_of(client: Client) -> Prompt:
    """Return the prompt that a client sends.

    Args:
        client: the client.
    """
    if not client.images:
        return list(client.prompt)
    parts: list[dict[str, Any]] = [{"type": "image", "image": _image(number)} for number in client.images]
    return ChatPrompt(messages=[{"role": "user", "content": [*parts, {"type": "text", "text": _text(client.prompt)}]}])


def encoded_prompt(client: Client) -> tuple[tuple[int, ...], tuple[GivenRows, ...]]:
    """Return the model's input: the tokens, and the image rows, whose digests do not matter here.

    Args:
        client: the client.
    """
    return _encoded(client.prompt, client.images) if client.images else (client.prompt, ())


def bytes_of(pictures: Collection[int]) -> int:
    """Return the size of the encoder outputs of images.

    Args:
        pictures: numbers of the images.
    """
    return sum(TILES[picture] for picture in pictures) * FAKE_IMAGES.tile_bytes


@functools.cache
def image_tokenizer() -> Tokenizer:
    """Return a tokenizer in which each sign around tiles is one token, so that prompts are short."""
    return byte_tokenizer(TEMPLATE, has_images=True, signs=SIGNS)


@functools.lru_cache(maxsize=1024)
def _encoded(prompt: tuple[int, ...], pictures: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[GivenRows, ...]]:
    reader = ImageReader(FAKE_IMAGES, ImageLimits())
    images = reader.read([ImageSource(f"picture {number}", _image(number)) for number in pictures])
    text = reader.expand_images(IMAGE_SIGN * len(images) + _text(prompt), images)
    token_ids = image_tokenizer().encode(text, add_special_tokens=False)
    given = []
    for one in reader.locate_images(token_ids, images):
        tiles = tiles_of(one.image.content, FAKE_IMAGES, one.image.place)
        given += [GivenRows(start, count, b"", rows_of(tiles, tile)) for tile, (start, count) in enumerate(one.runs)]
    return tuple(token_ids), tuple(given)


def _text(prompt: tuple[int, ...]) -> str:
    return "".join(chr(ord("a") + token_id % 26) for token_id in prompt)


@functools.cache
def _image(number: int) -> bytes:
    """Return a grey PNG whose tiles all differ."""
    width, height = 16, HEIGHTS[number]
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    lines = b"".join(b"\0" + bytes(50 * number + 3 * column + row for column in range(width)) for row in range(height))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    )
