"""Prepares images for Idefics 3 and SmolVLM (arXiv 2408.12637).

The steps follow the training: resize the longer side to longest_edge, resize both sides to multiples of the tile size,
and split the result. In the prompt, each tile is a marker of its position in the image, followed by its rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from trioserve.contracts.media import ImagePlan
from trioserve.vision.families.family import FamilyProcessing

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Idefics3Processing"]

LONGEST_EDGE_MAX = 4096  # Largest longest_edge that a checkpoint may set.
_TILE_BORDER = "<fake_token_around_image>"
_WHOLE_IMAGE = "<global-img>"


class Size(NamedTuple):
    width: int
    height: int


class Idefics3Processing(FamilyProcessing, frozen=True, kw_only=True, tag="idefics3"):
    """Preprocessing of the images of Idefics 3 and SmolVLM.

    Attributes:
        longest_edge: pixels of the image's longer side before tiling.
        tile_size: pixels of each side of a tile.
        splits: True to cut an image into tiles, followed by one tile of the whole image. False for one tile.
        tile_tokens: rows of one tile in the prompt.
    """

    longest_edge: int
    tile_size: int
    splits: bool
    tile_tokens: int

    @property
    def description(self) -> str:
        return f"{self.tile_tokens} tokens per tile of {self.tile_size} pixels"

    def plan(self, width: int, height: int, image_count: int = 1) -> ImagePlan:
        tile = self.tile_size
        rows = columns = 0
        if self.splits:
            second = _whole_tiles(_with_longest_edge(Size(width, height), self.longest_edge), tile)
            if second != (tile, tile):
                rows, columns = second.height // tile, second.width // tile
        tile_count = rows * columns + 1
        return ImagePlan(
            width=width,
            height=height,
            tile_width=tile,
            tile_height=tile,
            rows=rows,
            columns=columns,
            tile_count=tile_count,
            runs=(self.tile_tokens,) * tile_count,
        )

    def text(self, plan: ImagePlan) -> str:
        rows = self.row_token * self.tile_tokens
        whole = f"{_TILE_BORDER}{_WHOLE_IMAGE}{rows}{_TILE_BORDER}"
        if not plan.rows:
            return whole
        lines = [
            "".join(f"{_TILE_BORDER}<row_{row + 1}_col_{column + 1}>{rows}" for column in range(plan.columns))
            for row in range(plan.rows)
        ]
        return "\n".join(lines) + f"\n\n{whole}"

    def tiles(self, image: Image, plan: ImagePlan) -> npt.NDArray[np.uint8]:
        # The tiles row by row, then the whole image as one tile.
        tile = self.tile_size
        image = image.resize(
            _with_longest_edge(Size(plan.width, plan.height), self.longest_edge), resample=self.resample
        )
        tiles = np.empty((plan.tile_count, tile, tile, 3), dtype=np.uint8)
        if plan.rows:
            image = image.resize((plan.columns * tile, plan.rows * tile), resample=self.resample)
            whole = np.asarray(image).reshape(plan.rows, tile, plan.columns, tile, 3)
            tiles[:-1] = whole.transpose(0, 2, 1, 3, 4).reshape(-1, tile, tile, 3)
        tiles[-1] = np.asarray(image.resize((tile, tile), resample=self.resample))
        return tiles


def _with_longest_edge(size: Size, edge: int) -> Size:
    ratio = size.width / size.height
    if size.width >= size.height:
        width, height = edge, int(edge / ratio)
        height += height % 2
    else:
        width, height = int(edge * ratio), edge
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > LONGEST_EDGE_MAX:
        width, height = LONGEST_EDGE_MAX, int(LONGEST_EDGE_MAX / ratio)
    elif height > width and height > LONGEST_EDGE_MAX:
        width, height = int(LONGEST_EDGE_MAX * ratio), LONGEST_EDGE_MAX
    return Size(max(width, 1), max(height, 1))


def _whole_tiles(size: Size, tile: int) -> Size:
    ratio = size.width / size.height
    if size.width >= size.height:
        width = math.ceil(size.width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(size.height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return Size(width, height)
