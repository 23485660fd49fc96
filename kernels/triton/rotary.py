"""Rotates queries and keys (rotary embeddings) and writes keys and values into their slots, in one pass over a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["rotary_and_store_kv_", "rotary_store_kernel"]

HEAD_BLOCK = 8  # Number of heads of one program, usually with 8 x 128 numbers.


@triton.jit
def rotary_store_kernel(
    qkv,
    cos,
    sin,
    slots_of_layer,
    slots,
    qkv_stride,
    slot_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # The slot is needed for an address. It is loaded before the first store, because the compiler does not move a load
    # before a store.
    slot = tl.load(slots + row).to(tl.int64)
    head = (tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK))[:, None]
    half = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (head < HEADS + 2 * KV_HEADS) & (half < HEAD_DIM // 2)
    rotated = inside & (head < HEADS + KV_HEADS)
    first = qkv + row * qkv_stride + head * HEAD_DIM + half
    second = first + HEAD_DIM // 2
    low = tl.load(first, mask=inside, other=0.0)
    high = tl.load(second, mask=inside, other=0.0)
    angle = row * HEAD_DIM + half
    angles = half < HEAD_DIM // 2
    cos_low = tl.load(cos + angle, mask=angles, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + angle + HEAD_DIM // 2, mask=angles, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + angle, mask=angles, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + angle + HEAD_DIM // 2, mask=angles, other=0.0).to(tl.float32)
    rotated_low = (low.to(tl.float32) * cos_low + high.to(tl.float32) * sin_low).to(low.dtype)
    rotated_high = (high.to(tl.float32) * cos_high + low.to(tl.float32) * sin_high).to(high.dtype)
    tl.store(first, rotated_low, mask=rotated)
    tl.store(second, rotated_high, mask=rotated)
    # A slot has the order of a row without its queries: all keys, then all values.
    kept = inside & (head >= HEADS)
    target = slots_of_layer + slot * slot_stride + (head - HEADS) * HEAD_DIM + half
    tl.store(target, tl.where(rotated, rotated_low, low), mask=kept)
    tl.store(target + HEAD_DIM // 2, tl.where(rotated, rotated_high, high), mask=kept)


def rotary_and_store_kv_(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots_of_layer: Tensor, slots: Tensor, kv_heads: int
) -> None:
    rows, head_dim = qkv.shape[0], cos.shape[-1]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    assert qkv.stride(1) == 1
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    if rows:
        rotary_store_kernel[(rows, triton.cdiv(heads + 2 * kv_heads, HEAD_BLOCK))](
            qkv,
            cos,
            sin,
            slots_of_layer,
            slots,
            qkv.stride(0),
            slots_of_layer.stride(0),
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            HEAD_BLOCK=HEAD_BLOCK,
            HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
        )
