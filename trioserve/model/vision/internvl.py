"""The image encoder of InternVL (arXiv 2312.14238) in transformers' form, and of Qianfan-OCR: InternViT, then pixel
shuffle and an MLP."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.fields import Fields, unread_names, warn_of_unread
from trioserve.model.loading.names import Shape
from trioserve.model.model_config import ModelConfig
from trioserve.model.vision.family import (
    CLIP_MEAN,
    CLIP_STD,
    IMAGE_SIZE_MAX,
    UnknownEncoder,
    VisionConfig,
    VitConfig,
    check_range,
    image_token_id,
    pixel_fields,
    processor_fields,
    tile_limits,
    vision_fields,
    vit_config,
)
from trioserve.vision.families.internvl import InternvlProcessing, QianfanProcessing

__all__ = ["InternvlConfig", "QianfanConfig", "read_internvl", "read_qianfan"]

# transformers' processor always crops. The last field is for training.
_NOTES = ("crop_to_patches", "layer_scale_init_value", "drop_path_rate")


class InternvlConfig(VisionConfig, frozen=True, kw_only=True, tag="internvl"):
    """InternViT, and pixel shuffle.

    Attributes:
        vit: transformer.
        scale_factor: side of a square, in patches, that becomes one row.
    """

    vit: VitConfig
    scale_factor: int

    names: ClassVar[tuple[tuple[str, str], ...]] = (
        ("embeddings.patch_embedding.", "embeddings.patch_embeddings.projection."),
        ("embeddings.class_embedding", "embeddings.cls_token"),
        ("embeddings.position_embedding.weight", "embeddings.position_embeddings"),
        ("encoder.layers.", "encoder.layer."),
        ("self_attn.out_proj.", "attention.projection_layer."),
        ("self_attn.", "attention."),
        ("layer_norm1.", "layernorm_before."),
        ("layer_norm2.", "layernorm_after."),
    )

    def __post_init__(self) -> None:
        check_range("config", "1 / downsample_ratio", self.scale_factor, IMAGE_SIZE_MAX)
        if self.vit.positions_per_side % self.scale_factor:
            raise ModelLoadError(
                f"{self.vit.positions_per_side} patches per side are no multiple of {self.scale_factor}, which follows "
                "from downsample_ratio: the checkpoint's config is damaged"
            )

    def shapes(self) -> dict[str, Shape]:
        hidden, size = self.vit.hidden_size, self.output_size
        shapes = self.vit.shapes()
        for name in ("class_embedding", "position_embedding.weight"):
            shape = shapes[f"vision_model.embeddings.{name}"]
            shapes[f"vision_model.embeddings.{name}"] = (*(1,) * (3 - len(shape)), *shape)
        projector = "multi_modal_projector"
        inputs = hidden * self.scale_factor**2
        shapes[f"{projector}.layer_norm.weight"] = shapes[f"{projector}.layer_norm.bias"] = (inputs,)
        for name, columns in (("linear_1", inputs), ("linear_2", size)):
            shapes[f"{projector}.{name}.weight"] = (size, columns)
            shapes[f"{projector}.{name}.bias"] = (size,)
        return shapes


class QianfanConfig(InternvlConfig, frozen=True, kw_only=True, tag="qianfan_ocr"):
    """The encoder of Qianfan-OCR, whose tensors have InternVL's first names."""

    names: ClassVar[tuple[tuple[str, str], ...]] = (
        ("embeddings.position_embedding.weight", "embeddings.position_embedding"),
        ("self_attn.out_proj.", "attn.proj."),
        ("self_attn.", "attn."),
        ("layer_norm1.", "norm1."),
        ("layer_norm2.", "norm2."),
        ("lambda_", "ls"),
        ("multi_modal_projector.layer_norm.", "mlp1.0."),
        ("multi_modal_projector.linear_1.", "mlp1.1."),
        ("multi_modal_projector.linear_2.", "mlp1.3."),
    )


def read_internvl(directory: Path, outer: Fields, texts: ModelConfig) -> tuple[InternvlConfig, InternvlProcessing]:
    """Read the config files of InternVL.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    return _read(directory, outer, texts, InternvlConfig, InternvlProcessing)


def read_qianfan(directory: Path, outer: Fields, texts: ModelConfig) -> tuple[InternvlConfig, InternvlProcessing]:
    """Read the config files of Qianfan-OCR.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    return _read(directory, outer, texts, QianfanConfig, QianfanProcessing)


def _read(
    directory: Path,
    outer: Fields,
    texts: ModelConfig,
    kind: type[InternvlConfig],
    processing: type[InternvlProcessing],
) -> tuple[InternvlConfig, InternvlProcessing]:
    is_qianfan = kind is QianfanConfig
    fields = vision_fields(outer)
    norm_type, has_qk_norm = fields.text_or("norm_type", "layer_norm"), fields.flag_or("use_qk_norm", False)
    if norm_type != "layer_norm" or has_qk_norm:  # Encoders with six billion parameters have both.
        raise UnknownEncoder(
            f"the vision_config has norm_type {norm_type[:80]} and use_qk_norm {has_qk_norm}, not layer_norm and False"
        )
    for name, value in (
        ("use_mask_token", False),
        ("use_absolute_position_embeddings", True),
        ("use_mean_pooling", True),
    ):
        if fields.flag_or(name, value) is not value:
            raise fields.wrong(name, str(value).lower())
    if outer.text_or("projector_hidden_act", "gelu") != "gelu":
        raise outer.wrong("projector_hidden_act", "gelu")
    if outer.whole_or("vision_feature_layer", -1) != -1:
        raise outer.wrong("vision_feature_layer", "-1")
    if outer.text_or("vision_feature_select_strategy", "default") != "default":
        raise outer.wrong("vision_feature_select_strategy", "default")
    ratio = outer.number_or("downsample_ratio", 0.5)
    scale_factor = round(1 / ratio) if ratio > 0 else 0
    if scale_factor * ratio != 1:
        raise outer.wrong("downsample_ratio", "1 divided by a whole number")
    vit = vit_config(
        fields,
        layer_count=fields.whole_or("num_hidden_layers", 24),
        activation="gelu",
        hidden_size=1024,
        intermediate_size=4096,
        head_count=16,
        image_size=448,
        patch_size=14,
        has_class_token=True,
        has_attention_bias=fields.flag_or("attention_bias", is_qianfan),
        has_joint_qkv=is_qianfan,
        has_last_norm=False,
        has_layer_scale=True,
    )
    config = kind(vit=vit, scale_factor=scale_factor, output_size=texts.hidden_size)
    warn_of_unread("vision_config in config.json", unread_names(fields, _NOTES))
    processor = processor_fields(directory)
    return config, processing(
        **pixel_fields(processor, resample=3, mean=CLIP_MEAN, std=CLIP_STD),
        **tile_limits(processor, vit, 384),
        tile_tokens=(vit.positions_per_side // scale_factor) ** 2,
        embedding_size=config.output_size,
        image_token_id=image_token_id(outer, 151_667),
    )
