"""A matrix product whose sums do not depend on the number of rows.

All tiles have the same shape, and one program sums a tile's whole depth in order. In contrast, cuBLAS chooses the tile
shape by the number of rows, and may divide a sum between programs. A fixed number of programs compute all tiles
(persistent matmul: https://triton-lang.org/main/getting-started/tutorials/09-persistent-matmul.html). The result of a
tile does not depend on the program that computes it. Decodes do not fill all rows of a tile. Their speed is limited by
reading the weight, which is read once for ROW_BLOCK rows.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["product", "product_kernel", "program_count"]

ROW_BLOCK = 64
OUTPUT_BLOCK = 128
# Bytes per row of a tile. Four tiles of each operand are loaded at a time, and small GPUs have 99 KiB of shared memory.
DEPTH_BYTES = 128
STAGES = {2: 4, 4: 3}  # Stages by bytes per number. float32 is split into three parts, which need more shared memory.
INTERPRETED_PROGRAMS = 3  # Number of programs without a GPU. It is small, so that tests compute several tiles each.


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    result,
    values,
    weight,
    bias,
    rows,
    outputs,
    depth,
    result_stride,
    value_stride,
    weight_stride,
    HAS_BIAS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    OUTPUT_BLOCK: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
):
    # Program n computes every tile with index n modulo the number of programs. Tiles of the same outputs are adjacent.
    row_tiles = tl.cdiv(rows, ROW_BLOCK)
    tiles = row_tiles * tl.cdiv(outputs, OUTPUT_BLOCK)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tile % row_tiles * ROW_BLOCK + tl.arange(0, ROW_BLOCK)).to(tl.int64)
        output = (tile // row_tiles * OUTPUT_BLOCK + tl.arange(0, OUTPUT_BLOCK)).to(tl.int64)
        place = tl.arange(0, DEPTH_BLOCK)
        total = tl.zeros([ROW_BLOCK, OUTPUT_BLOCK], tl.float32)
        for begin in range(0, depth, DEPTH_BLOCK):
            inside = begin + place < depth
            numbers = tl.load(
                values + row[:, None] * value_stride + (begin + place)[None, :],
                mask=(row < rows)[:, None] & inside[None, :],
                other=0.0,
            )
            factors = tl.load(
                weight + output[None, :] * weight_stride + (begin + place)[:, None],
                mask=(output < outputs)[None, :] & inside[:, None],
                other=0.0,
            )
            total = tl.dot(numbers, factors, total, input_precision="tf32x3")
        if HAS_BIAS:
            total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
        tl.store(
            result + row[:, None] * result_stride + output[None, :],
            total.to(result.dtype.element_ty),
            mask=(row < rows)[:, None] & (output < outputs)[None, :],
        )


def product(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by a transposed weight and add a bias. Sums are float32.

    Args:
        values: [n, in].
        weight: [out, in].
        bias: [out], or None.

    Returns:
        [n, out].
    """
    rows, depth = values.shape
    outputs = weight.shape[0]
    assert weight.shape[1] == depth
    assert values.stride(1) == weight.stride(1) == 1
    result = values.new_empty(rows, outputs)
    if rows:
        tiles = triton.cdiv(rows, ROW_BLOCK) * triton.cdiv(outputs, OUTPUT_BLOCK)
        product_kernel[(min(tiles, program_count(values.device)),)](
            result,
            values,
            weight,
            weight if bias is None else bias,
            rows,
            outputs,
            depth,
            result.stride(0),
            values.stride(0),
            weight.stride(0),
            HAS_BIAS=bias is not None,
            ROW_BLOCK=ROW_BLOCK,
            OUTPUT_BLOCK=OUTPUT_BLOCK,
            DEPTH_BLOCK=DEPTH_BYTES // values.dtype.itemsize,
            num_warps=4,
            num_stages=STAGES[values.dtype.itemsize],
        )
    return result


@functools.cache
def program_count(device: torch.device) -> int:
    """Return the number of programs. A multiprocessor runs two: one can load while the other one multiplies.

    Args:
        device: device of the tensors.
    """
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count
