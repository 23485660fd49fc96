"""The image encoder of Gemma 3 (arXiv 2503.19786): SigLIP, then average pooling, a norm, and a projection."""

from __future__ import annotations

import math
from pathlib import Path

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.layer_config import AttentionConfig
from trioserve.model.loading.fields import Fields, unread_names, warn_of_unread
from trioserve.model.loading.names import Shape
from trioserve.model.model_config import ModelConfig
from trioserve.model.vision.family import (
    VisionConfig,
    VitConfig,
    check_range,
    image_token_id,
    pixel_fields,
    processor_fields,
    vision_fields,
    vit_config,
)
from trioserve.vision.families.gemma3 import Gemma3Processing, PanAndScan

__all__ = ["Gemma3Config", "read_gemma3"]

CROPS_MAX = 16
_NOTES = ("vision_use_head",)  # The head is not used.


class Gemma3Config(VisionConfig, frozen=True, kw_only=True, tag="gemma3"):
    """SigLIP and average pooling.

    Attributes:
        vit: transformer.
        tokens_per_side: square root of the number of an image's rows.
    """

    vit: VitConfig
    tokens_per_side: int

    def __post_init__(self) -> None:
        patches = self.vit.positions_per_side
        check_range("config", "square root of mm_tokens_per_image", self.tokens_per_side, patches)
        if patches % self.tokens_per_side:
            raise ModelLoadError(
                f"{patches} patches per side are no multiple of the {self.tokens_per_side} rows per side that follow "
                "from mm_tokens_per_image: the checkpoint's config is damaged"
            )

    def shapes(self) -> dict[str, Shape]:
        hidden = self.vit.hidden_size
        return self.vit.shapes() | {
            "multi_modal_projector.mm_soft_emb_norm.weight": (hidden,),
            "multi_modal_projector.mm_input_projection_weight": (hidden, self.output_size),
        }


def read_gemma3(directory: Path, outer: Fields, texts: ModelConfig) -> tuple[Gemma3Config, Gemma3Processing]:
    """Read the config files.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    fields = vision_fields(outer)
    # Fields that are missing have the defaults of transformers' classes.
    vit = vit_config(fields, hidden_size=768, intermediate_size=3072, head_count=12, image_size=224, patch_size=16)
    count = outer.whole_or("mm_tokens_per_image", 256)
    config = Gemma3Config(vit=vit, tokens_per_side=math.isqrt(max(count, 0)), output_size=texts.hidden_size)
    if config.tokens_per_side**2 != count:
        raise outer.wrong("mm_tokens_per_image", "a square number")
    warn_of_unread("vision_config in config.json", unread_names(fields, _NOTES))
    windows = [layer.attention.window for layer in texts.layers if isinstance(layer.attention, AttentionConfig)]
    if any(window is not None and window < count for window in windows):
        raise ModelLoadError(
            f"an image has {count} tokens, more than the sliding_window: windows that are smaller than an image are "
            "not supported"
        )
    processor = processor_fields(directory)
    size = processor.group_or_none("size") or Fields({"height": 224, "width": 224}, "size")
    for name in ("height", "width"):
        if size.whole(name) != vit.image_size:
            raise size.wrong(name, f"the image_size of the vision_config, {vit.image_size}")
    return config, Gemma3Processing(
        **pixel_fields(processor, resample=2),
        tile_size=vit.image_size,
        tile_tokens=count,
        embedding_size=config.output_size,
        image_token_id=image_token_id(outer, 262_144),
        is_bidirectional=True,
        pan_and_scan=_pan_and_scan(processor) if processor.flag_or("do_pan_and_scan", False) else None,
    )


def _pan_and_scan(processor: Fields) -> PanAndScan:
    crops_max = processor.whole_or("pan_and_scan_max_num_crops", 4)
    if not 2 <= crops_max <= CROPS_MAX:
        raise processor.wrong("pan_and_scan_max_num_crops", f"2 to {CROPS_MAX}")
    crop_size_min = processor.whole_or("pan_and_scan_min_crop_size", 256)
    if crop_size_min < crops_max:  # Smaller parts could be empty.
        raise processor.wrong("pan_and_scan_min_crop_size", f"at least {crops_max}")
    ratio_min = processor.number_or("pan_and_scan_min_ratio_to_activate", 1.2)
    return PanAndScan(crop_size_min=crop_size_min, crops_max=crops_max, ratio_min=ratio_min)
