"""A tensor in a safetensors file: where it lies, in which of the format's types, and how its rows are read."""

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
"""Of a value, by safetensors' name of its type: all that quantized checkpoints are read from."""


class FileTensor(msgspec.Struct, frozen=True):
    """offset: counts from the file's start. storage: a name of STORAGE_BYTES."""

    path: Path
    offset: int
    shape: Shape
    storage: str

    @property
    def dtype(self) -> Dtype:
        """Of a tensor of plain numbers; float32 for any other."""
        return PLAIN_DTYPES.get(self.storage, "float32")

    @property
    def byte_count(self) -> int:
        return math.prod(self.shape) * STORAGE_BYTES[self.storage]

    def part(self, first_row: int, shape: Shape) -> FileTensor:
        """The rows of this shape from first_row on."""
        if shape == self.shape:
            return self
        row_bytes = math.prod(shape[1:]) * STORAGE_BYTES[self.storage]
        return FileTensor(self.path, self.offset + first_row * row_bytes, shape, self.storage)

    def sample(self) -> bytes:
        """See StoredTensor."""
        return read_sample(self.path, self.offset, self.byte_count)

    def bytes(self) -> Bytes:
        """All that lies there, in one row. Raises ModelLoadError if the file cannot be read any more."""
        return read_bytes(self.path, self.offset, (self.byte_count,))

    def stored(self, name: str, place: TensorPlace) -> StoredTensor:
        """The rows that a place names, of a tensor of plain numbers. name: in here."""
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
