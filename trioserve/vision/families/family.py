"""Describes how one family of vision models prepares images.

To add a family, write one file in this folder and one line in registry.py, and the same in trioserve/model/vision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from trioserve.contracts.media import ImagePlan

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["FamilyProcessing"]


class FamilyProcessing(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Preprocessing of a vision model's images, as read from the model's configuration files.

    A family subclasses this class. The rounding of sizes must be the same as in transformers, because a difference of
    one pixel changes the image.

    Attributes:
        resample: Pillow's number of the resampling filter.
        mean: mean for each color. A pixel value becomes (value * rescale_factor - mean) / std.
        std: standard deviation for each color.
        rescale_factor: factor in the formula of `mean`.
        embedding_size: numbers in one embedding row.
        image_token_id: placeholder token that stands in the prompt once for each row.
        is_bidirectional: True if the rows of one run attend to each other in the language model.
    """

    resample: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale_factor: float
    embedding_size: int
    image_token_id: int
    is_bidirectional: bool = False

    sign: ClassVar[str] = "<image>"
    """Text that chat templates write in the place of one image."""
    row_token: ClassVar[str] = "<image>"
    """Text of `image_token_id`."""

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row in float32."""
        return 4 * self.embedding_size

    @property
    def image_bytes_max(self) -> int:
        """Return the bytes of the largest image's rows. 0 if they fit into the smallest limit of memory for images."""
        return 0

    @property
    def description(self) -> str:
        """Return how many tokens an image has, for operators."""
        raise NotImplementedError

    def plan(self, width: int, height: int, image_count: int = 1) -> ImagePlan:
        """Plan the tiles and the rows of an image.

        Args:
            width, height: size of the upright image, in pixels.
            image_count: number of images in the prompt. Some families cut a single image only.

        Raises:
            InvalidRequest: the model cannot read images of this size.
        """
        raise NotImplementedError

    def text(self, plan: ImagePlan) -> str:
        """Return the text that replaces `sign`. It has plan.runs runs of `row_token`.

        Args:
            plan: plan of the image.
        """
        raise NotImplementedError

    def tiles(self, image: Image, plan: ImagePlan) -> npt.NDArray[np.uint8]:
        """Resize an image and cut it into tiles.

        Args:
            image: upright RGB image.
            plan: plan of the image.

        Returns:
            uint8 [plan.tile_count, plan.tile_height, plan.tile_width, 3].
        """
        raise NotImplementedError
