"""Prepares images for Pixtral, Mistral Small 3 (arXiv 2410.07073) and LightOnOCR.

An image keeps its aspect ratio, and is only made smaller. Both sides become multiples of a square of patches, and each
square is one row in the prompt. In Pixtral and Mistral Small 3, a token ends each line of squares.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.media import ImagePlan
from trioserve.vision.families.family import FamilyProcessing

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["LightOnProcessing", "PixtralProcessing"]


class PixtralProcessing(FamilyProcessing, frozen=True, kw_only=True, tag="pixtral"):
    """Preprocessing of the images of Pixtral and Mistral Small 3.

    Attributes:
        square: pixels of each side of the square that becomes one row.
        longest_edge: longer sides are reduced to this number of pixels.
    """

    square: int
    longest_edge: int

    sign: ClassVar[str] = "[IMG]"
    row_token: ClassVar[str] = "[IMG]"

    @property
    def image_bytes_max(self) -> int:
        return math.ceil(self.longest_edge / self.square) ** 2 * self.row_bytes

    @property
    def description(self) -> str:
        return f"one token per {self.square} x {self.square} pixels, at most {self.longest_edge} pixels per side"

    def plan(self, width: int, height: int, image_count: int = 1) -> ImagePlan:
        if max(width, height) > self.longest_edge * min(width, height):
            raise InvalidRequest(
                f"an image has {width} x {height} pixels, but its longer side may be at most {self.longest_edge} times "
                "its shorter side: cut it",
                param="messages",
            )
        columns, rows = self._multiples(width, height, self.square)
        return ImagePlan(
            width=width,
            height=height,
            tile_width=columns * self.square,
            tile_height=rows * self.square,
            runs=(columns,) * rows,
        )

    def _multiples(self, width: int, height: int, size: int) -> tuple[int, int]:
        """Return the sides of the resized image in units of `size` pixels."""
        ratio = max(width / self.longest_edge, height / self.longest_edge, 1)
        columns, rows = (max(math.ceil(math.floor(side / ratio) / size), 1) for side in (width, height))
        return columns, rows

    def text(self, plan: ImagePlan) -> str:
        return "[IMG_BREAK]".join(self.row_token * count for count in plan.runs) + "[IMG_END]"

    def tiles(self, image: Image, plan: ImagePlan) -> npt.NDArray[np.uint8]:
        # The whole image is one tile.
        return np.asarray(image.resize((plan.tile_width, plan.tile_height), resample=self.resample))[None]


class LightOnProcessing(PixtralProcessing, frozen=True, kw_only=True, tag="lighton_ocr"):
    """Preprocessing of the images of LightOnOCR.

    Attributes:
        multiple: both sides of a resized image are multiples of this number of pixels. Squares at the right and the
            lower border that are not whole have no rows.
    """

    multiple: int

    sign: ClassVar[str] = "<|image_pad|>"
    row_token: ClassVar[str] = "<|image_pad|>"

    def plan(self, width: int, height: int, image_count: int = 1) -> ImagePlan:
        super().plan(width, height)  # Refuses thin images.
        columns, rows = self._multiples(width, height, self.multiple)
        tile_width, tile_height = columns * self.multiple, rows * self.multiple
        if min(tile_width, tile_height) < self.square:
            raise InvalidRequest(
                f"an image has {width} x {height} pixels, but each side needs {self.square - self.multiple + 1} after "
                "it is resized: send a larger image",
                param="messages",
            )
        return ImagePlan(
            width=width,
            height=height,
            tile_width=tile_width,
            tile_height=tile_height,
            runs=(tile_width // self.square * (tile_height // self.square),),
        )

    def text(self, plan: ImagePlan) -> str:
        return self.row_token * plan.row_count
