"""A product with a 4-bit weight. Each tile of the weight is unpacked before the tensor cores multiply it.

Programs compute the tiles as in product.py, and one program sums the whole depth of a tile. Reading the weight limits
the speed of a decode, so with few rows tiles have few outputs but more depth, and several programs may divide the depth
of a tile (split K). The last program to finish adds the parts in the order of their depth, so the result does not
depend on which program is last (see attention_decode.py). The batch-invariant mode uses one tile shape for any number
of rows, and never divides the depth.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from trioserve_kernels.four_bits import FourBitWeight
from trioserve_kernels.triton.product import find_rows, group_tiles, program_count, tile_programs

__all__ = ["four_bit_product", "four_bit_product_kernel"]

FEW_ROWS = 16
FEW_TILE = (16, 32)  # number of rows and outputs of a tile, if there are few rows
TILE = (64, 128)
FEW_DEPTH_BLOCK = 128  # 64 bytes of each output
DEPTH_BLOCK_MAX = 64
STAGES = 3
SPLITS_MAX = 8
SPLIT_BLOCKS_MIN = 2  # depth blocks of one part
FEW_PROGRAMS = (
    8  # Programs of a multiprocessor, which have 48 KiB in flight. The depth is divided to reach this number.
)
COUNTERS = 4_096  # tiles of one launch whose depth is divided


@triton.jit
def _unpack(codes, scale, start, IS_MXFP4: tl.constexpr, HAS_MIN: tl.constexpr):
    """Return the values of codes, float32 [bytes, OUTPUT_BLOCK].

    Args:
        codes: uint8 [bytes, OUTPUT_BLOCK], below 16.
        scale: [bytes, OUTPUT_BLOCK]. In MXFP4, uint8: a power of 2.
        start: minimums [bytes, OUTPUT_BLOCK], if HAS_MIN.
        IS_MXFP4: codes are numbers in e2m1.
        HAS_MIN: a value is scale * code + start.
    """
    if IS_MXFP4:
        # 2**(scale - 128) is a product of two powers of 2 that are normal numbers. It is half of the scale.
        half = scale.to(tl.int32) >> 1
        first = ((half + 63) << 23).to(tl.float32, bitcast=True)
        second = ((scale.to(tl.int32) - half + 63) << 23).to(tl.float32, bitcast=True)
        code = codes.to(tl.int32)
        # A code, read as bits of a float32, is its number divided by 2**126. PTX keeps subnormal numbers, as 2**-127.
        number = (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True)
        return number * 1.7014118346046923e38 * (first * second)
    factor = scale.to(tl.float32)
    if HAS_MIN:
        return codes.to(tl.float32) * factor + start.to(tl.float32)
    return codes.to(tl.float32) * factor + factor * -8.0


@triton.jit
def _of_bytes(numbers, group, channel, is_output, stride, GROUP_BYTES: tl.constexpr, BYTES: tl.constexpr):
    """Return the scale or minimum of each byte, [BYTES, OUTPUT_BLOCK]. It is read once for each group."""
    GROUPS: tl.constexpr = BYTES // GROUP_BYTES
    OUTPUTS: tl.constexpr = channel.shape[0]
    found = group + tl.arange(0, GROUPS)
    read = tl.load(
        numbers + channel[None, :] * stride + found[:, None],
        mask=is_output[None, :] & (found < stride)[:, None],
        other=0,
    )
    return tl.broadcast_to(read[:, None, :], (GROUPS, GROUP_BYTES, OUTPUTS)).reshape(BYTES, OUTPUTS)


@triton.jit(do_not_specialize=["rows"])
def four_bit_product_kernel(
    result,
    values,
    codes,
    scales,
    mins,
    bias,
    ends,
    parts,
    arrivals,
    rows,
    outputs,
    depth,
    result_stride,
    value_stride,
    code_stride,
    scale_stride,
    IS_MXFP4: tl.constexpr,
    HAS_MIN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    OUTPUT_BLOCK: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    # Program n computes every tile with index n modulo the number of programs. Tiles of the same outputs are adjacent.
    # GROUPS counts groups of rows as in product_kernel. With SPLITS above 1, an index names a part of a tile. Sums of
    # parts are float32 [SPLITS, rows, outputs] in `parts`. `arrivals` counts a tile's parts and is 0 after a launch.
    if GROUPS:
        tile_ends = group_tiles(ends, GROUPS, GROUP_BLOCK, ROW_BLOCK)
        row_tiles = tl.max(tile_ends, 0)
    else:
        row_tiles = tl.cdiv(rows, ROW_BLOCK)
    tiles = row_tiles * tl.cdiv(outputs, OUTPUT_BLOCK)
    split_depth = tl.cdiv(tl.cdiv(depth, DEPTH_BLOCK), SPLITS) * DEPTH_BLOCK
    GROUP_BYTES: tl.constexpr = min(GROUP, DEPTH_BLOCK) // 2
    for index in range(tl.program_id(0), tiles * SPLITS, tl.num_programs(0)):
        tile, split = index // SPLITS, index % SPLITS
        if GROUPS:
            group, first, end = find_rows(ends, tile_ends, tile % row_tiles, GROUP_BLOCK, ROW_BLOCK)
        else:
            group, first, end = 0, tile % row_tiles * ROW_BLOCK, rows
        row = (first + tl.arange(0, ROW_BLOCK)).to(tl.int64)
        output = (tile // row_tiles * OUTPUT_BLOCK + tl.arange(0, OUTPUT_BLOCK)).to(tl.int64)
        channel = group * outputs + output
        is_output = output < outputs
        byte = tl.arange(0, DEPTH_BLOCK // 2)
        # Number of the value in the byte's low half. The high half has number + 16.
        number = byte // 16 * 32 + byte % 16
        total = tl.zeros([ROW_BLOCK, OUTPUT_BLOCK], tl.float32)
        for begin in range(split * split_depth, tl.minimum((split + 1) * split_depth, depth), DEPTH_BLOCK):
            place = begin + number
            inside = place < depth
            both = tl.load(
                codes + channel[None, :] * code_stride + (begin // 2 + byte)[:, None],
                mask=is_output[None, :] & inside[:, None],
                other=0,
            )
            group_index = begin // GROUP
            scale = _of_bytes(scales, group_index, channel, is_output, scale_stride, GROUP_BYTES, DEPTH_BLOCK // 2)
            if HAS_MIN:
                start = _of_bytes(mins, group_index, channel, is_output, scale_stride, GROUP_BYTES, DEPTH_BLOCK // 2)
            else:
                start = scale  # unused
            numbers = values + row[:, None] * value_stride + place[None, :]
            seen = (row < end)[:, None] & inside[None, :]
            lower = tl.load(numbers, mask=seen, other=0.0)
            upper = tl.load(numbers + 16, mask=seen, other=0.0)
            factors = _unpack(both & 15, scale, start, IS_MXFP4, HAS_MIN)
            total = tl.dot(lower, factors.to(lower.dtype), total, input_precision="tf32x3")
            factors = _unpack(both >> 4, scale, start, IS_MXFP4, HAS_MIN)
            total = tl.dot(upper, factors.to(upper.dtype), total, input_precision="tf32x3")
        stored = (row < end)[:, None] & is_output[None, :]
        is_last = True
        if SPLITS > 1:
            place = row[:, None] * outputs + output[None, :]
            tl.store(parts + split * rows.to(tl.int64) * outputs + place, total, mask=stored)
            # All threads of the program have written their sums before one thread publishes them with the count.
            tl.debug_barrier()
            is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1
            if is_last:
                tl.store(arrivals + tile, 0)
                total = tl.zeros([ROW_BLOCK, OUTPUT_BLOCK], tl.float32)
                for part in range(SPLITS):
                    # The loads bypass the first-level cache, which may hold numbers of an earlier launch.
                    source = parts + part * rows.to(tl.int64) * outputs + place
                    total += tl.load(source, mask=stored, other=0.0, cache_modifier=".cg")
        if HAS_BIAS:
            total += tl.load(bias + channel, mask=is_output, other=0.0).to(tl.float32)[None, :]
        tl.store(
            result + row[:, None] * result_stride + output[None, :],
            total.to(result.dtype.element_ty),
            mask=stored & is_last,
        )


@functools.cache
def _arrivals(device: torch.device) -> Tensor:
    """Return the counters of a device, which are 0 between launches. All launches run on one CUDA stream."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def _splits(values: Tensor, outputs: int) -> int:
    """Return the number of programs that divide the depth of a tile with few rows: a power of 2."""
    tiles = triton.cdiv(outputs, FEW_TILE[1])
    if tiles > COUNTERS:
        return 1
    wanted = program_count(values.device, FEW_PROGRAMS) // tiles
    possible = values.shape[1] // (FEW_DEPTH_BLOCK * SPLIT_BLOCKS_MIN)
    most: int = max(1, min(wanted, possible, SPLITS_MAX))
    return 1 << most.bit_length() - 1


def four_bit_product(
    values: Tensor,
    weight: FourBitWeight,
    bias: Tensor | None,
    ends: Tensor | None = None,
    *,
    batch_invariant: bool = False,
) -> Tensor:
    """Multiply by a transposed 4-bit weight and add a bias. Sums are float32.

    Args:
        values: [n, in].
        weight: [out, in], or [groups * out, in] with groups. Its values are rounded to the dtype of `values`.
        bias: [out] or [groups * out], or None.
        ends: int32 [groups], as in `grouped_product`, or None.
        batch_invariant: True to use one tile shape for any number of rows.

    Returns:
        [n, out].
    """
    rows, depth = values.shape
    assert weight.inputs == depth
    assert values.stride(1) == 1
    groups = 1 if ends is None else len(ends)
    outputs = weight.outputs // groups
    result = values.new_empty(rows, outputs)
    if not rows:
        return result
    has_few_rows = rows <= FEW_ROWS * groups and not batch_invariant
    tile = FEW_TILE if has_few_rows else TILE
    # A mixture has enough tiles, because each row has several experts.
    splits = _splits(values, outputs) if has_few_rows and ends is None else 1
    parts = values.new_empty(splits, rows, outputs, dtype=torch.float32) if splits > 1 else result
    programs = triton.cdiv(outputs, tile[1]) * splits if splits > 1 else tile_programs(values, outputs, ends, tile)
    four_bit_product_kernel[(programs,)](
        result,
        values,
        weight.codes,
        weight.scales,
        weight.scales if weight.mins is None else weight.mins,
        values if bias is None else bias,
        weight.codes if ends is None else ends,
        parts,
        _arrivals(values.device) if splits > 1 else weight.codes,
        rows,
        outputs,
        depth,
        result.stride(0),
        values.stride(0),
        weight.codes.stride(0),
        weight.scales.stride(0),
        IS_MXFP4=weight.is_mxfp4,
        HAS_MIN=weight.mins is not None,
        HAS_BIAS=bias is not None,
        GROUP=weight.group,
        GROUPS=0 if ends is None else groups,
        GROUP_BLOCK=triton.next_power_of_2(groups),
        ROW_BLOCK=tile[0],
        OUTPUT_BLOCK=tile[1],
        DEPTH_BLOCK=FEW_DEPTH_BLOCK if has_few_rows else min(weight.group, DEPTH_BLOCK_MAX),
        SPLITS=splits,
        num_warps=4,
        num_stages=STAGES,
    )
    return result
