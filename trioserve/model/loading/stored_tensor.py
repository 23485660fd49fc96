"""Defines a tensor of a checkpoint that is not read yet, and converts the bytes of files to values.

Bytes are converted in small slices. A slice stays in the CPU's caches, and the only large allocation is the result.

`AdapterWeights` has the weights of a LoRA adapter (arXiv 2106.09685) in host memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.names import Shape, TensorPlace
from trioserve.model.number_formats import VALUE_BYTES, Dtype, Values, convert, empty_values, values_of

__all__ = [
    "AdapterMatrix",
    "AdapterWeights",
    "SLICE_VALUES",
    "Bytes",
    "FileRows",
    "StoredTensor",
    "read_blocks",
    "read_bytes",
    "read_plain",
    "read_sample",
    "FP8_ROWS",
    "FP8_SCALE_BYTES",
    "PLAIN_DTYPES",
    "STORAGE_BYTES",
    "FileTensor",
]

Bytes: TypeAlias = npt.NDArray[np.uint8]

SLICE_VALUES = 2**17  # Numbers in one slice, which has half a MiB in float32.
SAMPLE_PIECES, SAMPLE_PIECE_BYTES = 16, 2048
FP8_ROWS = "F8_E4M3"
"""Block type of FP8 matrices with one scale for each row: FP8_SCALE_BYTES with the scale in float32, then the codes."""
FP8_SCALE_BYTES = 4


class FileRows(NamedTuple):
    """Consecutive rows in a file.

    Attributes:
        offset: position of the first row in the file, in bytes.
        row_bytes: size of one row.
        part: function of a first row and a row count. It returns a tensor with these rows.
    """

    path: Path
    offset: int
    row_bytes: int
    part: Callable[[int, int], StoredTensor]


class StoredTensor(NamedTuple):
    """A tensor that can be read from a checkpoint.

    Attributes:
        name: our name, see names.py.
        dtype: number format in the checkpoint. float32 for a quantized tensor.
        read: function that returns the values in a given number format, in new memory. Several threads may call it at
            the same time. It raises ModelLoadError if the file cannot be read.
        sample: function that returns evenly distributed bytes of the tensor in the file.
        block_type: ggml's name for the type of a quantized matrix, or a name of our own. None for a tensor that is not
            quantized, or whose type nothing can keep.
        read_blocks: function that returns the blocks of a quantized matrix unchanged, uint8 [rows, bytes of a row].
            Like `read`, it may be called by several threads.
        rows: position of a matrix whose rows are consecutive in the file, in `dtype` or in blocks of block_type. None:
            the tensor can only be read as a whole.
    """

    name: str
    shape: Shape
    dtype: Dtype
    read: Callable[[Dtype], Values]
    sample: Callable[[], bytes]
    block_type: str | None = None
    read_blocks: Callable[[], Bytes] | None = None
    rows: FileRows | None = None

    @property
    def byte_count(self) -> int:
        """Size of the values in `dtype`."""
        return math.prod(self.shape) * VALUE_BYTES[self.dtype]


def read_bytes(path: Path, offset: int, shape: Shape) -> Bytes:
    """Read bytes from a file.

    Args:
        path: file.
        offset: position of the first byte.
        shape: shape of the result, which defines the number of bytes.

    Returns:
        uint8 array.

    Raises:
        ModelLoadError: the file cannot be read, or ends too early.
    """
    result = np.empty(shape, dtype=np.uint8)
    try:
        with path.open("rb") as file:
            file.seek(offset)
            if file.readinto(result.reshape(-1).data) != result.nbytes:
                raise ModelLoadError(
                    f"cannot load {path}: the file has become shorter since it was opened, fetch it again"
                )
    except OSError as error:
        raise ModelLoadError(f"cannot load {path}: {error.strerror or error}") from error
    return result


def read_sample(path: Path, offset: int, byte_count: int) -> bytes:
    """Read evenly distributed bytes from a range of a file, including the first and last bytes of the range. A small
    range is read completely.

    Args:
        path: file.
        offset: position of the range.
        byte_count: size of the range.

    Raises:
        ModelLoadError: the file cannot be read, or ends too early.
    """
    if byte_count <= SAMPLE_PIECES * SAMPLE_PIECE_BYTES:
        return read_bytes(path, offset, (byte_count,)).tobytes()
    last = byte_count - SAMPLE_PIECE_BYTES
    starts = (last * piece // (SAMPLE_PIECES - 1) for piece in range(SAMPLE_PIECES))
    return b"".join(read_bytes(path, offset + start, (SAMPLE_PIECE_BYTES,)).tobytes() for start in starts)


def read_plain(path: Path, offset: int, shape: Shape, stored: Dtype, wanted: Dtype) -> Values:
    """Read consecutive values from a file.

    Args:
        path: file.
        offset: position of the first value, in bytes.
        shape: shape of the result.
        stored: number format in the file.
        wanted: number format of the result.

    Raises:
        ModelLoadError: the file cannot be read, or ends too early.
    """
    if stored == wanted:
        return values_of(read_bytes(path, offset, (math.prod(shape), VALUE_BYTES[stored])), stored).reshape(shape)

    def decode(blocks: Bytes) -> Values:
        return values_of(blocks, stored)

    return read_blocks(path, offset, shape, wanted, block_values=1, block_bytes=VALUE_BYTES[stored], decode=decode)


def read_blocks(
    path: Path,
    offset: int,
    shape: Shape,
    wanted: Dtype,
    *,
    block_values: int,
    block_bytes: int,
    decode: Callable[[Bytes], Values],
) -> Values:
    """Read a tensor that is stored in blocks.

    Args:
        path: file.
        offset: position of the first block, in bytes.
        shape: shape of the result.
        wanted: number format of the result.
        block_values: values in one block.
        block_bytes: size of one block.
        decode: converts uint8 [blocks, block_bytes] to values.

    Raises:
        ModelLoadError: the file cannot be read, or ends too early.
    """
    result = empty_values(shape, wanted)
    flat = result.reshape(-1)
    blocks_at_once = max(1, min(SLICE_VALUES, flat.size) // block_values)
    memory = np.empty((blocks_at_once, block_bytes), dtype=np.uint8)
    try:
        with path.open("rb") as file:
            file.seek(offset)
            for start in range(0, flat.size, blocks_at_once * block_values):
                part = flat[start : start + blocks_at_once * block_values]
                blocks = memory[: part.size // block_values]
                if file.readinto(blocks.data) != blocks.nbytes:
                    raise ModelLoadError(
                        f"cannot load {path}: the file has become shorter since it was opened, fetch it again"
                    )
                convert(decode(blocks).reshape(-1), part)
    except OSError as error:
        raise ModelLoadError(f"cannot load {path}: {error.strerror or error}") from error
    return result


PLAIN_DTYPES: dict[str, Dtype] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
STORAGE_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8, "BOOL": 1}
"""Bytes of one value for each safetensors type that quantized checkpoints may use."""


class FileTensor(msgspec.Struct, frozen=True):
    """Position and type of a tensor in a file.

    Attributes:
        offset: position in bytes from the start of the file.
        storage: a name of STORAGE_BYTES.
    """

    path: Path
    offset: int
    shape: Shape
    storage: str

    @property
    def dtype(self) -> Dtype:
        """Number format of a plain tensor. float32 for any other tensor."""
        return PLAIN_DTYPES.get(self.storage, "float32")

    @property
    def byte_count(self) -> int:
        return math.prod(self.shape) * STORAGE_BYTES[self.storage]

    def part(self, first_row: int, shape: Shape) -> FileTensor:
        """Return some rows of the tensor.

        Args:
            first_row: index of the first row.
            shape: shape of the result.
        """
        if shape == self.shape:
            return self
        row_bytes = math.prod(shape[1:]) * STORAGE_BYTES[self.storage]
        return FileTensor(self.path, self.offset + first_row * row_bytes, shape, self.storage)

    def sample(self) -> bytes:
        """Return some bytes of the tensor, see StoredTensor."""
        return read_sample(self.path, self.offset, self.byte_count)

    def bytes(self) -> Bytes:
        """Read all bytes of the tensor into a one-dimensional array.

        Raises:
            ModelLoadError: the file cannot be read, or has become too short.
        """
        return read_bytes(self.path, self.offset, (self.byte_count,))

    def stored(self, name: str, place: TensorPlace) -> StoredTensor:
        """Return some rows of an unquantized tensor as a tensor of the model.

        Args:
            name: our name of the result.
            place: describes the rows of this tensor.
        """
        part = self.part(place.first_row, place.rows_shape)
        read = functools.partial(read_plain, part.path, part.offset, part.shape, part.dtype)
        stored = StoredTensor(name, place.shape, part.dtype, functools.partial(place.read, read), part.sample)
        if not place.has_parts:
            return stored
        rows = FileRows(
            part.path,
            part.offset,
            part.byte_count // part.shape[0],
            lambda first_row, row_count: self.stored(name, place.part(first_row, row_count)),
        )
        return stored._replace(rows=rows)


class AdapterMatrix(NamedTuple):
    """Low-rank change of one matrix of the model. For an input row x, b (a x) is added to the matrix's result.

    Attributes:
        a: [rank, inputs].
        b: [outputs, rank], already multiplied by the adapter's scale. Its rows are in the order of the rows of the
            loaded matrix.
    """

    a: Values
    b: Values


class AdapterWeights:
    """All matrices of one adapter.

    Args:
        digest: hash that names the content.
        dtype: number format of the matrices.
        matrices: low-rank matrices by the name of the model's matrix, such as layers.0.q_proj (see loading/names.py).
        rank_max: largest rank of all matrices of the adapter. None: `matrices` has all of them.

    Attributes:
        rank_max: see above. Equal in all processes that compute parts of one model.
    """

    def __init__(
        self, digest: str, dtype: Dtype, matrices: Mapping[str, AdapterMatrix], rank_max: int | None = None
    ) -> None:
        self.digest = digest
        self.dtype: Dtype = dtype
        self.matrices = dict(matrices)
        self.rank_max = max(len(matrix.a) for matrix in matrices.values()) if rank_max is None else rank_max

    @property
    def byte_count(self) -> int:
        return sum(part.nbytes for matrix in self.matrices.values() for part in matrix)
