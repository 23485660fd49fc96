"""Attention of prompt chunks of any lengths over their pages, in one launch.

Each program computes one tile of one chunk's tokens. The rows of its products are all combinations of a token and a
query head that shares the keys and values. The host creates the list of tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trioserve_kernels.paged import chunk_tile_tokens
from trioserve_kernels.triton.attention import attend_tile, begin_softmax, pipeline_stages, score_numbers, token_block

__all__ = ["chunks_kernel", "paged_chunks_"]

NO_WINDOW = 2**31 - 1


@triton.jit(do_not_specialize=["window", "table_stride", "page_stride"])
def chunks_kernel(
    attended,
    queries,
    pages,
    block_tables,
    contexts,
    row_starts,
    tiles,
    sinks,
    window,
    score_scale,
    score_cap,
    attended_stride,
    query_stride,
    table_stride,
    page_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    # There is one program for each tile and key/value head.
    kv_head = tl.program_id(1)
    chunk = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    tile_first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    row_start = tl.load(row_starts + chunk)
    count = tl.load(row_starts + chunk + 1) - row_start
    chunk_start = tl.load(contexts + chunk) - count
    member = tl.arange(0, ROW_BLOCK)
    token = tile_first + member // GROUP
    computed = (member < TILE_TOKENS * GROUP) & (token < count)
    dim = tl.arange(0, DIM_BLOCK)
    inside = computed[:, None] & (dim < HEAD_DIM)[None, :]
    row = (row_start + token).to(tl.int64)
    place = (kv_head * GROUP + member % GROUP)[:, None] * HEAD_DIM + dim[None, :]
    query = tl.load(queries + row[:, None] * query_stride + place, mask=inside, other=0.0)
    query_position = chunk_start + token
    # First position that the tile's first token attends to, and position after the tile's last token.
    first = tl.maximum(chunk_start + tile_first - window + 1, 0)
    end = chunk_start + tl.minimum(tile_first + TILE_TOKENS, count)
    maximum, total = begin_softmax(sinks, kv_head * GROUP + member % GROUP, computed, ROW_BLOCK, HAS_SINKS)
    result = tl.zeros([ROW_BLOCK, DIM_BLOCK], tl.float32)
    for start in range(first // TOKEN_BLOCK * TOKEN_BLOCK, end, TOKEN_BLOCK):
        position = start + tl.arange(0, TOKEN_BLOCK)
        behind = query_position[:, None] - position[None, :]
        maximum, total, result = attend_tile(
            query,
            maximum,
            total,
            result,
            pages,
            block_tables + chunk * table_stride,
            page_stride,
            position,
            (position >= first) & (position < end),
            (behind >= 0) & (behind < window),
            kv_head,
            score_scale,
            score_cap,
            KV_HEADS,
            HEAD_DIM,
            PAGE_TOKENS,
            DIM_BLOCK,
            IS_CAPPED,
        )
    # Rows after the chunk's end may have no visible tokens. A chunk without a context is unused, and its result is 0.
    result = result / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(attended + row[:, None] * attended_stride + place, result.to(attended.dtype.element_ty), mask=inside)


def paged_chunks_(
    attended: Tensor,
    queries: Tensor,
    pages: Tensor,
    block_tables: Tensor,
    contexts: Tensor,
    row_starts: Tensor,
    tiles: Tensor,
    window: int | None,
    score_cap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    _, page_tokens, _, kv_heads, head_dim = pages.shape
    group = queries.shape[1] // head_dim // kv_heads
    tile_tokens = chunk_tile_tokens(group)
    assert queries.stride(1) == attended.stride(1) == 1
    assert pages.is_contiguous()
    assert tiles.is_contiguous()
    dim_block = max(16, triton.next_power_of_2(head_dim))
    chunks_kernel[(tiles.shape[0], kv_heads)](
        attended,
        queries,
        pages,
        block_tables,
        contexts,
        row_starts,
        tiles,
        queries if sinks is None else sinks,
        NO_WINDOW if window is None else window,
        *score_numbers(head_dim, score_cap),
        attended.stride(0),
        queries.stride(0),
        block_tables.stride(0),
        block_tables.stride(1),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE_TOKENS=page_tokens,
        TILE_TOKENS=tile_tokens,
        ROW_BLOCK=max(16, triton.next_power_of_2(tile_tokens * group)),
        DIM_BLOCK=dim_block,
        TOKEN_BLOCK=token_block(dim_block, pages.dtype.itemsize),
        IS_CAPPED=score_cap is not None,
        HAS_SINKS=sinks is not None,
        # float32 and large heads need the registers of more warps. float32 already uses all registers, so a pipeline
        # would spill more registers to memory.
        num_warps=4 if dim_block * pages.dtype.itemsize <= 256 else 8,
        num_stages=pipeline_stages(pages.device) if pages.dtype.itemsize == 2 else 1,
    )
