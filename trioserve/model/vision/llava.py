"""The image encoders of LLaVA 1.5 (arXiv 2310.03744), LLaVA-NeXT and LLaVA-OneVision (arXiv 2408.03326): CLIP or
SigLIP, then an MLP."""

from __future__ import annotations

from pathlib import Path

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
    feature_layer_count,
    image_token_id,
    pixel_fields,
    processor_fields,
    vision_fields,
    vit_config,
)
from trioserve.model.vision.pixtral import PixtralConfig, read_pixtral
from trioserve.vision.families.llava import LlavaProcessing, OneVisionProcessing
from trioserve.vision.families.pixtral import PixtralProcessing

__all__ = ["LlavaConfig", "read_llava", "read_next", "read_onevision"]

CANVASES_MAX = 1000
TILES_MAX = 100
_NOTES = ("projection_dim", "vision_use_head", "vocab_size")  # Fields of heads that are not used.


class LlavaConfig(VisionConfig, frozen=True, kw_only=True, tag="llava"):
    """CLIP or SigLIP, and an MLP of two layers.

    Attributes:
        vit: transformer.
        layer_total: layers in the checkpoint. The last ones may be unused.
        has_projector_bias: the MLP has biases.
        has_newline: a learned row follows each line of a larger copy of an image.
    """

    vit: VitConfig
    layer_total: int
    has_projector_bias: bool
    has_newline: bool

    @property
    def layers_ignored(self) -> range:
        return range(self.vit.layer_count, self.layer_total)

    def shapes(self) -> dict[str, Shape]:
        size = self.output_size
        shapes = self.vit.shapes() | {
            "multi_modal_projector.linear_1.weight": (size, self.vit.hidden_size),
            "multi_modal_projector.linear_2.weight": (size, size),
        }
        if self.has_projector_bias:
            shapes["multi_modal_projector.linear_1.bias"] = shapes["multi_modal_projector.linear_2.bias"] = (size,)
        if self.has_newline:
            shapes["image_newline"] = (size,)
        return shapes


def read_llava(
    directory: Path, outer: Fields, texts: ModelConfig
) -> tuple[LlavaConfig, LlavaProcessing] | tuple[PixtralConfig, PixtralProcessing]:
    """Read the config files of LLaVA 1.5, or of Pixtral, which has the same class.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    if vision_fields(outer).text_or("model_type", None) == "pixtral":
        return read_pixtral(directory, outer, texts)
    config = _config(outer, texts, default_layer=-2, default_kind="clip_vision_model", has_newline=False)
    vit = config.vit
    processor = processor_fields(directory)
    crops = processor.flag_or("do_center_crop", vit.has_class_token)
    size = processor.group_or_none("size") or Fields({"shortest_edge": 224}, "size")
    _check_sides(size, ("shortest_edge",) if crops else ("height", "width"), vit)
    if crops:
        crop = processor.group_or_none("crop_size") or Fields({"height": 224, "width": 224}, "crop_size")
        _check_sides(crop, ("height", "width"), vit)
    return config, LlavaProcessing(
        **pixel_fields(processor, resample=3, mean=CLIP_MEAN, std=CLIP_STD),
        tile_size=vit.image_size,
        tile_tokens=vit.positions_per_side**2,
        crops=crops,
        embedding_size=config.output_size,
        image_token_id=image_token_id(outer, 32_000),
    )


def read_onevision(directory: Path, outer: Fields, texts: ModelConfig) -> tuple[LlavaConfig, OneVisionProcessing]:
    """Read the config files of LLaVA-OneVision.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    config = _config(outer, texts, default_layer=-1, default_kind="siglip_vision_model", has_newline=True)
    vit = config.vit
    aspect = outer.text_or("vision_aspect_ratio", "anyres_max_9")
    tiles_max = aspect.removeprefix("anyres_max_")
    if not tiles_max.isascii() or not tiles_max.isdigit() or not 1 <= int(tiles_max) <= TILES_MAX:
        raise outer.wrong("vision_aspect_ratio", f"anyres_max_1 to anyres_max_{TILES_MAX}")
    processor = processor_fields(directory)
    size = processor.group_or_none("size") or Fields({"height": 384, "width": 384}, "size")
    _check_sides(size, ("height", "width"), vit)
    sides = [384 * count for count in range(1, 7)]
    return config, OneVisionProcessing(
        **pixel_fields(processor, resample=3, mean=CLIP_MEAN, std=CLIP_STD),
        tile_size=vit.image_size,
        patches_per_side=vit.positions_per_side,
        canvases=_canvases(outer, processor, tuple((height, width) for height in sides for width in sides), vit),
        tiles_max=int(tiles_max),
        embedding_size=config.output_size,
        image_token_id=image_token_id(outer, 151_646),
    )


def read_next(directory: Path, outer: Fields, texts: ModelConfig) -> tuple[LlavaConfig, OneVisionProcessing]:
    """Read the config files of LLaVA-NeXT, or of LLaVA-NeXT-Video, whose images are the same.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    config = _config(outer, texts, default_layer=-2, default_kind="clip_vision_model", has_newline=True)
    vit = config.vit
    processor = processor_fields(directory)
    size = processor.group_or_none("size") or Fields({"shortest_edge": 336}, "size")
    _check_sides(size, ("height", "width") if "height" in size else ("shortest_edge",), vit)
    crop = processor.group_or_none("crop_size") or Fields({"height": 336, "width": 336}, "crop_size")
    _check_sides(crop, ("height", "width"), vit)
    return config, OneVisionProcessing(
        **pixel_fields(processor, resample=3, mean=CLIP_MEAN, std=CLIP_STD),
        tile_size=vit.image_size,
        patches_per_side=vit.positions_per_side,
        canvases=_canvases(outer, processor, ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)), vit),
        tiles_max=None,
        cuts_every_image=True,
        embedding_size=config.output_size,
        image_token_id=image_token_id(outer, 32_001 if "video_token_index" in outer else 32_000),
    )


def _canvases(
    outer: Fields, processor: Fields, default: tuple[tuple[int, int], ...], vit: VitConfig
) -> tuple[tuple[int, int], ...]:
    """Return the sizes of larger copies, as height and width in pixels. default: value of a missing field."""
    canvases = processor.pairs_or("image_grid_pinpoints", default)
    if canvases != outer.pairs_or("image_grid_pinpoints", default):
        raise outer.wrong("image_grid_pinpoints", f"the same as in {processor.source}")
    for side in (side for canvas in canvases for side in canvas):
        if side % vit.image_size or not 0 < side <= IMAGE_SIZE_MAX:
            raise outer.wrong("image_grid_pinpoints", f"multiples of the image_size {vit.image_size}")
    if not 0 < len(canvases) <= CANVASES_MAX:
        raise outer.wrong("image_grid_pinpoints", f"1 to {CANVASES_MAX} sizes")
    return canvases


def _config(
    outer: Fields, texts: ModelConfig, *, default_layer: int, default_kind: str, has_newline: bool
) -> LlavaConfig:
    fields = vision_fields(outer)
    kind = fields.text_or("model_type", default_kind)
    if kind not in ("clip_vision_model", "siglip_vision_model"):
        raise UnknownEncoder(
            f"model_type in the vision_config is {kind[:80]}, not clip_vision_model or siglip_vision_model"
        )
    is_clip = kind == "clip_vision_model"
    layer_total = fields.whole_or("num_hidden_layers", 12)
    layer_count = feature_layer_count(outer, layer_total, default_layer)
    strategy = outer.text_or(
        "vision_feature_select_strategy", "default" if default_kind == "clip_vision_model" else "full"
    )
    if strategy != ("default" if is_clip else "full"):
        raise outer.wrong("vision_feature_select_strategy", "default" if is_clip else "full")
    if outer.text_or("projector_hidden_act", "gelu") != "gelu":
        raise outer.wrong("projector_hidden_act", "gelu")
    vit = vit_config(
        fields,
        layer_count=layer_count,
        hidden_size=768,
        intermediate_size=3072,
        head_count=12,
        image_size=224,
        patch_size=32 if is_clip else 16,
        norm_eps=1e-5 if is_clip else 1e-6,
        activation="quick_gelu" if is_clip else "gelu_pytorch_tanh",
        has_class_token=is_clip,
        has_patch_bias=not is_clip,
        has_first_norm=is_clip,
        has_last_norm=False,
    )
    warn_of_unread("vision_config in config.json", unread_names(fields, _NOTES))
    return LlavaConfig(
        vit=vit,
        layer_total=layer_total,
        has_projector_bias=outer.flag_or("multimodal_projector_bias", True),
        has_newline=has_newline,
        output_size=texts.hidden_size,
    )


def _check_sides(size: Fields, names: tuple[str, ...], vit: VitConfig) -> None:
    for name in names:
        if size.whole(name) != vit.image_size:
            raise size.wrong(name, f"the image_size of the vision_config, {vit.image_size}")
