"""Tests of quantized weights against the gguf package and against float64, at every instruction level.

A block's values are scale * code, exact in float32, plus a min, where one rounding may differ. Sums over 32 codes are
whole numbers. So against the same quantized rows, only the order of float32 sums differs. Against the original rows,
the error is at most half a step of each number.

With AMX, products of 5 or more rows in bfloat16 do not quantize the rows. Each weight is rounded to bfloat16 instead,
by at most 0.7 of its last bit. With the rounded weights, again only the order of sums differs.
"""

from __future__ import annotations

import ctypes
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from trioserve_kernels.native import Engine, Library, WeightMemory
from trioserve_kernels.structs import BLOCK_FORMATS, MatrixStruct, WeightFormat, matrix_of

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Bits = npt.NDArray[np.uint16]  # A value holds the bits of a bfloat16.
BLOCK_TYPES = pytest.mark.parametrize("block_type", BLOCK_FORMATS)
OWN_BLOCK_BYTES = {"Q4_F32": 24, "Q8_F32": 40}  # 32 numbers: two float32, then the codes as in Q4_0 or Q8_0
# Positions in a block of a type's float16 scales, or of our own types' float32 scales.
SCALES_AT: dict[str, tuple[int, ...]] = {
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **dict.fromkeys(OWN_BLOCK_BYTES, (0, 4)),
}


def block_size(block_type: str) -> tuple[int, int]:
    """Return the number of values and the number of bytes of one block."""
    if block_type in OWN_BLOCK_BYTES:
        return 32, OWN_BLOCK_BYTES[block_type]
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[block_type]]
    return values, size


def stored_scales(block_type: str, numbers: Doubles) -> npt.NDArray[Any]:
    if block_type == "MXFP4":  # MXFP4 stores the exponents of powers of 2.
        return np.round(np.log2(np.abs(numbers) + 2**-100) + 127).astype(np.uint8)
    return numbers.astype(np.float32 if block_type in OWN_BLOCK_BYTES else np.float16)


def random_blocks(block_type: str, rows: int, columns: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Make blocks of random bytes with scales of realistic size: both signs, and a few zeros."""
    values, size = block_size(block_type)
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    for at in SCALES_AT.get(block_type, (0,)):
        numbers = random.normal(0, 0.01, blocks.shape[:2])
        numbers[random.random(numbers.shape) < 0.05] = 0
        scales = stored_scales(block_type, numbers)
        blocks[:, :, at : at + scales.itemsize] = scales[..., None].view(np.uint8)
    return np.ascontiguousarray(blocks.reshape(rows, -1))


def expected_values(block_type: str, blocks: npt.NDArray[np.uint8]) -> Floats:
    if block_type in OWN_BLOCK_BYTES:
        parts = np.ascontiguousarray(blocks).reshape(len(blocks), -1, OWN_BLOCK_BYTES[block_type])
        scales, mins = (np.ascontiguousarray(parts[..., at : at + 4]).view(np.float32) for at in (0, 4))
        stored = parts[..., 8:]
        codes = np.concatenate((stored & 15, stored >> 4), axis=-1) if "4" in block_type else stored.view(np.int8)
        own: Floats = (scales * codes.astype(np.float32) + mins).reshape(len(blocks), -1)
        return own
    values: Floats = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[block_type])
    return values


class Weight:
    """A packed matrix and its values. The memory after it, which is read ahead, holds NaN."""

    def __init__(self, library: Library, format: WeightFormat, rows: int, columns: int) -> None:
        self.format, self.rows, self.columns, self._library = format, rows, columns, library
        size = library.quantized_bytes(rows, columns, format)
        self._memory = WeightMemory(library, size + 8192)
        self.place = self._memory.take(size)
        ctypes.memset(self._memory.take(8192), 0xFF, 8192)

    @property
    def part(self) -> tuple[int, int, int, WeightFormat]:
        return self.place, self.rows, self.columns, self.format

    @property
    def matrix(self) -> MatrixStruct:
        return matrix_of(self.part)

    @property
    def values(self) -> Floats:
        return self._library.dequantized(self.format, self.place, self.rows, self.columns)


def weight_of_blocks(library: Library, block_type: str, rows: int, columns: int, seed: int = 0) -> Weight:
    weight = Weight(library, BLOCK_FORMATS[block_type][1], rows, columns)
    library.pack_blocks(block_type, random_blocks(block_type, rows, columns, seed), columns, weight.place)
    return weight


def weight_of_values(library: Library, format: WeightFormat, values: Floats) -> Weight:
    weight = Weight(library, format, *values.shape)
    library.pack_values(format, values, weight.place)
    return weight


def random_rows(rows: int, columns: int, seed: int = 9) -> Bits:
    """Make rows like activations: a few numbers are far larger than the others, and one group is all zeros."""
    x = np.random.default_rng(seed).normal(0, 1, (rows, columns)).astype(np.float32)
    x[:, 5::37] *= 30
    x[0, :32] = 0
    return bfloat16_bits(x)


def bfloat16_bits(values: Floats) -> Bits:
    return np.ascontiguousarray(values.view(np.uint16).reshape(*values.shape, 2)[..., 1])


def floats_of(bits: Bits) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def quantized_rows(x: Bits) -> tuple[Doubles, Doubles]:
    """Return the numbers that a product uses instead of x, and half of the rounding step of each number."""
    values = floats_of(x)
    rows, columns = values.shape
    padded = np.zeros((rows, -(-columns // 32), 32), dtype=np.float32)
    padded.reshape(rows, -1)[:, :columns] = values
    most = np.abs(padded).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    scale = (most / np.float32(127)).astype(np.float64)
    whole = np.rint(padded * inverse).astype(np.float64)
    halves = np.broadcast_to(scale / 2, padded.shape).reshape(rows, -1)[:, :columns]
    return (whole * scale).reshape(rows, -1)[:, :columns], halves


AMX_ROWS_MIN = 5


def rounds_weights(engine: Engine, rows: int = AMX_ROWS_MIN) -> bool:
    """Return True if products of this many bfloat16 rows round the weights, not the rows."""
    return engine.library.level.startswith("amx") and rows >= AMX_ROWS_MIN


def check_product(engine: Engine, x: Bits, values: Floats, product: Floats) -> None:
    weights = values.astype(np.float64)
    if rounds_weights(engine, len(x)):
        exact = floats_of(x).astype(np.float64)
        bound = np.abs(exact) @ (2.0**-7 * np.abs(weights) + rounding_of_starts(values)).T
        assert (np.abs(product - exact @ weights.T) <= bound + 1e-6).all()
        return
    rows, half_steps = quantized_rows(x)
    terms = np.abs(rows) @ np.abs(weights).T
    assert (np.abs(product - rows @ weights.T) <= 3e-6 * terms + 1e-6).all()
    bound = half_steps @ np.abs(weights).T
    assert (np.abs(product - floats_of(x).astype(np.float64) @ weights.T) <= 1.001 * bound + 3e-6 * terms + 1e-6).all()


def rounding_of_starts(values: Floats) -> Doubles:
    """Return the error of weights with mins before they are rounded to bfloat16.

    A code is in the last 8 bits of a float32, so the values of a group are as exact as 16 bits of its largest value.
    """
    rows, columns = values.shape
    padded = np.zeros((rows, -(-columns // 32), 32))
    padded.reshape(rows, -1)[:, :columns] = np.abs(values)
    most = 2.0**-12 * padded.max(axis=-1, keepdims=True)
    return np.broadcast_to(most, padded.shape).reshape(rows, -1)[:, :columns]


def rounded_weights(engine: Engine, weight: Weight) -> Floats:
    """Return the weights as rounded by the engine, from the product with a unit matrix."""
    ones = bfloat16_bits(np.eye(weight.columns, dtype=np.float32))
    return np.ascontiguousarray(engine.product(ones, weight.matrix, weight.rows).T)


# --- formats ----------------------------------------------------------------------------------------------------------


@BLOCK_TYPES
@pytest.mark.parametrize("rows, columns", ((1, 256), (16, 512), (50, 768)))
def test_packed_blocks_have_the_values_of_the_gguf_package(
    library: Library, block_type: str, rows: int, columns: int
) -> None:
    weight = weight_of_blocks(library, block_type, rows, columns)
    expected = expected_values(block_type, random_blocks(block_type, rows, columns))
    if block_type in ("Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q4_F32", "Q8_F32"):
        # scale * code + min is rounded once or twice. The sum is below 1.
        np.testing.assert_allclose(weight.values, expected, rtol=0, atol=2.0**-23 * max(1.0, np.abs(expected).max()))
    else:
        np.testing.assert_array_equal(weight.values, expected)


@pytest.mark.parametrize("format, steps", ((WeightFormat.Q8, 127), (WeightFormat.Q4_MIN, 15)))
@pytest.mark.parametrize("rows, columns", ((1, 32), (33, 48), (40, 576)))
def test_quantization_error_of_weights_is_at_most_half_a_step(
    library: Library, format: WeightFormat, steps: int, rows: int, columns: int
) -> None:
    values = np.random.default_rng(1).normal(0, 0.05, (rows, columns)).astype(np.float32)
    values[0, :32] = 0
    kept = weight_of_values(library, format, values).values
    for start in range(0, columns, 32):
        group = values[:, start : start + 32]
        span = np.abs(group).max(axis=1) if format == WeightFormat.Q8 else group.max(axis=1) - group.min(axis=1)
        # Scale and min are float16. Their rounding adds 2 ** -11 of the largest number's size.
        most = 0.5 * span / steps + 2.0**-10 * np.abs(group).max(axis=1) + 1e-7
        assert (np.abs(kept[:, start : start + 32] - group) <= most[:, None]).all()
    assert (kept[0, :32] == 0).all()


def test_quantized_nan_stays_nan(library: Library) -> None:
    values = np.ones((20, 64), dtype=np.float32)
    values[3, 40], values[7, 2] = np.nan, np.inf
    for format in (WeightFormat.Q8, WeightFormat.Q4_MIN):
        kept = weight_of_values(library, format, values).values
        finite = np.isfinite(kept)
        assert not finite[3, 40]
        assert not finite[7, 2]
        assert finite[[0, 1, 2, 4, 5, 6, 8]].all()


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@BLOCK_TYPES
@pytest.mark.parametrize("outputs", (16, 70))
def test_quantized_products_of_any_number_of_rows_equal_float64(engine: Engine, block_type: str, outputs: int) -> None:
    weight = weight_of_blocks(engine.library, block_type, outputs, 512)
    x = random_rows(70, 512)
    for rows in (*range(1, 20), 33, 70):
        check_product(engine, x[:rows], weight.values, engine.product(x[:rows], weight.matrix, outputs))


@pytest.mark.parametrize(
    "rows, outputs, inputs", ((1, 50, 576), (3, 33, 48), (5, 17, 1056), (97, 64, 160), (300, 48, 80), (600, 40, 96))
)
@pytest.mark.parametrize("format", (WeightFormat.Q8, WeightFormat.Q4_MIN), ids=str)
def test_quantized_products_of_other_shapes_equal_float64(
    engine: Engine, format: WeightFormat, rows: int, outputs: int, inputs: int
) -> None:
    values = np.random.default_rng(2).normal(0, 0.05, (outputs, inputs)).astype(np.float32)
    weight = weight_of_values(engine.library, format, values)
    x = random_rows(rows, inputs)
    check_product(engine, x, weight.values, engine.product(x, weight.matrix, outputs))


@BLOCK_TYPES
def test_largest_quantized_numbers_do_not_overflow(engine: Engine, block_type: str) -> None:
    """Use the extreme codes of every value and every row, for which 16-bit sums would overflow."""
    for fill in (0x00, 0xFF, 0x80, 0x7F):
        blocks = np.full_like(random_blocks(block_type, 32, 256), fill)
        values, _ = block_size(block_type)
        parts = blocks.reshape(32, 256 // values, -1)
        for at in SCALES_AT.get(block_type, (0,)):
            one = stored_scales(block_type, np.ones(1))
            parts[:, :, at : at + one.itemsize] = one.view(np.uint8)
        weight = Weight(engine.library, BLOCK_FORMATS[block_type][1], 32, 256)
        engine.library.pack_blocks(block_type, blocks, 256, weight.place)
        for sign in (1, -1):
            x = bfloat16_bits(np.full((3, 256), sign, dtype=np.float32))
            check_product(engine, x, weight.values, engine.product(x, weight.matrix, 32))


def test_quantized_product_of_a_row_has_the_same_bits_in_any_batch(engine: Engine) -> None:
    """Compare one row and many rows. If only few rows are quantized, compare only row counts with the same method."""
    for block_type in BLOCK_FORMATS:
        weight = weight_of_blocks(engine.library, block_type, 40, 512)
        x = random_rows(300, 512)
        together = engine.product(x, weight.matrix, 40)
        for count in (1, 3, 5, 16, 33, 150):
            if rounds_weights(engine) and count < AMX_ROWS_MIN:
                continue
            for row in (0, 1, 30, 150):
                some = engine.product(x[row : row + count], weight.matrix, 40)
                assert np.array_equal(some, together[row : row + count])
        few = engine.product(x[: AMX_ROWS_MIN - 1], weight.matrix, 40)
        for row in range(AMX_ROWS_MIN - 1):
            assert np.array_equal(engine.product(x[row : row + 1], weight.matrix, 40)[0], few[row])


@pytest.mark.parametrize("outputs", (32, 70))
@BLOCK_TYPES
def test_weights_are_rounded_to_the_nearest_bfloat16(engine: Engine, block_type: str, outputs: int) -> None:
    """Check that rounding goes up as often as down, and that bfloat16 values stay exact."""
    if not rounds_weights(engine):
        pytest.skip("rows are quantized at this level")
    weight = weight_of_blocks(engine.library, block_type, outputs, 512)
    exact, rounded = weight.values, rounded_weights(engine, weight)
    assert np.array_equal(rounded, floats_of(bfloat16_bits(rounded)))
    steps = np.exp2(np.floor(np.log2(np.maximum(np.abs(exact), 1e-30))) - 7)
    has_min = block_type in SCALES_AT and block_type not in ("Q3_K", "Q6_K")
    slack = rounding_of_starts(exact) if has_min else 2.0**-14 * np.abs(exact)
    assert (np.abs(rounded - exact) <= 0.7 * steps + slack).all()
    assert (rounded[exact == 0] == 0).all() or has_min
    is_held = (floats_of(bfloat16_bits(exact)) == exact) & (not has_min)
    assert np.array_equal(rounded[is_held], exact[is_held])
    is_large = (np.abs(exact) > 64 * slack) & ~is_held
    if block_type == "MXFP4":
        assert is_held.all()  # The numbers are 2 bits times a power of 2.
        return
    assert abs(((np.abs(rounded) - np.abs(exact)) / steps)[is_large].mean()) < 0.02


@pytest.mark.parametrize("outputs", (16, 70))
@BLOCK_TYPES
def test_products_with_rounded_weights_equal_float64(engine: Engine, block_type: str, outputs: int) -> None:
    if not rounds_weights(engine):
        pytest.skip("rows are quantized at this level")
    weight = weight_of_blocks(engine.library, block_type, outputs, 512)
    weights = rounded_weights(engine, weight).astype(np.float64)
    x = random_rows(560, 512)
    rows = floats_of(x).astype(np.float64)
    exact, terms = rows @ weights.T, np.abs(rows) @ np.abs(weights).T
    for count in (*range(5, 20), 31, 32, 33, 47, 48, 49, 64, 127, 128, 129, 144, 161, 256, 513, 560):
        product = engine.product(x[:count], weight.matrix, outputs)
        assert (np.abs(product - exact[:count]) <= 2e-6 * terms[:count]).all()


@BLOCK_TYPES
def test_float32_rows_are_quantized_at_every_level(engine: Engine, block_type: str) -> None:
    weight = weight_of_blocks(engine.library, block_type, 40, 256)
    x = random_rows(9, 256)
    product = engine.product(floats_of(x), weight.matrix, 40)
    rows, _ = quantized_rows(x)
    weights = weight.values.astype(np.float64)
    assert (np.abs(product - rows @ weights.T) <= 3e-6 * (np.abs(rows) @ np.abs(weights).T) + 1e-6).all()


def test_one_matrix_may_have_parts_of_different_formats(engine: Engine) -> None:
    """Use odd numbers of blocks in each part, and one part in bfloat16."""
    library = engine.library
    first = weight_of_blocks(library, "Q4_K", 48, 256)
    second = weight_of_blocks(library, "Q6_K", 16, 256, seed=1)
    dense = random_rows(80, 256, seed=3)
    memory = WeightMemory(library, library.packed_bytes(80, 256, "bfloat16") + 4096)
    place = memory.take(library.packed_bytes(80, 256, "bfloat16"))
    library.pack(dense, place)
    matrix = matrix_of(first.part, (place, 80, 256, WeightFormat.DENSE), second.part)
    for rows in (1, 7, 130):
        x = random_rows(rows, 256)
        product = engine.product(x, matrix, 144)
        check_product(engine, x, first.values, product[:, :48])
        exact, terms = floats_of(x) @ floats_of(dense).T, np.abs(floats_of(x)) @ np.abs(floats_of(dense)).T
        assert (np.abs(product[:, 48:128] - exact) <= 2e-6 * terms).all()
        check_product(engine, x, second.values, product[:, 128:])


def test_quantized_product_of_interleaved_matrices_equals_float64(engine: Engine) -> None:
    library = engine.library
    weight = Weight(library, WeightFormat.Q4_MIN, 96, 64)
    gate, up = (random_blocks("Q4_1", 48, 64, seed) for seed in (1, 2))
    library.pack_blocks("Q4_1", gate, 64, weight.place, first_block=0, block_step=2)
    library.pack_blocks("Q4_1", up, 64, weight.place, first_block=1, block_step=2)
    x = random_rows(6, 64)
    product = engine.product(x, weight.matrix, 96).reshape(6, 3, 2, 16)
    check_product(engine, x, expected_values("Q4_1", gate), product[:, :, 0].reshape(6, 48))
    check_product(engine, x, expected_values("Q4_1", up), product[:, :, 1].reshape(6, 48))


@pytest.mark.parametrize("bad", (float("nan"), float("inf"), -float("inf")))
def test_row_with_nan_or_infinity_spoils_only_itself(engine: Engine, bad: float) -> None:
    for block_type in ("Q8_0", "Q4_1"):
        weight = weight_of_blocks(engine.library, block_type, 32, 64)
        for count in (3, 9, 40, 150):
            x = random_rows(count, 64)
            for row in {2, count - 1}:
                x[:] = random_rows(count, 64)
                x[row, 50] = bfloat16_bits(np.array([bad], dtype=np.float32))[0]
                finite = np.isfinite(engine.product(x, weight.matrix, 32))
                assert finite[np.arange(count) != row].all()
                assert not finite[row].any()


def test_weight_with_nan_spoils_only_its_output(engine: Engine) -> None:
    """Check also later products in the same memory. A float16 has many encodings of NaN."""
    for block_type in ("Q8_0", "Q4_1"):
        for scale in (0x7E00, 0xFE00, 0x7FFF, 0xFFFF, 0x7C01, 0x7C00, 0xFC00):
            blocks = random_blocks(block_type, 40, 512)
            blocks[7, :2] = blocks[33, :2] = np.array([scale], dtype=np.uint16).view(np.uint8)
            weight = Weight(engine.library, BLOCK_FORMATS[block_type][1], 40, 512)
            engine.library.pack_blocks(block_type, blocks, 512, weight.place)
            clean = weight_of_blocks(engine.library, block_type, 16, 64)
            for count in (2, 9, 40, 150):
                x = random_rows(count, 512)
                x[0, :32] = x[1, :32]
                finite = np.isfinite(engine.product(x, weight.matrix, 40))
                is_good = ~np.isin(np.arange(40), (7, 33))
                assert finite[:, is_good].all()
                assert not finite[:, ~is_good].any()
                assert np.isfinite(engine.product(x[:, :64], clean.matrix, 16)).all()
