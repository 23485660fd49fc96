"""The reference kernels, declared as fused. A model then uses kernels for paged attention and sampling.

This implementation is slow. Its purpose is to test these code paths without Triton.
"""

from __future__ import annotations

from trioserve_kernels.reference import (
    activate,
    activate_and_mul,
    add_rms_norm_,
    attention_prompt,
    choose_tokens,
    clear_slots_,
    four_bit_linear,
    fp8_rows,
    gather_context,
    grouped_linear,
    linear,
    linear_by_head,
    paged_attention_decode,
    paged_chunks_,
    paged_decode_,
    paged_latents_,
    rms_norm,
    rotary_,
    rotary_and_store_kv_,
    store_kv_,
    weighted_sum,
)

__all__ = [
    "FUSED",
    "KEEPS_FOUR_BITS",
    "NAME",
    "WALKS",
    "add_rms_norm_",
    "attention_prompt",
    "choose_tokens",
    "clear_slots_",
    "four_bit_linear",
    "fp8_rows",
    "gather_context",
    "grouped_linear",
    "linear",
    "linear_by_head",
    "paged_attention_decode",
    "paged_chunks_",
    "paged_decode_",
    "paged_latents_",
    "rms_norm",
    "rotary_",
    "rotary_and_store_kv_",
    "activate",
    "activate_and_mul",
    "store_kv_",
    "weighted_sum",
]

NAME = "torch, fused"
FUSED = True
WALKS = True
KEEPS_FOUR_BITS = True
