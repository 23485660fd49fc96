"""Reads what the image encoders of several families have in common: fields of config files, and a transformer over
patches.

To add a family, write one file in this folder, with a subclass of `VisionConfig` and a function that reads it, and one
line in MEDIA_FAMILIES (part.py). Its encoder is in towers.py, and its images are prepared by a file in
trioserve/vision/families.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.fields import Fields
from trioserve.model.loading.hf_config import read_json_object
from trioserve.model.loading.names import Shape
from trioserve.model.model_config import LAYERS_MAX

__all__ = [
    "CLIP_MEAN",
    "CLIP_STD",
    "UnknownEncoder",
    "VisionConfig",
    "VitActivation",
    "VitConfig",
    "activation_of",
    "check_range",
    "feature_layer_count",
    "image_token_id",
    "pixel_fields",
    "processor_fields",
    "square_of",
    "tile_limits",
    "vision_fields",
    "vit_config",
]

VitActivation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]

DIMENSION_MAX = 2**16
IMAGE_SIZE_MAX = 4096
# Patches per tile. Memory of attention grows with the square of this number. Real models have up to 5,184 patches.
TILE_PATCHES_MAX = 2**14
# Tiles into which an image is cut. Real models have at most 12.
TILES_MAX = 64

_ACTIVATIONS: dict[str, VitActivation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
}
# transformers computes with these colours unless the processor's file has others.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")  # transformers 5 writes the second file.


class UnknownEncoder(ModelLoadError):
    """The image encoder is of a kind or in a format that is not supported. Then only the language model is served."""


class VitConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Config of a transformer over the patches of a tile: SigLIP (arXiv 2303.15343), CLIP (arXiv 2103.00020) or
    InternViT (arXiv 2312.14238), without a head.

    Attributes:
        layer_count: layers that are computed. A checkpoint may have more.
        image_size: width and height in pixels of the images for which the model has position embeddings.
        patch_size: width and height of a patch in pixels.
        has_class_token: a learned row is before the rows of the patches, and is removed after the last layer.
        has_patch_bias: the patch embedding has a bias.
        has_attention_bias: queries, keys and values have biases.
        has_joint_qkv: queries, keys and values are one matrix in the files.
        has_first_norm: a norm is before the first layer.
        has_last_norm: a norm is after the last layer.
        has_layer_scale: learned factors multiply the output of attention and MLP.

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
    activation: VitActivation
    has_class_token: bool = False
    has_patch_bias: bool = True
    has_attention_bias: bool = True
    has_joint_qkv: bool = False
    has_first_norm: bool = False
    has_last_norm: bool = True
    has_layer_scale: bool = False

    def __post_init__(self) -> None:
        for name, largest in (
            ("hidden_size", DIMENSION_MAX),
            ("intermediate_size", DIMENSION_MAX),
            ("layer_count", LAYERS_MAX),
            ("head_count", DIMENSION_MAX),
            ("image_size", IMAGE_SIZE_MAX),
            ("patch_size", IMAGE_SIZE_MAX),
        ):
            check_range("vision_config", name, getattr(self, name), largest)
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

    @property
    def _attention_rows(self) -> tuple[tuple[str, int], ...]:
        """Names of the matrices of the attention, and their rows."""
        names = ("qkv",) if self.has_joint_qkv else ("q_proj", "k_proj", "v_proj")
        return (*((name, 3 * self.hidden_size // len(names)) for name in names), ("out_proj", self.hidden_size))

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of every tensor of the transformer, by name."""
        hidden, middle = self.hidden_size, self.intermediate_size
        shapes: dict[str, Shape] = {
            "vision_model.embeddings.patch_embedding.weight": (hidden, 3, self.patch_size, self.patch_size),
            "vision_model.embeddings.position_embedding.weight": (
                self.positions_per_side**2 + self.has_class_token,
                hidden,
            ),
        }
        if self.has_patch_bias:
            shapes["vision_model.embeddings.patch_embedding.bias"] = (hidden,)
        if self.has_class_token:
            shapes["vision_model.embeddings.class_embedding"] = (hidden,)
        for index in range(self.layer_count):
            layer = f"vision_model.encoder.layers.{index}"
            for module, rows, columns in (
                *((f"self_attn.{name}", rows, hidden) for name, rows in self._attention_rows),
                ("mlp.fc1", middle, hidden),
                ("mlp.fc2", hidden, middle),
            ):
                shapes[f"{layer}.{module}.weight"] = (rows, columns)
                if self.has_attention_bias or module not in _QUERIES_KEYS_VALUES:
                    shapes[f"{layer}.{module}.bias"] = (rows,)
            for norm in ("layer_norm1", "layer_norm2"):
                shapes[f"{layer}.{norm}.weight"] = shapes[f"{layer}.{norm}.bias"] = (hidden,)
            if self.has_layer_scale:
                shapes[f"{layer}.lambda_1"] = shapes[f"{layer}.lambda_2"] = (hidden,)
        for norm, is_there in (("pre_layrnorm", self.has_first_norm), ("post_layernorm", self.has_last_norm)):
            if is_there:
                shapes[f"vision_model.{norm}.weight"] = shapes[f"vision_model.{norm}.bias"] = (hidden,)
        return shapes


_QUERIES_KEYS_VALUES = ("self_attn.qkv", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Config of an image encoder, and of the projection to the language model. Each family has a subclass.

    Attributes:
        output_size: hidden_size of the language model.
    """

    output_size: int

    layers_prefix: ClassVar[str] = "vision_model.encoder.layers."
    """Prefix of the tensors of layers."""
    names: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Parts of our names, and the parts of the names in files that replace them, in this order."""

    @property
    def layers_ignored(self) -> range:
        """Return the indexes of layers that a checkpoint has, but that are not computed."""
        return range(0)

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of every tensor, by name. part.py maps these names to names in files."""
        raise NotImplementedError


def check_range(place: str, name: str, value: int, largest: int) -> None:
    """Check a number of a config.

    Args:
        place: name of the config in the error.
        name: name of the field.
        value: the number.
        largest: largest allowed number. The smallest is 1.

    Raises:
        ModelLoadError: the number is out of range.
    """
    if not 1 <= value <= largest:
        raise ModelLoadError(
            f"the {place} has {name} {value}, allowed is 1 to {largest}: the checkpoint's config is damaged"
        )


def vision_fields(outer: Fields) -> Fields:
    """Return the fields of the image encoder.

    Args:
        outer: fields of config.json.

    Raises:
        ModelLoadError: there are none.
    """
    fields = outer.group_or_none("vision_config")
    if fields is None:
        raise ModelLoadError("config.json has no vision_config: fetch the checkpoint again")
    return fields


def vit_config(
    fields: Fields, *, layer_count: int | None = None, activation: str = "gelu_pytorch_tanh", **defaults: Any
) -> VitConfig:
    """Read the transformer of an image encoder.

    Args:
        fields: fields of the image encoder.
        layer_count: number of layers to compute. None: all layers.
        activation: value of a missing hidden_act.
        defaults: values of missing fields, as in transformers' class, by the attributes of VitConfig. All attributes
            with a default in VitConfig are taken from here.
    """
    if fields.whole_or("num_channels", 3) != 3:
        raise fields.wrong("num_channels", "3")
    return VitConfig(
        hidden_size=fields.whole_or("hidden_size", defaults["hidden_size"]),
        intermediate_size=fields.whole_or("intermediate_size", defaults["intermediate_size"]),
        layer_count=fields.whole_or("num_hidden_layers", 12) if layer_count is None else layer_count,
        head_count=fields.whole_or("num_attention_heads", defaults["head_count"]),
        image_size=square_of(fields, "image_size", defaults["image_size"]),
        patch_size=square_of(fields, "patch_size", defaults["patch_size"]),
        norm_eps=fields.number_or("layer_norm_eps", defaults.get("norm_eps", 1e-6)),
        activation=activation_of(fields, activation),
        **{name: value for name, value in defaults.items() if name.startswith("has_")},
    )


def activation_of(fields: Fields, default: str) -> VitActivation:
    """Return the activation of the MLPs.

    Args:
        fields: fields of the image encoder.
        default: value of a missing hidden_act.
    """
    name = fields.text_or("hidden_act", default)
    if name not in _ACTIVATIONS:
        raise fields.wrong("hidden_act", " or ".join(_ACTIVATIONS))
    return _ACTIVATIONS[name]


def feature_layer_count(outer: Fields, layer_total: int, default: int) -> int:
    """Return how many layers are computed. The rows of an image follow from the output of the last of them.

    Args:
        outer: fields of config.json.
        layer_total: layers of the image encoder.
        default: value of a missing vision_feature_layer.
    """
    layer = outer.whole_or("vision_feature_layer", default)
    layer_count = layer_total + 1 + layer if layer < 0 else layer
    if not 1 <= layer_count <= layer_total:
        raise outer.wrong("vision_feature_layer", f"one layer, -{layer_total} to {layer_total}")
    return layer_count


def square_of(fields: Fields, name: str, default: int) -> int:
    """Return the side of a square, which a config has as one number, two equal numbers, or equal height and width.

    Args:
        fields: fields of the image encoder.
        name: name of the field.
        default: value of a missing field.
    """
    group = fields.group_or_none(name) if fields.is_object(name) else None
    sides = (fields.wholes(name) or (default,)) if group is None else (group.whole("height"), group.whole("width"))
    if len(sides) > 2 or sides[0] != sides[-1]:
        raise fields.wrong(name, "a square")
    return sides[0]


def processor_fields(directory: Path) -> Fields:
    """Return the fields that say how images are prepared.

    Args:
        directory: checkpoint directory.

    Raises:
        ModelLoadError: the file is missing, or has a step turned off.
    """
    fields = _processor_file(directory)
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not fields.flag_or(name, True):
            raise fields.wrong(name, "true")
    return fields


def _processor_file(directory: Path) -> Fields:
    for name in _PROCESSOR_FILES:
        if (directory / name).is_file():
            fields = Fields(read_json_object(directory / name), name)
            inner = fields.group_or_none("image_processor")
            if inner is not None or name == _PROCESSOR_FILES[0]:
                return inner or fields
    raise ModelLoadError(
        f"the directory has no {_PROCESSOR_FILES[0]}, which says how images are prepared: fetch the checkpoint again"
    )


def pixel_fields(fields: Fields, **defaults: Any) -> dict[str, Any]:
    """Read the fields of FamilyProcessing that describe pixels.

    Args:
        fields: result of processor_fields.
        defaults: values of the missing fields resample, mean and std, as in transformers' class.

    Returns:
        Arguments of FamilyProcessing.
    """
    resample = fields.whole_or("resample", defaults["resample"])
    if not 0 <= resample <= 5:
        raise fields.wrong("resample", "the number of a filter, 0 to 5")
    return {
        "resample": resample,
        "mean": _colours(fields, "image_mean", defaults.get("mean", (0.5, 0.5, 0.5))),
        "std": _colours(fields, "image_std", defaults.get("std", (0.5, 0.5, 0.5))),
        "rescale_factor": fields.number_or("rescale_factor", 1 / 255),
    }


def tile_limits(fields: Fields, vit: VitConfig, default_size: int) -> dict[str, Any]:
    """Read the size and the number of the tiles into which an image is cut.

    Args:
        fields: result of processor_fields.
        vit: transformer, which computes one tile.
        default_size: width and height of a tile if the field is missing.

    Returns:
        Arguments of InternvlProcessing.
    """
    size = fields.group_or_none("size") or Fields({"height": default_size, "width": default_size}, "size")
    for name in ("height", "width"):
        if size.whole(name) != vit.image_size:
            raise size.wrong(name, f"the image_size of the vision_config, {vit.image_size}")
    tiles_min, tiles_max = fields.whole_or("min_patches", 1), fields.whole_or("max_patches", 12)
    if not 1 <= tiles_min <= tiles_max <= TILES_MAX:
        raise fields.wrong("max_patches", f"min_patches to {TILES_MAX}")
    return {"tile_size": vit.image_size, "tiles_min": tiles_min, "tiles_max": tiles_max}


def _colours(fields: Fields, name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
    if name not in fields:
        return default
    values = fields.numbers(name)
    if len(values) != 3 or (name == "image_std" and 0.0 in values):
        raise fields.wrong(name, "three numbers, one for each colour")
    red, green, blue = values
    return red, green, blue


def image_token_id(outer: Fields, default: int) -> int:
    """Return the token that stands for a row of an image.

    Args:
        outer: fields of config.json.
        default: token if the field is missing.
    """
    name = "image_token_index" if "image_token_index" in outer else "image_token_id"
    value = outer.whole_or(name, default)
    if value < 0:
        raise outer.wrong(name, "at least 0")
    return value
