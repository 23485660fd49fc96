"""Prepares images for Gemma 3 (arXiv 2503.19786): each image becomes one square tile of a fixed size."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from trioserve.contracts.media import ImagePlan
from trioserve.vision.families.family import FamilyProcessing

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Gemma3Processing"]


class Gemma3Processing(FamilyProcessing, frozen=True, kw_only=True, tag="gemma3"):
    """Preprocessing of the images of Gemma 3, without "pan and scan".

    Attributes:
        tile_size: pixels of each side of the tile.
        tile_tokens: rows of an image.
    """

    tile_size: int
    tile_tokens: int

    sign: ClassVar[str] = "<start_of_image>"
    row_token: ClassVar[str] = "<image_soft_token>"

    @property
    def description(self) -> str:
        return f"{self.tile_tokens} tokens per image"

    def plan(self, width: int, height: int, image_count: int = 1) -> ImagePlan:
        size = self.tile_size
        return ImagePlan(width=width, height=height, tile_width=size, tile_height=size, runs=(self.tile_tokens,))

    def text(self, plan: ImagePlan) -> str:
        return f"\n\n{self.sign}{self.row_token * self.tile_tokens}<end_of_image>\n\n"

    def tiles(self, image: Image, plan: ImagePlan) -> npt.NDArray[np.uint8]:
        return np.asarray(image.resize((plan.tile_width, plan.tile_height), resample=self.resample))[None]
