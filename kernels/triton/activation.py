"""Multiplies the activation of the gate by the up projection. Memory bandwidth limits the kernel's speed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trioserve_kernels.reference import CLAMPED_LIMIT, CLAMPED_SLOPE, Activation

__all__ = ["activate_and_mul", "activate_mul_kernel"]

COLUMN_BLOCK = 1024


@triton.jit
def activate_mul_kernel(
    product,
    gate_up,
    columns,
    gate_up_stride,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)
    inside = column < columns
    gate = tl.load(gate_up + row * gate_up_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + columns + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # The identity x (1 + tanh(y)) / 2 = x / (1 + exp(-2 y)) is used.
        active = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    elif ACTIVATION == "clamped_swiglu":
        gate = tl.where(gate > LIMIT, LIMIT, gate)  # keeps NaN
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
        active = gate / (1.0 + tl.exp(-SLOPE * gate))
    else:
        active = gate / (1.0 + tl.exp(-gate))
    tl.store(product + row * columns + column, (active * up).to(product.dtype.element_ty), mask=inside)


def activate_and_mul(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
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
            COLUMN_BLOCK=COLUMN_BLOCK,
        )
    return product
