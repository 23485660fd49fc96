"""Tensor in a safetensors file: its position, its storage type, and reading of its rows."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import msgspec

from trioserve.model.loading.names import Shape, TensorPlace
from trioserve.model.loading.stored_tensor import Bytes, FileRows, StoredTensor, read_bytes, read_plain, read_sample
from trioserve.model.number_formats import Dtype

__all__ = ["PLAIN_DTYPES", "STORAGE_BYTES", "FileTensor"]

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
            first_row: first row of the part.
            shape: shape of the part.
        """
        if shape == self.shape:
            return self
        row_bytes = math.prod(shape[1:]) * STORAGE_BYTES[self.storage]
        return FileTensor(self.path, self.offset + first_row * row_bytes, shape, self.storage)

    def sample(self) -> bytes:
        """Return some bytes of the tensor, see StoredTensor."""
        return read_sample(self.path, self.offset, self.byte_count)

    def bytes(self) -> Bytes:
        """Read all bytes of the tensor, one-dimensional.

        Raises:
            ModelLoadError: the file cannot be read, or has become shorter.
        """
        return read_bytes(self.path, self.offset, (self.byte_count,))

    def stored(self, name: str, place: TensorPlace) -> StoredTensor:
        """Return the part of a plain tensor that a place describes.

        Args:
            name: our name of the part.
            place: rows of this tensor.
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
