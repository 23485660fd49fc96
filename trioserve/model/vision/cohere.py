"""The image encoders of Aya Vision (arXiv 2505.08751) and Command A Vision: SigLIP, then pixel shuffle and a
gated MLP."""

from __future__ import annotations

from pathlib import Path

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.fields import Fields, unread_names, warn_of_unread
from trioserve.model.loading.names import Shape
from trioserve.model.model_config import ModelConfig
from trioserve.model.vision.family import (
    CLIP_MEAN,
    CLIP_STD,
    DIMENSION_MAX,
    IMAGE_SIZE_MAX,
    UnknownEncoder,
    VisionConfig,
    VitConfig,
    check_range,
    feature_layer_count,
    image_token_id,
    pixel_fields,
    processor_fields,
    tile_limits,
    vision_fields,
    vit_config,
)
from trioserve.vision.families.internvl import AyaProcessing, CohereProcessing

__all__ = ["CohereVisionConfig", "read_aya", "read_cohere2"]

_NOTES = ("vision_use_head", "vocab_size")  # Fields of heads that are not used.


class CohereVisionConfig(VisionConfig, frozen=True, kw_only=True, tag="cohere_vision"):
    """SigLIP, pixel shuffle, and an MLP whose first layer computes values and gates.

    Attributes:
        vit: transformer.
        layer_total: layers in the checkpoint. The last ones may be unused.
        scale_factor: side of a square, in patches, that becomes one row.
        inner_size: values and gates together.
        norm_eps: number that the norm before the MLP adds to the variance. None: there is no norm.
    """

    vit: VitConfig
    layer_total: int
    scale_factor: int
    inner_size: int
    norm_eps: float | None

    def __post_init__(self) -> None:
        check_range("config", "downsample_factor", self.scale_factor, IMAGE_SIZE_MAX)
        check_range("config", "alignment_intermediate_size", self.inner_size, DIMENSION_MAX)
        for name, value, divisor in (
            ("number of patches per side", self.vit.positions_per_side, self.scale_factor),
            ("alignment_intermediate_size", self.inner_size, 2),
        ):
            if value % divisor:
                raise ModelLoadError(
                    f"the {name} is {value}, which is no multiple of {divisor}: the checkpoint's config is damaged"
                )
        if self.norm_eps is not None and not 0 < self.norm_eps < 1:
            raise ModelLoadError(f"config.json has adapter_layer_norm_eps {self.norm_eps}, it must be a small number")

    @property
    def layers_ignored(self) -> range:
        return range(self.vit.layer_count, self.layer_total)

    def shapes(self) -> dict[str, Shape]:
        inputs = self.vit.hidden_size * self.scale_factor**2
        projector = "multi_modal_projector"
        shapes = self.vit.shapes() | {
            f"{projector}.linear_1.weight": (self.inner_size, inputs),
            f"{projector}.linear_1.bias": (self.inner_size,),
            f"{projector}.linear_2.weight": (self.output_size, self.inner_size // 2),
            f"{projector}.linear_2.bias": (self.output_size,),
        }
        if self.norm_eps is not None:
            shapes[f"{projector}.layernorm.weight"] = shapes[f"{projector}.layernorm.bias"] = (inputs,)
        return shapes


def read_aya(directory: Path, outer: Fields, texts: ModelConfig) -> tuple[CohereVisionConfig, AyaProcessing]:
    """Read the config files of Aya Vision.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    if outer.text_or("vision_feature_select_strategy", "full") != "full":
        raise outer.wrong("vision_feature_select_strategy", "full")
    config = _config(
        outer,
        texts,
        inner_size=outer.whole_or("alignment_intermediate_size", texts.hidden_size),
        norm_eps=outer.number_or("adapter_layer_norm_eps", 1e-6),
    )
    processor = processor_fields(directory)
    processor.flag_or("crop_to_patches", True)  # transformers' processor always crops.
    return config, AyaProcessing(
        **pixel_fields(processor, resample=3, mean=CLIP_MEAN, std=CLIP_STD),
        **tile_limits(processor, config.vit, 384),
        tile_tokens=(config.vit.positions_per_side // config.scale_factor) ** 2,
        embedding_size=config.output_size,
        image_token_id=image_token_id(outer, 255_036),
    )


def read_cohere2(directory: Path, outer: Fields, texts: ModelConfig) -> tuple[CohereVisionConfig, CohereProcessing]:
    """Read the config files of Command A Vision.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    inner_size = outer.whole_or("alignment_intermediate_size", 36_864)
    config = _config(outer, texts, inner_size=inner_size, norm_eps=None)
    processor = processor_fields(directory)
    limits = tile_limits(processor, config.vit, 512)
    if not processor.flag_or("crop_to_patches", True):
        limits |= {"tiles_max": 1}
    tokens_per_side = config.vit.positions_per_side // config.scale_factor
    if processor.whole_or("patch_size", 16) != tokens_per_side:  # Not the number of pixels in this class.
        raise processor.wrong("patch_size", f"{tokens_per_side}, the square root of the tokens of a tile")
    return config, CohereProcessing(
        **pixel_fields(processor, resample=3, mean=CLIP_MEAN, std=CLIP_STD),
        **limits,
        tile_tokens=tokens_per_side**2,
        embedding_size=config.output_size,
        image_token_id=image_token_id(outer, 255_036),
    )


def _config(outer: Fields, texts: ModelConfig, *, inner_size: int, norm_eps: float | None) -> CohereVisionConfig:
    fields = vision_fields(outer)
    kind = fields.text_or("model_type", "siglip_vision_model")
    if kind != "siglip_vision_model":
        raise UnknownEncoder(f"model_type in the vision_config is {kind[:80]}, not siglip_vision_model")
    layer_total = fields.whole_or("num_hidden_layers", 12)
    is_aya = norm_eps is not None
    vit = vit_config(
        fields,
        layer_count=feature_layer_count(outer, layer_total, -1) if is_aya else layer_total,
        hidden_size=768,
        intermediate_size=3072,
        head_count=12,
        image_size=224,
        patch_size=16,
        has_last_norm=not is_aya,
    )
    warn_of_unread("vision_config in config.json", unread_names(fields, _NOTES))
    return CohereVisionConfig(
        vit=vit,
        layer_total=layer_total,
        scale_factor=outer.whole_or("downsample_factor", 2),
        inner_size=inner_size,
        norm_eps=norm_eps,
        output_size=texts.hidden_size,
    )
