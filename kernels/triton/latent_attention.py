"""Attention over pages of latents (MLA, arXiv 2405.04434), for decodes and for chunks of prompts.

All heads share the keys of a token, and the first numbers of a key are also the value. So the heads of a token are the
rows of one product, and each page is read once for a block of heads. Decodes split long contexts between programs, see
attention_decode.py. The running softmax is FlashAttention's (arXiv 2205.14135).
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from trioserve_kernels.paged import (
    CHUNK_TILE_ROWS,
    SPLIT_TOKENS,
    DecodeWork,
    chunk_tile_tokens,
    decode_program_count,
    latent_parts_max,
)
from trioserve_kernels.triton import attention
from trioserve_kernels.triton.attention import LOG2_E, pipeline_stages

__all__ = ["latents_join_kernel", "latents_kernel", "paged_latents_"]

PART_BLOCK = 8  # number of parts that the second kernel reads at a time
TOKEN_BLOCK = 32
TWO_TILES_SHARED_BYTES = 104 * 1024  # for 64 queries and two tiles of 16 tokens, with latents of 512 numbers
SMALL_TOKEN_BLOCK = 16  # for GPUs with little shared memory, and for float32


@triton.jit
def _part_tokens(context, SPLIT_TOKENS: tl.constexpr, PARTS_MAX: tl.constexpr):
    """Return the tokens of one part: the smallest multiple of SPLIT_TOKENS with at most PARTS_MAX parts."""
    return tl.maximum(tl.cdiv(tl.cdiv(context, PARTS_MAX), SPLIT_TOKENS), 1) * SPLIT_TOKENS


@triton.jit(do_not_specialize=["table_stride", "page_stride", "parts_max"])
def latents_kernel(
    attended,
    queries,
    pages,
    block_tables,
    contexts,
    row_starts,
    tiles,
    sums,
    scales,
    score_scale,
    attended_stride,
    query_stride,
    table_stride,
    page_stride,
    parts_max,
    HEADS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    TURNED_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    PARTS_MAX: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    TURNED_BLOCK: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    IS_DECODE: tl.constexpr,
    ONE_PART: tl.constexpr,
):
    # A program computes the heads of TILE_TOKENS tokens, or ROW_BLOCK heads of one token, over its parts of a context.
    # Program (tile, block of heads, n) computes part n and every following part at a distance of the number of
    # programs. Only decodes have several parts.
    member = tl.arange(0, ROW_BLOCK)
    if IS_DECODE:
        chunk = tl.program_id(0).to(tl.int64)
        first, start, count = 0, chunk, 1
    else:
        chunk = tl.load(tiles + tl.program_id(0) * 2).to(tl.int64)
        first = tl.load(tiles + tl.program_id(0) * 2 + 1)
        start = tl.load(row_starts + chunk).to(tl.int64)
        count = (tl.load(row_starts + chunk + 1) - start).to(tl.int32)
    context = tl.load(contexts + chunk)
    if TILE_TOKENS == 1:
        token = first + tl.zeros([ROW_BLOCK], tl.int32)
        head = tl.program_id(1) * ROW_BLOCK + member
        is_there = (head < HEADS) & (token < count)  # A tile of an empty chunk has no rows.
    else:
        token = first + member // HEADS
        head = member % HEADS
        is_there = (member < TILE_TOKENS * HEADS) & (token < count)
    # Tokens that the tile's last row attends to.
    context_end = tl.minimum(context - count + first + TILE_TOKENS, context)
    part_tokens = _part_tokens(context, SPLIT_TOKENS, PARTS_MAX)
    parts = tl.cdiv(context, part_tokens)
    if ONE_PART:
        parts = 1  # An empty context also has one part, because its result of zeros must be written.
        part_tokens = context_end
    if tl.program_id(2) >= parts:
        return
    row = start + token
    latent = tl.arange(0, LATENT_BLOCK)
    turned = tl.arange(0, TURNED_BLOCK)
    is_latent = (latent < LATENT_DIM)[None, :]
    is_turned = (turned < TURNED_DIM)[None, :]
    query = queries + row[:, None] * query_stride + head[:, None] * (LATENT_DIM + TURNED_DIM)
    plain_query = tl.load(query + latent[None, :], mask=is_there[:, None] & is_latent, other=0.0)
    turned_query = tl.load(query + LATENT_DIM + turned[None, :], mask=is_there[:, None] & is_turned, other=0.0)
    inside = is_there[:, None] & is_latent
    for part in range(tl.program_id(2), parts, tl.num_programs(2)):
        begin = part * part_tokens
        end = tl.minimum(begin + part_tokens, context_end)
        maximum = tl.full([ROW_BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([ROW_BLOCK], tl.float32)
        result = tl.zeros([ROW_BLOCK, LATENT_BLOCK], tl.float32)
        for place in range(begin, end, TOKEN_BLOCK):
            position = place + tl.arange(0, TOKEN_BLOCK)
            in_context = position < end
            page = tl.load(
                block_tables + chunk * table_stride + position // PAGE_TOKENS * page_stride, mask=in_context, other=0
            )
            slot = page.to(tl.int64) * PAGE_TOKENS + position % PAGE_TOKENS
            key = pages + slot[:, None] * (LATENT_DIM + TURNED_DIM)
            latents = tl.load(key + latent[None, :], mask=in_context[:, None] & is_latent, other=0.0)
            rotated = tl.load(key + LATENT_DIM + turned[None, :], mask=in_context[:, None] & is_turned, other=0.0)
            scores = tl.dot(plain_query, tl.trans(latents), input_precision="tf32x3")
            scores = tl.dot(turned_query, tl.trans(rotated), scores, input_precision="tf32x3") * score_scale
            seen = in_context[None, :] & (position[None, :] <= (context - count + token)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(maximum, tl.max(scores, 1))
            # The maximum of a row without visible tokens so far is minus infinity. It is replaced by 0 to avoid NaN in
            # differences.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - base[:, None])
            shrunk = tl.exp2(maximum - base)
            result = result * shrunk[:, None] + tl.dot(weights.to(latents.dtype), latents, input_precision="tf32x3")
            total = total * shrunk + tl.sum(weights, 1)
            maximum = higher
        if ONE_PART:
            result = result / tl.where(total > 0, total, 1.0)[:, None]
            at = attended + row[:, None] * attended_stride + head[:, None] * LATENT_DIM + latent[None, :]
            tl.store(at, result.to(attended.dtype.element_ty), mask=inside)
        else:
            index = (row * HEADS + head) * parts_max + part
            tl.store(sums + index[:, None] * LATENT_DIM + latent[None, :], result, mask=inside)
            tl.store(scales + index * 2, maximum, mask=is_there)
            tl.store(scales + index * 2 + 1, total, mask=is_there)


@triton.jit(do_not_specialize=["parts_max"])
def latents_join_kernel(
    attended,
    contexts,
    sums,
    scales,
    attended_stride,
    parts_max,
    HEADS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    PARTS_MAX: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    PART_BLOCK: tl.constexpr,
):
    # There is one program for each row and head. It reads only the parts of the row's context.
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    context = tl.load(contexts + row)
    parts = tl.cdiv(context, _part_tokens(context, SPLIT_TOKENS, PARTS_MAX))
    latent = tl.arange(0, LATENT_BLOCK)
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    result = tl.zeros([LATENT_BLOCK], tl.float32)
    for start in range(0, parts, PART_BLOCK):
        part = start + tl.arange(0, PART_BLOCK)
        written = part < parts
        index = (row * HEADS + head) * parts_max + part
        part_maximum = tl.load(scales + index * 2, mask=written, other=float("-inf"))
        part_total = tl.load(scales + index * 2 + 1, mask=written, other=0.0)
        inside = written[:, None] & (latent < LATENT_DIM)[None, :]
        part_sums = tl.load(sums + index[:, None] * LATENT_DIM + latent[None, :], mask=inside, other=0.0)
        higher = tl.maximum(maximum, tl.max(part_maximum, 0))
        shrunk = tl.exp2(maximum - higher)
        weights = tl.exp2(part_maximum - higher)
        total = total * shrunk + tl.sum(part_total * weights, 0)
        result = result * shrunk + tl.sum(part_sums * weights[:, None], 0)
        maximum = higher
    place = attended + row * attended_stride + head * LATENT_DIM + latent
    result = result / tl.where(total > 0, total, 1.0)  # An empty context has a total of 0.
    tl.store(place, result.to(attended.dtype.element_ty), mask=latent < LATENT_DIM)


def paged_latents_(
    attended: Tensor,
    queries: Tensor,
    pages: Tensor,
    block_tables: Tensor,
    contexts: Tensor,
    latent_dim: int,
    row_starts: Tensor | None = None,
    tiles: Tensor | None = None,
    parts: int = 1,
    work: DecodeWork | None = None,
) -> None:
    _, page_tokens, _, _, entry_dim = pages.shape
    heads = queries.shape[1] // entry_dim
    assert queries.stride(1) == attended.stride(1) == 1
    assert pages.is_contiguous()
    assert parts == 1 or (work is not None and work.parts_max >= parts and work.sums.shape[3] == latent_dim)
    is_decode = row_starts is None or tiles is None
    count = len(contexts) if tiles is None else len(tiles)
    row_block = min(CHUNK_TILE_ROWS, max(16, triton.next_power_of_2(heads))) if is_decode else CHUNK_TILE_ROWS
    tile_tokens = 1 if is_decode else chunk_tile_tokens(heads)
    head_blocks = 1 if tile_tokens > 1 else triton.cdiv(heads, row_block)
    stages = pipeline_stages(pages.device)
    token_block = TOKEN_BLOCK if stages > 2 and pages.dtype.itemsize == 2 else SMALL_TOKEN_BLOCK
    if row_block == CHUNK_TILE_ROWS and attention.shared_bytes_max(pages.device) < TWO_TILES_SHARED_BYTES:
        stages = 1
    sums, scales = (queries, queries) if work is None else (work.sums, work.scales)
    latent_block = max(16, triton.next_power_of_2(latent_dim))
    latents_kernel[(count, head_blocks, decode_program_count(count, head_blocks, parts))](
        attended,
        queries,
        pages,
        block_tables,
        contexts,
        contexts if row_starts is None else row_starts,
        contexts if tiles is None else tiles,
        sums,
        scales,
        LOG2_E / math.sqrt(entry_dim),
        attended.stride(0),
        queries.stride(0),
        block_tables.stride(0),
        block_tables.stride(1),
        1 if work is None else work.parts_max,
        HEADS=heads,
        LATENT_DIM=latent_dim,
        TURNED_DIM=entry_dim - latent_dim,
        PAGE_TOKENS=page_tokens,
        SPLIT_TOKENS=SPLIT_TOKENS,
        PARTS_MAX=latent_parts_max(heads),
        ROW_BLOCK=row_block,
        LATENT_BLOCK=latent_block,
        TURNED_BLOCK=max(16, triton.next_power_of_2(entry_dim - latent_dim)),
        TOKEN_BLOCK=token_block,
        TILE_TOKENS=tile_tokens,
        IS_DECODE=is_decode,
        ONE_PART=parts == 1,
        num_warps=8 if row_block > 16 else 4,
        num_stages=stages,
    )
    if parts > 1:
        latents_join_kernel[(count, heads)](
            attended,
            contexts,
            sums,
            scales,
            attended.stride(0),
            1 if work is None else work.parts_max,
            HEADS=heads,
            LATENT_DIM=latent_dim,
            SPLIT_TOKENS=SPLIT_TOKENS,
            PARTS_MAX=latent_parts_max(heads),
            LATENT_BLOCK=latent_block,
            PART_BLOCK=PART_BLOCK,
            num_warps=4,
        )
