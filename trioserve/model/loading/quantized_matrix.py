"""Reads a quantized matrix, which a safetensors checkpoint stores as several tensors: 4-bit or 8-bit codes, scales and
zero points.

A matrix can be read as numbers, or as blocks of 32 numbers for the native kernels. A number is (code - zero point) *
scale, or an FP8 number * scale, in float32. The supported layouts are those of AutoAWQ (gemm), GPTQModel,
compressed-tensors, DeepSeek and AutoFP8.

gpt-oss stores its experts in MXFP4 (OCP Microscaling Formats 1.0). For 32 inputs, there are 16 bytes with two FP4
numbers (e2m1) each, and one byte with a power of 2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.names import Shape, TensorPlace
from trioserve.model.loading.quantization_config import StorageScheme
from trioserve.model.loading.stored_tensor import (
    FP8_ROWS,
    FP8_SCALE_BYTES,
    PLAIN_DTYPES,
    SLICE_VALUES,
    Bytes,
    FileTensor,
    StoredTensor,
)
from trioserve.model.number_formats import Dtype, Float32Array, Values, convert, empty_values, values_of

__all__ = ["Mxfp4Matrix", "mxfp4_matrices", "QuantizedMatrix", "quantized_matrices"]

BLOCK_BYTES = 16
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
        shape: [experts, inputs, outputs], the shape of an unquantized tensor, whose matrices are transposed.

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
        """Return some rows of one expert as a tensor of the model.

        Args:
            name: our name of the result.
            place: describes the rows in an unquantized tensor.
        """
        assert place.is_transposed, "the plain tensor is transposed"
        expert = place.first_row // self.shape[1]
        read = functools.partial(self._read, expert, place)
        sample = self._blocks.part(expert, (1, *self._blocks.shape[1:])).sample
        read_blocks = functools.partial(self._read_blocks, expert, place)
        return StoredTensor(name, place.shape, "float32", read, sample, "MXFP4", read_blocks)

    def _rows(self, expert: int, place: TensorPlace) -> tuple[Bytes, Bytes]:
        """Return the bytes of the numbers [rows, blocks, BLOCK_BYTES], and those of the scales [rows, blocks]."""
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
        """Return blocks in ggml's format, uint8 [rows, bytes of a row].

        A block has one byte with the scale, then 16 bytes with two numbers each: byte i has the numbers i and i + 16.
        """
        blocks, scales = self._rows(expert, place)
        codes = _codes(blocks)
        half = BLOCK_VALUES // 2
        packed = codes[..., :half] | codes[..., half:] << 4
        return np.concatenate((scales[..., None], packed), axis=-1).reshape(len(blocks), -1)


def _codes(blocks: Bytes) -> Bytes:
    """Unpack two 4-bit codes from each byte. Converts [..., BLOCK_BYTES] to [..., BLOCK_VALUES]."""
    return np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(*blocks.shape[:-1], BLOCK_VALUES)


BLOCK_VALUES = 32
WORD_BITS = 32
SIGN = np.uint8(0x80)
AWQ_OUTPUTS = 8  # number of outputs that one 32-bit word contains
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # index of the output in each 4 bits of a word, lowest bits first

_MAIN_PARTS = {"awq": "qweight", "gptq": "qweight", "packed": "weight_packed", "bytes": "weight"}
_OTHER_PARTS = {
    "awq": ("qzeros", "scales"),
    "gptq": ("qzeros", "scales", "g_idx"),
    "packed": ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    "bytes": ("weight_scale", "weight_scale_inv", "weight_zero_point", "weight_g_idx"),
}
_SCALES = ("scales", "weight_scale", "weight_scale_inv")
# These scales would be needed to quantize inputs and keys. This project does not quantize them with stored scales.
_UNUSED = (
    "input_scale",
    "input_zero_point",
    "input_scale_ub",
    "activation_scale",
    "output_scale",
    "q_scale",
    "k_scale",
    "v_scale",
)

Words = npt.NDArray[np.uint32]


def quantized_matrices(
    stored: Mapping[str, FileTensor], scheme: StorageScheme
) -> tuple[dict[str, QuantizedMatrix], dict[str, FileTensor]]:
    """Find the quantized matrices among stored tensors.

    Args:
        stored: tensors by their names in the files.
        scheme: storage of quantized matrices.

    Returns:
        Quantized matrices, by the name of a plain matrix. Then the remaining tensors.

    Raises:
        ModelLoadError: a part of a matrix is missing, or has a wrong shape or type.
    """
    matrices: dict[str, QuantizedMatrix] = {}
    rest = {name: tensor for name, tensor in stored.items() if name.rpartition(".")[2] not in _UNUSED}
    main = _MAIN_PARTS[scheme.layout]
    for name, tensor in stored.items():
        module, _, kind = name.rpartition(".")
        if kind != main or (scheme.layout == "bytes" and tensor.storage in PLAIN_DTYPES):
            continue
        parts = {main: rest.pop(name)}
        for other in _OTHER_PARTS[scheme.layout]:
            if (part := rest.pop(f"{module}.{other}", None)) is not None:
                parts[other] = part
        matrices[f"{module}.weight"] = QuantizedMatrix(module, parts, scheme)
    for name, tensor in rest.items():
        if name in matrices:
            raise ModelLoadError(f"the weights hold {name} both plain and quantized: fetch the checkpoint again")
        if tensor.storage not in PLAIN_DTYPES:
            raise ModelLoadError(
                f"{name} is stored as {tensor.storage}, and belongs to no matrix that is quantized as "
                "quantization_config in config.json says: it is a variant that is not supported"
            )
    return matrices, rest


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a matrix.

    Attributes:
        codes: function that returns the codes of a range of rows, uint8 [rows, inputs].
        scales: float32 [rows, groups].
        zeros: zero points, float32 [rows, groups].
        group_of: int64 [inputs], group of each input. None: a group consists of consecutive inputs.
    """

    codes: Callable[[int, int], Bytes]
    scales: Float32Array
    zeros: Float32Array
    group_of: npt.NDArray[np.int64] | None


class QuantizedMatrix:
    """A quantized matrix.

    Args:
        module: name of the matrix in the files, without the suffix of a tensor such as ".scales".
        parts: tensors of the matrix, by suffix.
        scheme: storage of quantized matrices.

    Attributes:
        shape: [outputs, inputs].

    Raises:
        ModelLoadError: a part is missing, or has a wrong shape or type.
    """

    dtype: Dtype = "float32"

    def __init__(self, module: str, parts: Mapping[str, FileTensor], scheme: StorageScheme) -> None:
        self._module = module
        self._parts = parts
        self._scheme = scheme
        self._main = parts[_MAIN_PARTS[scheme.layout]]
        self._is_float = scheme.is_float
        if len(self._main.shape) != 2 or 0 in self._main.shape:
            raise self._wrong(_MAIN_PARTS[scheme.layout], "a matrix")
        rows, columns = self._main.shape
        numbers = WORD_BITS // scheme.bits
        self.shape: Shape = {
            "awq": (columns * numbers, rows),
            "gptq": (columns, rows * numbers),
            "packed": (rows, columns * numbers),
            "bytes": (rows, columns),
        }[scheme.layout]
        self._inputs = self.shape[1]
        # Numbers of outputs and inputs that share one scale.
        self._scale_outputs, group = scheme.blocks or (1, scheme.group_size or self._inputs)
        self._group = min(group, self._inputs)
        self._group_count = -(-self._inputs // self._group)
        self._scales = self._found_scales()
        self._check_parts()

    def stored(self, name: str, place: TensorPlace) -> StoredTensor:
        """Return some rows of this matrix as a tensor of the model.

        Args:
            name: our name of the result.
            place: describes the rows of the matrix.
        """
        first, count = place.first_row, place.rows_shape[0]
        read = functools.partial(place.read, functools.partial(self._read, first, place.rows_shape))
        tensor = StoredTensor(name, place.shape, "float32", read, self._sample_of(first, count))
        if (block_type := self._block_type) is None or len(place.shape) != 2 or not place.has_whole_rows:
            return tensor
        read_blocks = functools.partial(self._read_blocks, block_type, place)
        return tensor._replace(block_type=block_type, read_blocks=read_blocks)

    @property
    def _block_type(self) -> str | None:
        """Block type in structs.BLOCK_FORMATS that can store the matrix without loss, or FP8_ROWS, or None."""
        if self._is_float and self._scheme.blocks is None and self._group_count == 1:
            return FP8_ROWS
        if self._is_float or self._scheme.has_order or self._inputs % BLOCK_VALUES or self._group % BLOCK_VALUES:
            return None
        is_half = self._scheme.is_symmetric and self._scales.storage == "F16"
        return f"Q{self._scheme.bits}_{0 if is_half else 'F32'}"

    def _sample_of(self, first: int, count: int) -> Callable[[], bytes]:
        if self._scheme.layout in ("awq", "gptq"):
            return self._main.sample
        return self._main.part(first, (count, self._main.shape[1])).sample

    def _read(self, first: int, shape: Shape, wanted: Dtype) -> Values:
        rows = self._rows(first, shape[0])
        result = empty_values(shape, wanted)
        table = _FP8_NUMBERS if self._is_float else None
        for start, stop in self._slices(shape[0]):
            codes = rows.codes(start, stop)
            scales, zeros = (self._repeated_for_inputs(rows, part[start:stop]) for part in (rows.scales, rows.zeros))
            values = codes.astype(np.float32) - zeros if table is None else table[codes]
            with np.errstate(invalid="ignore", over="ignore"):
                convert(values * scales, result[start:stop])
        return result

    def _repeated_for_inputs(self, rows: _Rows, groups: Float32Array) -> Float32Array:
        """Repeat the number of each group for each input of the group: [rows, groups] becomes [rows, inputs]."""
        if rows.group_of is not None:
            return groups[:, rows.group_of]
        return np.repeat(groups, self._group, axis=1)[:, : self._inputs]

    def _read_blocks(self, block_type: str, place: TensorPlace) -> Bytes:
        """Return blocks for the native kernels, uint8 [rows, bytes of a row], see kernels/cpu/quantized.h. Return rows
        as FP8_ROWS defines them if that is the block type.
        """
        count, bits = place.rows_shape[0], self._scheme.bits
        rows = self._rows(place.first_row, count)
        if block_type == FP8_ROWS:
            given = np.empty((count, FP8_SCALE_BYTES + self._inputs), dtype=np.uint8)
            given[:, :FP8_SCALE_BYTES] = rows.scales.view(np.uint8)
            given[:, FP8_SCALE_BYTES:] = rows.codes(0, count)
            return place.ordered(given)
        half = block_type.endswith("_0")
        middle = float(2 ** (bits - 1))
        if rows.group_of is not None:
            raise self._unreadable("g_idx is out of order, but desc_act is false", "use quantization none")
        if half and (rows.zeros != middle).any():
            raise self._unreadable("qzeros are not symmetric, but sym is true", "use quantization none")
        with np.errstate(invalid="ignore", over="ignore"):
            mins = rows.scales * ((0.0 if bits == 4 else middle) - rows.zeros)
        scale_bytes = 2 if half else 8
        blocks = np.empty((count, self._inputs // BLOCK_VALUES, scale_bytes + 4 * bits), dtype=np.uint8)
        for start, stop in self._slices(count):
            part = blocks[start:stop]
            if half:
                part[..., :2] = self._bytes_for_blocks(rows.scales[start:stop].astype(np.float16))
            else:
                part[..., :4] = self._bytes_for_blocks(rows.scales[start:stop])
                part[..., 4:8] = self._bytes_for_blocks(mins[start:stop])
            codes = rows.codes(start, stop).reshape(stop - start, -1, BLOCK_VALUES)
            if bits == 4:
                part[..., scale_bytes:] = codes[..., :16] | codes[..., 16:] << 4
            else:
                part[..., scale_bytes:] = codes ^ SIGN
        return place.ordered(blocks.reshape(count, -1))

    def _bytes_for_blocks(self, groups: npt.NDArray[np.float16] | Float32Array) -> Bytes:
        """Repeat the number of each group for each of its blocks: [rows, groups] becomes [rows, blocks, bytes]."""
        repeated = np.repeat(groups, self._group // BLOCK_VALUES, axis=1)[:, : self._inputs // BLOCK_VALUES]
        return np.ascontiguousarray(repeated)[..., None].view(np.uint8)

    def _slices(self, row_count: int) -> list[tuple[int, int]]:
        """Return ranges of rows that fit in the CPU's caches. If the first row begins an AWQ word, each range consists
        of whole words.
        """
        at_once = max(AWQ_OUTPUTS, SLICE_VALUES // self._inputs // AWQ_OUTPUTS * AWQ_OUTPUTS)
        return [(start, min(start + at_once, row_count)) for start in range(0, row_count, at_once)]

    # --- content of the files ----------------------------------------------------------------------------------------

    def _rows(self, first: int, count: int) -> _Rows:
        if (shape := self._parts.get("weight_shape")) is not None:
            kind = np.int64 if shape.storage == "I64" else np.int32
            if tuple(shape.bytes().view(kind).tolist()) != self.shape:
                raise self._unreadable(f"weight_shape is not {list(self.shape)}")
        scales = values_of(self._scales.bytes(), PLAIN_DTYPES[self._scales.storage])
        singles = empty_values(scales.shape, "float32")
        convert(scales, singles)
        grid = np.asarray(singles, dtype=np.float32).reshape(self._scales_shape)
        if self._scheme.layout in ("awq", "gptq"):
            grid = grid.T
        of_rows = np.arange(first, first + count) // self._scale_outputs
        scales_of_rows = np.ascontiguousarray(grid[of_rows])
        zeros = np.full((1, 1), 2 ** (self._scheme.bits - 1), dtype=np.float32)
        if (stored := self._zeros()) is not None:
            zeros = stored[of_rows].astype(np.float32)
        zeros_of_rows = np.ascontiguousarray(np.broadcast_to(zeros, scales_of_rows.shape))
        return _Rows(self._codes(first, count), scales_of_rows, zeros_of_rows, self._group_of())

    def _codes(self, first: int, count: int) -> Callable[[int, int], Bytes]:
        layout, bits, main = self._scheme.layout, self._scheme.bits, self._main
        if layout in ("awq", "gptq"):
            words = main.bytes().view("<u4").reshape(main.shape)
            if layout == "gptq":
                return lambda start, stop: _unpacked(_transposed_bytes(words[:, first + start : first + stop]), bits)

            def awq(start: int, stop: int) -> Bytes:
                word, skipped = divmod(first + start, AWQ_OUTPUTS)
                end = -(-(first + stop) // AWQ_OUTPUTS)
                turned = _awq_unpacked(words[:, word:end]).T
                return np.ascontiguousarray(turned[skipped : skipped + stop - start])

            return awq
        part = main.part(first, (count, main.shape[1]))
        rows = part.bytes().reshape(count, -1)
        if layout == "packed":
            return lambda start, stop: _unpacked(rows[start:stop], bits)
        if self._is_float:
            return lambda start, stop: rows[start:stop]
        return lambda start, stop: rows[start:stop] ^ SIGN

    def _zeros(self) -> npt.NDArray[np.uint8] | None:
        """Return the zero points, [outputs, groups], or None if they are not stored."""
        layout, bits = self._scheme.layout, self._scheme.bits
        if self._is_float:
            return None
        tensor = self._parts.get("qzeros") or self._parts.get("weight_zero_point")
        if tensor is None:
            return None
        if layout == "bytes":
            return tensor.bytes().reshape(-1, self._group_count) ^ SIGN
        words: Words = tensor.bytes().view("<u4").reshape(tensor.shape)
        if layout == "awq":
            return _awq_unpacked(words).T
        if layout == "gptq":
            # Add to the whole 32-bit word, including carries between its fields, as GPTQModel does. GPTQModel stores
            # a zero point of 0 as a field that overflows in this addition.
            ones = sum(1 << place for place in range(0, WORD_BITS, bits))
            words = words + np.uint32(self._scheme.zero_offset * ones)
            return _unpacked(words.view(np.uint8), bits)[:, : self.shape[0]].T
        return _unpacked(_transposed_bytes(words), bits)[:, : self.shape[0]].T

    def _group_of(self) -> npt.NDArray[np.int64] | None:
        tensor = self._parts.get("g_idx") or self._parts.get("weight_g_idx")
        if tensor is None:
            return None
        groups = tensor.bytes().view("<i4").astype(np.int64)
        if (groups == np.arange(self._inputs) // self._group).all():
            return None
        if groups.min() < 0 or groups.max() >= self._group_count:
            raise self._unreadable(f"g_idx names other groups than 0 to {self._group_count - 1}")
        return groups

    def _unreadable(self, what: str, remedy: str = "fetch the checkpoint again") -> ModelLoadError:
        return ModelLoadError(f"cannot load {self._main.path}: of {self._module}, {what}: {remedy}")

    # --- checks of the headers ---------------------------------------------------------------------------------------

    @property
    def _scales_shape(self) -> Shape:
        """Shape of the scales as a matrix."""
        if self._scheme.layout in ("awq", "gptq"):
            return self._group_count, self.shape[0]
        return -(-self.shape[0] // self._scale_outputs), self._group_count

    def _found_scales(self) -> FileTensor:
        name = next((name for name in _SCALES if name in self._parts), None)
        if name is None:
            inverse = "weight_scale" if self._scheme.blocks is None else "weight_scale_inv"
            raise self._lacks("scales" if self._scheme.layout in ("awq", "gptq") else inverse)
        scales = self._parts[name]
        if scales.storage not in PLAIN_DTYPES:
            raise self._wrong(name, f"stored as {', '.join(PLAIN_DTYPES)}")
        if self._scheme.layout == "bytes" and math.prod(scales.shape) == 1 and self._scheme.blocks is None:
            self._scale_outputs = self.shape[0]  # The whole matrix has one scale.
        allowed = [self._scales_shape]
        if 1 in self._scales_shape and self._scheme.layout == "bytes":
            allowed += [(math.prod(self._scales_shape),), ()]
        if scales.shape not in allowed or math.prod(scales.shape) != math.prod(self._scales_shape):
            raise self._wrong(name, f"of shape {list(self._scales_shape)}")
        return scales

    def _check_parts(self) -> None:
        layout, groups, outputs = self._scheme.layout, self._group_count, self.shape[0]
        numbers = WORD_BITS // self._scheme.bits
        words = -(-outputs // numbers)
        if layout != "bytes":
            self._check(_MAIN_PARTS[layout], ("I32",), self._main.shape)
        else:
            self._check("weight", ("F8_E4M3" if self._is_float else "I8",), self._main.shape)
        if layout in ("awq", "gptq"):
            self._check("qzeros", ("I32",), (groups, words))
            self._check("g_idx", ("I32",), (self._inputs,), is_needed=layout == "gptq" and self._scheme.has_order)
            return
        if layout == "packed":
            self._check("weight_shape", ("I64", "I32"), (2,))
        if not self._is_float:
            shape = (words, groups) if layout == "packed" else (outputs, groups)
            storage = "I32" if layout == "packed" else "I8"
            self._check("weight_zero_point", (storage,), shape, is_needed=not self._scheme.is_symmetric)
            self._check("weight_g_idx", ("I32",), (self._inputs,), is_needed=self._scheme.has_order)

    def _check(self, name: str, storages: tuple[str, ...], shape: Shape, *, is_needed: bool = True) -> None:
        tensor = self._parts.get(name)
        if tensor is None:
            if is_needed:
                raise self._lacks(name)
            return
        if tensor.storage not in storages:
            raise self._wrong(name, f"stored as {' or '.join(storages)}")
        if tensor.shape != shape:
            raise self._wrong(name, f"of shape {list(shape)}")

    def _lacks(self, name: str) -> ModelLoadError:
        return ModelLoadError(
            f"the weights lack {self._module}.{name}, which is needed beside "
            f"{self._module}.{_MAIN_PARTS[self._scheme.layout]}: the checkpoint is incomplete, fetch it again"
        )

    def _wrong(self, name: str, wanted: str) -> ModelLoadError:
        tensor = self._parts[name]
        return ModelLoadError(
            f"{self._module}.{name} is stored as {tensor.storage} and has shape {list(tensor.shape)}, but by "
            f"quantization_config in config.json it must be {wanted}: weights and config do not belong to the same "
            "model"
        )


def _transposed_bytes(words: Words) -> Bytes:
    """Transpose words [n, m], and return the transposed words as bytes."""
    return np.ascontiguousarray(words.T).view(np.uint8)


def _unpacked(packed: Bytes, bits: int) -> Bytes:
    """Unpack the numbers in the bytes of each row, lowest bits first."""
    if bits == 8:
        return packed
    codes = np.empty((len(packed), packed.shape[1], 2), dtype=np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., 0])
    np.right_shift(packed, 4, out=codes[..., 1])
    return codes.reshape(len(packed), -1)


def _awq_unpacked(words: Words) -> Bytes:
    """Unpack the numbers of words [n, m] to uint8 [n, 8 * m]."""
    codes = np.empty((*words.shape, AWQ_OUTPUTS), dtype=np.uint8)
    for place, output in enumerate(AWQ_ORDER):
        codes[..., output] = words >> (4 * place) & 15
    return codes.reshape(len(words), -1)


def _fp8_numbers() -> Float32Array:
    """Return the number that each byte encodes in e4m3: a sign, 4 bits of exponent, 3 bits of mantissa, no infinities.

    Source: https://arxiv.org/abs/2209.05433
    """
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    sizes = np.where(exponents == 0, mantissas * 2.0**-9, (8 + mantissas) * 2.0 ** (exponents - 10))
    sizes[codes & 127 == 127] = np.nan
    return np.where(codes & 128, -sizes, sizes).astype(np.float32)


_FP8_NUMBERS = _fp8_numbers()
