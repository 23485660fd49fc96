"""The image encoder of Idefics 3 and SmolVLM (arXiv 2408.12637): SigLIP, then pixel shuffle and a projection."""

from __future__ import annotations

from pathlib import Path

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.fields import Fields, unread_names, warn_of_unread
from trioserve.model.loading.names import Shape
from trioserve.model.model_config import ModelConfig
from trioserve.model.vision.family import (
    IMAGE_SIZE_MAX,
    TILE_PATCHES_MAX,
    VisionConfig,
    VitConfig,
    check_range,
    image_token_id,
    pixel_fields,
    processor_fields,
    vision_fields,
    vit_config,
)
from trioserve.vision.families.idefics3 import Idefics3Processing

__all__ = ["Idefics3Config", "read_idefics3"]

_NOTES = ("max_image_size", "size", "tie_word_embeddings", "use_base_siglip")  # The processor's fields replace these.


class Idefics3Config(VisionConfig, frozen=True, kw_only=True, tag="idefics3"):
    """SigLIP and pixel shuffle.

    Attributes:
        vit: transformer.
        scale_factor: side of a square, in patches, that becomes one row.
    """

    vit: VitConfig
    scale_factor: int

    def __post_init__(self) -> None:
        check_range("vision_config", "scale_factor", self.scale_factor, IMAGE_SIZE_MAX)

    def tile_tokens(self, tile_size: int) -> int:
        """Return the number of rows that the encoder computes for one tile.

        Args:
            tile_size: width and height of the tile in pixels.

        Raises:
            ModelLoadError: the number of rows is not whole, or the tile has too many patches.
        """
        size = self.vit.patch_size
        patches, left = divmod(tile_size, size)
        if left or patches % self.scale_factor or patches < 1:
            raise ModelLoadError(
                f"tiles of {tile_size} pixels are no whole number of patches of {size} pixels, of which squares of "
                f"{self.scale_factor} per side become one row: the checkpoint's files do not belong to the same model"
            )
        if patches**2 > TILE_PATCHES_MAX:
            raise ModelLoadError(
                f"tiles of {tile_size} pixels have {patches**2} patches of {size} pixels, allowed are "
                f"{TILE_PATCHES_MAX}: the checkpoint's files are damaged"
            )
        return (patches // self.scale_factor) ** 2

    def shapes(self) -> dict[str, Shape]:
        inputs = self.vit.hidden_size * self.scale_factor**2
        return self.vit.shapes() | {"connector.modality_projection.proj.weight": (self.output_size, inputs)}


def read_idefics3(directory: Path, outer: Fields, texts: ModelConfig) -> tuple[Idefics3Config, Idefics3Processing]:
    """Read the config files.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    fields = vision_fields(outer)
    config = Idefics3Config(
        # Fields that are missing have the defaults of transformers' classes.
        vit=vit_config(
            fields,
            hidden_size=1152,
            intermediate_size=3072,
            head_count=16,
            image_size=224,
            patch_size=32,
        ),
        scale_factor=outer.whole_or("scale_factor", 2),
        output_size=texts.hidden_size,
    )
    warn_of_unread("vision_config in config.json", unread_names(fields, _NOTES))
    processor = processor_fields(directory)
    size = processor.group_or_none("size") or Fields({"longest_edge": 4 * 364}, "size")
    tile = processor.group_or_none("max_image_size") or Fields({"longest_edge": 364}, "max_image_size")
    tile_size = _side(tile)
    return config, Idefics3Processing(
        **pixel_fields(processor, resample=1),
        longest_edge=_side(size),
        tile_size=tile_size,
        splits=processor.flag_or("do_image_splitting", True),
        tile_tokens=config.tile_tokens(tile_size),
        embedding_size=config.output_size,
        image_token_id=image_token_id(outer, 128_257),
    )


def _side(fields: Fields) -> int:
    value = fields.whole("longest_edge")
    if not 1 <= value <= IMAGE_SIZE_MAX:
        raise fields.wrong("longest_edge", f"1 to {IMAGE_SIZE_MAX}")
    return value
