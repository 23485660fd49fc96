"""A GGUF file as a checkpoint: tensors by our names, dequantized, with queries and keys in transformers' order."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.gguf import GgufTensor, read_gguf
from trioserve.model.loading.gguf_config import ROPE_FACTORS_NAME, model_config_from, sampling_defaults_from
from trioserve.model.loading.names import gguf_name, match_tensors
from trioserve.model.model_config import ModelConfig

if TYPE_CHECKING:
    import torch

__all__ = ["GgufCheckpoint"]

_PLAIN_VALUE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_DEQUANTIZED_VALUE_BYTES = 4


class GgufCheckpoint:
    """Opening reads the header only. Raises ModelLoadError when the file does not hold a whole, known model."""

    def __init__(self, path: Path) -> None:
        file = read_gguf(path)
        self.files: tuple[Path, ...] = (path,)
        self.config: ModelConfig = model_config_from(file)
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        outside = match_tensors(self.config, shapes, gguf_name, ignored=lambda name: name == ROPE_FACTORS_NAME)
        self._tensors = {name: file.tensors[outside_name] for name, outside_name in outside.items()}
        self.weight_bytes: int = sum(
            tensor.value_count * _PLAIN_VALUE_BYTES.get(tensor.storage.name, _DEQUANTIZED_VALUE_BYTES)
            for tensor in self._tensors.values()
        )
        self.tokenizer_directory: Path | None = None
        self.gguf_metadata: dict[str, object] | None = file.metadata
        self.sampling_defaults: dict[str, float | int] = sampling_defaults_from(file.metadata)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor in its stored dtype, or float32 where it was quantized; all of them fresh memory."""
        path = self.files[0]
        try:
            with path.open("rb") as file:
                for name, tensor in self._tensors.items():
                    yield name, self._in_transformers_order(name, _read(file, tensor))
        except OSError as error:
            raise ModelLoadError(f"cannot load {path}: {error.strerror or error}") from error

    def _in_transformers_order(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """llama.cpp rotates adjacent dimensions in files of architecture "llama", so its converter has interleaved the
        two halves of each head's rows; the other architectures keep transformers' order."""
        module = name.split(".")[-2]
        if self.config.architecture != "llama" or module not in ("q_proj", "k_proj"):
            return values
        heads = self.config.head_count if module == "q_proj" else self.config.kv_head_count
        return _halves_apart(values, heads)


def _read(file: BufferedReader, tensor: GgufTensor) -> torch.Tensor:
    # Here, because opening a checkpoint must not import torch: that alone takes seconds.
    import numpy as np
    import torch

    from trioserve.model.loading.dequantize import dequantize, slice_blocks

    file.seek(tensor.offset)
    storage = tensor.storage
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(storage.name)
    values = torch.empty(tensor.shape, dtype=plain or torch.float32)
    if plain is not None:
        _fill(file, values.view(-1).view(torch.uint8).numpy().data)
        return values
    blocks_of_values = values.numpy().reshape(-1, storage.block_values)
    at_once = min(slice_blocks(storage.block_values), blocks_of_values.shape[0])
    slice_memory = np.empty((at_once, storage.block_bytes), dtype=np.uint8)
    for start in range(0, blocks_of_values.shape[0], at_once):
        part = blocks_of_values[start : start + at_once]
        blocks = slice_memory[: part.shape[0]]
        _fill(file, blocks.data)
        dequantize(storage.name, blocks, part)
    return values


def _halves_apart(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Row 2 * pair + half of each head becomes row half * pairs + pair."""
    import numpy as np
    import torch

    # By numpy: threads of torch would wait for each other on busy cores. It knows no bfloat16: two bytes are an int16.
    raw = (values.view(torch.int16) if values.itemsize == 2 else values).numpy()
    ordered = np.ascontiguousarray(raw.reshape(heads, -1, 2, raw[0].size).swapaxes(1, 2))
    return torch.from_numpy(ordered).view(values.dtype).view(values.shape)


def _fill(file: BufferedReader, memory: memoryview) -> None:
    """Read as many bytes as the contiguous memory has."""
    if file.readinto(memory) != memory.nbytes:
        raise ModelLoadError(f"cannot load {file.name}: it has become shorter since it was opened, fetch it again")
