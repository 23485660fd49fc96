"""RMS norm, with or without a residual sum before the norm. Each value is read and written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_rms_norm_", "rms_norm", "rms_norm_kernel"]

BLOCK_NUMBERS_MIN = 1024  # If rows are shorter, such as heads, a program computes several rows.


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    normed,
    values,
    product,
    weight,
    rows,
    columns,
    inner,
    outer_stride,
    inner_stride,
    eps,
    ADD: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
):
    # Row r of `values` is at (r // inner, r % inner). Rows of `normed` and `product` are contiguous.
    row = (tl.program_id(0) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)).to(tl.int64)[:, None]
    column = tl.arange(0, COLUMN_BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    place = (row // inner) * outer_stride + (row % inner) * inner_stride + column
    numbers = tl.load(values + place, mask=inside, other=0.0)
    if ADD:
        # The sum is rounded to the dtype of the residual before it is normalized, because later code reads the rounded
        # sum.
        added = tl.load(product + row * columns + column, mask=inside, other=0.0)
        numbers = (numbers.to(tl.float32) + added.to(tl.float32)).to(values.dtype.element_ty)
        tl.store(values + place, numbers, mask=inside)
    if WEIGHTED:
        # The weight is loaded before the sum is computed, so that the program waits for memory only once.
        factors = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    numbers = numbers.to(tl.float32)
    mean = tl.sum(numbers * numbers, 1) / columns
    numbers = numbers * tl.rsqrt(mean + eps)[:, None]
    if WEIGHTED:
        numbers = numbers * factors
    tl.store(normed + row * columns + column, numbers.to(normed.dtype.element_ty), mask=inside)


def rms_norm(values: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return _launch(values, None, weight, eps)


def add_rms_norm_(hidden: Tensor, product: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    return _launch(hidden, product, weight, eps)


def _launch(values: Tensor, product: Tensor | None, weight: Tensor | None, eps: float) -> Tensor:
    assert 2 <= values.dim() <= 3, "values have 2 or 3 dimensions"
    assert values.stride(-1) == 1
    assert product is None or product.is_contiguous()
    columns, inner = values.shape[-1], values.shape[-2] if values.dim() == 3 else 1
    rows = values.shape[0] * inner
    normed = values.new_empty(values.shape)
    column_block = triton.next_power_of_2(columns)
    row_block = max(1, BLOCK_NUMBERS_MIN // column_block)
    if rows:
        rms_norm_kernel[(triton.cdiv(rows, row_block),)](
            normed,
            values,
            values if product is None else product,
            values if weight is None else weight,
            rows,
            columns,
            inner,
            values.stride(0),
            values.stride(1) if values.dim() == 3 else 0,
            eps,
            ADD=product is not None,
            WEIGHTED=weight is not None,
            ROW_BLOCK=row_block,
            COLUMN_BLOCK=column_block,
            # Each thread has 8 or 16 numbers. It loads them with one or two loads of 16 bytes from each tensor, which
            # run at the same time.
            num_warps=4 if column_block <= 1024 else 8 if column_block <= 4096 else 16,
        )
    return normed
