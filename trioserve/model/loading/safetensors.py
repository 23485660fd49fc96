"""Opens a checkpoint directory that transformers saved, and compares the tensors in its files with the config.

The safetensors package is not used, because it cannot return bfloat16 to numpy, and does not report the offset of a
tensor. Format: https://huggingface.co/docs/safetensors. A file is untrusted until its header is compared with its size.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from msgspec import structs

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.layer_config import ExpertsConfig
from trioserve.model.loading.encoder_part import EncoderPart, is_encoder_tensor
from trioserve.model.loading.fields import Fields, check_apart
from trioserve.model.loading.hf_config import (
    has_head,
    model_config_from,
    named_class,
    read_json_object,
    sampling_defaults_from,
    sees_images,
)
from trioserve.model.loading.names import (
    TRANSFORMERS,
    FurtherLayers,
    Shape,
    as_saved,
    match_tensors,
    outside_name,
    tensor_shapes,
)
from trioserve.model.loading.quantization_config import storage_scheme
from trioserve.model.loading.quantized_matrix import Mxfp4Matrix, QuantizedMatrix, mxfp4_matrices, quantized_matrices
from trioserve.model.loading.stored_tensor import FP8_ROWS, PLAIN_DTYPES, STORAGE_BYTES, FileTensor, StoredTensor
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import VALUE_BYTES, Dtype, Values
from trioserve.model.vision.family import UnknownEncoder
from trioserve.model.vision.part import MEDIA_FAMILIES, VisionPart

__all__ = [
    "EMBEDDING_NAME",
    "INDEX_NAME",
    "FurtherTensor",
    "SafetensorsCheckpoint",
    "UnfetchedCheckpoint",
    "stored_tensors",
    "tensors_in_file",
]

logger = logging.getLogger(__name__)

FurtherTensor: TypeAlias = FileTensor | QuantizedMatrix | Mxfp4Matrix

# Prefixes of the language model's tensors in models that read images, in transformers 4 and 5. The second name is the
# prefix of the same tensors in a model that reads only texts.
_TEXT_PREFIXES = (
    ("model.language_model.lm_head.", "lm_head."),  # HyperCLOVA X
    ("model.language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("thinker.model.", "model."),
    ("thinker.lm_head.", "lm_head."),
    *((prefix, "") for prefix in ("language_model.", "language.", "llm.")),
    # Names without a prefix. The other tensors of such models begin with "visual.", "vision_tower.",
    # "model.vision_embed_tokens.", "transformer.vision." or "transformer.visual.".
    *((name, name) for name in ("lm_head.", "model.embed_tokens.", "model.layers.", "model.norm.")),
    *((f"transformer.{name}.",) * 2 for name in ("embedding", "encoder", "h", "ln_f", "output_layer", "wte")),
)
EMBEDDING_NAME = "model.embed_tokens.weight"
INDEX_NAME = "model.safetensors.index.json"
HEADER_BYTES_MAX = 100_000_000  # The safetensors package has the same limit.
HEADER_COMMAS_MAX = 2**19  # A header has six commas per tensor. The largest models have about two thousand tensors.
POSITION_IDS = ("embeddings.position_ids", "embeddings.token_type_ids")
DIMENSIONS_MAX = 8  # Real tensors have far fewer dimensions.


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Entry(msgspec.Struct, frozen=True):
    """Header entry of one tensor.

    Attributes:
        data_offsets: offset of the tensor's first byte, and offset after its last byte, from the end of the header.
    """

    dtype: str
    shape: tuple[_Count, ...]
    data_offsets: tuple[_Count, _Count]


class SafetensorsCheckpoint:
    """Checkpoint of a directory with safetensors. Opening reads only headers.

    Args:
        directory: checkpoint directory.
        context_tokens: see open_checkpoint.
        uses_further_layers: see open_checkpoint.

    Raises:
        ModelLoadError: the directory does not contain a complete model of a supported family.
    """

    def __init__(
        self, directory: Path, context_tokens: int | None = None, *, uses_further_layers: bool = False
    ) -> None:
        if not (directory / "config.json").is_file():
            raise ModelLoadError("the directory has safetensors but no config.json: fetch the checkpoint again")
        config = read_json_object(directory / "config.json")
        quantization = _quantization(Fields(config, "config.json"))
        stored = stored_tensors(directory, PLAIN_DTYPES if quantization is None else STORAGE_BYTES)
        whole = stored
        if sees_images(config):
            stored = _text_tensors(stored)
        generation_path = directory / "generation_config.json"
        generation_config = read_json_object(generation_path) if generation_path.is_file() else {}
        described = model_config_from(config, generation_config, dtype_name="float32", context_tokens=context_tokens)
        if described.cross is not None:
            stored = {name: tensor for name, tensor in stored.items() if not is_encoder_tensor(name)}
        embedding_name, self._head_name = (
            outside_name(name, described.family, TRANSFORMERS) for name in ("embed.weight", "lm_head.weight")
        )
        # Models that compute embeddings are saved without a head, and their names have no prefix. Some old models
        # with a head have no prefix either.
        prefix, _, unprefixed = embedding_name.partition(".")
        if unprefixed in stored:
            stored = {name if name == self._head_name else f"{prefix}.{name}": at for name, at in stored.items()}
        self.files: tuple[Path, ...] = tuple(dict.fromkeys(tensor.path for tensor in stored.values()))
        embedding = stored.get(embedding_name)
        matrices: Mapping[str, QuantizedMatrix | Mxfp4Matrix] = {}
        if quantization is not None:
            scheme = storage_scheme(quantization)
            matrices, stored = (
                mxfp4_matrices(stored) if scheme.layout == "mxfp4" else quantized_matrices(stored, scheme)
            )
        dtype_name = "float32" if embedding is None else embedding.dtype
        self.config: ModelConfig = structs.replace(described, dtype_name=dtype_name)
        self.continues_texts: bool = has_head(config)
        if not self.continues_texts and self._head_name not in stored:
            # Without a head, the embedding replaces it. check_can_generate rejects requests that need logits.
            self.config = structs.replace(self.config, tie_word_embeddings=True)
        if self.config.cross is not None:
            bias_name = outside_name("lm_head.bias", self.config.family, TRANSFORMERS)
            has_bias = self.config.has_head_bias and bias_name in stored
            is_tied = self.config.tie_word_embeddings
            if self.config.relative is not None:  # transformers 5 writes true for every T5.
                is_tied = self._head_name not in stored
            self.config = structs.replace(self.config, has_head_bias=has_bias, tie_word_embeddings=is_tied)
        self.vision = _vision_part(directory, config, self.config, whole)
        if self.vision is not None:
            self.files = tuple(dict.fromkeys((*self.files, *self.vision.files)))
        self.encoder: EncoderPart | None = None
        if self.config.cross is not None:
            self.encoder = EncoderPart(directory, config, self.config, whole)
            self.files = tuple(dict.fromkeys((*self.files, *self.encoder.files)))
        self._matrices = matrices
        self._stored: dict[str, FurtherTensor] = {**stored, **matrices}
        shapes = {name: tensor.shape for name, tensor in self._stored.items()}
        self.config = as_saved(self.config, shapes)
        mlps = (layer.mlp for layer in self.config.layers)
        self._has_shared_experts = any(isinstance(mlp, ExpertsConfig) and mlp.shared_size for mlp in mlps)
        further = Fields(config, "config.json").whole_or("num_nextn_predict_layers", 0)
        self._further = FurtherLayers(self.config, TRANSFORMERS, further)
        self._places = match_tensors(self.config, shapes, TRANSFORMERS, ignored=self._ignored)
        if not uses_further_layers:
            self._further.log_unused()
        for place in self._places.values():
            if place.name in matrices and place.rows_shape[1:] != matrices[place.name].shape[-1:]:
                raise ModelLoadError(
                    f"{place.name} is quantized with shape {list(matrices[place.name].shape)}, but the config asks for "
                    f"{list(place.rows_shape)}: weights and config do not belong to the same model"
                )
        self.weight_bytes: int = sum(tensor.byte_count for tensor in self.tensors())
        self.tokenizer_directory: Path | None = directory
        self.gguf_metadata: dict[str, object] | None = None
        self.sampling_defaults: dict[str, float | int] = sampling_defaults_from(generation_config)

    def tensors(self) -> Iterator[StoredTensor]:
        for name, place in self._places.items():
            yield self._stored[place.name].stored(name, place)

    def further_tensors(self) -> dict[str, FurtherTensor]:
        """Return the tensors of the first prediction layer (MTP), by their names without the layer's prefix.

        Returns:
            Tensors by name. Empty if there is no prediction layer.
        """
        prefix = self._further.first_prefix
        if prefix is None:
            return {}
        names = [name for name in self._stored if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._stored[name] for name in names}

    def _ignored(self, name: str) -> bool:
        # Old checkpoints store rotary frequencies, which are computed from the config. Some checkpoints store a tied
        # matrix twice.
        if name.endswith(("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq")) or (
            name == self._head_name and self.config.tie_word_embeddings
        ):
            return True
        if self.config.cross is not None and name.endswith("decoder.embed_tokens.weight"):
            return True
        # Tensors with a dimension of 0 belong to a shared expert without channels.
        if self._further.has(name) or 0 in self._stored[name].shape:
            return True
        if name.endswith(".shared_expert_gate.weight") and not self._has_shared_experts:
            return True
        # Some programs write a bias of zeros for each quantized module, even if the model has none.
        module, _, kind = name.rpartition(".")
        tensor = self._stored[name]
        if kind != "bias" or f"{module}.weight" not in self._matrices or not isinstance(tensor, FileTensor):
            return False
        return not tensor.bytes().any()


class UnfetchedCheckpoint:
    """Checkpoint whose weights are not on this machine. Its tensors follow from the config, and cannot be read.

    Args:
        directory: directory with config.json and the other small files of a checkpoint.
        context_tokens: see open_checkpoint.

    Raises:
        ModelLoadError: the config is damaged, or not of a supported family.
    """

    def __init__(self, directory: Path, context_tokens: int | None = None) -> None:
        if not (directory / "config.json").is_file():
            raise ModelLoadError("the model has no config.json: only checkpoints of transformers can be checked")
        config = read_json_object(directory / "config.json")
        generation_path = directory / "generation_config.json"
        generation_config = read_json_object(generation_path) if generation_path.is_file() else {}
        quantization = _quantization(Fields(config, "config.json"))
        self._scheme = None if quantization is None else storage_scheme(quantization)
        self.config: ModelConfig = model_config_from(
            config, generation_config, dtype_name=_config_dtype(config), context_tokens=context_tokens
        )
        self.files: tuple[Path, ...] = ()
        self.continues_texts: bool = has_head(config)
        self.vision = _vision_part(directory, config, self.config, None)
        self.encoder: EncoderPart | None = None
        if self.config.cross is not None:
            self.encoder = EncoderPart(directory, config, self.config, None)
        self.weight_bytes: int = sum(tensor.byte_count for tensor in self.tensors())
        self.tokenizer_directory: Path | None = directory
        self.gguf_metadata: dict[str, object] | None = None
        self.sampling_defaults: dict[str, float | int] = sampling_defaults_from(generation_config)

    def tensors(self) -> Iterator[StoredTensor]:
        for name, shape in tensor_shapes(self.config).items():
            yield StoredTensor(name, shape, self.config.dtype_name, _cannot_read, bytes, self._block_type(name, shape))

    def _block_type(self, name: str, shape: Shape) -> str | None:
        """Return the block type that a matrix usually has with this quantization."""
        scheme = self._scheme
        if scheme is None or len(shape) != 2 or not name.startswith("layers.") or ".router." in name:
            return None
        if scheme.layout == "mxfp4":
            return "MXFP4" if ".experts." in name else None
        if scheme.is_float:
            return FP8_ROWS if scheme.blocks is None else None
        if scheme.has_order:
            return None
        # GPTQ has float16 scales. compressed-tensors writes scales in the format of the model.
        is_half = scheme.is_symmetric and (scheme.layout == "gptq" or self.config.dtype_name == "float16")
        return f"Q{scheme.bits}_{0 if is_half else 'F32'}"


def _vision_part(
    directory: Path, config: dict[str, object], texts: ModelConfig, stored: Mapping[str, FileTensor] | None
) -> VisionPart | None:
    """Open the encoder of a model's images or sounds. A warning is logged for an encoder that is not supported."""
    if not sees_images(config):
        return None
    media = "sounds" if "audio_config" in config and "vision_config" not in config else "images"
    if (name := named_class(config)) in MEDIA_FAMILIES:
        try:
            return VisionPart(directory, config, name, texts, stored)
        except UnknownEncoder as error:
            logger.warning("%s are not served: %s", media, error)
            return None
    logger.warning("%s are not served: only the text part of this model is supported", media)
    return None


def _cannot_read(wanted: Dtype) -> Values:
    raise AssertionError("the weights are not on this machine")


def _config_dtype(config: dict[str, object]) -> Dtype:
    """Return the number format that config.json names. transformers writes float32 if it names none."""
    outer = Fields(config, "config.json")
    texts = outer.group_or_none("text_config") or Fields({}, "text_config")
    for fields in (outer, texts):
        for name in ("dtype", "torch_dtype"):
            for dtype in VALUE_BYTES:
                if fields.is_one_of(name, (dtype,)):
                    return dtype
    return "float32"


def _quantization(fields: Fields) -> dict[str, object] | None:
    """Return quantization_config. In a model that reads images, it may be inside or outside of text_config."""
    texts = fields.group_or_none("text_config") or Fields({}, "config.json")
    return fields.object_or_none("quantization_config") or texts.object_or_none("quantization_config")


def _text_tensors(stored: dict[str, FileTensor]) -> dict[str, FileTensor]:
    """Return the tensors of the language model, with the names that they have in a model that reads only texts."""
    found: dict[str, FileTensor] = {}
    for name, tensor in stored.items():
        for prefix, usual in _TEXT_PREFIXES:
            if name.startswith(prefix):
                found[usual + name.removeprefix(prefix)] = tensor
                break
    return found


def stored_tensors(directory: Path, storages: Collection[str] = tuple(PLAIN_DTYPES)) -> dict[str, FileTensor]:
    """Return every tensor of a directory, by its name in the files.

    Args:
        directory: checkpoint directory.
        storages: allowed storage types.

    Raises:
        ModelLoadError: a file is missing or damaged, or its storage type is not allowed.
    """
    index_path = directory / INDEX_NAME
    single = directory / "model.safetensors"
    if single.is_file():
        return tensors_in_file(single, storages)
    if index_path.is_file():
        return _indexed_tensors(directory, storages)
    files = sorted(directory.glob("*.safetensors"))
    if len(files) != 1:
        raise ModelLoadError(
            f"the directory has {len(files)} safetensors files but no {INDEX_NAME}, which lists their tensors: "
            "fetch the checkpoint again"
        )
    return tensors_in_file(files[0], storages)


def _indexed_tensors(directory: Path, storages: Collection[str]) -> dict[str, FileTensor]:
    fields = Fields(read_json_object(directory / INDEX_NAME), INDEX_NAME)
    weight_map = fields.object_or_none("weight_map")
    if not weight_map:
        raise ModelLoadError(f"{INDEX_NAME} has no weight_map: fetch the checkpoint again")
    file_names: dict[str, str] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or "\0" in file_name or Path(file_name).name != file_name:
            raise ModelLoadError(f"{INDEX_NAME} says that {name} is in {file_name!r}, which is no plain file name")
        file_names[name] = file_name
    shards = sorted(set(file_names.values()))
    absent = [shard for shard in shards if not (directory / shard).is_file()]
    if absent:
        raise ModelLoadError(
            f"{INDEX_NAME} names {len(shards)} files, of which {len(absent)} are missing, {absent[0]} first: "
            "fetch the checkpoint again"
        )
    headers = {shard: tensors_in_file(directory / shard, storages) for shard in shards}
    for name, shard in file_names.items():
        if name not in headers[shard]:
            raise ModelLoadError(
                f"{INDEX_NAME} says that {name} is in {shard}, but it is not: fetch the checkpoint again"
            )
    return {name: headers[shard][name] for name, shard in file_names.items()}


def tensors_in_file(path: Path, storages: Collection[str]) -> dict[str, FileTensor]:
    """Read the header of a file, and return its tensors by name.

    Args:
        path: file.
        storages: allowed storage types.

    Raises:
        ModelLoadError: the file is damaged, or its storage type is not allowed.
    """
    # The file begins with eight bytes that contain the length of a JSON object. The object follows. It lists the
    # offsets of the tensors, which are the rest of the file.
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_BYTES_MAX):
            raise _damaged(path, f"it has {size} bytes, and its header should have {length}")
        text = file.read(length)
    if text.count(b",") > HEADER_COMMAS_MAX:
        raise _damaged(path, f"its header has {text.count(b',')} commas, allowed are {HEADER_COMMAS_MAX}")
    try:
        entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        # Old encoders store position ids, which are not needed because they are consecutive numbers.
        entries = {name: entry for name, entry in entries.items() if not name.endswith(POSITION_IDS)}
        described = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in entries.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    for entry in described.values():
        if entry.dtype not in storages:
            raise ModelLoadError(
                f"{path.name} stores {entry.dtype[:20]}; supported are {', '.join(storages)}: "
                "use an unquantized checkpoint or a GGUF file"
            )
    tensors = {name: _file_tensor(path, name, entry, 8 + length, size) for name, entry in described.items()}
    places = ((tensor.offset, tensor.offset + tensor.byte_count, name) for name, tensor in tensors.items())
    check_apart(path.name, places)
    return tensors


def _file_tensor(path: Path, name: str, entry: _Entry, data_start: int, size: int) -> FileTensor:
    if len(entry.shape) > DIMENSIONS_MAX:
        raise _damaged(path, f"{name[:80]!r} has {len(entry.shape)} dimensions, allowed are {DIMENSIONS_MAX}")
    first, end = (data_start + offset for offset in entry.data_offsets)
    if end > size or end - first != math.prod(entry.shape) * STORAGE_BYTES[entry.dtype]:
        raise _damaged(
            path, f"{name[:80]!r} with {list(entry.shape)} values lies at bytes {first} to {end}, the file has {size}"
        )
    return FileTensor(path, first, entry.shape, entry.dtype)


def _damaged(path: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(f"{path.name} is damaged or incomplete ({reason}): fetch the checkpoint again")
