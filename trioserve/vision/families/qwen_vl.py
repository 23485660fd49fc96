"""Prepares images for Qwen2-VL, Qwen2.5-VL and Qwen3-VL (arXiv 2409.12191, 2502.13923), for GLM-4.1V (arXiv
2507.01006), for PaddleOCR-VL (arXiv 2510.14528), EXAONE 4.5 and HyperCLOVA X.

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

__all__ = ["ExaoneProcessing", "GlmVLProcessing", "HyperClovaProcessing", "PaddleProcessing", "QwenVLProcessing"]

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
    # Values of fields that a checkpoint lacks, as in transformers.
    pixels_min_default: ClassVar[int] = 56 * 56
    pixels_max_default: ClassVar[int] = 28 * 28 * 1280
    counts_frames: ClassVar[bool] = False
    """True if a checkpoint counts the pixels of all copies of an image that make a patch."""
    has_grid: ClassVar[bool] = True
    """True if the language model places an image's tokens in rows and columns."""

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
        columns, rows = self._squares(width, height)
        return ImagePlan(
            width=width,
            height=height,
            tile_width=columns * self.square,
            tile_height=rows * self.square,
            runs=(rows * columns,),
            grid=(rows, columns) if self.has_grid else None,
        )

    def _squares(self, width: int, height: int) -> tuple[int, int]:
        """Return how many squares the resized image has in a line, and how many lines."""
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
        return columns, rows

    def text(self, plan: ImagePlan) -> str:
        return self.row_token * plan.row_count

    def tiles(self, image: Image, plan: ImagePlan) -> npt.NDArray[np.uint8]:
        # The whole image is one tile.
        return np.asarray(image.resize((plan.tile_width, plan.tile_height), resample=self.resample))[None]


class GlmVLProcessing(QwenVLProcessing, frozen=True, kw_only=True, tag="glm_vl"):
    """Preprocessing of the images of GLM-4.1V, GLM-4.5V and GLM-OCR."""

    sign: ClassVar[str] = "<|image|>"
    row_token: ClassVar[str] = "<|image|>"
    pixels_min_default: ClassVar[int] = 112 * 112
    pixels_max_default: ClassVar[int] = 28 * 28 * 15_000
    counts_frames: ClassVar[bool] = True

    def _squares(self, width: int, height: int) -> tuple[int, int]:
        if min(width, height) < self.square:
            scale = max(self.square / height, self.square / width)
            width, height = int(width * scale), int(height * scale)
        return QwenVLProcessing._squares(self, width, height)


class PaddleProcessing(QwenVLProcessing, frozen=True, kw_only=True, tag="paddleocr_vl"):
    """Preprocessing of the images of PaddleOCR-VL, which enlarges sides that are shorter than a square."""

    sign: ClassVar[str] = "<|IMAGE_PLACEHOLDER|>"
    row_token: ClassVar[str] = "<|IMAGE_PLACEHOLDER|>"
    pixels_min_default: ClassVar[int] = 384 * 384
    pixels_max_default: ClassVar[int] = 1536 * 1536

    def _squares(self, width: int, height: int) -> tuple[int, int]:
        square = self.square
        if height < square:
            width, height = round(width * square / height), square
        if width < square:
            width, height = square, round(height * square / width)
        return QwenVLProcessing._squares(self, width, height)


class ExaoneProcessing(QwenVLProcessing, frozen=True, kw_only=True, tag="exaone4_5"):
    """Preprocessing of the images of EXAONE 4.5, whose language model places image tokens like tokens of a text."""

    has_grid: ClassVar[bool] = False


class HyperClovaProcessing(ExaoneProcessing, frozen=True, kw_only=True, tag="hyperclovax"):
    """Preprocessing of the images of HyperCLOVA X SEED Think 32B."""

    sign: ClassVar[str] = "<|IMAGE_PAD|>"
    row_token: ClassVar[str] = "<|IMAGE_PAD|>"
