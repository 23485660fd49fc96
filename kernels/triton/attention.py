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
from torch import Tensor

from trioserve_kernels.kv_format import is_coded

__all__ = [
    "attend_tile",
    "begin_slopes",
    "begin_softmax",
    "kv_bytes",
    "pipeline_stages",
    "score_numbers",
    "shared_bytes_max",
    "token_block",
]

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
def begin_slopes(slopes, head, is_there, ROWS: tl.constexpr, HAS_SLOPES: tl.constexpr):
    """Return the slope of each row's head in units of log 2, float32 [ROWS].

    Args:
        slopes: float32, the slope of each head. Not read if HAS_SLOPES is False.
        head: int [ROWS], the head of each row.
        is_there: bool [ROWS], True for rows with a head.
        ROWS: number of rows.
        HAS_SLOPES: True if heads have slopes.
    """
    slope = tl.zeros([ROWS], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + head, mask=is_there, other=0.0) * 1.4426950408889634
    return slope


@triton.jit
def _loaded(pointer, in_context, in_head, IS_WHOLE: tl.constexpr, IS_PADDED: tl.constexpr):
    """Load numbers of a tile. Numbers outside of the context or of the head are 0.

    Args:
        pointer: addresses.
        in_context: bool, not used if IS_WHOLE.
        in_head: bool, not used if IS_WHOLE and not IS_PADDED.
        IS_WHOLE: True if all tokens are in the context.
        IS_PADDED: True if some numbers are outside of the head.
    """
    if not IS_WHOLE:
        numbers = tl.load(pointer, mask=in_context & in_head, other=0)
    elif IS_PADDED:
        numbers = tl.load(pointer, mask=in_head, other=0)
    else:
        numbers = tl.load(pointer)
    return numbers


@triton.jit
def _scales(head, in_context, HEAD_DIM: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Load the scales of 8-bit heads, float32 [N]. They are two bytes of a bfloat16 after the head's codes."""
    low = _loaded(head + HEAD_DIM, in_context, in_context, IS_WHOLE, False).to(tl.uint32)
    high = _loaded(head + HEAD_DIM + 1, in_context, in_context, IS_WHOLE, False).to(tl.uint32)
    return ((high << 24) | (low << 16)).to(tl.float32, bitcast=True)


@triton.jit
def _decoded(codes, KV_FORMAT: tl.constexpr):
    """Convert codes of 8 bits to float32, without their scale. Hardware before sm_89 cannot convert e4m3."""
    if KV_FORMAT == 1:
        numbers = codes.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        # float16 has one more exponent bit. So the same bits, shifted, are the number divided by 256.
        wide = codes.to(tl.uint16)
        wide = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        numbers = wide.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return numbers


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
    slope,
    query_position,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Add one tile of N tokens to the running softmax of M query rows.

    Args:
        query: [M, DIM_BLOCK].
        maximum: float32 [M], running maximum.
        total: float32 [M], running sum of weights.
        attended: float32 [M, DIM_BLOCK], running weighted sum of values.
        pages: one layer's cache, as bytes if it has 8 bits.
        block_table: int32, pages of the sequence.
        page_stride: distance between two entries of the block table.
        position: int [N], positions of the tile's tokens.
        in_context: bool [N], tokens that may be read.
        seen: bool [M, N] or [1, N], tokens that a row attends to.
        kv_head: index of the key/value head.
        score_scale: see `score_numbers`.
        score_cap: see `score_numbers`.
        slope: float32 [M], slope of each row's head, see `begin_slopes`. Not read if HAS_SLOPES is False.
        query_position: int [M] or [1], position of each row's token.
        KV_HEADS: number of key/value heads.
        HEAD_DIM: numbers per head.
        PAGE_TOKENS: tokens per page.
        DIM_BLOCK: HEAD_DIM rounded up to a power of 2.
        IS_CAPPED: True to limit scores with score_cap.
        HAS_SLOPES: True to add slopes times distances to the scores.
        KV_FORMAT: format of the pages, see `kv_bytes`.
        IS_WHOLE: True if every row attends to every token of the tile. Then the two masks are not used.

    Returns:
        The new maximum, total and attended.
    """
    dim = tl.arange(0, DIM_BLOCK)
    in_head = dim < HEAD_DIM
    IS_PADDED: tl.constexpr = DIM_BLOCK != HEAD_DIM
    HEAD_SIZE: tl.constexpr = HEAD_DIM if KV_FORMAT == 0 else HEAD_DIM + 2
    entry = block_table + position // PAGE_TOKENS * page_stride
    page = _loaded(entry, in_context, in_context, IS_WHOLE, False)
    slot = page.to(tl.int64) * PAGE_TOKENS + position % PAGE_TOKENS
    key = pages + slot * (2 * KV_HEADS * HEAD_SIZE) + kv_head * HEAD_SIZE
    value = key + KV_HEADS * HEAD_SIZE
    keys = _loaded(key[None, :] + dim[:, None], in_context[None, :], in_head[:, None], IS_WHOLE, IS_PADDED)
    if KV_FORMAT == 0:
        scores = tl.dot(query, keys, input_precision="tf32x3") * score_scale
    else:
        # The codes are exact in 16 bits. So the keys are not rounded, if their scale is applied to the scores.
        scores = tl.dot(query, _decoded(keys, KV_FORMAT).to(query.dtype), input_precision="tf32x3")
        scores = scores * (_scales(key, in_context, HEAD_DIM, IS_WHOLE) * score_scale)[None, :]
    if IS_CAPPED:
        scores = tl.where(scores > 126.0, 126.0, scores)  # keeps NaN
        scores = score_cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
    if HAS_SLOPES:
        scores += slope[:, None] * (position[None, :] - query_position[:, None]).to(tl.float32)
    if not IS_WHOLE:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(maximum, tl.max(scores, 1))
    base = higher
    if not IS_WHOLE:
        # The maximum of a row without visible tokens so far is minus infinity. It is replaced by 0 to avoid NaN in
        # differences.
        base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    shrunk = tl.exp2(maximum - base)
    values = _loaded(value[:, None] + dim[None, :], in_context[:, None], in_head[None, :], IS_WHOLE, IS_PADDED)
    if KV_FORMAT != 0:
        value_scales = _scales(value, in_context, HEAD_DIM, IS_WHOLE)
        values = (_decoded(values, KV_FORMAT) * value_scales[:, None]).to(query.dtype)
    attended = attended * shrunk[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="tf32x3")
    return higher, total * shrunk + tl.sum(weights, 1), attended


def kv_bytes(pages: Tensor) -> tuple[Tensor, int]:
    """Return pages as a kernel reads them, and the KV_FORMAT of the kernel: 0 for plain numbers, 1 int8, 2 e4m3.

    Args:
        pages: keys and values. In 8 bits, the result has the same memory as bytes, see kv_format.py.
    """
    if not is_coded(pages):
        return pages, 0
    return pages.view(torch.uint8), 1 if pages.dtype == torch.int8 else 2


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
