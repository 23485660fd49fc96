"""Decoding of a client's image file with Pillow, inside of a process that can be killed (decoding_process).

image_header checks the header first. So a small file whose header announces a billion pixels is refused without
decoding. Only the first frame of an animation is decoded.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.extras import install_command
from trioserve.vision.image_header import ImageHeader, scan_header

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["pixels_of", "transparency_of", "why_no_images"]


def why_no_images() -> str | None:
    """Return the reason why this server cannot decode images, or None if it can."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        return f"Pillow, which decodes images, is not installed: {install_command('vision')}"
    return None


def pixels_of(content: bytes, place: str) -> Image:
    """Decode an image to upright RGB. Transparent pixels are blended with white.

    Args:
        content: bytes of the file.
        place: name of the image in error messages.

    Raises:
        InvalidRequest: the file is incomplete or damaged, or its pixels have another size than its header.
    """
    header = scan_header(content, place)
    try:
        return _upright(_rgb(_loaded(content, header)), header.orientation)
    except Exception as error:  # a decoder may raise anything on untrusted bytes
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
        InvalidRequest: see pixels_of.
    """
    import PIL.ImageChops

    header = scan_header(content, place)
    try:
        image = _loaded(content, header)
        if not _may_be_transparent(image):
            return None
        alpha = image.convert("RGBA").getchannel("A")
        if alpha.getextrema() == (255, 255):  # many programs write an alpha channel that is opaque everywhere
            return None
        return _upright(PIL.ImageChops.invert(alpha), header.orientation)
    except Exception as error:  # a decoder may raise anything on untrusted bytes
        raise _damaged(place, error) from error


def _loaded(content: bytes, header: ImageHeader) -> Image:
    import PIL.Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about many pixels; read_header has checked our own limit
        try:
            image = PIL.Image.open(io.BytesIO(content), formats=(header.format,))
        except PIL.UnidentifiedImageError:  # raise our own error, because Pillow's message names a Python object
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

    if image.mode.startswith("I") or image.mode == "F":  # 16 bits: keep the upper 8, because Pillow would clip to 255
        import numpy as np

        values = np.asarray(image).astype(np.float64)
        image = PIL.Image.fromarray((values.clip(0, 65_535) / 256).astype(np.uint8))
    if _may_be_transparent(image):
        image = image.convert("RGBA")
        white = PIL.Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = PIL.Image.alpha_composite(white, image)
    return image.convert("RGB")
