"""Reads the image encoder of a checkpoint: its config, its preparation of images, and its tensors. The checkpoint's
language model is read like any other model.

An image encoder is a transformer over the patches of a tile. A projection converts its output to rows with the hidden
size of the language model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.images import ImageProcessing
from trioserve.model.layer_config import Activation
from trioserve.model.loading.fields import Fields, unread_names, warn_of_unread
from trioserve.model.loading.hf_config import read_json_object
from trioserve.model.loading.names import Shape, TensorPlace
from trioserve.model.loading.stored_tensor import PLAIN_DTYPES, FileTensor, StoredTensor
from trioserve.model.model_config import LAYERS_MAX, ModelConfig

__all__ = ["VisionConfig", "VISION_CLASSES", "VisionPart"]

DIMENSION_MAX = 2**16
IMAGE_SIZE_MAX = 4096
# Patches per tile. Memory of attention grows with the square of this number. Real models have up to 5,184 patches.
TILE_PATCHES_MAX = 2**14


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Config of SigLIP (arXiv 2303.15343) without its head, and of Idefics 3's pixel shuffle (arXiv 2408.12637).

    Attributes:
        image_size: width and height in pixels of the images for which the model has position embeddings.
        patch_size: width and height of a patch in pixels.
        scale_factor: side of a square, in patches, that becomes one row.
        output_size: hidden_size of the language model.

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
        """Return the number of rows that the encoder computes for one tile.

        Args:
            tile_size: width and height of the tile in pixels.

        Raises:
            ModelLoadError: the number of rows is not whole, or the tile has too many patches.
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


VISION_CLASSES = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
"""Classes in config.json whose image part is supported. Of other classes only the text part is served."""

_ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")  # transformers 5 writes the second file.
_PREFIXES = ("model.", "")
_LAYERS = "vision_model.encoder.layers."
_NOTES = ("max_image_size", "size", "tie_word_embeddings", "use_base_siglip")  # The processor's fields replace these.


class VisionPart:
    """Opened image encoder of a checkpoint. Opening reads only small files.

    Args:
        directory: checkpoint directory.
        config: content of config.json.
        texts: config of the language model.
        stored: every tensor of the checkpoint, by its name in the files. None: the weights are not on this machine.

    Raises:
        ModelLoadError: files are damaged, or tensors and config do not match.
    """

    def __init__(
        self, directory: Path, config: Mapping[str, object], texts: ModelConfig, stored: Mapping[str, FileTensor] | None
    ) -> None:
        fields = Fields(config, "config.json")
        self.config = _vision_config(fields, texts)
        self.processing = _processing(directory, fields, self.config)
        if self.processing.image_token_id >= texts.vocab_size:
            raise ModelLoadError(
                f"image_token_id in config.json is {self.processing.image_token_id}, but the vocabulary has "
                f"{texts.vocab_size} tokens: the checkpoint's config is damaged"
            )
        self._stored: dict[str, FileTensor] = {}
        if stored is not None:
            shapes = vision_shapes(self.config)
            self._stored = _placed(stored, shapes)
            _check_layers(stored, shapes)
        self.files = tuple(dict.fromkeys(tensor.path for tensor in self._stored.values()))
        self.weight_bytes = sum(tensor.byte_count for tensor in self._stored.values())

    def tensors(self) -> Iterator[StoredTensor]:
        """Yield every tensor, with the names of vision_shapes."""
        for name, tensor in self._stored.items():
            yield tensor.stored(name, TensorPlace(name, tensor.shape))


def vision_shapes(config: VisionConfig) -> dict[str, Shape]:
    """Return the shape of every tensor of an image encoder, by its name in the files without a prefix.

    Args:
        config: image encoder.
    """
    hidden, middle = config.hidden_size, config.intermediate_size
    shapes: dict[str, Shape] = {
        "vision_model.embeddings.patch_embedding.weight": (hidden, 3, config.patch_size, config.patch_size),
        "vision_model.embeddings.patch_embedding.bias": (hidden,),
        "vision_model.embeddings.position_embedding.weight": (config.positions_per_side**2, hidden),
    }
    for index in range(config.layer_count):
        layer = f"{_LAYERS}{index}"
        for module, rows, columns in (
            *((f"self_attn.{name}_proj", hidden, hidden) for name in ("q", "k", "v", "out")),
            ("mlp.fc1", middle, hidden),
            ("mlp.fc2", hidden, middle),
        ):
            shapes[f"{layer}.{module}.weight"] = (rows, columns)
            shapes[f"{layer}.{module}.bias"] = (rows,)
        for norm in ("layer_norm1", "layer_norm2"):
            shapes[f"{layer}.{norm}.weight"] = shapes[f"{layer}.{norm}.bias"] = (hidden,)
    shapes["vision_model.post_layernorm.weight"] = shapes["vision_model.post_layernorm.bias"] = (hidden,)
    shapes["connector.modality_projection.proj.weight"] = (config.output_size, hidden * config.scale_factor**2)
    return shapes


def _placed(stored: Mapping[str, FileTensor], shapes: Mapping[str, Shape]) -> dict[str, FileTensor]:
    placed = {}
    for name, shape in shapes.items():
        tensor = next((stored[prefix + name] for prefix in _PREFIXES if prefix + name in stored), None)
        if tensor is None:
            raise ModelLoadError(f"the weights lack {name} of the image part: the checkpoint is incomplete")
        if tensor.shape != shape or tensor.storage not in PLAIN_DTYPES:
            raise ModelLoadError(
                f"{name} is {tensor.storage} with shape {list(tensor.shape)}; the config asks for {list(shape)}, and "
                f"the image part must be stored as {', '.join(PLAIN_DTYPES)}"
            )
        placed[name] = tensor
    return placed


def _check_layers(stored: Mapping[str, FileTensor], shapes: Mapping[str, Shape]) -> None:
    """Raise ModelLoadError if the files have more layers than the config. All other unused tensors are ignored."""
    for name in stored:
        for prefix in _PREFIXES:
            inner = name.removeprefix(prefix)
            if name.startswith(f"{prefix}{_LAYERS}") and inner not in shapes:
                raise ModelLoadError(
                    f"the weights hold {name[:80]}, which the vision_config does not have: weights and config do not "
                    "belong to the same model"
                )


def _vision_config(outer: Fields, texts: ModelConfig) -> VisionConfig:
    fields = outer.group_or_none("vision_config")
    if fields is None:
        raise ModelLoadError("config.json has no vision_config: fetch the checkpoint again")
    activation = fields.text_or("hidden_act", "gelu_pytorch_tanh")
    if activation not in _ACTIVATIONS:
        raise fields.wrong("hidden_act", " or ".join(_ACTIVATIONS))
    if fields.whole_or("num_channels", 3) != 3:
        raise fields.wrong("num_channels", "3")
    config = VisionConfig(
        # Fields that are missing have the defaults of transformers' classes.
        hidden_size=fields.whole_or("hidden_size", 1152),
        intermediate_size=fields.whole_or("intermediate_size", 3072),
        layer_count=fields.whole_or("num_hidden_layers", 12),
        head_count=fields.whole_or("num_attention_heads", 16),
        image_size=fields.whole_or("image_size", 224),
        patch_size=fields.whole_or("patch_size", 32),
        norm_eps=fields.number_or("layer_norm_eps", 1e-6),
        activation=_ACTIVATIONS[activation],
        scale_factor=outer.whole_or("scale_factor", 2),
        output_size=texts.hidden_size,
    )
    warn_of_unread("vision_config in config.json", unread_names(fields, _NOTES))
    return config


def _processing(directory: Path, outer: Fields, config: VisionConfig) -> ImageProcessing:
    fields = _processor_fields(directory)
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not fields.flag_or(name, True):
            raise fields.wrong(name, "true")
    size = fields.group_or_none("size") or Fields({"longest_edge": 4 * 364}, "size")
    tile = fields.group_or_none("max_image_size") or Fields({"longest_edge": 364}, "max_image_size")
    tile_size = _side(tile)
    return ImageProcessing(
        longest_edge=_side(size),
        tile_size=tile_size,
        splits=fields.flag_or("do_image_splitting", True),
        resample=_filter(fields),
        mean=_colours(fields, "image_mean"),
        std=_colours(fields, "image_std"),
        rescale_factor=fields.number_or("rescale_factor", 1 / 255),
        tile_tokens=config.tile_tokens(tile_size),
        embedding_size=config.output_size,
        image_token_id=_image_token_id(outer),
    )


def _processor_fields(directory: Path) -> Fields:
    for name in _PROCESSOR_FILES:
        if (directory / name).is_file():
            fields = Fields(read_json_object(directory / name), name)
            inner = fields.group_or_none("image_processor")
            if inner is not None or name == _PROCESSOR_FILES[0]:
                return inner or fields
    raise ModelLoadError(
        f"the directory has no {_PROCESSOR_FILES[0]}, which says how images are prepared: fetch the checkpoint again"
    )


def _side(fields: Fields) -> int:
    value = fields.whole("longest_edge")
    if not 1 <= value <= 4096:
        raise fields.wrong("longest_edge", "1 to 4096")
    return value


def _filter(fields: Fields) -> int:
    value = fields.whole_or("resample", 1)
    if not 0 <= value <= 5:
        raise fields.wrong("resample", "the number of a filter, 0 to 5")
    return value


def _colours(fields: Fields, name: str) -> tuple[float, float, float]:
    if name not in fields:
        return (0.5, 0.5, 0.5)
    values = fields.numbers(name)
    if len(values) != 3 or (name == "image_std" and 0.0 in values):
        raise fields.wrong(name, "three numbers, one for each colour")
    red, green, blue = values
    return red, green, blue


def _image_token_id(outer: Fields) -> int:
    value = outer.whole_or("image_token_id", 128_257)
    if value < 0:
        raise outer.wrong("image_token_id", "at least 0")
    return value
