"""A directory as transformers saves it: which file holds which tensor, checked against the config, read one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.fields import Fields
from trioserve.model.loading.hf_config import model_config_from, read_json_object, sampling_defaults_from
from trioserve.model.loading.names import Shape, match_tensors, transformers_name
from trioserve.model.model_config import ModelConfig

if TYPE_CHECKING:
    import torch

__all__ = ["SafetensorsCheckpoint"]

_DTYPES = {"BF16": ("bfloat16", 2), "F16": ("float16", 2), "F32": ("float32", 4)}
_INDEX_NAME = "model.safetensors.index.json"


class _StoredTensor:
    """Where a tensor lies, and as what; dtype is safetensors' name for it."""

    def __init__(self, path: Path, shape: Shape, dtype: str) -> None:
        if dtype not in _DTYPES:
            raise ModelLoadError(
                f"{path.name} stores {dtype}; supported are {', '.join(_DTYPES)}: "
                "take an unquantized checkpoint or a GGUF file"
            )
        self.path = path
        self.shape = shape
        self.dtype_name, value_bytes = _DTYPES[dtype]
        self.byte_count = math.prod(shape) * value_bytes


class SafetensorsCheckpoint:
    """Opening reads the headers only. Raises ModelLoadError when the directory does not hold a whole, known model."""

    def __init__(self, directory: Path) -> None:
        if not (directory / "config.json").is_file():
            raise ModelLoadError("the directory has safetensors but no config.json: fetch the checkpoint again")
        stored = _stored_tensors(directory)
        self.files: tuple[Path, ...] = tuple(dict.fromkeys(tensor.path for tensor in stored.values()))
        generation_path = directory / "generation_config.json"
        generation_config = read_json_object(generation_path) if generation_path.is_file() else {}
        embedding = stored.get(transformers_name("embed.weight"))
        self.config: ModelConfig = model_config_from(
            read_json_object(directory / "config.json"),
            generation_config,
            dtype_name="float32" if embedding is None else embedding.dtype_name,
        )
        shapes = {name: tensor.shape for name, tensor in stored.items()}
        self._outside_names = match_tensors(self.config, shapes, transformers_name, ignored=self._ignored)
        self._path_by_name = {name: stored[outside].path for name, outside in self._outside_names.items()}
        self.weight_bytes: int = sum(stored[outside].byte_count for outside in self._outside_names.values())
        self.tokenizer_directory: Path | None = directory
        self.gguf_metadata: dict[str, object] | None = None
        self.sampling_defaults: dict[str, float | int] = sampling_defaults_from(generation_config)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor in the checkpoint's dtype. It may share the mapped file's memory: copy what you keep."""
        shards: dict[Path, safe_open] = {}
        for name, outside_name in self._outside_names.items():
            path = self._path_by_name[name]
            try:
                if path not in shards:
                    shards[path] = safe_open(path, framework="pt")
                tensor = shards[path].get_tensor(outside_name)  # type: ignore[no-untyped-call]  # their stub
            except (SafetensorError, OSError) as error:
                raise _damaged(path, error) from error
            yield name, tensor

    def _ignored(self, name: str) -> bool:
        # Old checkpoints store the rotary frequencies, which follow from the config; some store a tied matrix twice.
        return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and self.config.tie_word_embeddings)


def _stored_tensors(directory: Path) -> dict[str, _StoredTensor]:
    """Every tensor by its name out there; from one file, or from those that the index names."""
    index_path = directory / _INDEX_NAME
    single = directory / "model.safetensors"
    if single.is_file():
        return _header(single)
    if index_path.is_file():
        return _indexed_tensors(directory)
    files = sorted(directory.glob("*.safetensors"))
    if len(files) != 1:
        raise ModelLoadError(
            f"the directory has {len(files)} safetensors files but no {_INDEX_NAME}, which says what is in which: "
            "fetch the checkpoint again"
        )
    return _header(files[0])


def _indexed_tensors(directory: Path) -> dict[str, _StoredTensor]:
    fields = Fields(read_json_object(directory / _INDEX_NAME), _INDEX_NAME)
    weight_map = fields.object_or_none("weight_map")
    if not weight_map:
        raise ModelLoadError(f"{_INDEX_NAME} has no weight_map: fetch the checkpoint again")
    file_names: dict[str, str] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or "\0" in file_name or Path(file_name).name != file_name:
            raise ModelLoadError(f"{_INDEX_NAME} says that {name} is in {file_name!r}, which is no plain file name")
        file_names[name] = file_name
    shards = sorted(set(file_names.values()))
    absent = [shard for shard in shards if not (directory / shard).is_file()]
    if absent:
        raise ModelLoadError(
            f"{_INDEX_NAME} names {len(shards)} files, of which {len(absent)} are missing, {absent[0]} first: "
            "fetch the checkpoint again"
        )
    headers = {shard: _header(directory / shard) for shard in shards}
    for name, shard in file_names.items():
        if name not in headers[shard]:
            raise ModelLoadError(
                f"{_INDEX_NAME} says that {name} is in {shard}, but it is not: fetch the checkpoint again"
            )
    return {name: headers[shard][name] for name, shard in file_names.items()}


def _header(path: Path) -> dict[str, _StoredTensor]:
    try:
        # numpy, because opening a checkpoint must not import torch: that alone takes seconds.
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is not iterable itself
            return {
                name: _StoredTensor(path, tuple(tensor.get_shape()), str(tensor.get_dtype()))
                for name, tensor in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> ModelLoadError:
    return ModelLoadError(f"{path.name} is damaged or incomplete ({error}): fetch the checkpoint again")
