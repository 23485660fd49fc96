"""Shared parts of the attention kernels: running softmax over tiles of a paged context, and the size of a tile.

Source: FlashAttention (arXiv 2205.14135). Scores are in units of log 2, because the hardware computes exp2. Tokens that
a row does not attend to are never read, so the unused slots of a page may contain any numbers.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["attend_tile", "begin_softmax", "pipeline_stages", "score_numbers", "shared_bytes_max", "token_block"]

LOG2_E = 1.4426950408889634
# Bytes of a tile of keys, and of a tile of values. Two tiles of keys and two of values are loaded at a time, and small
# GPUs have 99 KiB of shared memory.
TILE_BYTES_MAX = 16 * 1024
# The loads of a tile's keys and values depend on a load from the block table, and Triton divides the stages between
# both loads. With up to 4 stages, there is one buffer for keys and one for values. With 5 stages, there are two buffers
# for each, so the next tile is loaded while this tile is multiplied. Asynchronous products (wgmma) use one more buffer.
PIPELINE_STAGES = 5
# Additional stages are used if a program may use at least this number of bytes of shared memory. With heads of 128
# numbers on sm_90, decodes need 71 KiB and chunks need 113 KiB. Three or two programs then run on a multiprocessor, as
# without a pipeline. On sm_80 (164 KiB per multiprocessor), sm_86 and sm_89 (100 KiB), only one program would run
# instead of two. On sm_86 and sm_89, chunks with heads of 256 numbers would not fit.
PIPELINED_SHARED_BYTES = 227 * 1024


def pipeline_stages(device: torch.device) -> int:
    return PIPELINE_STAGES if shared_bytes_max(device) >= PIPELINED_SHARED_BYTES else 2


@functools.cache
def shared_bytes_max(device: torch.device) -> int:
    """Return the shared memory that one program may use, in bytes.

    Args:
        device: a CUDA device. For any other device the result is 0.
    """
    if device.type != "cuda":
        return 0
    properties: Any = torch.cuda.get_device_properties(device)  # The types of torch do not contain the attribute.
    return int(properties.shared_memory_per_block_optin)


@triton.jit
def begin_softmax(sinks, head, is_there, ROWS: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Return the running maximum and total of the softmax before the first tile, float32 [ROWS].

    Args:
        sinks: float32, the sink of each head. Not read if HAS_SINKS is False.
        head: int [ROWS], the head of each row.
        is_there: bool [ROWS], True for rows whose head has a sink.
        ROWS: number of rows.
        HAS_SINKS: True if heads have sinks.
    """
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        maximum = tl.load(sinks + head, mask=is_there, other=0.0) * 1.4426950408889634
        maximum = tl.where(is_there, maximum, float("-inf"))
        total = tl.where(is_there, 1.0, 0.0)
    return maximum, total


@triton.jit
def attend_tile(
    query,
    maximum,
    total,
    attended,
    pages,
    block_table,
    page_stride,
    position,
    in_context,
    seen,
    kv_head,
    score_scale,
    score_cap,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    IS_CAPPED: tl.constexpr,
):
    """Add one tile of N tokens to the running softmax of M query rows.

    Args:
        query: [M, DIM_BLOCK].
        maximum: float32 [M], running maximum.
        total: float32 [M], running sum of weights.
        attended: float32 [M, DIM_BLOCK], running weighted sum of values.
        pages: one layer's cache.
        block_table: int32, pages of the sequence.
        page_stride: distance between two entries of the block table.
        position: int [N], positions of the tile's tokens.
        in_context: bool [N], tokens that may be read.
        seen: bool [M, N] or [1, N], tokens that a row attends to.
        kv_head: index of the key/value head.
        score_scale: see `score_numbers`.
        score_cap: see `score_numbers`.
        KV_HEADS: number of key/value heads.
        HEAD_DIM: numbers per head.
        PAGE_TOKENS: tokens per page.
        DIM_BLOCK: HEAD_DIM rounded up to a power of 2.
        IS_CAPPED: True to limit scores with score_cap.

    Returns:
        The new maximum, total and attended.
    """
    dim = tl.arange(0, DIM_BLOCK)
    page = tl.load(block_table + position // PAGE_TOKENS * page_stride, mask=in_context, other=0)
    slot = page.to(tl.int64) * PAGE_TOKENS + position % PAGE_TOKENS
    key = pages + slot * (2 * KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
    value = key + KV_HEADS * HEAD_DIM
    keys = tl.load(key[None, :] + dim[:, None], mask=in_context[None, :] & (dim < HEAD_DIM)[:, None], other=0.0)
    scores = tl.dot(query, keys, input_precision="tf32x3") * score_scale
    if IS_CAPPED:
        scores = tl.where(scores > 126.0, 126.0, scores)  # keeps NaN
        scores = score_cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(maximum, tl.max(scores, 1))
    # The maximum of a row without visible tokens so far is minus infinity. It is replaced by 0 to avoid NaN in
    # differences.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    shrunk = tl.exp2(maximum - base)
    values = tl.load(value[:, None] + dim[None, :], mask=in_context[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    attended = attended * shrunk[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="tf32x3")
    return higher, total * shrunk + tl.sum(weights, 1), attended


def score_numbers(head_dim: int, score_cap: float | None) -> tuple[float, float]:
    """Return the factor on the product of query and key, and the cap, both in units of log 2.

    With a cap, the kernel computes cap * (1 - 2 / (1 + 2 ** a)) from the scaled product a. This formula is a tanh.

    Args:
        head_dim: numbers per head.
        score_cap: limit of the scores, or None.
    """
    if score_cap is None:
        return LOG2_E / math.sqrt(head_dim), 0.0
    return 2 * LOG2_E / (math.sqrt(head_dim) * score_cap), score_cap * LOG2_E


def token_block(dim_block: int, number_bytes: int) -> int:
    """Return the tokens per tile: a power of 2 between 16 and 64.

    Args:
        dim_block: numbers per head, rounded up to a power of 2.
        number_bytes: bytes per number.
    """
    return min(64, max(16, TILE_BYTES_MAX // (dim_block * number_bytes)))
