"""A matrix product whose sums do not depend on the number of rows.

All tiles have the same shape, and one program sums a tile's whole depth in order. In contrast, cuBLAS chooses the tile
shape by the number of rows, and may divide a sum between programs. A fixed number of programs compute all tiles
(persistent matmul: https://triton-lang.org/main/getting-started/tutorials/09-persistent-matmul.html). The result of a
tile does not depend on the program that computes it. Decodes do not fill all rows of a tile. Their speed is limited by
reading the weight, which is read once for ROW_BLOCK rows.

A grouped product multiplies consecutive groups of rows, each by its own weight, as the experts of a mixture do
(MegaBlocks, arXiv 2211.15841). The device finds the group of each tile of rows, so a launch can be captured.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "find_rows",
    "group_tiles",
    "grouped_product",
    "tile_programs",
    "product",
    "product_kernel",
    "program_count",
]

ROW_BLOCK = 64
OUTPUT_BLOCK = 128
FEW_ROWS_TILE = (16, 64)  # rows and outputs of a tile, if groups have few rows
# Bytes per row of a tile. Four tiles of each operand are loaded at a time, and small GPUs have 99 KiB of shared memory.
DEPTH_BYTES = 128
STAGES = {2: 4, 4: 3}  # Stages by bytes per number. float32 is split into three parts, which need more shared memory.
INTERPRETED_PROGRAMS = 3  # Number of programs without a GPU. It is small, so that tests compute several tiles each.


@triton.jit
def group_tiles(ends, GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr):
    """Return the numbers of row tiles up to and including each group, int32 [GROUP_BLOCK]. No tile has two groups.

    Args:
        ends: int32 [GROUPS], the row after the last row of each group.
        GROUPS: number of groups.
        GROUP_BLOCK: GROUPS rounded up to a power of 2.
        ROW_BLOCK: rows of a tile.
    """
    group = tl.arange(0, GROUP_BLOCK)
    end = tl.load(ends + group, mask=group < GROUPS, other=0)
    start = tl.load(ends + group - 1, mask=(group > 0) & (group < GROUPS), other=0)
    return tl.cumsum(tl.cdiv(end - start, ROW_BLOCK), 0)


@triton.jit
def find_rows(ends, tile_ends, tile, GROUP_BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr):
    """Find the group of a row tile.

    Args:
        ends: see `group_tiles`.
        tile_ends: result of `group_tiles`.
        tile: number of the row tile.
        GROUP_BLOCK: see `group_tiles`.
        ROW_BLOCK: see `group_tiles`.

    Returns:
        Number of the group, the tile's first row, and the row after the group's last row.
    """
    found = tl.sum((tile_ends <= tile).to(tl.int32), 0)
    tiles_before = tl.max(tl.where(tl.arange(0, GROUP_BLOCK) < found, tile_ends, 0), 0)
    start = tl.load(ends + found - 1, mask=found > 0, other=0)
    return found, start + (tile - tiles_before) * ROW_BLOCK, tl.load(ends + found)


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    result,
    values,
    weight,
    bias,
    ends,
    rows,
    outputs,
    depth,
    result_stride,
    value_stride,
    weight_stride,
    HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    OUTPUT_BLOCK: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
):
    # Program n computes every tile with index n modulo the number of programs. Tiles of the same outputs are adjacent.
    # Without groups, GROUPS is 0. With groups, the weight has the outputs of all groups.
    if GROUPS:
        tile_ends = group_tiles(ends, GROUPS, GROUP_BLOCK, ROW_BLOCK)
        row_tiles = tl.max(tile_ends, 0)
    else:
        row_tiles = tl.cdiv(rows, ROW_BLOCK)
    tiles = row_tiles * tl.cdiv(outputs, OUTPUT_BLOCK)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        if GROUPS:
            group, first, end = find_rows(ends, tile_ends, tile % row_tiles, GROUP_BLOCK, ROW_BLOCK)
        else:
            group, first, end = 0, tile % row_tiles * ROW_BLOCK, rows
        row = (first + tl.arange(0, ROW_BLOCK)).to(tl.int64)
        output = (tile // row_tiles * OUTPUT_BLOCK + tl.arange(0, OUTPUT_BLOCK)).to(tl.int64)
        channel = group * outputs + output
        place = tl.arange(0, DEPTH_BLOCK)
        total = tl.zeros([ROW_BLOCK, OUTPUT_BLOCK], tl.float32)
        for begin in range(0, depth, DEPTH_BLOCK):
            inside = begin + place < depth
            numbers = tl.load(
                values + row[:, None] * value_stride + (begin + place)[None, :],
                mask=(row < end)[:, None] & inside[None, :],
                other=0.0,
            )
            factors = tl.load(
                weight + channel[None, :] * weight_stride + (begin + place)[:, None],
                mask=(output < outputs)[None, :] & inside[:, None],
                other=0.0,
            )
            total = tl.dot(numbers, factors, total, input_precision="tf32x3")
        if HAS_BIAS:
            total += tl.load(bias + channel, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
        tl.store(
            result + row[:, None] * result_stride + output[None, :],
            total.to(result.dtype.element_ty),
            mask=(row < end)[:, None] & (output < outputs)[None, :],
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
    result = values.new_empty(values.shape[0], weight.shape[0])
    _launch(result, values, weight, bias, None, (ROW_BLOCK, OUTPUT_BLOCK))
    return result


def grouped_product(
    values: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None, *, batch_invariant: bool = False
) -> Tensor:
    """Multiply each group of rows by its own transposed weight and add its bias. Sums are float32.

    Args:
        values: [n, in], rows in the order of their groups.
        weight: [groups, out, in], contiguous.
        ends: int32 [groups], the row after the last row of each group.
        bias: [groups, out], contiguous, or None.
        batch_invariant: True to use one tile shape for any number of rows.

    Returns:
        [n, out]. Rows after the last group are undefined.
    """
    groups, outputs, depth = weight.shape
    assert weight.is_contiguous()
    result = values.new_empty(values.shape[0], outputs)
    has_few_rows = values.shape[0] <= groups * FEW_ROWS_TILE[0] and not batch_invariant
    tile = FEW_ROWS_TILE if has_few_rows else (ROW_BLOCK, OUTPUT_BLOCK)
    _launch(result, values, weight.view(-1, depth), bias, ends, tile)
    return result


def _launch(
    result: Tensor, values: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor | None, tile: tuple[int, int]
) -> None:
    rows, depth = values.shape
    outputs = result.shape[1]
    assert weight.shape[1] == depth
    assert values.stride(1) == weight.stride(1) == 1
    if not rows:
        return
    product_kernel[(tile_programs(values, outputs, ends, tile),)](
        result,
        values,
        weight,
        weight if bias is None else bias,
        weight if ends is None else ends,
        rows,
        outputs,
        depth,
        result.stride(0),
        values.stride(0),
        weight.stride(0),
        HAS_BIAS=bias is not None,
        GROUPS=0 if ends is None else len(ends),
        GROUP_BLOCK=1 if ends is None else triton.next_power_of_2(len(ends)),
        ROW_BLOCK=tile[0],
        OUTPUT_BLOCK=tile[1],
        DEPTH_BLOCK=DEPTH_BYTES // values.dtype.itemsize,
        num_warps=4,
        num_stages=STAGES[values.dtype.itemsize],
    )


def tile_programs(values: Tensor, outputs: int, ends: Tensor | None, tile: tuple[int, int]) -> int:
    """Return the number of programs of a launch: one for each tile, up to a limit.

    Args:
        values: [n, in].
        outputs: outputs of a row.
        ends: ends of the groups, or None.
        tile: rows and outputs of a tile.
    """
    rows = values.shape[0]
    row_tiles = triton.cdiv(rows, tile[0]) if ends is None else rows // tile[0] + min(rows, len(ends))
    per_multiprocessor = 2 if tile[0] == ROW_BLOCK else 4
    tiles: int = row_tiles * triton.cdiv(outputs, tile[1])
    return min(tiles, program_count(values.device, per_multiprocessor))


@functools.cache
def program_count(device: torch.device, per_multiprocessor: int = 2) -> int:
    """Return the largest number of programs of a launch.

    Args:
        device: device of the tensors.
        per_multiprocessor: programs that a multiprocessor runs at a time. With two, one can load while the other one
            multiplies. Small tiles load fewer bytes at a time, so more programs are needed.
    """
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return per_multiprocessor * torch.cuda.get_device_properties(device).multi_processor_count
