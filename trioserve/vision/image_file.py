"""Decodes an image file that a client sent, with Pillow, in a process that can be killed (decoding_process).

The header is read first (image_header), so a file of a few bytes that claims a billion pixels costs nothing. Of an
animation the first frame counts.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

from trioserve.contracts.errors import InvalidRequest
from trioserve.vision.image_header import ImageHeader, scan_header

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["pixels_of", "transparency_of", "why_no_images"]


def why_no_images() -> str | None:
    """Why no image can be decoded here; None: they can be."""
    try:
        import PIL.Image  # noqa: F401  # that is the question
    except ImportError:
        return "Pillow, which decodes images, is not installed: pip install 'trioserve[vision]'"
    return None


def pixels_of(content: bytes, place: str) -> Image:
    """Decode an image to upright RGB, what is transparent on white.

    Raises:
        InvalidRequest: the file breaks off, is damaged, or holds another size than its header says.
    """
    header = scan_header(content, place)
    try:
        return _upright(_rgb(_loaded(content, header)), header.orientation)
    except Exception as error:  # a decoder on a stranger's bytes: it may fail in any way
        raise _damaged(place, error) from error


def transparency_of(content: bytes, place: str) -> Image | None:
    """Decode how transparent each pixel is: one upright byte each, 255 for all of it.

    Returns:
        None if the file has no transparent pixel.

    Raises:
        InvalidRequest: as pixels_of.
    """
    import PIL.ImageChops

    header = scan_header(content, place)
    try:
        image = _loaded(content, header)
        if not _may_let_through(image):
            return None
        alpha = image.convert("RGBA").getchannel("A")
        if alpha.getextrema() == (255, 255):  # a channel that says nothing, as many programs write one
            return None
        return _upright(PIL.ImageChops.invert(alpha), header.orientation)
    except Exception as error:  # a decoder on a stranger's bytes: it may fail in any way
        raise _damaged(place, error) from error


def _loaded(content: bytes, header: ImageHeader) -> Image:
    import PIL.Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own bound on pixels: ours was checked before
        try:
            image = PIL.Image.open(io.BytesIO(content), formats=(header.format,))
        except PIL.UnidentifiedImageError:  # its text is about a Python object
            raise ValueError(f"it is no {header.format} that Pillow reads") from None
    if image.size != (header.width, header.height):
        width, height = image.size
        raise ValueError(f"it holds {width} x {height} pixels, its header says {header.width} x {header.height}")
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
