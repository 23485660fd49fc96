"""Rounds rows to FP8 (e4m3), each with its own scale, as inputs of torch's FP8 products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trioserve_kernels.fp8 import FP8_LARGEST
from trioserve_kernels.triton.rotary import eight_bit_codes

__all__ = ["fp8_rows", "fp8_rows_kernel"]

COLUMN_BLOCK_MAX = 4096
SCALE_MIN = torch.finfo(torch.float32).tiny  # A row of zeros stays a row of zeros.


@triton.jit
def fp8_rows_kernel(
    codes,
    scales,
    values,
    columns,
    value_stride,
    SHARE: tl.constexpr,
    SCALE_MIN: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
):
    # Program (row) reads its row twice. The second time, most of it is in a cache.
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, COLUMN_BLOCK)
    most = tl.zeros([COLUMN_BLOCK], tl.float32)
    flaw = tl.zeros([COLUMN_BLOCK], tl.int32)
    for start in range(0, columns, COLUMN_BLOCK):
        inside = start + lane < columns
        size = tl.abs(tl.load(values + row * value_stride + start + lane, mask=inside, other=0.0).to(tl.float32))
        is_finite = size < float("inf")
        flaw = tl.where(is_finite, flaw, 1)
        most = tl.where(is_finite, tl.maximum(most, size), most)
    has_flaw = tl.max(flaw, 0) > 0
    scale = tl.maximum(tl.max(most, 0) * SHARE, SCALE_MIN)
    tl.store(scales + row, scale)
    for start in range(0, columns, COLUMN_BLOCK):
        inside = start + lane < columns
        numbers = tl.load(values + row * value_stride + start + lane, mask=inside, other=0.0).to(tl.float32)
        # A row that contains infinity or NaN has a NaN in each code.
        found = eight_bit_codes(tl.where(numbers == numbers, numbers, 0.0), scale, 2)
        found = tl.where(has_flaw, 0x7F, found).to(tl.uint8)
        tl.store(codes + row * columns + start + lane, found, mask=inside)


def fp8_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = values.shape
    assert values.stride(1) == 1
    codes = values.new_empty(rows, columns, dtype=torch.uint8)
    scales = values.new_empty(rows, 1, dtype=torch.float32)
    if rows:
        column_block = min(triton.next_power_of_2(columns), COLUMN_BLOCK_MAX)
        fp8_rows_kernel[(rows,)](
            codes,
            scales,
            values,
            columns,
            values.stride(0),
            SHARE=1 / FP8_LARGEST,
            SCALE_MIN=SCALE_MIN,
            COLUMN_BLOCK=column_block,
            num_warps=4 if column_block <= 1024 else 8,
        )
    return codes.view(torch.float8_e4m3fn), scales
