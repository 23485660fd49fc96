"""Triton kernels that are batch-invariant: the bits of a row depend only on its own token and context.

Kernels for norms, rotary embeddings, activation and sampling are always batch-invariant, because a program computes
whole rows in blocks of one shape. Products use the kernel of product.py instead of cuBLAS. A decode is computed like a
row of a prompt, by the same kernel over the same tiles at absolute positions. The context of a decode is not split
between programs, which is slower for few rows with long contexts. One assumption remains: the tensor cores' result for
a row does not depend on the row's index in a tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trioserve_kernels.four_bits import FourBitWeight
from trioserve_kernels.paged import DecodeWork
from trioserve_kernels.reference import Product
from trioserve_kernels.triton import (
    FUSED,
    KEEPS_FOUR_BITS,
    WALKS,
    activate,
    activate_and_mul,
    add_rms_norm_,
    attention_prompt,
    choose_tokens,
    clear_slots_,
    fp8_rows,
    gather_context,
    linear_by_head,
    paged_attention_decode,
    paged_latents_,
    rms_norm,
    rotary_,
    rotary_and_store_kv_,
    store_kv_,
    weighted_sum,
)
from trioserve_kernels.triton.attention_chunks import paged_chunks_ as _paged_chunks_
from trioserve_kernels.triton.four_bit_product import four_bit_product
from trioserve_kernels.triton.product import grouped_product
from trioserve_kernels.triton.product import product as _product

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

NAME = "triton, batch-invariant"


def linear(values: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
    return _product(values, weight, bias)


def four_bit_linear(values: Tensor, weight: FourBitWeight, bias: Tensor | None) -> Tensor:
    return four_bit_product(values, weight, bias, batch_invariant=True)


def grouped_linear(values: Tensor, weight: Tensor | FourBitWeight, ends: Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(weight, FourBitWeight):
        return four_bit_product(values, weight, bias, ends, batch_invariant=True)
    return grouped_product(values, weight, ends, bias, batch_invariant=True)


def paged_decode_(
    attended: Tensor,
    queries: Tensor,
    pages: Tensor,
    block_tables: Tensor,
    contexts: Tensor,
    window: int | None,
    parts: int,
    work: DecodeWork,
    score_cap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> None:
    # Each row is a chunk of one token. `parts` and `work` are not used.
    count = queries.shape[0]
    row_starts = torch.arange(count + 1, dtype=torch.int32, device=queries.device)
    # Each int64 is viewed as two int32: the number of a chunk, and 0, because its only tile begins at its first row.
    tiles = torch.arange(count, dtype=torch.int64, device=queries.device).view(torch.int32).view(count, 2)
    paged_chunks_(attended, queries, pages, block_tables, contexts, row_starts, tiles, window, score_cap, sinks, slopes)


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
) -> None:
    _paged_chunks_(
        attended,
        queries,
        pages,
        block_tables,
        contexts,
        row_starts,
        tiles,
        window,
        score_cap,
        sinks,
        slopes,
        skips_masks=False,
    )
