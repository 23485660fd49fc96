"""Prepares images for Qwen2-VL, Qwen2.5-VL and Qwen3-VL (arXiv 2409.12191, 2502.13923).

An image keeps its aspect ratio. Both sides become multiples of a square of patches, and each square is one row in the
prompt.
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

__all__ = ["QwenVLProcessing"]

RATIO_MAX = 200  # transformers refuses longer and thinner images, too.


class QwenVLProcessing(FamilyProcessing, frozen=True, kw_only=True, tag="qwen_vl"):
    """Preprocessing of the images of Qwen's vision models.

    Attributes:
        square: pixels of each side of the square that becomes one row.
        pixels_min: smaller images are enlarged to about this number of pixels.
        pixels_max: larger images are reduced to at most this number of pixels.
    """

    square: int
    pixels_min: int
    pixels_max: int

    sign: ClassVar[str] = "<|image_pad|>"
    row_token: ClassVar[str] = "<|image_pad|>"

    @property
    def rows_max(self) -> int:
        """Return the number of rows of the largest image."""
        return self.pixels_max // self.square**2

    @property
    def image_bytes_max(self) -> int:
        return self.rows_max * self.row_bytes

    @property
    def description(self) -> str:
        return f"one token per {self.square} x {self.square} pixels, at most {self.rows_max} tokens"

    def plan(self, width: int, height: int, image_count: int = 1) -> ImagePlan:
        if max(width, height) > RATIO_MAX * min(width, height):
            raise InvalidRequest(
                f"an image has {width} x {height} pixels, but its longer side may be at most {RATIO_MAX} times its "
                "shorter side: cut it",
                param="messages",
            )
        square = self.square
        columns, rows = round(width / square), round(height / square)
        if columns * rows * square**2 > self.pixels_max:
            ratio = math.sqrt(width * height / self.pixels_max)
            columns = max(1, math.floor(width / ratio / square))
            rows = max(1, math.floor(height / ratio / square))
        elif columns * rows * square**2 < self.pixels_min:
            ratio = math.sqrt(self.pixels_min / (width * height))
            columns, rows = math.ceil(width * ratio / square), math.ceil(height * ratio / square)
        return ImagePlan(
            width=width,
            height=height,
            tile_width=columns * square,
            tile_height=rows * square,
            runs=(rows * columns,),
            grid=(rows, columns),
        )

    def text(self, plan: ImagePlan) -> str:
        return self.row_token * plan.row_count

    def tiles(self, image: Image, plan: ImagePlan) -> npt.NDArray[np.uint8]:
        # The whole image is one tile.
        return np.asarray(image.resize((plan.tile_width, plan.tile_height), resample=self.resample))[None]
