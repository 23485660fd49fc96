"""Tests that KV of another engine is converted value for value, and that KV that cannot be used is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from trioserve.connectors.stream.staging import convert, objection_to
from trioserve.contracts.kv_transfer import KVLayout
from trioserve.model import number_formats

LAYOUT = KVLayout(model="m", layer_count=2, block_size=16, kv_head_count=3, head_dim=64, dtype="bfloat16")
FORMATS = ("float32", "bfloat16", "float16")


def singles() -> np.ndarray:
    """Return each bfloat16 value, the float32 values next to it, and three float32 values near the middle of two."""
    high = np.arange(0x10000, dtype=np.uint32) << 16
    bits = np.concatenate([high | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    return bits.view(np.float32)


def stored(dtype: str) -> np.ndarray:
    if dtype == "float32":
        return singles()
    kind = np.uint16 if dtype == "bfloat16" else np.float16
    return np.arange(0x10000, dtype=np.uint16).view(kind)


@pytest.mark.parametrize("wanted", FORMATS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_converted_kv_is_rounded_like_in_the_model_package(dtype, wanted):
    values = stored(dtype)
    expected = number_formats.empty_values(values.shape, wanted)
    number_formats.convert(values, expected)
    converted = np.frombuffer(convert(values.tobytes(), dtype, wanted), expected.dtype)
    if wanted == "bfloat16":
        as_numbers = [(each.astype(np.uint32) << 16).view(np.float32) for each in (converted, expected)]
    else:
        as_numbers = [converted, expected]
    np.testing.assert_array_equal(*as_numbers)  # A NaN must stay NaN.
    assert dtype == wanted or len(values) > 60_000


def test_kv_with_an_equal_dtype_is_not_copied():
    content = bytearray(b"12345678")
    view = convert(content, "float32", "float32")
    content[0] = ord("9")
    assert bytes(view) == b"92345678"


def test_same_model_is_accepted_with_other_block_size_and_dtype():
    for change in ({}, {"block_size": 1}, {"block_size": 1000}, {"dtype": "float32"}, {"dtype": "float16"}):
        assert objection_to(msgspec.structs.replace(LAYOUT, **change), LAYOUT) is None


def test_8_bit_kv_is_accepted_only_with_the_same_dtype():
    layout = msgspec.structs.replace(LAYOUT, dtype="int8")
    assert layout.token_bytes == 2 * 3 * (64 + 2)
    assert objection_to(msgspec.structs.replace(layout, block_size=5), layout) is None
    assert objection_to(LAYOUT, layout) is not None
    content = bytes(range(256)) * 3
    assert bytes(convert(content, "int8", "int8")) == content


@pytest.mark.parametrize(
    ("change", "expect"),
    [
        ({"model": "n" * 1_000}, "is of the model"),
        ({"layer_count": 3}, "has 3 layers, and this engine's 2"),
        ({"kv_head_count": -1}, "-1 KV heads"),
        ({"head_dim": 2**60}, "numbers in a head"),
        ({"dtype": "fp4"}, 'are "fp4"'),
        ({"dtype": "fp8"}, "is kept as fp8, and this engine's as bfloat16"),
        ({"dtype": "int8"}, "the same --kv-cache-dtype alone"),
        ({"block_size": 0}, "have 0 tokens"),
    ],
)
def test_kv_of_another_layout_is_refused_with_a_sentence(change, expect):
    objection = objection_to(msgspec.structs.replace(LAYOUT, **change), LAYOUT)
    assert objection is not None
    assert expect in objection
    assert len(objection) < 500
