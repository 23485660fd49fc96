"""The image encoders of Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL (arXiv 2502.13923), Qwen3-VL (arXiv 2511.21631)
and Qwen3.5. EXAONE 4.5 and HyperCLOVA X SEED Think 32B have that of Qwen2.5-VL."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.fields import Fields, unread_names, warn_of_unread
from trioserve.model.loading.names import Shape
from trioserve.model.model_config import LAYERS_MAX, ModelConfig
from trioserve.model.vision.family import (
    CLIP_MEAN,
    CLIP_STD,
    DIMENSION_MAX,
    IMAGE_SIZE_MAX,
    VisionConfig,
    VitActivation,
    activation_of,
    check_range,
    image_token_id,
    pixel_fields,
    processor_fields,
    vision_fields,
)
from trioserve.vision.families.qwen_vl import ExaoneProcessing, HyperClovaProcessing, QwenVLProcessing

__all__ = [
    "GridConfig",
    "HyperClovaConfig",
    "QwenVLConfig",
    "grid_fields",
    "grid_processing",
    "read_exaone",
    "read_hyperclova",
    "read_qwen2_5_vl",
    "read_qwen2_vl",
    "read_qwen3_5",
    "read_qwen3_vl",
]

Kind: TypeAlias = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
NORM_EPS = 1e-6
_NOTES = ("in_chans", "initializer_range", "spatial_patch_size", "tokens_per_second")


class GridConfig(VisionConfig, frozen=True, kw_only=True):
    """A transformer over the patches of a whole image, with rotary positions in rows and columns.

    Attributes:
        patch_size: pixels of each side of a patch.
        frame_count: copies of an image that make a patch. The model was trained on videos.
        merge_size: patches of each side of the square that becomes one row.
        window_size: rows of each side of a window. None: every layer sees the whole image.
        whole_layers: layers that see the whole image. All other layers see windows.
        positions_per_side: side of the square of learned positions, which are interpolated. 0: there are none.
    """

    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    patch_size: int
    frame_count: int
    merge_size: int
    activation: VitActivation
    window_size: int | None = None
    whole_layers: tuple[int, ...] = ()
    positions_per_side: int = 0

    def __post_init__(self) -> None:
        for name, largest in (
            ("hidden_size", DIMENSION_MAX),
            ("intermediate_size", DIMENSION_MAX),
            ("layer_count", LAYERS_MAX),
            ("head_count", DIMENSION_MAX),
            ("patch_size", IMAGE_SIZE_MAX),
            ("frame_count", 16),
            ("merge_size", 16),
        ):
            check_range("vision_config", name, getattr(self, name), largest)
        if self.hidden_size % (4 * self.head_count):
            raise ModelLoadError(
                f"the vision_config has hidden_size {self.hidden_size} and {self.head_count} heads, but the size of a "
                "head must be a multiple of 4: the checkpoint's config is damaged"
            )
        if self.window_size is not None:
            check_range("vision_config", "number of rows in a window", self.window_size, IMAGE_SIZE_MAX)

    @property
    def square(self) -> int:
        """Pixels of each side of the square that becomes one row."""
        return self.patch_size * self.merge_size


class QwenVLConfig(GridConfig, frozen=True, kw_only=True, tag="qwen_vl"):
    """The image encoder of a Qwen model.

    Attributes:
        kind: qwen2_vl has LayerNorm and an MLP without a gate. qwen2_5_vl has RMS norm and an MLP with a gate. qwen3_vl
            is like qwen2_vl, and adds learned positions to patches.
        deep_layers: layers whose outputs are added to the first layers of the language model (DeepStack, arXiv
            2406.04334).
        kv_head_count: heads of keys and values. None: head_count.
        merger_size: numbers that a merger computes for a row. None: output_size.
    """

    kind: Kind
    deep_layers: tuple[int, ...] = ()
    kv_head_count: int | None = None
    merger_size: int | None = None

    def __post_init__(self) -> None:
        GridConfig.__post_init__(self)
        if self.kv_head_count is not None:
            check_range("vision_config", "num_key_value_heads", self.kv_head_count, self.head_count)
            if self.head_count % self.kv_head_count:
                raise ModelLoadError(
                    f"the vision_config has {self.head_count} heads, which is no multiple of num_key_value_heads "
                    f"{self.kv_head_count}: the checkpoint's config is damaged"
                )
        if self.merger_size is not None:
            check_range("vision_config", "out_hidden_size", self.merger_size, DIMENSION_MAX)
        if [layer for layer in range(self.layer_count) if layer in self.deep_layers] != list(self.deep_layers):
            raise ModelLoadError(
                f"deepstack_visual_indexes in the vision_config is {list(self.deep_layers)}, but must be ascending "
                f"numbers of the {self.layer_count} layers: the checkpoint's config is damaged"
            )

    @property
    def mlp_names(self) -> tuple[str, ...]:
        """Names of the MLP's projections. The last one gives the output."""
        if self.kind == "qwen2_5_vl":
            return ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        return ("mlp.fc1", "mlp.fc2") if self.kind == "qwen2_vl" else ("mlp.linear_fc1", "mlp.linear_fc2")

    @property
    def merger_names(self) -> tuple[str, str, str]:
        """Names of a merger's norm and of its two projections."""
        return ("norm", "linear_fc1", "linear_fc2") if self.kind == "qwen3_vl" else ("ln_q", "mlp.0", "mlp.2")

    @property
    def mergers(self) -> dict[str, bool]:
        """Names of the mergers: of the last layer, then of the deep layers. True if the norm is over a whole square."""
        deep = {f"visual.deepstack_merger_list.{index}": True for index in range(len(self.deep_layers))}
        return {"visual.merger": False, **deep}

    def shapes(self) -> dict[str, Shape]:
        hidden, middle, size = self.hidden_size, self.intermediate_size, self.patch_size
        shapes: dict[str, Shape] = {"visual.patch_embed.proj.weight": (hidden, 3, self.frame_count, size, size)}
        if self.positions_per_side:
            shapes["visual.patch_embed.proj.bias"] = (hidden,)
            shapes["visual.pos_embed.weight"] = (self.positions_per_side**2, hidden)

        def add_linear(name: str, rows: int, columns: int) -> None:
            shapes[f"{name}.weight"] = (rows, columns)
            shapes[f"{name}.bias"] = (rows,)

        def add_norm(name: str, columns: int) -> None:
            shapes[f"{name}.weight"] = (columns,)
            if self.kind != "qwen2_5_vl":
                shapes[f"{name}.bias"] = (columns,)

        for index in range(self.layer_count):
            layer = f"visual.blocks.{index}"
            add_norm(f"{layer}.norm1", hidden)
            add_norm(f"{layer}.norm2", hidden)
            kv_count = self.kv_head_count or self.head_count
            add_linear(f"{layer}.attn.qkv", hidden + 2 * kv_count * (hidden // self.head_count), hidden)
            add_linear(f"{layer}.attn.proj", hidden, hidden)
            *inner, last = self.mlp_names
            for name in inner:
                add_linear(f"{layer}.{name}", middle, hidden)
            add_linear(f"{layer}.{last}", hidden, middle)
        merged = hidden * self.merge_size**2
        norm, first, second = self.merger_names
        for merger, is_whole in self.mergers.items():
            add_norm(f"{merger}.{norm}", merged if is_whole else hidden)
            add_linear(f"{merger}.{first}", merged, merged)
            add_linear(f"{merger}.{second}", self.merger_size or self.output_size, merged)
        return shapes


class HyperClovaConfig(QwenVLConfig, frozen=True, kw_only=True, tag="hyperclovax"):
    """The encoder of HyperCLOVA X: that of Qwen2.5-VL, and a projection of its rows."""

    names: ClassVar[tuple[tuple[str, str], ...]] = (("visual.", "vision_model."), ("projector.", "vision_projector."))

    def shapes(self) -> dict[str, Shape]:
        assert self.merger_size is not None, "the reader sets it"
        projector: dict[str, Shape] = {
            "projector.weight": (self.output_size, self.merger_size),
            "projector.bias": (self.output_size,),
        }
        return QwenVLConfig.shapes(self) | projector


def read_qwen2_vl(directory: Path, outer: Fields, texts: ModelConfig) -> tuple[QwenVLConfig, QwenVLProcessing]:
    """Read the config files of Qwen2-VL.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    fields = vision_fields(outer)
    hidden_size = fields.whole_or("embed_dim", 1280)
    config = QwenVLConfig(
        kind="qwen2_vl",
        hidden_size=hidden_size,
        intermediate_size=hidden_size * fields.whole_or("mlp_ratio", 4),
        activation=activation_of(fields, "quick_gelu"),
        **grid_fields(fields, texts, patch_size=14, layer_count=32, output_field="hidden_size"),
    )
    return config, grid_processing(directory, outer, texts, config, fields, embedding_size=config.output_size)


def read_qwen2_5_vl(directory: Path, outer: Fields, texts: ModelConfig) -> tuple[QwenVLConfig, QwenVLProcessing]:
    """Read the config files of Qwen2.5-VL.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    fields = vision_fields(outer)
    config = QwenVLConfig(**_windowed(fields, grid_fields(fields, texts, patch_size=14, layer_count=32)))
    return config, grid_processing(directory, outer, texts, config, fields, embedding_size=config.output_size)


def read_exaone(directory: Path, outer: Fields, texts: ModelConfig) -> tuple[QwenVLConfig, QwenVLProcessing]:
    """Read the config files of EXAONE 4.5. Heads of its encoder share keys and values.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    fields = vision_fields(outer)
    shared = _windowed(fields, grid_fields(fields, texts, patch_size=14, layer_count=32))
    config = QwenVLConfig(kv_head_count=fields.whole_or("num_key_value_heads", 8), **shared)
    return config, grid_processing(
        directory, outer, texts, config, fields, 67, embedding_size=config.output_size, kind=ExaoneProcessing
    )


def read_hyperclova(directory: Path, outer: Fields, texts: ModelConfig) -> tuple[QwenVLConfig, QwenVLProcessing]:
    """Read the config files of HyperCLOVA X SEED Think 32B.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    fields = vision_fields(outer)
    shared = grid_fields(fields, texts, patch_size=14, layer_count=32, output_field=None)
    config = HyperClovaConfig(merger_size=fields.whole_or("out_hidden_size", 3584), **_windowed(fields, shared))
    return config, grid_processing(
        directory, outer, texts, config, fields, 128_060, embedding_size=config.output_size, kind=HyperClovaProcessing
    )


def _windowed(fields: Fields, shared: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of QwenVLConfig for the encoder of Qwen2.5-VL. shared: result of grid_fields."""
    square = shared["patch_size"] * shared["merge_size"]
    return {
        **shared,
        "kind": "qwen2_5_vl",
        "hidden_size": fields.whole_or("hidden_size", 3584),
        "intermediate_size": fields.whole_or("intermediate_size", 3420),
        "activation": activation_of(fields, "silu"),
        "window_size": fields.whole_or("window_size", 112) // max(square, 1),
        "whole_layers": fields.wholes("fullatt_block_indexes") or (7, 15, 23, 31),
    }


def read_qwen3_vl(directory: Path, outer: Fields, texts: ModelConfig) -> tuple[QwenVLConfig, QwenVLProcessing]:
    """Read the config files of Qwen3-VL.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    fields = vision_fields(outer)
    deep_layers = fields.wholes("deepstack_visual_indexes") if "deepstack_visual_indexes" in fields else (8, 16, 24)
    return _read_qwen3(directory, outer, texts, deep_layers, 151_655)


def read_qwen3_5(directory: Path, outer: Fields, texts: ModelConfig) -> tuple[QwenVLConfig, QwenVLProcessing]:
    """Read the config files of Qwen3.5, whose encoder is that of Qwen3-VL without DeepStack.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    fields = vision_fields(outer)
    if fields.wholes("deepstack_visual_indexes"):
        raise fields.wrong("deepstack_visual_indexes", "[] for this family")
    return _read_qwen3(directory, outer, texts, (), 248_056)


def _read_qwen3(
    directory: Path, outer: Fields, texts: ModelConfig, deep_layers: tuple[int, ...], image_token: int
) -> tuple[QwenVLConfig, QwenVLProcessing]:
    fields = vision_fields(outer)
    positions = fields.whole_or("num_position_embeddings", 2304)
    if not (positions >= 1 and math.isqrt(positions) ** 2 == positions):
        raise fields.wrong("num_position_embeddings", "a square")
    config = QwenVLConfig(
        kind="qwen3_vl",
        hidden_size=fields.whole_or("hidden_size", 1152),
        intermediate_size=fields.whole_or("intermediate_size", 4304),
        activation=activation_of(fields, "gelu_pytorch_tanh"),
        positions_per_side=math.isqrt(positions),
        deep_layers=deep_layers,
        **grid_fields(fields, texts, patch_size=16, layer_count=27),
    )
    if len(deep_layers) > texts.layer_count:
        raise ModelLoadError(
            f"deepstack_visual_indexes in the vision_config has {len(deep_layers)} layers, but the language model has "
            f"only {texts.layer_count}: the checkpoint's config is damaged"
        )
    size = config.output_size * (1 + len(deep_layers))
    return config, grid_processing(directory, outer, texts, config, fields, image_token, embedding_size=size)


def grid_fields(
    fields: Fields,
    texts: ModelConfig,
    *,
    patch_size: int,
    layer_count: int,
    head_count: int = 16,
    output_field: str | None = "out_hidden_size",
) -> dict[str, Any]:
    """Read the fields of GridConfig that have the same name in all families.

    Args:
        fields: fields of the image encoder.
        texts: config of the language model.
        patch_size, layer_count, head_count: values of missing fields.
        output_field: field with the hidden_size of the language model. None: there is none.
    """
    if fields.whole_or("in_channels", 3) != 3:
        raise fields.wrong("in_channels", "3")
    if output_field is not None and fields.whole_or(output_field, texts.hidden_size) != texts.hidden_size:
        raise fields.wrong(output_field, f"{texts.hidden_size}, the hidden_size of the language model")
    return {
        "layer_count": fields.whole_or("depth", layer_count),
        "head_count": fields.whole_or("num_heads", head_count),
        "patch_size": fields.whole_or("patch_size", patch_size),
        "frame_count": fields.whole_or("temporal_patch_size", 2),
        "merge_size": fields.whole_or("spatial_merge_size", 2),
        "output_size": texts.hidden_size,
    }


def grid_processing(
    directory: Path,
    outer: Fields,
    texts: ModelConfig,
    config: GridConfig,
    fields: Fields,
    image_token: int = 151_655,
    *,
    embedding_size: int,
    kind: type[QwenVLProcessing] = QwenVLProcessing,
) -> QwenVLProcessing:
    """Read the config of the preparation of images, and check that nothing in the image encoder's is unknown.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
        config: config of the image encoder.
        fields: its fields.
        image_token: value of a missing image_token_id.
        embedding_size: numbers in one row.
        kind: class of the preparation.
    """
    if kind.has_grid and not any(rotary is not None and rotary.axes for rotary, _ in texts.rotaries):
        raise ModelLoadError(
            "the text_config lacks mrope_section, which divides the rotated numbers of a head between the positions of "
            "an image: fetch the checkpoint again"
        )
    _check_rope(fields)
    warn_of_unread("vision_config in config.json", unread_names(fields, _NOTES))
    images = processor_fields(directory)
    for name, value in (
        ("patch_size", config.patch_size),
        ("merge_size", config.merge_size),
        ("temporal_patch_size", config.frame_count),
    ):
        if images.whole_or(name, value) != value:
            raise images.wrong(name, f"the number in config.json, {value}")
    size = images.group_or_none("size") or Fields({}, "size")
    # Older files have the first two fields beside an unused size.
    pixels_min = images.whole_or("min_pixels", size.whole_or("shortest_edge", kind.pixels_min_default))
    pixels_max = images.whole_or("max_pixels", size.whole_or("longest_edge", kind.pixels_max_default))
    frames = config.frame_count if kind.counts_frames else 1
    if pixels_min % frames or pixels_max % frames:
        raise images.wrong("size", f"multiples of the temporal_patch_size {frames}")
    pixels_min, pixels_max = pixels_min // frames, pixels_max // frames
    if not config.square**2 <= pixels_min <= pixels_max <= IMAGE_SIZE_MAX**2 * 4:
        raise ModelLoadError(
            f"images have {pixels_min} to {pixels_max} pixels, but one token needs {config.square**2}, and at most "
            f"{IMAGE_SIZE_MAX**2 * 4} are supported: the checkpoint's files are damaged"
        )
    return kind(
        square=config.square,
        pixels_min=pixels_min,
        pixels_max=pixels_max,
        embedding_size=embedding_size,
        image_token_id=image_token_id(outer, image_token),
        **pixel_fields(images, resample=3, mean=CLIP_MEAN, std=CLIP_STD),
    )


def _check_rope(fields: Fields) -> None:
    rope = fields.group_or_none("rope_parameters")
    if rope is None:
        return
    if rope.text_or("rope_type", "axial") not in ("axial", "default"):
        raise rope.wrong("rope_type", "axial")
    if rope.number_or("rope_theta", 10_000.0) != 10_000.0:
        raise rope.wrong("rope_theta", "10000")
