"""Decodes a client's image file with Pillow, inside of a process that can be killed (decoding_process).

image_header checks the header first. So a small file whose header announces a billion pixels is refused without
decoding. Only the first frame of an animation is decoded.

This module also encodes generated images. Each function takes milliseconds, so callers run it in a thread or in another
process.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Literal

import msgspec

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.extras import install_command
from trioserve.contracts.image_generation import RGBImage
from trioserve.contracts.media import ImageLimits
from trioserve.vision.image_header import ImageHeader, read_header, scan_header

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "pixels_of",
    "transparency_of",
    "why_no_images",
    "IMAGE_FORMATS",
    "ImageFormat",
    "ImageKind",
    "decoded_mask",
    "decoded_image",
    "encoded_image",
    "load_decoders",
]


def why_no_images() -> str | None:
    """Return the reason why this server cannot decode images, or None if it can."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        return f"Pillow, which decodes images, is not installed: {install_command('vision')}"
    return None


def load_decoders() -> None:
    """Import Pillow's decoders, which it would otherwise import with the first image."""
    import PIL.GifImagePlugin
    import PIL.JpegImagePlugin
    import PIL.MpoImagePlugin
    import PIL.PngImagePlugin
    import PIL.WebPImagePlugin  # noqa: F401


def pixels_of(content: bytes, place: str) -> Image:
    """Decode an image to upright RGB. Transparent pixels are blended with white.

    Args:
        content: bytes of the file.
        place: name of the image in error messages.

    Raises:
        InvalidRequest: the file is incomplete or damaged, or the size of its pixels differs from its header.
    """
    header = scan_header(content, place)
    try:
        return _upright(_rgb(_loaded(content, header)), header.orientation)
    except Exception as error:  # A decoder may raise any exception on untrusted bytes.
        raise _damaged(place, error) from error


def transparency_of(content: bytes, place: str) -> Image | None:
    """Decode the transparency of each pixel, as an upright image with one byte per pixel.

    Args:
        content: bytes of the file.
        place: name of the image in error messages.

    Returns:
        An image in which 255 is a fully transparent pixel and 0 is an opaque pixel, or None if the file has no
        transparent pixel.

    Raises:
        InvalidRequest: the file is refused for one of the reasons in pixels_of.
    """
    import PIL.ImageChops

    header = scan_header(content, place)
    try:
        image = _loaded(content, header)
        if not _may_be_transparent(image):
            return None
        alpha = image.convert("RGBA").getchannel("A")
        if alpha.getextrema() == (255, 255):  # Many programs write an alpha channel that is opaque everywhere.
            return None
        return _upright(PIL.ImageChops.invert(alpha), header.orientation)
    except Exception as error:  # A decoder may raise any exception on untrusted bytes.
        raise _damaged(place, error) from error


def _loaded(content: bytes, header: ImageHeader) -> Image:
    import PIL.Image

    with warnings.catch_warnings():
        # Pillow warns about images with many pixels, but read_header has already checked our own limit.
        warnings.simplefilter("ignore")
        try:
            image = PIL.Image.open(io.BytesIO(content), formats=(header.format,))
        except PIL.UnidentifiedImageError:  # Raise our own error, because Pillow's message names a Python object.
            raise ValueError(f"Pillow cannot read it as {header.format}") from None
    if image.size != (header.width, header.height):
        width, height = image.size
        raise ValueError(f"it has {width} x {height} pixels, but its header has {header.width} x {header.height}")
    image.load()
    return image


def _upright(pixels: Image, orientation: int) -> Image:
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    turn = turns.get(orientation)
    return pixels if turn is None else pixels.transpose(turn)


def _damaged(place: str, error: Exception) -> InvalidRequest:
    if isinstance(error, MemoryError):
        return InvalidRequest(f"{place} takes more memory to decode than an image may: send a smaller one", param=place)
    reason = str(error) or type(error).__name__
    printable = "".join(letter if letter.isprintable() else "?" for letter in reason)[:200]
    return InvalidRequest(f"{place} cannot be decoded ({printable}): it is damaged or incomplete", param=place)


def _may_be_transparent(image: Image) -> bool:
    return "A" in image.getbands() or image.info.get("transparency") is not None


def _rgb(image: Image) -> Image:
    import PIL.Image

    # Of 16-bit samples, keep the upper 8 bits, because Pillow would clip the samples to 255.
    if image.mode.startswith("I") or image.mode == "F":
        import numpy as np

        values = np.asarray(image).astype(np.float64)
        image = PIL.Image.fromarray((values.clip(0, 65_535) / 256).astype(np.uint8))
    if _may_be_transparent(image):
        image = image.convert("RGBA")
        white = PIL.Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = PIL.Image.alpha_composite(white, image)
    return image.convert("RGB")


ImageKind = Literal["png", "jpeg", "webp"]
IMAGE_FORMATS: tuple[ImageKind, ...] = ("png", "jpeg", "webp")
# The zlib level, from 0 to 9. This level is twice as fast as Pillow's default of 6, and makes photographs 2 % larger.
PNG_COMPRESSION = 4


class ImageFormat(msgspec.Struct, frozen=True):
    """The file format of a generated image.

    Attributes:
        kind: the format.
        quality: quality of JPEG and WebP from 0 to 100 (best). OpenAI's output_compression. Ignored for PNG.
    """

    kind: ImageKind = "png"
    quality: int = 100


def encoded_image(picture: RGBImage, file_format: ImageFormat) -> bytes:
    """Encode an image as a file.

    Args:
        picture: RGB pixels.
        file_format: format and quality of the file.
    """
    import PIL.Image

    image = PIL.Image.frombytes("RGB", (picture.width, picture.height), picture.rgb)
    file = io.BytesIO()
    if file_format.kind == "png":
        image.save(file, "PNG", compress_level=PNG_COMPRESSION)
    else:
        image.save(file, file_format.kind.upper(), quality=file_format.quality)
    return file.getvalue()


def decoded_image(content: bytes, limits: ImageLimits, place: str) -> RGBImage:
    """Decode an image file to upright RGB. Transparent pixels are blended with white.

    Args:
        content: bytes of the file.
        limits: limits on the size of the image. They are checked before pixels are decoded.
        place: name of the image in error messages.

    Raises:
        InvalidRequest: the file is not an image, is damaged, or is too large.
    """
    read_header(content, limits, place)
    image = pixels_of(content, place)
    return RGBImage(image.width, image.height, image.tobytes())


def decoded_mask(content: bytes, limits: ImageLimits, place: str) -> RGBImage:
    """Decode the mask of an edit, see ImageParams.mask. Bright pixels of the decoded mask mark the part of the image
    that may change.

    Transparent pixels of the file mark the part that may change, as in OpenAI's API. If a file has no transparency, its
    bright pixels mark this part, as in diffusers.

    Args:
        content, limits, place: the same as in decoded_image.

    Raises:
        InvalidRequest: the file is refused for one of the reasons in decoded_image.
    """
    read_header(content, limits, place)
    image = transparency_of(content, place)
    if image is None:
        return decoded_image(content, limits, place)
    image = image.convert("RGB")
    return RGBImage(image.width, image.height, image.tobytes())
