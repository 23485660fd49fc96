"""What both attention kernels share: the running softmax over tiles of a paged context (FlashAttention, arXiv
2205.14135), and how large a tile is.

Scores are kept in units of log 2, since exp2 is what the hardware computes. Tokens that a row does not see are never
read, so whatever lies in a page behind its last token is harmless.
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
TILE_BYTES_MAX = 16 * 1024  # keys or values of a tile; two of each are in flight, and small GPUs have 99 KiB
# Keys and values are found through the block table, so their loads wait for another load of the same tile, and Triton
# divides the stages between the two. Up to 4 stages leave one buffer for keys and one for values; 5 leave two of each,
# so that the next tile is on its way while this one is multiplied. Where products are asynchronous (wgmma), there is
# one more.
PIPELINE_STAGES = 5
# What a program may use where these are worth it: with heads of 128 numbers decodes take 71 KiB on sm_90 and chunks
# 113, and three and two of them run on a multiprocessor as before. On sm_80 (164 KiB a multiprocessor), sm_86 and sm_89
# (100) one would run in the place of two, and on the latter chunks with heads of 256 would not fit.
PIPELINED_SHARED_BYTES = 227 * 1024


def pipeline_stages(device: torch.device) -> int:
    return PIPELINE_STAGES if shared_bytes_max(device) >= PIPELINED_SHARED_BYTES else 2


@functools.cache
def shared_bytes_max(device: torch.device) -> int:
    """What one program may use of a multiprocessor's shared memory; 0 where there is none, in the interpreter."""
    if device.type != "cuda":
        return 0
    properties: Any = torch.cuda.get_device_properties(device)  # torch's own types leave the number out
    return int(properties.shared_memory_per_block_optin)


@triton.jit
def begin_softmax(sinks, head, is_there, ROWS: tl.constexpr, HAS_SINKS: tl.constexpr):
    """The running maximum and total [ROWS] before any tile. head, is_there: [ROWS], whose sink is a row's, and whether
    it has one; without sinks nothing has been seen."""
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
    """One tile of tokens into the running softmax of query [M, DIM_BLOCK].

    page_stride: from one entry of the block table to the next. position, in_context: [N], the tile's tokens and which
    of them may be read. seen: [M, N] or [1, N]. score_scale, score_cap: see score_numbers.
    Returns the new maximum, total [M] and attended [M, DIM_BLOCK], all float32.
    """
    dim = tl.arange(0, DIM_BLOCK)
    page = tl.load(block_table + position // PAGE_TOKENS * page_stride, mask=in_context, other=0)
    slot = page.to(tl.int64) * PAGE_TOKENS + position % PAGE_TOKENS
    key = pages + slot * (2 * KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
    value = key + KV_HEADS * HEAD_DIM
    keys = tl.load(key[None, :] + dim[:, None], mask=in_context[None, :] & (dim < HEAD_DIM)[:, None], other=0.0)
    scores = tl.dot(query, keys, input_precision="tf32x3") * score_scale
    if IS_CAPPED:
        scores = tl.where(scores > 126.0, 126.0, scores)  # a NaN stays one
        scores = score_cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(maximum, tl.max(scores, 1))
    # A row that has seen nothing yet keeps minus infinity; 0 in its place keeps the differences numbers.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    shrunk = tl.exp2(maximum - base)
    values = tl.load(value[:, None] + dim[None, :], mask=in_context[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    attended = attended * shrunk[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="tf32x3")
    return higher, total * shrunk + tl.sum(weights, 1), attended


def score_numbers(head_dim: int, score_cap: float | None) -> tuple[float, float]:
    """What a product of query and key is multiplied by, to be in units of log 2. Where scores are capped, what comes of
    this is a, and then they are the second number times 1 - 2 / (1 + 2 ** a), which is a tanh."""
    if score_cap is None:
        return LOG2_E / math.sqrt(head_dim), 0.0
    return 2 * LOG2_E / (math.sqrt(head_dim) * score_cap), score_cap * LOG2_E


def token_block(dim_block: int, number_bytes: int) -> int:
    """Tokens of a tile: a power of 2 between 16 and 64."""
    return min(64, max(16, TILE_BYTES_MAX // (dim_block * number_bytes)))
