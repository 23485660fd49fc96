"""Description of the vision part of a model: a transformer over the patches of a tile, and a projection of its output
to rows of the text model's size.
"""

from __future__ import annotations

import msgspec

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.model_config import LAYERS_MAX, Activation

__all__ = ["VisionConfig"]

DIMENSION_MAX = 2**16
IMAGE_SIZE_MAX = 4096
TILE_PATCHES_MAX = 2**14  # attention takes memory in proportion to their square; real models have up to 5,184


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """SigLIP (arXiv 2303.15343) without its head, and the pixel shuffle of Idefics 3 (arXiv 2408.12637).

    Attributes:
        image_size: width and height in pixels of the images for which the model has position embeddings.
        patch_size: width and height of a patch in pixels.
        scale_factor: a square of this many patches per side becomes one row.
        output_size: hidden_size of the text model.

    Raises:
        ModelLoadError: values contradict each other. The message names the field.
    """

    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    image_size: int
    patch_size: int
    norm_eps: float
    activation: Activation
    scale_factor: int
    output_size: int

    def __post_init__(self) -> None:
        for name, largest in (
            ("hidden_size", DIMENSION_MAX),
            ("intermediate_size", DIMENSION_MAX),
            ("layer_count", LAYERS_MAX),
            ("head_count", DIMENSION_MAX),
            ("image_size", IMAGE_SIZE_MAX),
            ("patch_size", IMAGE_SIZE_MAX),
            ("scale_factor", IMAGE_SIZE_MAX),
            ("output_size", 2**24),
        ):
            value = getattr(self, name)
            if not 1 <= value <= largest:
                raise ModelLoadError(
                    f"the vision_config has {name} {value}, allowed is 1 to {largest}: the checkpoint's config is "
                    "damaged"
                )
        if self.hidden_size % self.head_count:
            raise ModelLoadError(
                f"the vision_config has hidden_size {self.hidden_size} and {self.head_count} heads, which must divide "
                "it: the checkpoint's config is damaged"
            )
        if not 0 < self.norm_eps < 1:
            raise ModelLoadError(f"the vision_config has layer_norm_eps {self.norm_eps}, it must be a small number")
        if self.patch_size > self.image_size:
            raise ModelLoadError(
                f"the vision_config has patches of {self.patch_size} pixels in images of {self.image_size}: the "
                "checkpoint's config is damaged"
            )

    @property
    def positions_per_side(self) -> int:
        return self.image_size // self.patch_size

    def tile_tokens(self, tile_size: int) -> int:
        """Return the number of rows that one tile becomes.

        Args:
            tile_size: width and height of the tile in pixels.

        Raises:
            ModelLoadError: the tile is not a whole number of rows, or has too many patches.
        """
        patches, left = divmod(tile_size, self.patch_size)
        if left or patches % self.scale_factor or patches < 1:
            raise ModelLoadError(
                f"tiles of {tile_size} pixels are no whole number of patches of {self.patch_size} pixels, of which "
                f"squares of {self.scale_factor} per side become one row: the checkpoint's files do not belong to the "
                "same model"
            )
        if patches**2 > TILE_PATCHES_MAX:
            raise ModelLoadError(
                f"tiles of {tile_size} pixels have {patches**2} patches of {self.patch_size} pixels, allowed are "
                f"{TILE_PATCHES_MAX}: the checkpoint's files are damaged"
            )
        return (patches // self.scale_factor) ** 2
