"""The kernels in Triton, for CUDA, one kernel per file. CUDA builds of torch include triton.

No launch waits for the device, reads from the device, or depends on the device for its grid. Therefore, a step can be
captured in a CUDA graph after all its kernels are compiled. torch's allocator provides temporary memory, which belongs
to the capture. Functions that models do not call with FUSED kernels are not written in Triton: they use torch.
"""

from __future__ import annotations

from trioserve_kernels.reference import (
    attention_prompt,
    clear_slots_,
    gather_context,
    linear,
    linear_by_head,
    paged_attention_decode,
    rotary_,
    store_kv_,
)
from trioserve_kernels.triton.attention_chunks import paged_chunks_
from trioserve_kernels.triton.attention_decode import paged_decode_
from trioserve_kernels.triton.four_bit_product import four_bit_product as four_bit_linear
from trioserve_kernels.triton.fp8_rows import fp8_rows
from trioserve_kernels.triton.latent_attention import paged_latents_
from trioserve_kernels.triton.mlp import activate, activate_and_mul, grouped_linear, weighted_sum
from trioserve_kernels.triton.norm import add_rms_norm_, rms_norm
from trioserve_kernels.triton.rotary import rotary_and_store_kv_
from trioserve_kernels.triton.sampling import choose_tokens

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

NAME = "triton"
FUSED = True
WALKS = True
KEEPS_FOUR_BITS = True
