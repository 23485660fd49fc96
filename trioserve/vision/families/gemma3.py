"""Prepares images for Gemma 3 (arXiv 2503.19786): each image becomes one square tile of a fixed size. With "pan and
scan", the parts of a long image become more tiles."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from trioserve.contracts.media import ImagePlan
from trioserve.vision.families.family import FamilyProcessing

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Gemma3Processing", "PanAndScan"]


class PanAndScan(msgspec.Struct, frozen=True, kw_only=True):
    """When and how often a long image is cut.

    Attributes:
        crop_size_min: pixels of the shorter side of a part, at least crops_max.
        crops_max: largest number of parts.
        ratio_min: smallest ratio of the longer side to the shorter one.
    """

    crop_size_min: int
    crops_max: int
    ratio_min: float

    def crop_count(self, long: int, short: int) -> int:
        """Return the number of parts. 0: the image is not cut.

        Args:
            long, short: pixels of the longer and the shorter side.
        """
        if long / short < self.ratio_min:
            return 0
        count = min(math.floor(long / self.crop_size_min), math.floor(long / short + 0.5))
        count = min(max(count, 2), self.crops_max)
        return count if min(math.ceil(long / count), short) >= self.crop_size_min else 0


class Gemma3Processing(FamilyProcessing, frozen=True, kw_only=True, tag="gemma3"):
    """Preprocessing of the images of Gemma 3.

    Attributes:
        tile_size: pixels of each side of a tile.
        tile_tokens: rows of a tile.
        pan_and_scan: how long images are cut. None: they are not cut.
    """

    tile_size: int
    tile_tokens: int
    pan_and_scan: PanAndScan | None = None

    sign: ClassVar[str] = "<start_of_image>"
    row_token: ClassVar[str] = "<image_soft_token>"

    @property
    def description(self) -> str:
        return f"{self.tile_tokens} tokens per image" + (" or part of a long image" if self.pan_and_scan else "")

    def plan(self, width: int, height: int, image_count: int = 1) -> ImagePlan:
        size = self.tile_size
        crops = 0
        if self.pan_and_scan is not None:
            crops = self.pan_and_scan.crop_count(max(width, height), min(width, height))
        rows, columns = (1, crops) if width >= height else (crops, 1)
        return ImagePlan(
            width=width,
            height=height,
            tile_width=size,
            tile_height=size,
            rows=rows if crops else 0,
            columns=columns if crops else 0,
            tile_count=1 + crops,
            runs=(self.tile_tokens,) * (1 + crops),
        )

    def text(self, plan: ImagePlan) -> str:
        tile = f"\n\n{self.sign}{self.row_token * self.tile_tokens}<end_of_image>\n\n"
        if not plan.rows:
            return tile
        crops = " ".join([tile] * (plan.tile_count - 1))
        return f"Here is the original image {tile} and here are some crops to help you see better {crops}"

    def tiles(self, image: Image, plan: ImagePlan) -> npt.NDArray[np.uint8]:
        parts = [image]
        if plan.rows:
            width, height = math.ceil(plan.width / plan.columns), math.ceil(plan.height / plan.rows)
            for left, top in (
                (column * width, row * height) for row in range(plan.rows) for column in range(plan.columns)
            ):
                parts.append(image.crop((left, top, min(left + width, plan.width), min(top + height, plan.height))))
        size = (plan.tile_width, plan.tile_height)
        return np.stack([np.asarray(part.resize(size, resample=self.resample)) for part in parts])
