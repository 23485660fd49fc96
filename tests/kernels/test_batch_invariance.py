"""A row's bits are its own: the same whatever is computed beside it, at every level of instructions."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from trioserve_kernels.native import (
    BLOCK_FORMATS,
    DTYPES,
    Engine,
    MatrixStruct,
    WeightFormat,
    WeightMemory,
    matrix_of,
)

Array = npt.NDArray[Any]
DTYPE_IDS = pytest.mark.parametrize("dtype", DTYPES)


def random(*shape: int, dtype: str = "float32", seed: int = 0) -> Array:
    values = np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)
    return values if dtype == "float32" else bfloat16_bits(values)


def bfloat16_bits(values: npt.NDArray[np.float32]) -> Array:
    return np.ascontiguousarray(values.view(np.uint16).reshape(*values.shape, 2)[..., 1])


# --- products -------------------------------------------------------------------------------------------------------

COMPANIES = ((0, 1), (2, 4), (7, 12), (150, 151), (33, 41), (40, 57), (100, 133), (130, 300), (0, 129))
"""First and last row of some products, all of the same 300 rows."""


def check_product(engine: Engine, x: Array, matrix: MatrixStruct, outputs: int) -> None:
    whole = engine.product(x, matrix, outputs, batch_invariant=True)
    for first, end in COMPANIES:
        part = engine.product(np.ascontiguousarray(x[first:end]), matrix, outputs, batch_invariant=True)
        assert part.tobytes() == whole[first:end].tobytes(), f"rows {first} to {end - 1}"


@DTYPE_IDS
@pytest.mark.parametrize("outputs, inputs", ((50, 31), (96, 800)))
def test_a_row_of_a_product_has_the_same_bits_in_any_company(
    engine: Engine, dtype: str, outputs: int, inputs: int
) -> None:
    library = engine.library
    memory = WeightMemory(library, library.packed_bytes(outputs, inputs, dtype) + 4096)
    packed = memory.take(library.packed_bytes(outputs, inputs, dtype))
    library.pack(random(outputs, inputs, dtype=dtype, seed=1), packed)
    matrix = matrix_of((packed, outputs, inputs, WeightFormat.DENSE))
    check_product(engine, random(300, inputs, dtype=dtype), matrix, outputs)
    memory.close()


@DTYPE_IDS
@pytest.mark.parametrize("block_type", BLOCK_FORMATS)
def test_a_row_times_a_quantized_weight_has_the_same_bits_in_any_company(
    engine: Engine, dtype: str, block_type: str
) -> None:
    outputs, inputs, library = 50, 512, engine.library
    _, format = BLOCK_FORMATS[block_type]
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[block_type]]
    if block_type.endswith("_K"):
        # Any bits of a scale are a number here: the mantissa's bytes alone are drawn.
        blocks = np.random.default_rng(0).integers(0, 48, (outputs, inputs // values * size), dtype=np.uint8)
    else:
        blocks = gguf.quants.quantize(random(outputs, inputs, seed=2), gguf.GGMLQuantizationType[block_type])
    memory = WeightMemory(library, library.quantized_bytes(outputs, inputs, format) + 8192)
    packed = memory.take(library.quantized_bytes(outputs, inputs, format))
    library.pack_blocks(block_type, np.ascontiguousarray(blocks), inputs, packed)
    check_product(engine, random(300, inputs, dtype=dtype), matrix_of((packed, outputs, inputs, format)), outputs)
    memory.close()
