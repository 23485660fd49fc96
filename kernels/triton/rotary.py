"""Normalizes and rotates queries and keys (rotary embeddings), and writes keys and values into their slots, in one pass
over a row.

Slots of 8 bits get the bytes that kv_format.py describes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trioserve_kernels.kv_format import LARGEST, TINY
from trioserve_kernels.triton.attention import kv_bytes

__all__ = ["eight_bit_codes", "rotary_and_store_kv_", "rotary_store_kernel"]

HEAD_BLOCK = 8  # Number of heads of one program, usually with 8 x 128 numbers.


@triton.jit
def eight_bit_codes(numbers, scales, KV_FORMAT: tl.constexpr):
    """Return codes of 8 bits, rounded to the nearest and to even, as uint8.

    Args:
        numbers: float32, at most the format's largest number times the scale.
        scales: float32, 0 to store zeros.
        KV_FORMAT: see `kv_bytes`.
    """
    shares = tl.where(scales == 0.0, 0.0, tl.div_rn(numbers, tl.where(scales == 0.0, 1.0, scales)))
    if KV_FORMAT == 1:
        # The sum has no bits for fractions, so it is rounded.
        codes = (shares + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    else:
        bits = shares.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # e4m3 keeps 3 bits after the leading one. Below the exponent -6, numbers are multiples of 1 / 512.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        small = (tl.abs(shares) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
        codes = tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
    return codes.to(tl.uint8)


@triton.jit
def rotary_store_kernel(
    qkv,
    cos,
    sin,
    slots_of_layer,
    slots,
    norm_weight,
    norm_eps,
    qkv_stride,
    slot_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    TINY: tl.constexpr,
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
    if HAS_NORM:
        # Both results are rounded to the dtype, as by separate operators.
        weight = norm_weight + head * HEAD_DIM + half
        weight_low = tl.load(weight, mask=rotated, other=0.0).to(tl.float32)
        weight_high = tl.load(weight + HEAD_DIM // 2, mask=rotated, other=0.0).to(tl.float32)
        exact_low = low.to(tl.float32)
        exact_high = high.to(tl.float32)
        mean = (tl.sum(exact_low * exact_low, 1) + tl.sum(exact_high * exact_high, 1)) / HEAD_DIM
        factor = tl.rsqrt(mean + norm_eps)[:, None]
        normed_low = ((exact_low * factor).to(low.dtype).to(tl.float32) * weight_low).to(low.dtype)
        normed_high = ((exact_high * factor).to(low.dtype).to(tl.float32) * weight_high).to(low.dtype)
        low = tl.where(rotated, normed_low, low)
        high = tl.where(rotated, normed_high, high)
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
    kept_low = tl.where(rotated, rotated_low, low)
    kept_high = tl.where(rotated, rotated_high, high)
    head_size = HEAD_DIM if KV_FORMAT == 0 else HEAD_DIM + 2
    target = slots_of_layer + slot * slot_stride + (head - HEADS) * head_size + half
    if KV_FORMAT == 0:
        tl.store(target, kept_low, mask=kept)
        tl.store(target + HEAD_DIM // 2, kept_high, mask=kept)
    else:
        kept_low = kept_low.to(tl.float32)
        kept_high = kept_high.to(tl.float32)
        size_low = tl.abs(kept_low)
        size_high = tl.abs(kept_high)
        is_finite_low = size_low < float("inf")
        is_finite_high = size_high < float("inf")
        flaws = tl.max(1 - is_finite_low.to(tl.int32), 1) + tl.max(1 - is_finite_high.to(tl.int32), 1)
        is_finite = (flaws == 0)[:, None]
        most = tl.maximum(
            tl.max(tl.where(is_finite_low, size_low, 0.0), 1), tl.max(tl.where(is_finite_high, size_high, 0.0), 1)
        )[:, None]
        # The scale is rounded up to bfloat16, so that dividing by it does not make the largest number overflow.
        bits = tl.div_rn(most, tl.full([HEAD_BLOCK, 1], LARGEST, tl.float32)).to(tl.int32, bitcast=True)
        bits = tl.where(most <= TINY, 0, (bits + 0xFFFF) & -0x10000)
        scales = tl.where(is_finite, bits.to(tl.float32, bitcast=True), 0.0)
        tl.store(target, eight_bit_codes(tl.where(is_finite, kept_low, 0.0), scales, KV_FORMAT), mask=kept)
        tl.store(
            target + HEAD_DIM // 2, eight_bit_codes(tl.where(is_finite, kept_high, 0.0), scales, KV_FORMAT), mask=kept
        )
        bits = tl.where(is_finite, bits, 0x7FC00000)
        scale = slots_of_layer + slot * slot_stride + (head - HEADS) * head_size + HEAD_DIM
        is_kept = (head >= HEADS) & (head < HEADS + 2 * KV_HEADS)
        tl.store(scale, ((bits >> 16) & 0xFF).to(tl.uint8), mask=is_kept)
        tl.store(scale + 1, ((bits >> 24) & 0xFF).to(tl.uint8), mask=is_kept)


def rotary_and_store_kv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots_of_layer: Tensor,
    slots: Tensor,
    kv_heads: int,
    head_norm: tuple[Tensor, float] | None = None,
) -> None:
    rows, head_dim = qkv.shape[0], cos.shape[-1]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    assert qkv.stride(1) == 1
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    numbers, kv_format = kv_bytes(slots_of_layer)
    if rows:
        rotary_store_kernel[(rows, triton.cdiv(heads + 2 * kv_heads, HEAD_BLOCK))](
            qkv,
            cos,
            sin,
            numbers,
            slots,
            *((qkv, 0.0) if head_norm is None else head_norm),
            qkv.stride(0),
            numbers.stride(0),
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            HEAD_BLOCK=HEAD_BLOCK,
            HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
            HAS_NORM=head_norm is not None,
            KV_FORMAT=kv_format,
            LARGEST=LARGEST.get(slots_of_layer.dtype, 0.0),
            TINY=TINY,
        )
