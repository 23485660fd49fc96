"""Prepares images for InternVL (arXiv 2404.16821): an image becomes a grid of square tiles, and a small copy of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from trioserve.contracts.media import ImagePlan
from trioserve.vision.families.family import FamilyProcessing

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["InternvlProcessing"]


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
            runs=(self.tile_tokens * tile_count,),
        )

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
