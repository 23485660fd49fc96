"""Attention of one query per sequence over its pages. Several programs compute parts of a context, and the last of them
joins the parts.

Source: flash decoding, https://pytorch.org/blog/flash-decoding/. The query heads that share keys and values are the
rows of one product, so keys and values are read once. The device splits a context by its length only. The grid depends
on the number of rows and on the longest possible context, so a captured launch can be used for every step with the same
number of rows.

A program counts itself when its parts are written. No program waits for another one. The program that counts last joins
the parts in the order of their tokens, so the result does not depend on which program is last. It also sets the count
back to 0 for the next launch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trioserve_kernels.kv_format import head_dim_of
from trioserve_kernels.paged import DECODE_PARTS_MAX, SPLIT_TOKENS, DecodeWork, decode_program_count
from trioserve_kernels.triton.attention import (
    attend_tile,
    begin_slopes,
    begin_softmax,
    kv_bytes,
    pipeline_stages,
    score_numbers,
    token_block,
)

__all__ = ["decode_kernel", "paged_decode_"]

NO_WINDOW = 2**31 - 1


@triton.jit
def _part_tokens(context, SPLIT_TOKENS: tl.constexpr, PARTS_MAX: tl.constexpr):
    """Return the tokens of one part: the smallest multiple of SPLIT_TOKENS with at most PARTS_MAX parts."""
    return tl.maximum(tl.cdiv(tl.cdiv(context, PARTS_MAX), SPLIT_TOKENS), 1) * SPLIT_TOKENS


@triton.jit
def _join(
    attended,
    sums,
    scales,
    first_part,
    head,
    parts,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PARTS_MAX: tl.constexpr,
    JOINED_COLUMNS: tl.constexpr,
):
    """Write the result of one head of a row from the row's parts, of which all have a visible token.

    Args:
        attended: result of the row.
        sums: see DecodeWork.
        scales: see DecodeWork.
        first_part: index of the row's first part in the buffers.
        head: head of the row.
        parts: parts of the row.
        HEADS: heads of the row.
        HEAD_DIM: numbers per head.
        DIM_BLOCK: HEAD_DIM rounded up to a power of 2.
        PARTS_MAX: largest number of parts, a power of 2.
        JOINED_COLUMNS: numbers of a head that are computed at a time, a divisor of DIM_BLOCK.
    """
    part = tl.arange(0, PARTS_MAX)
    written = part < parts
    index = (first_part + part) * HEADS + head
    # The loads bypass the first-level cache, which may hold numbers of an earlier launch.
    maximum = tl.load(scales + index * 2, mask=written, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(scales + index * 2 + 1, mask=written, other=0.0, cache_modifier=".cg")
    weights = tl.exp2(maximum - tl.max(maximum, 0))
    total = tl.sum(total * weights, 0)
    # A few columns at a time need fewer registers than the loop over tokens, so more programs fit on a multiprocessor.
    for column in range(0, DIM_BLOCK, JOINED_COLUMNS):
        dim = column + tl.arange(0, JOINED_COLUMNS)
        part_sums = tl.load(
            sums + index[:, None] * HEAD_DIM + dim[None, :],
            mask=written[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        result = tl.sum(part_sums * weights[:, None], 0) / total
        tl.store(attended + head * HEAD_DIM + dim, result.to(attended.dtype.element_ty), mask=dim < HEAD_DIM)


@triton.jit(do_not_specialize=["window", "table_stride", "page_stride", "parts_max"])
def decode_kernel(
    attended,
    queries,
    pages,
    block_tables,
    contexts,
    sums,
    scales,
    arrivals,
    sinks,
    slopes,
    window,
    score_scale,
    score_cap,
    attended_stride,
    query_stride,
    table_stride,
    page_stride,
    parts_max,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    PARTS_MAX: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    KV_FORMAT: tl.constexpr,
):
    # Program (row, key/value head, n) computes part n of the row and every following part at a distance of the number
    # of programs. Parts count from the part in which the window begins.
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    context = tl.load(contexts + row)
    first = tl.maximum(context - window, 0)
    part_tokens = _part_tokens(context, SPLIT_TOKENS, PARTS_MAX)
    # An empty context also has one part, because its result of zeros must be written.
    parts = tl.maximum(tl.cdiv(context, part_tokens) - first // part_tokens, 1)
    programs = tl.minimum(tl.num_programs(2), parts)
    if tl.program_id(2) >= programs:
        # The grid is made for the longest context. With a short context, most programs end now.
        return
    member = tl.arange(0, GROUP_BLOCK)
    head = kv_head * GROUP + member
    dim = tl.arange(0, DIM_BLOCK)
    inside = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    place = head[:, None] * HEAD_DIM + dim[None, :]
    query = tl.load(queries + row * query_stride + place, mask=inside, other=0.0)
    slope = begin_slopes(slopes, head, member < GROUP, GROUP_BLOCK, HAS_SLOPES)
    query_position = context - 1 + tl.zeros([GROUP_BLOCK], tl.int32)
    for part in range(tl.program_id(2), parts, tl.num_programs(2)):
        begin = (first // part_tokens + part) * part_tokens
        end = tl.minimum(begin + part_tokens, context)
        # The loop starts at the tile of the first visible token, so that every tile has a visible token.
        begin = tl.maximum(begin, first // TOKEN_BLOCK * TOKEN_BLOCK)
        # A sink is added only once, in the first part.
        has_sink = (member < GROUP) & (part == 0) & (context > 0)
        maximum, total = begin_softmax(sinks, head, has_sink, GROUP_BLOCK, HAS_SINKS)
        result = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
        for start in range(begin, end, TOKEN_BLOCK):
            position = start + tl.arange(0, TOKEN_BLOCK)
            visible = (position >= first) & (position < end)
            maximum, total, result = attend_tile(
                query,
                maximum,
                total,
                result,
                pages,
                block_tables + row * table_stride,
                page_stride,
                position,
                visible,
                visible[None, :],
                kv_head,
                score_scale,
                score_cap,
                slope,
                query_position,
                KV_HEADS,
                HEAD_DIM,
                PAGE_TOKENS,
                DIM_BLOCK,
                IS_CAPPED,
                HAS_SLOPES,
                KV_FORMAT,
                False,
            )
        if parts == 1:
            result = result / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(attended + row * attended_stride + place, result.to(attended.dtype.element_ty), mask=inside)
        else:
            index = (row * parts_max + part) * (KV_HEADS * GROUP)
            tl.store(sums + index * HEAD_DIM + place, result, mask=inside)
            tl.store(scales + (index + head) * 2, maximum, mask=member < GROUP)
            tl.store(scales + (index + head) * 2 + 1, total, mask=member < GROUP)
    if parts > 1:
        # All threads of the program have written their numbers before one thread publishes them with the count.
        tl.debug_barrier()
        arrival = arrivals + row * KV_HEADS + kv_head
        if tl.atomic_add(arrival, 1, sem="acq_rel") == programs - 1:
            tl.store(arrival, 0)
            for joined in range(GROUP):
                _join(
                    attended + row * attended_stride,
                    sums,
                    scales,
                    row * parts_max,
                    kv_head * GROUP + joined,
                    parts,
                    KV_HEADS * GROUP,
                    HEAD_DIM,
                    DIM_BLOCK,
                    PARTS_MAX,
                    16,
                )


def paged_decode_(
    attended: Tensor,
    queries: Tensor,
    pages: Tensor,
    block_tables: Tensor,
    contexts: Tensor,
    window: int | None,
    parts: int,
    work: DecodeWork,
    score_cap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> None:
    count = queries.shape[0]
    _, page_tokens, _, kv_heads, _ = pages.shape
    head_dim = head_dim_of(pages)
    heads = queries.shape[1] // head_dim
    numbers, kv_format = kv_bytes(pages)
    assert queries.stride(1) == attended.stride(1) == 1
    assert pages.is_contiguous()
    assert work.sums.shape[0] >= count
    assert work.sums.shape[2] == heads
    assert work.parts_max >= parts
    dim_block = max(16, triton.next_power_of_2(head_dim))
    decode_kernel[(count, kv_heads, decode_program_count(count, kv_heads, parts))](
        attended,
        queries,
        numbers,
        block_tables,
        contexts,
        work.sums,
        work.scales,
        work.arrivals,
        queries if sinks is None else sinks,
        queries if slopes is None else slopes,
        NO_WINDOW if window is None else window,
        *score_numbers(head_dim, score_cap),
        attended.stride(0),
        queries.stride(0),
        block_tables.stride(0),
        block_tables.stride(1),
        work.parts_max,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        PAGE_TOKENS=page_tokens,
        SPLIT_TOKENS=SPLIT_TOKENS,
        PARTS_MAX=DECODE_PARTS_MAX,
        GROUP_BLOCK=max(16, triton.next_power_of_2(heads // kv_heads)),
        DIM_BLOCK=dim_block,
        TOKEN_BLOCK=token_block(dim_block, 4 if kv_format else queries.dtype.itemsize),
        IS_CAPPED=score_cap is not None,
        HAS_SINKS=sinks is not None,
        HAS_SLOPES=slopes is not None,
        KV_FORMAT=kv_format,
        num_warps=4,
        num_stages=pipeline_stages(pages.device),
    )
