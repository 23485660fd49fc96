"""Tests that conversions of number formats equal those of torch, for every number of the 16-bit formats and for float32
numbers of every exponent.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from trioserve.model.number_formats import (
    VALUE_BYTES,
    Dtype,
    Values,
    are_finite,
    convert,
    dtype_of,
    empty_values,
    values_of,
)
from trioserve.model.torch_step.formats import TORCH_DTYPES, as_tensor


def numbers(dtype: Dtype) -> Values:
    if VALUE_BYTES[dtype] == 2:
        bits = np.arange(2**16, dtype=np.uint16)
    else:
        # random bits, and numbers at and around the middle between two bfloat16 numbers
        high = np.arange(2**16, dtype=np.uint32) << 16
        low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
        bits = np.concatenate(
            (
                (high[:, None] | low).reshape(-1),
                np.random.default_rng(7).integers(0, 2**32, 2**20, dtype=np.uint32),
            )
        )
    return values_of(bits.view(np.uint8), dtype)


@pytest.mark.parametrize("stored, wanted", list(product(VALUE_BYTES, VALUE_BYTES)))
def test_numbers_are_rounded_to_the_nearest_as_torch_does(stored: Dtype, wanted: Dtype) -> None:
    values = numbers(stored)
    result = empty_values(values.shape, wanted)
    convert(values, result)
    assert dtype_of(result) == wanted
    given, expected = as_tensor(result), as_tensor(values).to(TORCH_DTYPES[wanted])
    assert torch.equal(given.isnan(), expected.isnan())
    assert torch.equal(given.nan_to_num(7.0), expected.nan_to_num(7.0))
    zeros = expected == 0
    assert torch.equal(given[zeros].signbit(), expected[zeros].signbit())


@pytest.mark.parametrize("dtype", VALUE_BYTES)
@pytest.mark.parametrize("value", (float("inf"), -float("inf"), float("nan")))
def test_only_infinite_numbers_and_nan_are_not_finite(dtype: Dtype, value: float) -> None:
    values = empty_values((3,), dtype)
    convert(np.array([-0.0, 6e4, -6e-8], dtype=np.float32), values)
    assert are_finite(values)
    convert(np.array([1.0, value, 1.0], dtype=np.float32), values)
    assert not are_finite(values)
