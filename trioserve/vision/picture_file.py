"""Pictures and the files that hold them: what a model has made becomes a PNG, JPEG or WebP, and what a client sends to
be changed becomes a picture. All of it takes milliseconds, so it runs in a thread."""

from __future__ import annotations

import io
from typing import Literal

import msgspec

from trioserve.contracts.image_generation import Picture
from trioserve.contracts.images import ImageLimits
from trioserve.vision.image_file import pixels_of, transparency_of
from trioserve.vision.image_header import read_header

__all__ = ["PICTURE_FORMATS", "PictureFormat", "PictureKind", "decoded_mask", "decoded_picture", "encoded_picture"]

PictureKind = Literal["png", "jpeg", "webp"]
PICTURE_FORMATS: tuple[PictureKind, ...] = ("png", "jpeg", "webp")
PNG_COMPRESSION = 4  # of zlib's 0 to 9: twice as fast as Pillow's 6, for 2 % more bytes of a photograph


class PictureFormat(msgspec.Struct, frozen=True):
    """quality: 0 to 100, of JPEG and WebP: OpenAI's output_compression, where 100 is the best."""

    kind: PictureKind = "png"
    quality: int = 100


def encoded_picture(picture: Picture, form: PictureFormat) -> bytes:
    """As a file."""
    import PIL.Image

    image = PIL.Image.frombytes("RGB", (picture.width, picture.height), picture.rgb)
    file = io.BytesIO()
    if form.kind == "png":
        image.save(file, "PNG", compress_level=PNG_COMPRESSION)
    else:
        image.save(file, form.kind.upper(), quality=form.quality)
    return file.getvalue()


def decoded_picture(content: bytes, limits: ImageLimits, place: str) -> Picture:
    """In RGB and upright; what shines through stands on white. place: what it is called in an error. Raises
    InvalidRequest for what is no image, or too large a one, before a pixel is decoded."""
    read_header(content, limits, place)
    image = pixels_of(content, place)
    return Picture(image.width, image.height, image.tobytes())


def decoded_mask(content: bytes, limits: ImageLimits, place: str) -> Picture:
    """Bright where a picture may change, as ImageParams.mask is: where the file is transparent, as in OpenAI's API. Of
    a file that has no transparency, where it is bright, as in diffusers. Raises InvalidRequest."""
    read_header(content, limits, place)
    image = transparency_of(content, place)
    if image is None:
        return decoded_picture(content, limits, place)
    image = image.convert("RGB")
    return Picture(image.width, image.height, image.tobytes())
