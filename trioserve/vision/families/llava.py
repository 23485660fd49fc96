"""Prepares images for LLaVA 1.5 (arXiv 2310.03744), LLaVA-NeXT and LLaVA-OneVision (arXiv 2408.03326).

LLaVA 1.5 makes one square tile of an image. LLaVA-NeXT adds the tiles of a larger copy, and LLaVA-OneVision does so if
the prompt has only one image. The copy keeps the aspect ratio. It is centered on the smallest canvas that holds most of
the image's detail.
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

__all__ = ["LlavaProcessing", "OneVisionProcessing", "OneVisionGrid"]


class LlavaProcessing(FamilyProcessing, frozen=True, kw_only=True, tag="llava"):
    """Preprocessing of the images of LLaVA 1.5.

    Attributes:
        tile_size: pixels of each side of the tile.
        tile_tokens: rows of an image.
        crops: True to cut the middle square out of an image. False to distort the image to a square.
    """

    tile_size: int
    tile_tokens: int
    crops: bool

    @property
    def description(self) -> str:
        return f"{self.tile_tokens} tokens per image"

    def plan(self, width: int, height: int, image_count: int = 1) -> ImagePlan:
        size = self.tile_size
        return ImagePlan(width=width, height=height, tile_width=size, tile_height=size, runs=(self.tile_tokens,))

    def text(self, plan: ImagePlan) -> str:
        return self.row_token * plan.row_count

    def tiles(self, image: Image, plan: ImagePlan) -> npt.NDArray[np.uint8]:
        size = self.tile_size
        if not self.crops:
            return np.asarray(image.resize((size, size), resample=self.resample))[None]
        short, long = sorted(image.size)
        long = int(size * long / short)
        image = image.resize((size, long) if image.width <= image.height else (long, size), resample=self.resample)
        left, top = (image.width - size) // 2, (image.height - size) // 2
        return np.asarray(image)[None, top : top + size, left : left + size]


class OneVisionGrid(NamedTuple):
    """Rows and columns of patches of the larger copy of an image.

    Attributes:
        height, width: patches without the border that holds nothing of the image.
        row_count, column_count: rows and columns of the embeddings, after the patches were reduced.
    """

    height: int
    width: int
    row_count: int
    column_count: int


class OneVisionProcessing(FamilyProcessing, frozen=True, kw_only=True, tag="llava_onevision"):
    """Preprocessing of the images of LLaVA-NeXT and LLaVA-OneVision.

    Attributes:
        tile_size: pixels of each side of a tile.
        patches_per_side: rows of a tile are the square of this number.
        canvases: sizes of the larger copy, as height and width in pixels.
        tiles_max: a larger copy of more tiles is reduced to the embeddings of about this number of tiles. None: it is
            not reduced.
        cuts_every_image: True if images of a prompt with several images have larger copies, too.
    """

    tile_size: int
    patches_per_side: int
    canvases: tuple[tuple[int, int], ...]
    tiles_max: int | None
    cuts_every_image: bool = False

    @property
    def description(self) -> str:
        return f"{self.patches_per_side**2} tokens per tile of {self.tile_size} pixels"

    def plan(self, width: int, height: int, image_count: int = 1) -> ImagePlan:
        size = self.tile_size
        tile_tokens = self.patches_per_side**2
        if image_count > 1 and not self.cuts_every_image:
            return ImagePlan(width=width, height=height, tile_width=size, tile_height=size, runs=(tile_tokens + 1,))
        canvas_height, canvas_width = self._canvas(width, height)
        plan = ImagePlan(
            width=width,
            height=height,
            tile_width=size,
            tile_height=size,
            rows=canvas_height // size,
            columns=canvas_width // size,
            tile_count=1 + canvas_height // size * (canvas_width // size),
            runs=(),
        )
        grid = self.grid(plan)
        return ImagePlan(
            width=width,
            height=height,
            tile_width=size,
            tile_height=size,
            rows=plan.rows,
            columns=plan.columns,
            tile_count=plan.tile_count,
            runs=(tile_tokens + grid.row_count * (grid.column_count + 1),),  # One more row ends each line.
        )

    def grid(self, plan: ImagePlan) -> OneVisionGrid:
        """Return the patches of the larger copy.

        Args:
            plan: plan of an image with a larger copy. Its runs are not used.
        """
        height, width = self.patches_per_side * plan.rows, self.patches_per_side * plan.columns
        if plan.width / plan.height > width / height:
            height -= (height - int(round(plan.height * (width / plan.width), 7))) // 2 * 2
        else:
            width -= (width - int(round(plan.width * (height / plan.height), 7))) // 2 * 2
        if self.tiles_max is None:
            return OneVisionGrid(height, width, height, width)
        ratio = math.sqrt(height * width / (self.tiles_max * self.patches_per_side**2))
        if ratio > 1.1:
            return OneVisionGrid(height, width, int(height // ratio), int(width // ratio))
        return OneVisionGrid(height, width, height, width)

    def text(self, plan: ImagePlan) -> str:
        return self.row_token * plan.row_count

    def tiles(self, image: Image, plan: ImagePlan) -> npt.NDArray[np.uint8]:
        size = self.tile_size
        if not plan.rows:
            return np.asarray(self._padded(image).resize((size, size), resample=self.resample))[None]
        tiles = np.empty((plan.tile_count, size, size, 3), dtype=np.uint8)
        tiles[0] = np.asarray(image.resize((size, size), resample=self.resample))
        canvas = np.zeros((plan.rows * size, plan.columns * size, 3), dtype=np.uint8)
        height, width = canvas.shape[:2]
        if width / plan.width < height / plan.height:
            height = min(math.ceil(plan.height * (width / plan.width)), height)
        else:
            width = min(math.ceil(plan.width * (height / plan.height)), width)
        top, left = (canvas.shape[0] - height) // 2, (canvas.shape[1] - width) // 2
        resized = image.resize((width, height), resample=self.resample)
        canvas[top : top + height, left : left + width] = np.asarray(resized)
        parts = canvas.reshape(plan.rows, size, plan.columns, size, 3).transpose(0, 2, 1, 3, 4)
        tiles[1:] = parts.reshape(-1, size, size, 3)
        return tiles

    def _canvas(self, width: int, height: int) -> tuple[int, int]:
        """Return the canvas that holds most pixels of the image. Among several, the smallest."""
        best, most, least_wasted = self.canvases[0], 0, math.inf
        for canvas in self.canvases:
            scale = min(canvas[1] / width, canvas[0] / height)
            pixels = min(int(width * scale) * int(height * scale), width * height)
            wasted = canvas[0] * canvas[1] - pixels
            if pixels > most or (pixels == most and wasted < least_wasted):
                best, most, least_wasted = canvas, pixels, wasted
        return best

    def _padded(self, image: Image) -> Image:
        """Return the image in the middle of a square that has the mean color."""
        import PIL.Image

        side = max(image.size)
        red, green, blue = (int(value * 255) for value in self.mean)
        square = PIL.Image.new("RGB", (side, side), (red, green, blue))
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        return square
