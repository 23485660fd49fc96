"""Attention of one query per sequence over its pages. Several programs compute parts of a context, and a second kernel
combines the parts.

Source: flash decoding, https://pytorch.org/blog/flash-decoding/. The query heads that share keys and values are the
rows of one product, so keys and values are read once. The device splits a context by its length only. The grid depends
on the number of rows and on the longest possible context, so a captured launch can be used for every step with the same
number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trioserve_kernels.paged import DECODE_PARTS_MAX, SPLIT_TOKENS, DecodeWork, decode_program_count
from trioserve_kernels.triton.attention import attend_tile, begin_softmax, pipeline_stages, score_numbers, token_block

__all__ = ["decode_join_kernel", "decode_split_kernel", "paged_decode_"]

PART_BLOCK = 16  # number of parts that the second kernel reads at a time
NO_WINDOW = 2**31 - 1


@triton.jit
def _part_tokens(context, SPLIT_TOKENS: tl.constexpr, PARTS_MAX: tl.constexpr):
    """Return the tokens of one part: the smallest multiple of SPLIT_TOKENS with at most PARTS_MAX parts."""
    return tl.maximum(tl.cdiv(tl.cdiv(context, PARTS_MAX), SPLIT_TOKENS), 1) * SPLIT_TOKENS


@triton.jit(do_not_specialize=["window", "table_stride", "page_stride", "parts_max"])
def decode_split_kernel(
    attended,
    queries,
    pages,
    block_tables,
    contexts,
    sums,
    scales,
    sinks,
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
    ONE_PART: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    # Program (row, key/value head, n) computes part n of the row and every following part at a distance of the number
    # of programs. Parts count from the part in which the window begins. With ONE_PART, the program writes the final
    # result, because no parts have to be combined.
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    context = tl.load(contexts + row)
    first = tl.maximum(context - window, 0)
    part_tokens = _part_tokens(context, SPLIT_TOKENS, PARTS_MAX)
    parts = tl.cdiv(context, part_tokens) - first // part_tokens
    if ONE_PART:
        parts = 1  # An empty context also has one part, because its result of zeros must be written.
    if tl.program_id(2) >= parts:
        # The grid is made for the longest context. With a short context, most programs end now.
        return
    member = tl.arange(0, GROUP_BLOCK)
    head = kv_head * GROUP + member
    dim = tl.arange(0, DIM_BLOCK)
    inside = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    place = head[:, None] * HEAD_DIM + dim[None, :]
    query = tl.load(queries + row * query_stride + place, mask=inside, other=0.0)
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
                KV_HEADS,
                HEAD_DIM,
                PAGE_TOKENS,
                DIM_BLOCK,
                IS_CAPPED,
            )
        if ONE_PART:
            result = result / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(attended + row * attended_stride + place, result.to(attended.dtype.element_ty), mask=inside)
        else:
            index = (row * KV_HEADS * GROUP + head) * parts_max + part
            tl.store(sums + index[:, None] * HEAD_DIM + dim[None, :], result, mask=inside)
            tl.store(scales + index * 2, maximum, mask=member < GROUP)
            tl.store(scales + index * 2 + 1, total, mask=member < GROUP)


@triton.jit(do_not_specialize=["window", "parts_max"])
def decode_join_kernel(
    attended,
    contexts,
    sums,
    scales,
    window,
    attended_stride,
    parts_max,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    PARTS_MAX: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PART_BLOCK: tl.constexpr,
):
    # There is one program for each row and head. It reads only parts with a visible token, because only these
    # parts were written.
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    context = tl.load(contexts + row)
    first = tl.maximum(context - window, 0)
    part_tokens = _part_tokens(context, SPLIT_TOKENS, PARTS_MAX)
    parts = tl.cdiv(context, part_tokens) - first // part_tokens
    dim = tl.arange(0, DIM_BLOCK)
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    result = tl.zeros([DIM_BLOCK], tl.float32)
    for start in range(0, parts, PART_BLOCK):
        part = start + tl.arange(0, PART_BLOCK)
        written = part < parts
        index = (row * HEADS + head) * parts_max + part
        part_maximum = tl.load(scales + index * 2, mask=written, other=float("-inf"))
        part_total = tl.load(scales + index * 2 + 1, mask=written, other=0.0)
        inside = written[:, None] & (dim < HEAD_DIM)[None, :]
        part_sums = tl.load(sums + index[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
        higher = tl.maximum(maximum, tl.max(part_maximum, 0))
        shrunk = tl.exp2(maximum - higher)
        weights = tl.exp2(part_maximum - higher)
        total = total * shrunk + tl.sum(part_total * weights, 0)
        result = result * shrunk + tl.sum(part_sums * weights[:, None], 0)
        maximum = higher
    place = attended + row * attended_stride + head * HEAD_DIM + dim
    result = result / tl.where(total > 0, total, 1.0)  # An empty context has a total of 0.
    tl.store(place, result.to(attended.dtype.element_ty), mask=dim < HEAD_DIM)


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
) -> None:
    count = queries.shape[0]
    _, page_tokens, _, kv_heads, head_dim = pages.shape
    heads = queries.shape[1] // head_dim
    assert queries.stride(1) == attended.stride(1) == 1
    assert pages.is_contiguous()
    assert work.sums.shape[0] >= count
    assert work.sums.shape[1] == heads
    assert work.parts_max >= parts
    visible = NO_WINDOW if window is None else window
    dim_block = max(16, triton.next_power_of_2(head_dim))
    decode_split_kernel[(count, kv_heads, decode_program_count(count, kv_heads, parts))](
        attended,
        queries,
        pages,
        block_tables,
        contexts,
        work.sums,
        work.scales,
        queries if sinks is None else sinks,
        visible,
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
        TOKEN_BLOCK=token_block(dim_block, pages.dtype.itemsize),
        IS_CAPPED=score_cap is not None,
        HAS_SINKS=sinks is not None,
        ONE_PART=parts == 1,
        num_warps=4,
        num_stages=pipeline_stages(pages.device),
    )
    if parts > 1:
        decode_join_kernel[(count, heads)](
            attended,
            contexts,
            work.sums,
            work.scales,
            visible,
            attended.stride(0),
            work.parts_max,
            HEADS=heads,
            HEAD_DIM=head_dim,
            SPLIT_TOKENS=SPLIT_TOKENS,
            PARTS_MAX=DECODE_PARTS_MAX,
            DIM_BLOCK=dim_block,
            PART_BLOCK=PART_BLOCK,
            num_warps=4,
        )
