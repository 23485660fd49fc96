"""An image as a client sends it: what its header says, then its pixels. Nothing that a file says is believed.

Pillow decodes, in the thread for texts. A header is read first, so that a file of a few bytes that claims to be of a
billion pixels costs nothing; of what moves, the first picture counts.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, NamedTuple

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.images import ImageLimits

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ImageHeader", "pixels_of", "read_header", "transparency_of", "why_no_images"]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_ORIENTATION = 274  # the tag of EXIF
_TURNED = (5, 6, 7, 8)  # its values with width and height exchanged


class ImageHeader(NamedTuple):
    """width, height: upright, as it is to be seen."""

    width: int
    height: int


def why_no_images() -> str | None:
    """Why no image can be decoded here; None: they can be."""
    try:
        import PIL.Image  # noqa: F401  # that is the question
    except ImportError:
        return "Pillow, which decodes images, is not installed: pip install 'trioserve[vision]'"
    return None


def read_header(content: bytes, limits: ImageLimits, place: str) -> ImageHeader:
    """place: what the image is called in an error. Raises InvalidRequest for what is no image, or too large a one."""
    if len(content) > limits.image_bytes_max:
        raise InvalidRequest(
            f"{place} has {len(content)} bytes, an image may have {limits.image_bytes_max}: send a smaller one",
            param=place,
        )
    image = _opened(content, place)
    width, height = image.size
    if max(width, height) > limits.side_max or width * height > limits.pixels_max or min(width, height) < 1:
        raise InvalidRequest(
            f"{place} is {width} x {height} pixels; allowed are {limits.pixels_max} in all, and {limits.side_max} on "
            "either side: send a smaller one",
            param=place,
        )
    return ImageHeader(height, width) if _orientation(image) in _TURNED else ImageHeader(width, height)


def pixels_of(content: bytes, place: str) -> Image:
    """In RGB and upright; what shines through stands on white. The header has been read before. Raises InvalidRequest
    for a file that breaks off or is damaged."""
    image = _opened(content, place)
    orientation = _orientation(image)
    try:
        image.load()
        return _upright(_rgb(image), orientation)
    except Exception as error:  # a decoder on a stranger's bytes: it may fail in any way
        raise _damaged(place, error) from error


def transparency_of(content: bytes, place: str) -> Image | None:
    """How far each pixel lets through what is behind it: one byte, 255 for all of it; upright. None: the file has no
    pixel that could. As above otherwise."""
    import PIL.ImageChops

    image = _opened(content, place)
    orientation = _orientation(image)
    try:
        image.load()
        if not _may_let_through(image):
            return None
        alpha = image.convert("RGBA").getchannel("A")
        if alpha.getextrema() == (255, 255):  # a channel that says nothing, as many programs write one
            return None
        return _upright(PIL.ImageChops.invert(alpha), orientation)
    except Exception as error:  # a decoder on a stranger's bytes: it may fail in any way
        raise _damaged(place, error) from error


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


def _opened(content: bytes, place: str) -> Image:
    import PIL.Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own bound on pixels: ours is looked at next
            return PIL.Image.open(io.BytesIO(content), formats=FORMATS)
    except PIL.UnidentifiedImageError as error:
        raise InvalidRequest(
            f"{place} is no image that can be read: send PNG, JPEG, WebP or GIF", param=place
        ) from error
    except Exception as error:  # a decoder on a stranger's bytes: it may fail in any way
        raise _damaged(place, error) from error


def _damaged(place: str, error: Exception) -> InvalidRequest:
    reason = str(error) or type(error).__name__
    printable = "".join(letter if letter.isprintable() else "?" for letter in reason)[:200]
    return InvalidRequest(f"{place} cannot be decoded ({printable}): it is damaged or incomplete", param=place)


def _orientation(image: Image) -> int:
    """As its header says; what stands behind the pixels is not looked at. 1: it is upright."""
    import PIL.Image

    exif = image.info.get("exif")
    if not isinstance(exif, bytes):
        return 1
    found = PIL.Image.Exif()
    try:
        found.load(exif)
        orientation = found.get(_ORIENTATION, 1)
    except Exception:  # damaged, and the pixels may still be whole
        return 1
    return orientation if orientation in range(1, 9) else 1


def _may_let_through(image: Image) -> bool:
    return "A" in image.getbands() or image.info.get("transparency") is not None


def _rgb(image: Image) -> Image:
    import PIL.Image

    if image.mode.startswith("I") or image.mode == "F":  # 16 bits: the upper 8, where Pillow would cut off
        import numpy as np

        values = np.asarray(image).astype(np.float64)
        image = PIL.Image.fromarray((values.clip(0, 65_535) / 256).astype(np.uint8))
    if _may_let_through(image):
        image = image.convert("RGBA")
        white = PIL.Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = PIL.Image.alpha_composite(white, image)
    return image.convert("RGB")
