"""Plans how an image is split into tiles: the sizes to which it is resized, and the number of tiles.

The steps follow the training of Idefics 3 and SmolVLM: resize the longer side to longest_edge, resize both sides to
multiples of the tile size, and split the result. The rounding must be the same as in transformers, because a difference
of one pixel changes the image.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from trioserve.contracts.images import ImageProcessing

__all__ = ["TilePlan", "plan_tiles"]

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
