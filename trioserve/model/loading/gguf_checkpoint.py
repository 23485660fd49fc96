"""A GGUF file as a checkpoint: tensors by our names, dequantized, with queries and keys in transformers' order."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from trioserve.model.loading.gguf import GgufTensor, read_gguf
from trioserve.model.loading.gguf_config import ROPE_FACTORS_NAME, model_config_from, sampling_defaults_from
from trioserve.model.loading.names import gguf_name, match_tensors
from trioserve.model.loading.stored_tensor import Bytes, StoredTensor, read_blocks, read_bytes, read_plain, read_sample
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import Dtype, Values

__all__ = ["GgufCheckpoint"]

AnyArray = TypeVar("AnyArray", bound=npt.NDArray[Any])

_PLAIN_DTYPES: dict[str, Dtype] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GgufCheckpoint:
    """Opening reads the header only. Raises ModelLoadError when the file does not hold a whole, known model."""

    def __init__(self, path: Path) -> None:
        file = read_gguf(path)
        self.files: tuple[Path, ...] = (path,)
        self.config: ModelConfig = model_config_from(file)
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        outside = match_tensors(self.config, shapes, gguf_name, ignored=lambda name: name == ROPE_FACTORS_NAME)
        self._tensors = {name: file.tensors[outside_name] for name, outside_name in outside.items()}
        self.weight_bytes: int = sum(tensor.byte_count for tensor in self.tensors())
        self.tokenizer_directory: Path | None = None
        self.gguf_metadata: dict[str, object] | None = file.metadata
        self.sampling_defaults: dict[str, float | int] = sampling_defaults_from(file.metadata)

    def tensors(self) -> Iterator[StoredTensor]:
        for name, tensor in self._tensors.items():
            dtype = _PLAIN_DTYPES.get(tensor.storage.name, "float32")
            sample = functools.partial(read_sample, self.files[0], tensor.offset, tensor.byte_count)
            stored = StoredTensor(name, tensor.shape, dtype, functools.partial(self._read, name, tensor), sample)
            if tensor.storage.name not in _PLAIN_DTYPES and len(tensor.shape) == 2:
                read_blocks = functools.partial(self._read_blocks, name, tensor)
                stored = stored._replace(block_type=tensor.storage.name, read_blocks=read_blocks)
            yield stored

    def _read(self, name: str, tensor: GgufTensor, wanted: Dtype) -> Values:
        path, storage = self.files[0], tensor.storage
        plain = _PLAIN_DTYPES.get(storage.name)
        if plain is not None:
            values = read_plain(path, tensor.offset, tensor.shape, plain, wanted)
        else:
            from trioserve.model.loading.dequantize import dequantize  # needs the gguf package: plain files do not

            values = read_blocks(
                path,
                tensor.offset,
                tensor.shape,
                wanted,
                block_values=storage.block_values,
                block_bytes=storage.block_bytes,
                decode=functools.partial(dequantize, storage.name),
            )
        return self._in_transformers_order(name, values)

    def _read_blocks(self, name: str, tensor: GgufTensor) -> Bytes:
        rows = tensor.shape[0]
        blocks = read_bytes(self.files[0], tensor.offset, (rows, tensor.byte_count // rows))
        return self._in_transformers_order(name, blocks)  # whole rows change places, so their blocks do

    def _in_transformers_order(self, name: str, values: AnyArray) -> AnyArray:
        """llama.cpp rotates adjacent dimensions in files of architecture "llama", so its converter has interleaved the
        two halves of each head's rows; the other architectures keep transformers' order."""
        module = name.split(".")[-2]
        if self.config.architecture != "llama" or module not in ("q_proj", "k_proj"):
            return values
        heads = self.config.head_count if module == "q_proj" else self.config.kv_head_count
        # Row 2 * pair + half of each head becomes row half * pairs + pair.
        halves_apart = values.reshape(heads, -1, 2, values[0].size).swapaxes(1, 2)
        return cast(AnyArray, np.ascontiguousarray(halves_apart).reshape(values.shape))
