"""Expert matrices in MXFP4 as gpt-oss stores them (OCP Microscaling Formats 1.0).

Each 32 inputs have 16 bytes with two FP4 numbers (e2m1) each, and one byte with a power of 2. The matrices can be read
as numbers, or as ggml's blocks, which the native kernels keep.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.file_tensor import PLAIN_DTYPES, FileTensor
from trioserve.model.loading.names import Shape, TensorPlace
from trioserve.model.loading.stored_tensor import SLICE_VALUES, Bytes, StoredTensor
from trioserve.model.number_formats import Dtype, Values, convert, empty_values

__all__ = ["Mxfp4Matrix", "mxfp4_matrices"]

BLOCK_VALUES, BLOCK_BYTES = 32, 16
EXPONENT_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = np.array((*_MAGNITUDES, *(-value for value in _MAGNITUDES)), dtype=np.float32)


def mxfp4_matrices(stored: Mapping[str, FileTensor]) -> tuple[dict[str, Mxfp4Matrix], dict[str, FileTensor]]:
    """Find the quantized matrices among stored tensors.

    Args:
        stored: tensors by their names in the files.

    Returns:
        Quantized matrices, by the name of a plain matrix. Then the remaining tensors.

    Raises:
        ModelLoadError: scales are missing, or a part has a wrong shape or type.
    """
    rest = dict(stored)
    matrices: dict[str, Mxfp4Matrix] = {}
    for name in stored:
        if not name.endswith("_blocks"):
            continue
        module = name.removesuffix("_blocks")
        blocks, scales = rest.pop(name), rest.pop(f"{module}_scales", None)
        if scales is None:
            raise ModelLoadError(f"the weights hold {name}, but no {module}_scales: fetch the checkpoint again")
        if module in stored:
            raise ModelLoadError(f"the weights hold {module} both plain and quantized: fetch the checkpoint again")
        matrices[module] = Mxfp4Matrix(module, blocks, scales)
    for name, tensor in rest.items():
        if tensor.storage not in PLAIN_DTYPES:
            raise ModelLoadError(
                f"{name} is stored as {tensor.storage}, and belongs to no matrix that is quantized as "
                "quantization_config in config.json says: it is a variant that is not supported"
            )
    return matrices, rest


class Mxfp4Matrix:
    """Matrices of all experts of one layer.

    Args:
        module: name in the files, without "_blocks".
        blocks: FP4 numbers.
        scales: powers of 2.

    Attributes:
        shape: [experts, inputs, outputs], the shape of a plain tensor, whose matrices are transposed.

    Raises:
        ModelLoadError: a part has a wrong shape or type.
    """

    dtype: Dtype = "float32"

    def __init__(self, module: str, blocks: FileTensor, scales: FileTensor) -> None:
        for part, tensor in (("blocks", blocks), ("scales", scales)):
            if tensor.storage != "U8":
                raise ModelLoadError(f"{module}_{part} is stored as {tensor.storage}, but it must be U8")
        if len(blocks.shape) != 4 or blocks.shape[3] != BLOCK_BYTES or 0 in blocks.shape:
            raise ModelLoadError(
                f"{module}_blocks has shape {list(blocks.shape)}, but it must be experts, outputs, blocks of "
                f"{BLOCK_VALUES} inputs, and {BLOCK_BYTES} bytes"
            )
        if scales.shape != blocks.shape[:3]:
            raise ModelLoadError(
                f"{module}_scales has shape {list(scales.shape)}, but {module}_blocks has {list(blocks.shape)}: "
                "fetch the checkpoint again"
            )
        self._blocks, self._scales = blocks, scales
        experts, self._outputs, self._block_count = blocks.shape[:3]
        self.shape: Shape = (experts, self._block_count * BLOCK_VALUES, self._outputs)

    def stored(self, name: str, place: TensorPlace) -> StoredTensor:
        """Return the rows of one expert that a place describes.

        Args:
            name: our name of the part.
            place: rows of the plain tensor.
        """
        assert place.is_transposed, "the plain tensor is transposed"
        expert = place.first_row // self.shape[1]
        read = functools.partial(self._read, expert, place)
        sample = self._blocks.part(expert, (1, *self._blocks.shape[1:])).sample
        read_blocks = functools.partial(self._read_blocks, expert, place)
        return StoredTensor(name, place.shape, "float32", read, sample, "MXFP4", read_blocks)

    def _rows(self, expert: int, place: TensorPlace) -> tuple[Bytes, Bytes]:
        """Return the bytes of the numbers, [rows, blocks, BLOCK_BYTES], and of the scales, [rows, blocks]."""
        shape = (self._outputs, self._block_count)
        blocks = self._blocks.part(expert, (1, *shape, BLOCK_BYTES)).bytes().reshape(*shape, BLOCK_BYTES)
        scales = self._scales.part(expert, (1, *shape)).bytes().reshape(shape)
        return place.in_order(blocks), place.in_order(scales)

    def _read(self, expert: int, place: TensorPlace, wanted: Dtype) -> Values:
        blocks, scales = self._rows(expert, place)
        result = empty_values(place.shape, wanted)
        at_once = max(1, SLICE_VALUES // self.shape[1])
        for start in range(0, len(blocks), at_once):
            numbers = _NUMBERS[_codes(blocks[start : start + at_once])]
            exponents = scales[start : start + at_once].astype(np.int32) - EXPONENT_BIAS
            with np.errstate(over="ignore"):
                values = np.ldexp(numbers, exponents[..., None])
            convert(values.reshape(len(values), -1), result[start : start + at_once])
        return result

    def _read_blocks(self, expert: int, place: TensorPlace) -> Bytes:
        """Return ggml's blocks, uint8 [rows, bytes of a row].

        A block has a byte with the scale, and then 16 bytes. Byte i of these holds the numbers i and i + 16.
        """
        blocks, scales = self._rows(expert, place)
        codes = _codes(blocks)
        half = BLOCK_VALUES // 2
        packed = codes[..., :half] | codes[..., half:] << 4
        return np.concatenate((scales[..., None], packed), axis=-1).reshape(len(blocks), -1)


def _codes(blocks: Bytes) -> Bytes:
    """Return the 4 bits of each number, [..., BLOCK_VALUES], from bytes [..., BLOCK_BYTES]."""
    return np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(*blocks.shape[:-1], BLOCK_VALUES)
