"""Common interface of checkpoints in all file formats: config, tensors by the names of loading/names.py, and the path
of the tokenizer.

Opening a checkpoint reads only headers. A tensor is read when it is requested. Opening and reading do not need torch.

Tensors of a GGUF file get the names and the row order of this project.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.encoder_part import EncoderPart
from trioserve.model.loading.fields import one_line
from trioserve.model.loading.gguf import GgufTensor, read_gguf
from trioserve.model.loading.gguf_config import (
    ROPE_FACTORS_NAMES,
    further_layers,
    model_config_from,
    sampling_defaults_from,
)
from trioserve.model.loading.names import GGUF, FurtherLayers, TensorPlace, match_tensors
from trioserve.model.loading.safetensors import SafetensorsCheckpoint
from trioserve.model.loading.stored_tensor import (
    Bytes,
    FileRows,
    StoredTensor,
    read_blocks,
    read_bytes,
    read_plain,
    read_sample,
)
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import Dtype, Values
from trioserve.model.vision.part import VisionPart

__all__ = ["Checkpoint", "dequantize", "open_checkpoint"]


_PLAIN_DTYPES: dict[str, Dtype] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def dequantize(storage_name: str, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Dequantize blocks with the gguf package, which creates several temporary copies.

    Args:
        storage_name: a quantized type, as in gguf.STORAGE_TYPES.
        blocks: uint8 [blocks, bytes of a block], contiguous. For speed, the blocks should fit in the CPU's caches.

    Returns:
        The values of all blocks in order. If a scale is not finite, its values are not finite.
    """
    import gguf.constants  # Only quantized files need this package.
    import gguf.quants

    with np.errstate(invalid="ignore", over="ignore"):
        # Pass all blocks as one row. The package computes rows in groups of 16, so many short rows would be ten times
        # slower.
        kind = gguf.constants.GGMLQuantizationType[storage_name]
        values: npt.NDArray[np.float32] = gguf.quants.dequantize(blocks.reshape(1, -1), kind)
    return values


class GgufCheckpoint:
    """Checkpoint in a GGUF file. Opening reads only the header.

    Args:
        path: file.
        context_tokens: see open_checkpoint.

    Raises:
        ModelLoadError: the file does not contain a complete model of a supported family.
    """

    def __init__(self, path: Path, context_tokens: int | None = None) -> None:
        file = read_gguf(path)
        self.files: tuple[Path, ...] = (path,)
        self.config: ModelConfig = model_config_from(file, context_tokens)
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        further = FurtherLayers(self.config, GGUF, further_layers(file))

        def is_ignored(name: str) -> bool:
            # Some files contain the projections of latents twice: as one joint tensor, and as two tensors.
            is_joint = self.config.has_latents and name.endswith(f".{GGUF.joint}.weight")
            return is_joint or name in ROPE_FACTORS_NAMES or further.has(name)

        self._places = match_tensors(self.config, shapes, GGUF, ignored=is_ignored)
        further.log_unused()
        self._stored = file.tensors
        self.weight_bytes: int = sum(tensor.byte_count for tensor in self.tensors())
        self.tokenizer_directory: Path | None = None
        self.gguf_metadata: dict[str, object] | None = file.metadata
        self.continues_texts = True
        self.vision: VisionPart | None = None
        self.encoder: EncoderPart | None = None
        self.sampling_defaults: dict[str, float | int] = sampling_defaults_from(file.metadata)

    def tensors(self) -> Iterator[StoredTensor]:
        for name, place in self._places.items():
            yield self._stored_tensor(name, place)

    def _stored_tensor(self, name: str, place: TensorPlace) -> StoredTensor:
        tensor = self._stored[place.name].part(place)
        dtype = _PLAIN_DTYPES.get(tensor.storage.name, "float32")
        sample = functools.partial(read_sample, self.files[0], tensor.offset, tensor.byte_count)
        read = functools.partial(place.read, functools.partial(self._read, tensor))
        stored = StoredTensor(name, place.shape, dtype, read, sample)
        if tensor.storage.name not in _PLAIN_DTYPES and len(place.shape) == 2 and place.has_whole_rows:
            read_blocks = functools.partial(self._read_blocks, tensor, place)
            stored = stored._replace(block_type=tensor.storage.name, read_blocks=read_blocks)
        if not place.has_parts:
            return stored
        rows = FileRows(
            self.files[0],
            tensor.offset,
            tensor.byte_count // place.shape[0],
            lambda first_row, row_count: self._stored_tensor(name, place.part(first_row, row_count)),
        )
        return stored._replace(rows=rows)

    def _read(self, tensor: GgufTensor, wanted: Dtype) -> Values:
        path, storage = self.files[0], tensor.storage
        plain = _PLAIN_DTYPES.get(storage.name)
        if plain is not None:
            return read_plain(path, tensor.offset, tensor.shape, plain, wanted)
        return read_blocks(
            path,
            tensor.offset,
            tensor.shape,
            wanted,
            block_values=storage.block_values,
            block_bytes=storage.block_bytes,
            decode=functools.partial(dequantize, storage.name),
        )

    def _read_blocks(self, tensor: GgufTensor, place: TensorPlace) -> Bytes:
        rows = tensor.shape[0]
        blocks = read_bytes(self.files[0], tensor.offset, (rows, tensor.byte_count // rows))
        return place.ordered(blocks)  # Blocks can be reordered like values, because only whole rows move.


class Checkpoint(Protocol):
    """An opened checkpoint.

    Attributes:
        config: description of the model.
        files: files that contain the weights.
        weight_bytes: size of all tensors in total.
        tokenizer_directory: directory with the tokenizer's files. None if gguf_metadata has the tokenizer.
        gguf_metadata: metadata of a GGUF file. None for other formats.
        vision: image encoder of the model. None if the model has no image encoder, or one that is not supported.
        encoder: encoder to whose rows the decoder attends. None if the model has none.
        sampling_defaults: sampling parameters that the model's authors recommend, with the names of SamplingParams.
    """

    @property
    def config(self) -> ModelConfig: ...
    @property
    def files(self) -> tuple[Path, ...]: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def tokenizer_directory(self) -> Path | None: ...
    @property
    def gguf_metadata(self) -> Mapping[str, object] | None: ...
    @property
    def vision(self) -> VisionPart | None: ...
    @property
    def encoder(self) -> EncoderPart | None: ...
    @property
    def continues_texts(self) -> bool:
        """True if the model has an output head. A model without a head can only compute embeddings of texts."""
        ...

    @property
    def sampling_defaults(self) -> Mapping[str, float | int]: ...

    def tensors(self) -> Iterator[StoredTensor]:
        """Yield every tensor of the model, in the order in which a forward pass uses them, without reading it."""
        ...


def open_checkpoint(path: Path, *, context_tokens: int | None = None, uses_further_layers: bool = False) -> Checkpoint:
    """Open a directory with safetensors, a directory with exactly one .gguf file, or a .gguf file.

    Args:
        path: directory or file.
        context_tokens: longest context to be served, in tokens. It selects longrope's factors for short or for long
            contexts. None is the model's limit.
        uses_further_layers: the caller uses the prediction layers after the model's layers for draft tokens. False: a
            log line reports that these layers are not used.

    Raises:
        ModelLoadError: the path has no checkpoint, or the checkpoint is damaged. The message is one sentence that
            begins with the path.
    """
    try:
        return _opened(path, context_tokens, uses_further_layers)
    except ModelLoadError as error:
        raise ModelLoadError(f"cannot load {path}: {one_line(str(error))}") from error
    except OSError as error:
        raise ModelLoadError(f"cannot load {path}: {error.strerror or error}") from error


def _opened(path: Path, context_tokens: int | None, uses_further_layers: bool) -> Checkpoint:
    if path.is_dir():
        if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").is_file():
            return SafetensorsCheckpoint(path, context_tokens, uses_further_layers=uses_further_layers)
        path = _only_gguf(path)
    elif not path.exists():
        raise ModelLoadError("there is no such file or directory")
    elif path.suffix.lower() != ".gguf":
        raise ModelLoadError(
            "a model is a .gguf file or a directory with config.json and safetensors; name one of them"
        )
    return GgufCheckpoint(path, context_tokens)


def _only_gguf(directory: Path) -> Path:
    files = sorted(directory.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(path.name for path in files[:5])
        raise ModelLoadError(f"the directory holds {len(files)} GGUF files ({names}): name one of them")
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    if pickled:
        raise ModelLoadError(
            f"the directory has its weights only in {pickled[0]}, a format that can run code; "
            "safetensors are needed: fetch them or convert the model"
        )
    raise ModelLoadError("the directory has no weights; needed are config.json and *.safetensors, or one .gguf file")
