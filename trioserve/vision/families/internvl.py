"""Prepares images for InternVL (arXiv 2404.16821), Aya Vision (arXiv 2505.08751) and Command A Vision: an image becomes
a grid of square tiles, and a small copy of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from trioserve.contracts.media import ImagePlan
from trioserve.vision.families.family import FamilyProcessing

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["AyaProcessing", "CohereProcessing", "InternvlProcessing", "QianfanProcessing"]


class InternvlProcessing(FamilyProcessing, frozen=True, kw_only=True, tag="internvl"):
    """Preprocessing of the images of InternVL.

    Attributes:
        tile_size: pixels of each side of a tile.
        tile_tokens: rows of one tile in the prompt.
        tiles_min, tiles_max: smallest and largest number of tiles, without the small copy.
    """

    tile_size: int
    tile_tokens: int
    tiles_min: int
    tiles_max: int

    sign: ClassVar[str] = "<IMG_CONTEXT>"
    row_token: ClassVar[str] = "<IMG_CONTEXT>"

    @property
    def description(self) -> str:
        return f"{self.tile_tokens} tokens per tile of {self.tile_size} pixels"

    def plan(self, width: int, height: int, image_count: int = 1) -> ImagePlan:
        columns, rows = self._grid(width, height)
        tile_count = rows * columns + (rows * columns > 1)
        return ImagePlan(
            width=width,
            height=height,
            tile_width=self.tile_size,
            tile_height=self.tile_size,
            rows=rows,
            columns=columns,
            tile_count=tile_count,
            runs=self._runs(tile_count),
        )

    def _runs(self, tile_count: int) -> tuple[int, ...]:
        return (self.tile_tokens * tile_count,)

    def text(self, plan: ImagePlan) -> str:
        return f"<img>{self.row_token * plan.row_count}</img>"

    def tiles(self, image: Image, plan: ImagePlan) -> npt.NDArray[np.uint8]:
        size = self.tile_size
        whole = np.asarray(image.resize((plan.columns * size, plan.rows * size), resample=self.resample))
        tiles = (
            whole.reshape(plan.rows, size, plan.columns, size, 3).transpose(0, 2, 1, 3, 4).reshape(-1, size, size, 3)
        )
        if plan.tile_count == 1:
            return tiles
        return np.concatenate((tiles, np.asarray(image.resize((size, size), resample=self.resample))[None]))

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the columns and rows whose ratio is closest to that of the image.

        Among equal ratios, more tiles are better, as long as they have less than twice the pixels of the image.
        """
        if self.tiles_max == 1:
            return 1, 1
        sides = range(1, self.tiles_max + 1)
        grids = [(columns, rows) for columns in sides for rows in sides]
        allowed = [grid for grid in grids if self.tiles_min <= math.prod(grid) <= self.tiles_max]
        best, least = (1, 1), math.inf
        for grid in sorted(allowed, key=math.prod):
            difference = abs(width / height - grid[0] / grid[1])
            is_filled = width * height > 0.5 * self.tile_size**2 * math.prod(grid)
            if difference < least or (difference == least and is_filled):
                best, least = grid, difference
        return best


class QianfanProcessing(InternvlProcessing, frozen=True, kw_only=True, tag="qianfan_ocr"):
    """Preprocessing of the images of Qianfan-OCR."""

    sign: ClassVar[str] = "<image>"


class AyaProcessing(InternvlProcessing, frozen=True, kw_only=True, tag="aya_vision"):
    """Preprocessing of the images of Aya Vision: the name of a tile precedes its rows."""

    sign: ClassVar[str] = "<image>"
    row_token: ClassVar[str] = "<|IMG_PATCH|>"

    def _runs(self, tile_count: int) -> tuple[int, ...]:
        return (self.tile_tokens,) * tile_count

    def text(self, plan: ImagePlan) -> str:
        rows = self.row_token * self.tile_tokens
        names = [*(f"TILE_{number}" for number in range(1, plan.tile_count)), "TILE_GLOBAL"]
        return "<|START_OF_IMG|>" + "".join(name + rows for name in names) + "<|END_OF_IMG|>"


class CohereProcessing(AyaProcessing, frozen=True, kw_only=True, tag="cohere2_vision"):
    """Preprocessing of the images of Command A Vision: a line break follows the rows of a tile."""

    sign: ClassVar[str] = "<|IMG_PATCH|>"

    def text(self, plan: ImagePlan) -> str:
        rows = self.row_token * self.tile_tokens + "<|IMG_LINE_BREAK|>"
        return f"<|START_OF_IMG|>{rows * plan.tile_count}<|END_OF_IMG|>"

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the columns and rows that hold the image with least enlargement. If none does, with most pixels."""
        sides = range(1, self.tiles_max + 1)
        grids = [(columns, rows) for columns in sides for rows in sides if columns * rows <= self.tiles_max]
        scales = {
            grid: min(grid[0] * self.tile_size / width, grid[1] * self.tile_size / height)
            for grid in sorted(grids, key=math.prod)
        }
        enlarging = [grid for grid, scale in scales.items() if scale >= 1]
        return min(enlarging, key=scales.__getitem__) if enlarging else max(scales, key=scales.__getitem__)
