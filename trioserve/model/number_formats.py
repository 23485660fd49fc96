"""Number formats by name, and as numpy arrays: how wide each is, and how one becomes another."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from trioserve.model.model_config import Dtype

__all__ = ["VALUE_BYTES", "Dtype", "Float32Array", "Values", "convert", "dtype_of", "empty_values", "values_of"]

Float32Array: TypeAlias = npt.NDArray[np.float32]
Values: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.float16] | npt.NDArray[np.uint16]
"""An array in one of the formats. numpy knows no bfloat16: its numbers are held as their 16 bits, in a uint16."""

VALUE_BYTES: dict[Dtype, int] = {"bfloat16": 2, "float16": 2, "float32": 4}

_ARRAY_TYPES: dict[Dtype, type[np.generic]] = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}
_NAN_BITS = 0x7FC0


def empty_values(shape: tuple[int, ...], dtype: Dtype) -> Values:
    """Not yet written."""
    return cast(Values, np.empty(shape, dtype=_ARRAY_TYPES[dtype]))


def values_of(stored: npt.NDArray[np.uint8], dtype: Dtype) -> Values:
    """The values that contiguous bytes hold; they share their memory."""
    return cast(Values, stored.reshape(-1).view(_ARRAY_TYPES[dtype]))


def dtype_of(values: Values) -> Dtype:
    return next(name for name, kind in _ARRAY_TYPES.items() if values.dtype == kind)


def convert(values: Values, result: Values) -> None:
    """Write the values into `result`, an array of the same shape, in its format.

    What does not fit is rounded to the nearest number, to the even one of two that are equally near; what is too large
    becomes infinite; what is no number stays none.
    """
    if values.dtype == result.dtype:
        result[...] = cast(Any, values)
        return
    singles = _singles(values)
    if result.dtype == np.uint16:
        _round_to_bfloat16(singles, cast("npt.NDArray[np.uint16]", result))
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            result[...] = cast(Any, singles)


def _singles(values: Values) -> Float32Array:
    """As float32, which holds the numbers of every format exactly."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def _round_to_bfloat16(singles: Float32Array, result: npt.NDArray[np.uint16]) -> None:
    bits = np.ascontiguousarray(singles).view(np.uint32)
    # Half of the last kept place is added, or just less where the kept part is even. The sum carries into the exponent
    # as it should, up to infinity; that of a NaN may overflow, so these are written anew.
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    result[...] = rounded
    no_number = np.isnan(singles)
    if no_number.any():
        result[no_number] = _NAN_BITS
