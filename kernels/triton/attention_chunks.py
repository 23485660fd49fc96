"""Attention of prompt chunks of any lengths over their pages, in one launch.

Each program computes one tile of one chunk's tokens, or a piece of the tile. The rows of its products are all
combinations of a token and a query head that shares the keys and values. The host creates the list of tiles. A tile
that begins after its chunk's last row belongs to no row and costs nothing, so a list may have a fixed length.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trioserve_kernels.kv_format import head_dim_of
from trioserve_kernels.paged import chunk_tile_tokens
from trioserve_kernels.triton.attention import (
    attend_tile,
    begin_slopes,
    begin_softmax,
    kv_bytes,
    pipeline_stages,
    score_numbers,
    token_block,
)

__all__ = ["chunks_kernel", "paged_chunks_"]

NO_WINDOW = 2**31 - 1
# Bytes of a program's queries. In float32 each is multiplied in three pieces, and small GPUs have 99 KiB of shared
# memory.
FLOAT32_QUERY_BYTES_MAX = 16 * 1024


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
    slopes,
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
    PIECE_TOKENS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    SKIPS_MASKS: tl.constexpr,
):
    # There is one program for each tile, key/value head, and piece of a tile with PIECE_TOKENS tokens.
    kv_head = tl.program_id(1)
    chunk = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    tile_end = tl.load(tiles + 2 * tl.program_id(0) + 1) + TILE_TOKENS
    tile_first = tile_end - TILE_TOKENS + tl.program_id(2) * PIECE_TOKENS
    row_start = tl.load(row_starts + chunk)
    count = tl.load(row_starts + chunk + 1) - row_start
    tile_end = tl.minimum(tl.minimum(tile_first + PIECE_TOKENS, tile_end), count)
    if tile_first >= tile_end:
        return
    chunk_start = tl.load(contexts + chunk) - count
    member = tl.arange(0, ROW_BLOCK)
    token = tile_first + member // GROUP
    computed = (member < PIECE_TOKENS * GROUP) & (token < tile_end)
    dim = tl.arange(0, DIM_BLOCK)
    inside = computed[:, None] & (dim < HEAD_DIM)[None, :]
    row = (row_start + token).to(tl.int64)
    place = (kv_head * GROUP + member % GROUP)[:, None] * HEAD_DIM + dim[None, :]
    query = tl.load(queries + row[:, None] * query_stride + place, mask=inside, other=0.0)
    query_position = chunk_start + token
    # First position that the tile's first token attends to, and position after the tile's last token.
    first = tl.maximum(chunk_start + tile_first - window + 1, 0)
    end = chunk_start + tile_end
    maximum, total = begin_softmax(sinks, kv_head * GROUP + member % GROUP, computed, ROW_BLOCK, HAS_SINKS)
    slope = begin_slopes(slopes, kv_head * GROUP + member % GROUP, computed, ROW_BLOCK, HAS_SLOPES)
    result = tl.zeros([ROW_BLOCK, DIM_BLOCK], tl.float32)
    begin = first // TOKEN_BLOCK * TOKEN_BLOCK
    # Every row attends to every token from whole_begin to whole_end - 1. Tiles in between need no masks. The result of
    # a row then depends on the other rows of its tile, but only by the rounding of the compiler's fused operations.
    whole_begin = begin
    whole_end = begin
    if SKIPS_MASKS:
        whole_begin = tl.cdiv(tl.maximum(end - window, 0), TOKEN_BLOCK) * TOKEN_BLOCK
        whole_end = tl.maximum((chunk_start + tile_first + 1) // TOKEN_BLOCK * TOKEN_BLOCK, whole_begin)
    for masked in range(begin, end - (whole_end - whole_begin), TOKEN_BLOCK):
        start = tl.where(masked < whole_begin, masked, masked + (whole_end - whole_begin))
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
    if SKIPS_MASKS:
        for start in range(whole_begin, whole_end, TOKEN_BLOCK):
            position = start + tl.arange(0, TOKEN_BLOCK)
            maximum, total, result = attend_tile(
                query,
                maximum,
                total,
                result,
                pages,
                block_tables + chunk * table_stride,
                page_stride,
                position,
                position >= 0,
                (position >= 0)[None, :],
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
                True,
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
    slopes: Tensor | None = None,
    *,
    skips_masks: bool = True,
) -> None:
    """Compute what reference.paged_chunks_ describes.

    Args:
        skips_masks: False computes every tile of the context in the same way, so that a row's bits do not depend on
            the chunk that it belongs to.
    """
    _, page_tokens, _, kv_heads, _ = pages.shape
    head_dim = head_dim_of(pages)
    numbers, kv_format = kv_bytes(pages)
    group = queries.shape[1] // head_dim // kv_heads
    tile_tokens = chunk_tile_tokens(group)
    assert queries.stride(1) == attended.stride(1) == 1
    assert pages.is_contiguous()
    assert tiles.is_contiguous()
    dim_block = max(16, triton.next_power_of_2(head_dim))
    number_bytes = queries.dtype.itemsize
    piece_tokens = tile_tokens
    if number_bytes == 4:
        piece_tokens = min(tile_tokens, max(1, FLOAT32_QUERY_BYTES_MAX // (4 * dim_block * group)))
    # float32, large heads, and loads that are not asynchronous need the registers of more warps, or smaller tiles.
    is_pipelined = number_bytes == 2 and kv_format == 0 and pipeline_stages(pages.device) > 2
    num_warps = 4 if dim_block * number_bytes < 256 or (dim_block == 128 and is_pipelined) else 8
    token_count = token_block(dim_block, number_bytes if is_pipelined or (dim_block > 128 and kv_format == 0) else 4)
    chunks_kernel[(tiles.shape[0], kv_heads, triton.cdiv(tile_tokens, piece_tokens))](
        attended,
        queries,
        numbers,
        block_tables,
        contexts,
        row_starts,
        tiles,
        queries if sinks is None else sinks,
        queries if slopes is None else slopes,
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
        PIECE_TOKENS=piece_tokens,
        ROW_BLOCK=max(16, triton.next_power_of_2(piece_tokens * group)),
        DIM_BLOCK=dim_block,
        TOKEN_BLOCK=token_count,
        IS_CAPPED=score_cap is not None,
        HAS_SINKS=sinks is not None,
        HAS_SLOPES=slopes is not None,
        KV_FORMAT=kv_format,
        SKIPS_MASKS=skips_masks,
        num_warps=num_warps,
        # float32 already uses all registers, so a pipeline would spill more registers to memory.
        num_stages=pipeline_stages(pages.device) if number_bytes == 2 else 1,
    )
