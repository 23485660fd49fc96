"""Plans how an image is split into tiles, and splits its pixels into the tiles that a model gets.

A plan has the sizes to which the image is resized, and the number of tiles. The steps follow the training of Idefics 3
and SmolVLM: resize the longer side to longest_edge, resize both sides to multiples of the tile size, and split the
result. The rounding must be the same as in transformers, because a difference of one pixel changes the image.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trioserve.contracts.images import ImageProcessing, Tiles
from trioserve.vision.image_file import pixels_of

__all__ = ["TilePlan", "plan_tiles", "tiles_from", "tiles_of"]

LONGEST_EDGE_MAX = 4096  # Largest longest_edge that a checkpoint may set.


class Size(NamedTuple):
    width: int
    height: int


class TilePlan(NamedTuple):
    """The tiles of one image.

    Attributes:
        sizes: the image is resized to each of these sizes, in order.
        rows, columns: numbers of tiles. Both are 0 if the whole image is the only tile.
    """

    sizes: tuple[Size, ...]
    rows: int
    columns: int

    @property
    def tile_count(self) -> int:
        return self.rows * self.columns + 1


def plan_tiles(width: int, height: int, processing: ImageProcessing) -> TilePlan:
    """Plan the tiles of an image.

    Args:
        width, height: size of the upright image, in pixels.
        processing: how images are prepared for the model, such as the tile size.
    """
    tile = processing.tile_size
    first = _with_longest_edge(Size(width, height), processing.longest_edge)
    if not processing.splits:
        return TilePlan((first, Size(tile, tile)), 0, 0)
    second = _whole_tiles(first, tile)
    if second == (tile, tile):
        return TilePlan((first, second), 0, 0)
    return TilePlan((first, second), second.height // tile, second.width // tile)


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


def tiles_of(content: bytes, processing: ImageProcessing, place: str) -> npt.NDArray[np.uint8]:
    """Decode an image file and split it into tiles.

    Args:
        content: bytes of the file.
        processing: how images are prepared for the model, such as the tile size.
        place: name of the image in error messages.

    Returns:
        uint8 [count, tile_size, tile_size, 3]: the tiles of plan_tiles row by row, then the whole image as one tile.

    Raises:
        InvalidRequest: the file is damaged.

    Cost:
        0.1 to 0.2 seconds for a large image.
    """
    image = pixels_of(content, place)
    plan = plan_tiles(image.width, image.height, processing)
    for size in plan.sizes:
        image = image.resize(size, resample=processing.resample)
    tile = processing.tile_size
    tiles = np.empty((plan.tile_count, tile, tile, 3), dtype=np.uint8)
    if plan.rows:
        whole = np.asarray(image).reshape(plan.rows, tile, plan.columns, tile, 3)
        tiles[:-1] = whole.transpose(0, 2, 1, 3, 4).reshape(-1, tile, tile, 3)
        image = image.resize((tile, tile), resample=processing.resample)
    tiles[-1] = np.asarray(image)
    return tiles


def tiles_from(pixels: bytes | bytearray | memoryview, processing: ImageProcessing) -> Tiles:
    """Return the tiles that another process has computed, without a copy.

    Args:
        pixels: bytes of the result of tiles_of.
        processing: contains the size of a tile.
    """
    tile = processing.tile_size
    return np.frombuffer(pixels, dtype=np.uint8).reshape(-1, tile, tile, 3)
