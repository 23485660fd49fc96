"""Reads the shards of a checkpoint that one rank has. Shards keep the names of tensors, so a model loads them as usual.

If a shard consists of consecutive rows, only these rows are read. For a shard of columns, whole rows are read, a few at
a time, and cut. Quantized blocks stay unchanged, unless a cut divides a block. The matrix is then dequantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trioserve.model.loading.checkpoint import Checkpoint
from trioserve.model.loading.encoder_part import EncoderPart
from trioserve.model.loading.gguf import STORAGE_TYPES
from trioserve.model.loading.names import NUMBERED
from trioserve.model.loading.stored_tensor import (
    FP8_ROWS,
    FP8_SCALE_BYTES,
    AdapterMatrix,
    AdapterWeights,
    Bytes,
    StoredTensor,
)
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import Dtype, Values, empty_values
from trioserve.model.parallel.shares import Cut, Cuts, Run, Runs, divide, head_runs
from trioserve.model.vision.part import VisionPart

__all__ = ["RankCheckpoint"]

SLICE_VALUES = 2**20  # number of values that are read at a time when columns are cut
BLOCK_VALUES = 32  # numbers per block, in block types that ggml does not define
_BLOCK_VALUES = {storage.name: storage.block_values for storage in STORAGE_TYPES.values()}


class RankCheckpoint:
    """The Checkpoint of one rank. Only its weights and config differ from the whole model's Checkpoint.

    Args:
        checkpoint: the whole model, or a stage of it.
        rank: number of the rank.
        size: number of ranks.
        expert_parallel: see share_of.

    Raises:
        StartupError: the model cannot be divided among so many ranks.
    """

    def __init__(self, checkpoint: Checkpoint, rank: int, size: int, *, expert_parallel: bool = False) -> None:
        self.whole = checkpoint
        self._place = rank, size
        self._share = divide(checkpoint.config, rank, size, expert_parallel=expert_parallel)
        self.config: ModelConfig = self._share.config
        self.files: tuple[Path, ...] = checkpoint.files
        self.weight_bytes: int = sum(tensor.byte_count for tensor in self.tensors())
        self.tokenizer_directory: Path | None = checkpoint.tokenizer_directory
        self.gguf_metadata: Mapping[str, object] | None = checkpoint.gguf_metadata
        self.continues_texts: bool = checkpoint.continues_texts
        self.vision: VisionPart | None = checkpoint.vision
        self.encoder: EncoderPart | None = None  # Models with an encoder are not divided.
        self.sampling_defaults: Mapping[str, float | int] = checkpoint.sampling_defaults

    @property
    def kv_heads(self) -> Run:
        """KV heads of this rank, with their numbers in the whole model."""
        whole, own = self.whole.config.kv_attention, self.config.kv_attention.kv_entry.head_count
        count = whole.kv_entry.head_count
        runs = None if own == count else head_runs(whole.head_count, count, *self._place)
        return (0, own) if runs is None else runs.groups

    def tensors(self) -> Iterator[StoredTensor]:
        return self.part_of(self.whole.tensors())

    def part_of(self, tensors: Iterable[StoredTensor]) -> Iterator[StoredTensor]:
        """Yield this rank's shards of the tensors of another whole model. Both models must have equal shapes.

        Args:
            tensors: tensors of the whole model.
        """
        for tensor in tensors:
            cut = self.cut_of(tensor.name)
            if cut is not None:
                yield _cut_tensor(tensor, cut)

    def cut_of(self, name: str) -> Cut | None:
        """Return the rows or columns of a tensor that this rank has. None: the rank has no shard of the tensor.

        Args:
            name: name of the tensor.

        Raises:
            KeyError: shares.py defines no cut for this tensor.
        """
        path = name.split(".")
        cuts = self._share.cuts
        if path[0] == "layers":
            layer = int(path[1])
            cuts, path = self._share.layers[layer], path[2:]
            if path[0] == "experts" and int(path[1]) not in self.config.experts_of(layer):
                return None
            if path[0].startswith("shared") and not self._has_shared(layer):
                return None
        return _cut_named(cuts, path)

    def _has_shared(self, layer: int) -> bool:
        """Return True if the rank has a shard of a layer's shared experts."""
        return "shared.down_proj" in self._share.layers[layer]


def _cut_named(cuts: Cuts, path: list[str]) -> Cut:
    """Return the cut of a tensor. The path is the tensor's name without the layer."""
    if path[0] in NUMBERED and path[1].isdecimal():
        path = [path[0], *path[2:]]
    *module, kind = path
    cut = cuts[".".join(module if kind in ("weight", "bias") else path)]
    if kind != "bias" or cut.columns is None:
        return cut
    return Cut(has_bias=cut.has_bias)


def _cut_tensor(tensor: StoredTensor, cut: Cut) -> StoredTensor:
    if not cut.has_bias and cut.columns is None:
        return _zeros(tensor)
    if cut.rows is not None and not _is_all(cut.rows, tensor.shape[0]):
        return _some_rows(tensor, cut.rows)
    if cut.columns is not None and not _is_all(cut.columns, tensor.shape[1]):
        return _some_columns(tensor, cut.columns)
    return tensor


def _is_all(runs: Runs, count: int) -> bool:
    return runs == ((0, count),)


def _zeros(tensor: StoredTensor) -> StoredTensor:
    def read(wanted: Dtype) -> Values:
        zeros = empty_values(tensor.shape, wanted)
        zeros[...] = 0  # The bits of 0 are equal in every dtype.
        return zeros

    return StoredTensor(tensor.name, tensor.shape, tensor.dtype, read, tensor.sample)


def _some_rows(tensor: StoredTensor, runs: Runs) -> StoredTensor:
    """Select rows of a tensor. `sample` still returns bytes of the whole tensor."""
    shape = (sum(count for _, count in runs), *tensor.shape[1:])
    if tensor.rows is not None and len(runs) == 1:
        return tensor.rows.part(*runs[0])._replace(name=tensor.name, sample=tensor.sample)
    parts = [tensor]
    within = runs
    if tensor.rows is not None:
        parts, within = [tensor.rows.part(*run) for run in runs], ((0, shape[0]),)

    def rows_of(read: Callable[[StoredTensor], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        return _taken(_joined([read(part) for part in parts]), within)

    found = StoredTensor(
        tensor.name, shape, tensor.dtype, lambda wanted: rows_of(lambda part: part.read(wanted)), tensor.sample
    )
    if tensor.block_type is None:
        return found
    return found._replace(block_type=tensor.block_type, read_blocks=lambda: rows_of(_blocks_of))


def _some_columns(tensor: StoredTensor, runs: Runs) -> StoredTensor:
    row_count, column_count = tensor.shape
    shape = (row_count, sum(count for _, count in runs))

    def cut(read: Callable[[StoredTensor], npt.NDArray[Any]], runs: Runs) -> npt.NDArray[Any]:
        """Read the tensor and cut its columns. The runs count values, or blocks of values."""
        return _joined([_taken(read(part), runs, axis=1) for part in _slices(tensor)])

    found = StoredTensor(
        tensor.name, shape, tensor.dtype, lambda wanted: cut(lambda part: part.read(wanted), runs), tensor.sample
    )
    block_type = tensor.block_type
    if block_type is None:
        return found
    if block_type == FP8_ROWS:

        def read_rows() -> Bytes:
            rows = _blocks_of(tensor)
            codes = _taken(rows[:, FP8_SCALE_BYTES:], runs, axis=1)
            return np.concatenate((rows[:, :FP8_SCALE_BYTES], codes), axis=1)

        return found._replace(block_type=block_type, read_blocks=read_rows)
    block_values = _BLOCK_VALUES.get(block_type, BLOCK_VALUES)
    if any(first % block_values or count % block_values for first, count in runs):
        return found
    in_blocks = tuple((first // block_values, count // block_values) for first, count in runs)

    def read_blocks() -> Bytes:
        def read(part: StoredTensor) -> Bytes:
            return _blocks_of(part).reshape(part.shape[0], column_count // block_values, -1)

        return cut(read, in_blocks).reshape(row_count, -1)

    return found._replace(block_type=block_type, read_blocks=read_blocks)


def _slices(tensor: StoredTensor) -> Iterator[StoredTensor]:
    """Yield a few rows at a time to save memory. Yield the whole tensor if its rows cannot be read separately."""
    if tensor.rows is None:
        yield tensor
        return
    row_count, column_count = tensor.shape
    at_once = max(1, SLICE_VALUES // column_count)
    for first in range(0, row_count, at_once):
        yield tensor.rows.part(first, min(at_once, row_count - first))


def _blocks_of(tensor: StoredTensor) -> Bytes:
    assert tensor.read_blocks is not None, "only tensors with a block type have blocks"
    return tensor.read_blocks()


def _joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def rank_adapter(whole: AdapterWeights, checkpoint: RankCheckpoint) -> AdapterWeights:
    """Return the rank's shards of an adapter, which are cut like the rank's weights.

    If the rank has some outputs of a matrix, `b` has the same outputs. If it has some inputs, `a` has the same inputs.
    The adapter's product is then a partial sum, like the product of the matrix.

    Args:
        whole: the adapter for all ranks.
        checkpoint: the rank's weights.

    Returns:
        The rank's shards. Matrices that the rank does not have are omitted.
    """

    def part(values: Values, runs: Runs | None, axis: int) -> Values:
        return values if runs is None else np.ascontiguousarray(_taken(values, runs, axis))

    matrices: dict[str, AdapterMatrix] = {}
    for name, matrix in whole.matrices.items():
        cut = checkpoint.cut_of(f"{name}.weight")
        if cut is not None:
            matrices[name] = AdapterMatrix(part(matrix.a, cut.columns, 1), part(matrix.b, cut.rows, 0))
    return AdapterWeights(whole.digest, whole.dtype, matrices, whole.rank_max)


def _taken(values: npt.NDArray[Any], runs: Runs, axis: int = 0) -> npt.NDArray[Any]:
    """Copy the runs of an axis, so that the memory of all other values can be freed."""
    if _is_all(runs, values.shape[axis]):
        return values
    places = np.concatenate([np.arange(first, first + count) for first, count in runs])
    return np.take(values, places, axis=axis)
