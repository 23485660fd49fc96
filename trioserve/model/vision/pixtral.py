"""The image encoder of Pixtral (arXiv 2410.07073), Mistral Small 3 and LightOnOCR: a transformer with rotary positions
in rows and columns, then a projection, which joins squares of patches in the last two."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.fields import Fields, unread_names, warn_of_unread
from trioserve.model.loading.names import Shape
from trioserve.model.model_config import LAYERS_MAX, ModelConfig
from trioserve.model.vision.family import (
    CLIP_MEAN,
    CLIP_STD,
    DIMENSION_MAX,
    IMAGE_SIZE_MAX,
    UnknownEncoder,
    VisionConfig,
    VitActivation,
    activation_of,
    check_range,
    feature_layer_count,
    image_token_id,
    pixel_fields,
    processor_fields,
    square_of,
    vision_fields,
)
from trioserve.vision.families.pixtral import LightOnProcessing, PixtralProcessing

__all__ = ["PIXTRAL_NORM_EPS", "LightOnConfig", "PixtralConfig", "read_lighton", "read_mistral3", "read_pixtral"]

PIXTRAL_NORM_EPS = 1e-5
_NOTES = ("head_dim", "image_size", "num_channels", "vocab_size")  # transformers ignores the first one.


class PixtralConfig(VisionConfig, frozen=True, kw_only=True, tag="pixtral"):
    """A transformer over the patches of a whole image.

    Attributes:
        layer_count: layers that are computed.
        layer_total: layers in the checkpoint. The last ones may be unused.
        merge_size: patches of each side of the square that becomes one row. None: the checkpoint has no merger, and
            each patch is one row.
        merger_eps: number that the merger's norm adds to the variance.
    """

    hidden_size: int
    intermediate_size: int
    layer_count: int
    layer_total: int
    head_count: int
    patch_size: int
    activation: VitActivation
    theta: float
    merge_size: int | None
    merger_eps: float
    has_projector_bias: bool

    names: ClassVar[tuple[tuple[str, str], ...]] = (("encoder.layers.", "transformer.layers."),)

    def __post_init__(self) -> None:
        for name, largest in (
            ("hidden_size", DIMENSION_MAX),
            ("intermediate_size", DIMENSION_MAX),
            ("layer_count", LAYERS_MAX),
            ("head_count", DIMENSION_MAX),
            ("patch_size", IMAGE_SIZE_MAX),
        ):
            check_range("vision_config", name, getattr(self, name), largest)
        if self.merge_size is not None:
            check_range("config", "spatial_merge_size", self.merge_size, 16)
        if self.hidden_size % (4 * self.head_count):
            raise ModelLoadError(
                f"the vision_config has hidden_size {self.hidden_size} and {self.head_count} heads, but the size of a "
                "head must be a multiple of 4: the checkpoint's config is damaged"
            )

    @property
    def layers_ignored(self) -> range:
        return range(self.layer_count, self.layer_total)

    def shapes(self) -> dict[str, Shape]:
        hidden, middle, size = self.hidden_size, self.intermediate_size, self.output_size
        shapes: dict[str, Shape] = {
            "vision_model.patch_conv.weight": (hidden, 3, self.patch_size, self.patch_size),
            "vision_model.ln_pre.weight": (hidden,),
            "multi_modal_projector.linear_1.weight": (size, hidden),
            "multi_modal_projector.linear_2.weight": (size, size),
        }
        for index in range(self.layer_count):
            layer = f"vision_model.encoder.layers.{index}"
            shapes |= {f"{layer}.{name}.weight": (hidden,) for name in ("attention_norm", "ffn_norm")}
            shapes |= {f"{layer}.attention.{name}_proj.weight": (hidden, hidden) for name in ("q", "k", "v", "o")}
            shapes |= {f"{layer}.feed_forward.{name}_proj.weight": (middle, hidden) for name in ("gate", "up")}
            shapes[f"{layer}.feed_forward.down_proj.weight"] = (hidden, middle)
        if self.has_projector_bias:
            shapes |= {f"multi_modal_projector.linear_{number}.bias": (size,) for number in (1, 2)}
        if self.merge_size is not None:
            merged = hidden * self.merge_size**2
            shapes["multi_modal_projector.norm.weight"] = (hidden,)
            shapes["multi_modal_projector.patch_merger.merging_layer.weight"] = (hidden, merged)
        return shapes


class LightOnConfig(PixtralConfig, frozen=True, kw_only=True, tag="lighton_ocr"):
    """The encoder of LightOnOCR, whose tensors have other names."""

    names: ClassVar[tuple[tuple[str, str], ...]] = (
        *PixtralConfig.names,
        ("vision_model.", "vision_encoder."),
        ("multi_modal_projector.", "vision_projection."),
    )


def read_mistral3(directory: Path, outer: Fields, texts: ModelConfig) -> tuple[PixtralConfig, PixtralProcessing]:
    """Read the config files of Mistral Small 3.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    return _read(directory, outer, texts, PixtralConfig, 10, **_merger(outer))


def read_pixtral(directory: Path, outer: Fields, texts: ModelConfig) -> tuple[PixtralConfig, PixtralProcessing]:
    """Read the config files of Pixtral, whose class in transformers is that of LLaVA.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    if outer.text_or("vision_feature_select_strategy", "default") != "full":
        raise outer.wrong("vision_feature_select_strategy", "full")
    return _read(directory, outer, texts, PixtralConfig, 32_000, merge_size=None, default_layer=-2, has_bias=True)


def read_lighton(directory: Path, outer: Fields, texts: ModelConfig) -> tuple[PixtralConfig, PixtralProcessing]:
    """Read the config files of LightOnOCR.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    config, whole = _read(directory, outer, texts, LightOnConfig, 151_655, **_merger(outer))
    fields = processor_fields(directory)
    multiple = square_of(fields, "patch_size", 16)
    check_range("image processor", "patch_size", multiple, IMAGE_SIZE_MAX)
    if multiple % config.patch_size:
        raise fields.wrong("patch_size", f"a multiple of {config.patch_size}, the patch_size of the vision_config")
    return config, LightOnProcessing(
        **{name: getattr(whole, name) for name in whole.__struct_fields__}, multiple=multiple
    )


def _merger(outer: Fields) -> dict[str, Any]:
    kind = vision_fields(outer).text_or("model_type", "pixtral")
    if kind != "pixtral":
        raise UnknownEncoder(f"model_type in the vision_config is {kind[:80]}, not pixtral")
    return {"merge_size": outer.whole_or("spatial_merge_size", 2), "default_layer": -1, "has_bias": False}


def _read(
    directory: Path,
    outer: Fields,
    texts: ModelConfig,
    kind: type[PixtralConfig],
    image_token: int,
    *,
    merge_size: int | None,
    default_layer: int,
    has_bias: bool,
) -> tuple[PixtralConfig, PixtralProcessing]:
    fields = vision_fields(outer)
    if outer.text_or("projector_hidden_act", "gelu") != "gelu":
        raise outer.wrong("projector_hidden_act", "gelu")
    layer_total = fields.whole_or("num_hidden_layers", 24)
    rope = fields.group_or_none("rope_parameters") or fields
    if rope.text_or("rope_type", "axial") not in ("axial", "default"):
        raise rope.wrong("rope_type", "axial")
    config = kind(
        # Fields that are missing have the defaults of transformers' class.
        hidden_size=fields.whole_or("hidden_size", 1024),
        intermediate_size=fields.whole_or("intermediate_size", 4096),
        layer_count=feature_layer_count(outer, layer_total, default_layer),
        layer_total=layer_total,
        head_count=fields.whole_or("num_attention_heads", 16),
        patch_size=square_of(fields, "patch_size", 16),
        activation=activation_of(fields, "gelu"),
        theta=rope.number_or("rope_theta", 10_000.0),
        merge_size=merge_size,
        merger_eps=texts.norm_eps,
        has_projector_bias=outer.flag_or("multimodal_projector_bias", has_bias),
        output_size=texts.hidden_size,
    )
    if not config.theta > 0:
        raise rope.wrong("rope_theta", "above 0")
    warn_of_unread("vision_config in config.json", unread_names(fields, _NOTES))
    processor = processor_fields(directory)
    size = processor.group_or_none("size") or Fields({"longest_edge": 1024}, "size")
    longest_edge = size.whole("longest_edge")
    if not 1 <= longest_edge <= IMAGE_SIZE_MAX:
        raise size.wrong("longest_edge", f"1 to {IMAGE_SIZE_MAX}")
    return config, PixtralProcessing(
        **pixel_fields(processor, resample=3, mean=CLIP_MEAN, std=CLIP_STD),
        square=config.patch_size * (merge_size or 1),
        longest_edge=longest_edge,
        embedding_size=config.output_size,
        image_token_id=image_token_id(outer, image_token),
    )
