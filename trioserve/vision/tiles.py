"""An image's pixels cut into the tiles that a model sees."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trioserve.contracts.images import ImageProcessing, Tiles
from trioserve.vision.image_file import pixels_of
from trioserve.vision.tile_plan import plan_tiles

__all__ = ["tiles_from", "tiles_of"]


def tiles_of(content: bytes, processing: ImageProcessing, place: str) -> npt.NDArray[np.uint8]:
    """uint8 [count, tile_size, tile_size, 3], as plan_tiles counts them: row by row, then all of it. A tenth of a
    second or two. Raises InvalidRequest for a file that is damaged."""
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
    """The tiles that another process has cut, without a copy."""
    tile = processing.tile_size
    return np.frombuffer(pixels, dtype=np.uint8).reshape(-1, tile, tile, 3)
