"""Reads the header of a GGUF file: metadata as Python values, and the offset of each tensor.

The format is GGUF, versions 2 and 3, little-endian, as specified in ggml's docs/gguf.md. The gguf package is not used,
because it creates a numpy array for each string and needs two seconds for a vocabulary of 50,000 tokens.

The file is untrusted until its header is compared with its size. The values of a header need at most about ten times
the header's size, because arrays of numbers stay compact and the number of nested arrays is limited.
"""

from __future__ import annotations

import math
import mmap
import struct
import sys
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.fields import check_apart

if TYPE_CHECKING:  # Code that reads only metadata does not need numpy.
    from trioserve.model.loading.names import Shape, TensorPlace

__all__ = ["GgufFile", "GgufTensor", "StorageType", "STORAGE_TYPES", "read_float32s", "read_gguf"]

METADATA_ENTRIES_MAX = 65_536  # Real files have about fifty metadata entries.
TENSORS_MAX = 65_536  # The largest models have about two thousand tensors.
DIMENSIONS_MAX = 4  # ggml has the same limit.
ALIGNMENT_MAX = 2**20
ALIGNMENT_DEFAULT = 32
ARRAY_DEPTH_MAX = 4  # The format allows nested arrays, but no known file contains them.
NESTED_ARRAYS_MAX = 65_536  # Even an empty nested array needs 80 bytes and a microsecond.
NAME_BYTES_MAX = 65_535  # The specification has this limit for metadata keys.

_NUMBER_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


class StorageType(msgspec.Struct, frozen=True):
    """Storage of a tensor's values in ggml: blocks of block_values values, each of block_bytes bytes."""

    name: str
    block_values: int
    block_bytes: int


STORAGE_TYPES = {
    0: StorageType("F32", 1, 4),
    1: StorageType("F16", 1, 2),
    2: StorageType("Q4_0", 32, 18),
    3: StorageType("Q4_1", 32, 20),
    6: StorageType("Q5_0", 32, 22),
    7: StorageType("Q5_1", 32, 24),
    8: StorageType("Q8_0", 32, 34),
    10: StorageType("Q2_K", 256, 84),
    11: StorageType("Q3_K", 256, 110),
    12: StorageType("Q4_K", 256, 144),
    13: StorageType("Q5_K", 256, 176),
    14: StorageType("Q6_K", 256, 210),
    20: StorageType("IQ4_NL", 32, 18),
    23: StorageType("IQ4_XS", 256, 136),
    30: StorageType("BF16", 1, 2),
    39: StorageType("MXFP4", 32, 17),
}


class GgufTensor(msgspec.Struct, frozen=True):
    """Shape, storage and offset of a tensor in a file.

    Attributes:
        shape: number of rows first, as in torch.
        offset: position in bytes from the start of the file.
    """

    name: str
    shape: Shape
    storage: StorageType
    offset: int
    byte_count: int
    value_count: int

    def part(self, place: TensorPlace) -> GgufTensor:
        """Return some rows of the tensor.

        Args:
            place: describes the rows of this tensor.
        """
        if place.rows_shape == self.shape:
            return self
        row_bytes = self.byte_count * math.prod(place.rows_shape[1:]) // self.value_count
        return msgspec.structs.replace(
            self,
            shape=place.rows_shape,
            offset=self.offset + place.first_row * row_bytes,
            byte_count=place.rows_shape[0] * row_bytes,
            value_count=math.prod(place.rows_shape),
        )


class GgufFile(msgspec.Struct, frozen=True):
    """Header of a file.

    Attributes:
        metadata: values by key: numbers, bools, strings, lists of bools or strings, and arrays of numbers.
        tensors: tensors by their names in the file.
    """

    path: Path
    metadata: dict[str, object]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a file.

    Args:
        path: file.

    Raises:
        ModelLoadError: the file is damaged or not supported.

    Cost:
        About a tenth of a second.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < 24:
            raise ModelLoadError(f"the file has {size} bytes, but a GGUF header alone has 24: fetch it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            return _Header(buffer).read(path)


class _Header:
    """Reader of a header. Its position only moves forward, and each read first checks that the file is long enough."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer
        self._size = len(buffer)
        self._position = 0
        self._nested_array_count = 0

    def read(self, path: Path) -> GgufFile:
        if (magic := self._bytes(4)) != b"GGUF":
            raise ModelLoadError(f"the file begins with {magic!r}, not with b'GGUF': it is no GGUF file")
        version = self._number("I")
        if version not in (2, 3):
            if version in (0x02000000, 0x03000000):
                raise ModelLoadError("the file is a big-endian GGUF; convert it to little-endian")
            raise ModelLoadError(f"the file is GGUF version {version}; supported are 2 and 3: convert the model again")
        tensor_count = self._count("tensors", TENSORS_MAX)
        entry_count = self._count("metadata entries", METADATA_ENTRIES_MAX)
        metadata = self._metadata(entry_count)
        if isinstance(parts := metadata.get("split.count"), int) and parts > 1:
            raise ModelLoadError(
                f"the file is one of {parts} parts, which are not read together: "
                "join them with llama-gguf-split --merge"
            )
        return GgufFile(path, metadata, self._tensors(tensor_count, _alignment(metadata)))

    def _metadata(self, entry_count: int) -> dict[str, object]:
        metadata: dict[str, object] = {}
        for _ in range(entry_count):
            key = self._string()
            if len(key) > NAME_BYTES_MAX or key in metadata:
                raise ModelLoadError(
                    f"the file's metadata has a key twice or a damaged one: {key[:80]!r}; fetch it again"
                )
            metadata[key] = self._value(self._number("I"), key, depth=0)
        return metadata

    def _value(self, kind: int, key: str, *, depth: int) -> object:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key, depth=depth + 1)
        if kind == _BOOL:
            return self._bytes(1) != b"\0"
        if kind in _NUMBER_FORMATS:
            return self._number(_NUMBER_FORMATS[kind])
        raise ModelLoadError(f"the file's metadata {key[:80]!r} has the unknown type {kind}: the file is damaged")

    def _array(self, key: str, *, depth: int) -> list[object] | array[int] | array[float]:
        kind = self._number("I")
        count = self._number("Q")
        if depth > ARRAY_DEPTH_MAX:
            raise ModelLoadError(f"the file's metadata {key[:80]!r} nests arrays too deeply: the file is damaged")
        smallest = {_STRING: 8, _ARRAY: 12}.get(kind) or struct.calcsize(_NUMBER_FORMATS.get(kind, "B"))
        if count * smallest > self._size - self._position:
            raise self._truncated()
        if kind == _STRING:
            return list(self._strings(count))
        if kind == _ARRAY:
            self._nested_array_count += count
            if self._nested_array_count > NESTED_ARRAYS_MAX:
                raise ModelLoadError(
                    f"the file's metadata {key[:80]!r} holds {count} arrays, and all together more than "
                    f"{NESTED_ARRAYS_MAX}: the file is damaged"
                )
        if kind == _ARRAY or kind not in _NUMBER_FORMATS:
            return [self._value(kind, key, depth=depth) for _ in range(count)]
        if kind == _BOOL:
            return [value != 0 for value in self._bytes(count)]
        numbers: array[int] | array[float] = array(_NUMBER_FORMATS[kind], self._bytes(count * smallest))
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers

    def _tensors(self, tensor_count: int, alignment: int) -> dict[str, GgufTensor]:
        described = [self._tensor_description() for _ in range(tensor_count)]
        data_start = -(-self._position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, storage, relative_offset in described:
            if name in tensors:
                raise ModelLoadError(f"the file holds the tensor {name[:80]!r} twice: it is damaged")
            value_count = 1
            for length in shape:
                value_count *= length
            byte_count = value_count // storage.block_values * storage.block_bytes
            offset = data_start + relative_offset
            if relative_offset % alignment or offset + byte_count > self._size:
                raise ModelLoadError(
                    f"the tensor {name[:80]!r} lies at bytes {offset} to {offset + byte_count}, but the file has "
                    f"{self._size} and aligns to {alignment}: it is damaged or incomplete, fetch it again"
                )
            tensors[name] = GgufTensor(name, shape, storage, offset, byte_count, value_count)
        places = ((tensor.offset, tensor.offset + tensor.byte_count, tensor.name) for tensor in tensors.values())
        check_apart("the file", places)
        return tensors

    def _tensor_description(self) -> tuple[str, Shape, StorageType, int]:
        name = self._string()
        dimension_count = self._number("I")
        if not 1 <= dimension_count <= DIMENSIONS_MAX:
            raise ModelLoadError(
                f"the tensor {name[:80]!r} has {dimension_count} dimensions, allowed are 1 to {DIMENSIONS_MAX}: "
                "the file is damaged"
            )
        lengths = [self._number("Q") for _ in range(dimension_count)]
        kind = self._number("I")
        offset = self._number("Q")
        if kind not in STORAGE_TYPES:
            names = ", ".join(storage.name for storage in STORAGE_TYPES.values())
            raise ModelLoadError(
                f"the tensor {name[:80]!r} is stored as ggml type {kind}; supported are {names}: use another file"
            )
        storage = STORAGE_TYPES[kind]
        if min(lengths) < 1 or lengths[0] % storage.block_values:
            raise ModelLoadError(
                f"the tensor {name[:80]!r} has the lengths {lengths}, which {storage.name} cannot hold: "
                "the file is damaged"
            )
        return name, tuple(reversed(lengths)), storage, offset

    def _count(self, what: str, largest: int) -> int:
        count = self._number("Q")
        if count > largest:
            raise ModelLoadError(f"the file announces {count} {what}, allowed are {largest}: it is damaged")
        return count

    def _bytes(self, length: int) -> bytes:
        end = self._position + length
        if end > self._size:
            raise self._truncated()
        taken = self._buffer[self._position : end]
        self._position = end
        return taken

    def _number(self, number_format: str) -> int:
        # With the formats "f" and "d", which only metadata uses, the result is a float.
        number: int = struct.unpack("<" + number_format, self._bytes(struct.calcsize(number_format)))[0]
        return number

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        # The loop calls no method for speed, because a vocabulary and its merges have 100,000 to 500,000 strings.
        buffer, size, position = self._buffer, self._size, self._position
        strings: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + int.from_bytes(buffer[position:start], "little")
                if position > size:
                    raise self._truncated()
                strings.append(buffer[start:position].decode())
        except UnicodeDecodeError as error:
            raise ModelLoadError("a string in the file's header is not UTF-8: it is damaged, fetch it again") from error
        self._position = position
        return strings

    def _truncated(self) -> ModelLoadError:
        return ModelLoadError(
            f"the file ends inside its header (it has {self._size} bytes): it is damaged or incomplete, fetch it again"
        )


def _alignment(metadata: dict[str, object]) -> int:
    alignment = metadata.get("general.alignment", ALIGNMENT_DEFAULT)
    if not isinstance(alignment, int) or not 1 <= alignment <= ALIGNMENT_MAX or alignment & (alignment - 1):
        raise ModelLoadError(
            f"general.alignment is {str(alignment)[:40]}, allowed are powers of two up to {ALIGNMENT_MAX}: "
            "the file is damaged"
        )
    return alignment


def read_float32s(tensor: GgufTensor, path: Path) -> tuple[float, ...]:
    """Read a small F32 tensor that belongs to the configuration.

    Args:
        tensor: shape and offset of the tensor.
        path: file.
    """
    with path.open("rb") as file:
        file.seek(tensor.offset)
        values = array("f")
        values.fromfile(file, tensor.value_count)
    return tuple(values)
