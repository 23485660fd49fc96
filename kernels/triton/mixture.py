"""Kernels for mixtures of experts: products of groups of rows, and the weighted sum of each row's experts.

The number of rows of an expert stays on the device. On GPUs for which torch has a grouped product, torch multiplies.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trioserve_kernels import reference
from trioserve_kernels.four_bits import FourBitWeight
from trioserve_kernels.triton.four_bit_product import four_bit_product
from trioserve_kernels.triton.product import grouped_product

__all__ = ["grouped_linear", "weighted_sum", "weighted_sum_kernel"]

COLUMN_BLOCK = 1024


def grouped_linear(values: Tensor, weight: Tensor | FourBitWeight, ends: Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(weight, FourBitWeight):
        return four_bit_product(values, weight, bias, ends)
    if reference.has_grouped_mm(values, weight):
        return reference.grouped_linear(values, weight, ends, bias)
    return grouped_product(values, weight, ends, bias)


@triton.jit
def weighted_sum_kernel(
    result,
    products,
    weights,
    columns,
    COUNT: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)
    inside = column < columns
    total = tl.zeros([COLUMN_BLOCK], tl.float32)
    for place in tl.static_range(COUNT):
        weight = tl.where(inside, tl.load(weights + row * COUNT + place), 0.0)
        # A product with the weight 0 is not read, because it may be undefined.
        product = tl.load(products + (row * COUNT + place) * columns + column, mask=weight != 0.0, other=0.0)
        total += product.to(tl.float32) * weight
    tl.store(result + row * columns + column, total.to(result.dtype.element_ty), mask=inside)


def weighted_sum(products: Tensor, weights: Tensor) -> Tensor:
    rows, count, columns = products.shape
    assert products.is_contiguous()
    assert weights.is_contiguous()
    result = products.new_empty(rows, columns)
    if rows:
        weighted_sum_kernel[(rows, triton.cdiv(columns, COLUMN_BLOCK))](
            result, products, weights, columns, COUNT=count, COLUMN_BLOCK=COLUMN_BLOCK
        )
    return result
