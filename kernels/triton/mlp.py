"""Kernels of MLPs: the activation, and for mixtures of experts the products of groups of rows and the weighted sum of
each row's experts.

The number of rows of an expert stays on the device. On GPUs for which torch has a grouped product, torch multiplies.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trioserve_kernels import reference
from trioserve_kernels.four_bits import FourBitWeight
from trioserve_kernels.reference import CLAMPED_LIMIT, CLAMPED_SLOPE, Activation
from trioserve_kernels.triton.four_bit_product import four_bit_product
from trioserve_kernels.triton.product import grouped_product

__all__ = [
    "activate",
    "activate_and_mul",
    "activate_mul_kernel",
    "grouped_linear",
    "weighted_sum",
    "weighted_sum_kernel",
]

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


@triton.jit
def activate_mul_kernel(
    product,
    gate_up,
    columns,
    gate_up_stride,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    HAS_UP: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)
    inside = column < columns
    gate = tl.load(gate_up + row * gate_up_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = 1.0
    if HAS_UP:
        up = tl.load(gate_up + row * gate_up_stride + columns + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # The identity x (1 + tanh(y)) / 2 = x / (1 + exp(-2 y)) is used.
        active = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    elif ACTIVATION == "relu":
        active = tl.where(gate < 0.0, 0.0, gate)  # keeps NaN
    elif ACTIVATION == "relu2":
        active = tl.where(gate < 0.0, 0.0, gate) * gate
    elif ACTIVATION == "clamped_swiglu":
        gate = tl.where(gate > LIMIT, LIMIT, gate)  # keeps NaN
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
        active = gate / (1.0 + tl.exp(-SLOPE * gate))
    else:
        active = gate / (1.0 + tl.exp(-gate))
    tl.store(product + row * columns + column, (active * up).to(product.dtype.element_ty), mask=inside)


def activate_and_mul(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    return _activated(gate_up, activation, gate_up.shape[1] // 2, has_up=True)


def activate(values: Tensor, activation: Activation) -> Tensor:
    return _activated(values, activation, values.shape[1], has_up=False)


def _activated(gate_up: Tensor, activation: Activation, columns: int, *, has_up: bool) -> Tensor:
    rows = gate_up.shape[0]
    assert gate_up.stride(1) == 1
    product = gate_up.new_empty(rows, columns)
    if rows:
        activate_mul_kernel[(rows, triton.cdiv(columns, COLUMN_BLOCK))](
            product,
            gate_up,
            columns,
            gate_up.stride(0),
            ACTIVATION=activation,
            SLOPE=CLAMPED_SLOPE,
            LIMIT=CLAMPED_LIMIT,
            HAS_UP=has_up,
            COLUMN_BLOCK=COLUMN_BLOCK,
        )
    return product
