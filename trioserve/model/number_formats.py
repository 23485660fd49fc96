"""Number formats of weights and of the KV cache: names, sizes, numpy arrays, and conversion between formats."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from trioserve.model.model_config import Dtype
from trioserve.model.settings import ModelSettings

__all__ = [
    "KV_SCALE_BYTES",
    "VALUE_BYTES",
    "Dtype",
    "Float32Array",
    "KvFormat",
    "Values",
    "are_finite",
    "bytes_of",
    "convert",
    "dtype_of",
    "empty_values",
    "head_bytes",
    "head_width",
    "kv_format_of",
    "values_of",
]

Float32Array: TypeAlias = npt.NDArray[np.float32]
Values: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.float16] | npt.NDArray[np.uint16]
"""Array in one of the formats. numpy has no bfloat16, so its 16 bits are held as uint16."""

VALUE_BYTES: dict[Dtype, int] = {"bfloat16": 2, "float16": 2, "float32": 4}

_ARRAY_TYPES: dict[Dtype, type[np.generic]] = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}
_NAN_BITS, _EXPONENT_BITS = 0x7FC0, 0x7F80


def empty_values(shape: tuple[int, ...], dtype: Dtype) -> Values:
    """Return an uninitialised array.

    Args:
        dtype: number format of the array. bfloat16 gives a uint16 array.
    """
    return cast(Values, np.empty(shape, dtype=_ARRAY_TYPES[dtype]))


def values_of(stored: npt.NDArray[np.uint8], dtype: Dtype) -> Values:
    """Return the values that some bytes encode, without a copy.

    Args:
        stored: contiguous uint8 array.
        dtype: number format of the bytes.

    Returns:
        One-dimensional array that shares the memory of `stored`.
    """
    return cast(Values, stored.reshape(-1).view(_ARRAY_TYPES[dtype]))


def bytes_of(values: Values) -> npt.NDArray[np.uint8]:
    """Return the bytes of some values, the inverse of values_of.

    Args:
        values: array in any of the formats. It is copied if it is not contiguous.
    """
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def dtype_of(values: Values) -> Dtype:
    return next(name for name, kind in _ARRAY_TYPES.items() if values.dtype == kind)


def convert(values: Values, result: Values) -> None:
    """Write values into an array, converted to the format of that array.

    Numbers are rounded to the nearest number of the format, ties to even. Numbers that are too large become infinite.
    NaN stays NaN.

    Args:
        values: array in any of the formats.
        result: array of the same shape, which is overwritten.
    """
    if values.dtype == result.dtype:
        result[...] = cast(Any, values)
        return
    singles = _as_float32(values)
    if result.dtype == np.uint16:
        _round_to_bfloat16(singles, cast("npt.NDArray[np.uint16]", result))
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            result[...] = cast(Any, singles)


def are_finite(values: Values) -> bool:
    """Return True if no value is infinite or NaN.

    Args:
        values: array in any of the formats.
    """
    if values.dtype == np.uint16:
        bits = cast("npt.NDArray[np.uint16]", values)
        return not bool(((bits & _EXPONENT_BITS) == _EXPONENT_BITS).any())
    return bool(np.isfinite(values).all())


def _as_float32(values: Values) -> Float32Array:
    """Return the values as float32, which represents the numbers of every format exactly."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def _round_to_bfloat16(singles: Float32Array, result: npt.NDArray[np.uint16]) -> None:
    bits = np.ascontiguousarray(singles).view(np.uint32)
    # Round half to even: add half of the last kept bit, or slightly less if the kept bits are even. A carry into the
    # exponent is correct, even if the result is infinity. A NaN may overflow, so NaNs are written separately.
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    result[...] = rounded
    no_number = np.isnan(singles)
    if no_number.any():
        result[no_number] = _NAN_BITS


KvFormat = Literal["plain", "int8", "fp8"]
"""plain is the model's dtype. int8 and fp8 (e4m3) store a bfloat16 scale after the numbers of each head.

The scale follows from these numbers alone, so the rounding of a token does not depend on its step or its block.
"""

KV_SCALE_BYTES = 2


def kv_format_of(settings: ModelSettings) -> KvFormat:
    return "plain" if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype


def head_width(head_dim: int, kv_format: KvFormat) -> int:
    """Return the number of array elements for one head of one token: numbers, or bytes for 8-bit formats.

    Args:
        head_dim: size of one head.
        kv_format: number format of the KV cache.
    """
    return head_dim if kv_format == "plain" else head_dim + KV_SCALE_BYTES


def head_bytes(head_dim: int, dtype: Dtype, kv_format: KvFormat) -> int:
    return head_width(head_dim, kv_format) * (VALUE_BYTES[dtype] if kv_format == "plain" else 1)
