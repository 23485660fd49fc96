"""Reads a GGUF file as a checkpoint. Tensors get the names and the row order of this project."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trioserve.model.loading.audio_part import AudioPart
from trioserve.model.loading.gguf import GgufTensor, read_gguf
from trioserve.model.loading.gguf_config import (
    ROPE_FACTORS_NAMES,
    further_layers,
    model_config_from,
    sampling_defaults_from,
)
from trioserve.model.loading.names import GGUF, FurtherLayers, TensorPlace, match_tensors
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

__all__ = ["GgufCheckpoint", "dequantize"]

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
        self.audio: AudioPart | None = None
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
