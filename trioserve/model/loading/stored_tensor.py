"""A tensor of a checkpoint before it is read, and how the bytes of a file become values: slice by slice, so that what
is converted on the way stays in the CPU's caches and takes no memory beside the result."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.names import Shape
from trioserve.model.number_formats import VALUE_BYTES, Dtype, Values, convert, empty_values, values_of

__all__ = [
    "SLICE_VALUES",
    "Bytes",
    "FileRows",
    "StoredTensor",
    "read_blocks",
    "read_bytes",
    "read_plain",
    "read_sample",
]

Bytes: TypeAlias = npt.NDArray[np.uint8]

SLICE_VALUES = 2**17  # of float32 half a MiB
SAMPLE_PIECES, SAMPLE_PIECE_BYTES = 16, 2048


class FileRows(NamedTuple):
    """Rows of row_bytes each, one behind the other from this offset of a file on. part(first_row, row_count) is a
    tensor of some of them."""

    path: Path
    offset: int
    row_bytes: int
    part: Callable[[int, int], StoredTensor]


class StoredTensor(NamedTuple):
    """name: see names.py. dtype: the checkpoint's own; float32 where it is quantized.

    read(dtype) gives its values in that format, in memory of their own; several threads may read at the same time. It
    raises ModelLoadError if the file cannot be read any more. block_type: ggml's name of the type of a matrix that is
    quantized; read_blocks() then gives its blocks as they are, uint8 [rows, bytes of a row], on the same terms.
    sample() gives some of its bytes as they lie in the file, from all over it. rows: of a matrix whose rows lie
    there as they are wanted, in `dtype` or in blocks of block_type; None: it is read as a whole.
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
        """In its own format."""
        return math.prod(self.shape) * VALUE_BYTES[self.dtype]


def read_bytes(path: Path, offset: int, shape: Shape) -> Bytes:
    """The bytes from this offset of a file on. Raises ModelLoadError if the file cannot be read, or ends before."""
    result = np.empty(shape, dtype=np.uint8)
    try:
        with path.open("rb") as file:
            file.seek(offset)
            if file.readinto(result.reshape(-1).data) != result.nbytes:
                raise ModelLoadError(f"cannot load {path}: it has become shorter since it was opened, fetch it again")
    except OSError as error:
        raise ModelLoadError(f"cannot load {path}: {error.strerror or error}") from error
    return result


def read_sample(path: Path, offset: int, byte_count: int) -> bytes:
    """Of so many bytes from this offset of a file on, some that are spread evenly, the first and the last among them;
    all, if they are few. Raises ModelLoadError as read_bytes does."""
    if byte_count <= SAMPLE_PIECES * SAMPLE_PIECE_BYTES:
        return read_bytes(path, offset, (byte_count,)).tobytes()
    last = byte_count - SAMPLE_PIECE_BYTES
    starts = (last * piece // (SAMPLE_PIECES - 1) for piece in range(SAMPLE_PIECES))
    return b"".join(read_bytes(path, offset + start, (SAMPLE_PIECE_BYTES,)).tobytes() for start in starts)


def read_plain(path: Path, offset: int, shape: Shape, stored: Dtype, wanted: Dtype) -> Values:
    """The values of a tensor that lie one after the other from this offset of a file on."""
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
    """The same of a tensor that lies in blocks. decode: uint8 [blocks, block_bytes] to the values they stand for.

    Raises ModelLoadError if the file cannot be read, or ends before the tensor does.
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
                        f"cannot load {path}: it has become shorter since it was opened, fetch it again"
                    )
                convert(decode(blocks).reshape(-1), part)
    except OSError as error:
        raise ModelLoadError(f"cannot load {path}: {error.strerror or error}") from error
    return result
