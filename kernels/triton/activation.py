"""SiLU of the gate times the up projection. Bound by memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["silu_and_mul", "silu_mul_kernel"]

COLUMN_BLOCK = 1024


@triton.jit
def silu_mul_kernel(product, gate_up, columns, gate_up_stride, COLUMN_BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)
    inside = column < columns
    gate = tl.load(gate_up + row * gate_up_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + columns + column, mask=inside, other=0.0).to(tl.float32)
    silu = gate / (1.0 + tl.exp(-gate))
    tl.store(product + row * columns + column, (silu * up).to(product.dtype.element_ty), mask=inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    product = gate_up.new_empty(rows, columns)
    if rows:
        silu_mul_kernel[(rows, triton.cdiv(columns, COLUMN_BLOCK))](
            product, gate_up, columns, gate_up.stride(0), COLUMN_BLOCK=COLUMN_BLOCK
        )
    return product
