"""Plain torch: what each kernel means. Every other implementation is compared with this one.

Shapes: T tokens of a step; H heads, K key/value heads, G = H / K heads to each of them, D numbers a head; a page is one
KV block of P tokens, and `pages` is one layer's cache, [pages, P, 2, K, D], keys at index 0 and values at index 1.

What a row's numbers depend on: its own token and its own context, and nothing else up to rounding. A product or a
softmax may be blocked differently for another number of rows or another padded length, and then sums in another order:
about 1e-6 of the largest term in float32, the last bit or two in bfloat16 and float16. Padded positions are masked with
minus infinity and add an exact 0, provided that what lies there is finite; see `clear_slots_`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as _rms_norm
from torch.nn.functional import scaled_dot_product_attention, silu

__all__ = [
    "NAME",
    "attention_prompt",
    "clear_slots_",
    "decode_mask",
    "gather_context",
    "paged_attention_decode",
    "prompt_mask",
    "rms_norm",
    "rotary_",
    "silu_and_mul",
    "store_kv_",
]

NAME = "torch"


def rms_norm(values: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """values / sqrt(mean(values ** 2) + eps) * weight over the last dimension (arXiv 1910.07467).

    The mean is taken in float32 whatever the dtype. weight: [last dimension], or None for ones.
    """
    return _rms_norm(values, values.shape[-1:], weight, eps)


def rotary_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn the pairs (j, j + D / 2) of every head by its token's angles, in place (RoFormer, arXiv 2104.09864).

    heads: [T, heads, D], the last two dimensions contiguous. cos, sin: [T, 1, D] in the dtype of heads; both halves
    hold the same angles, and the first half of sin is negated, so that the turn is heads * cos + swapped halves * sin.
    """
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(cos).addcmul_(swapped, sin)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 * I] to [T, I]: silu of the first half times the second half (SwiGLU, arXiv 2002.05202)."""
    gate, up = gate_up.chunk(2, -1)
    return silu(gate).mul_(up)


def store_kv_(slots_of_layer: Tensor, keys_values: Tensor, slots: Tensor) -> None:
    """Write each token's keys and values into its slot.

    slots_of_layer: [pages * P, 2 * K * D], the layer's pages seen as rows. keys_values: [T, 2 * K * D] in the same
    dtype. slots: int64 [T], page * P + offset; all different.
    """
    slots_of_layer.index_copy_(0, slots, keys_values)


def clear_slots_(slots_of_layer: Tensor, slots: Tensor) -> None:
    """Zero the slots (int64 [n]) of a page that come after its last token.

    Masked positions are multiplied by an exact 0, and 0 * NaN is NaN: what an earlier user of the page left there must
    not reach this one.
    """
    slots_of_layer.index_fill_(0, slots, 0)


def decode_mask(visible_from: Tensor, visible_to: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """[n, 1, 1, width]: 0 where visible_from[i] <= position < visible_to[i], minus infinity elsewhere.

    Positions count from the first slot of the row's block table. visible_from, visible_to: int64 [n].
    """
    position = torch.arange(width, device=visible_to.device)
    hidden = (position >= visible_to[:, None]) | (position < visible_from[:, None])
    return _additive(hidden, dtype)[:, None, None]


def prompt_mask(
    query_offset: int, query_count: int, context: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[query_count, context]: 0 where query query_offset + i sees position j, that is j <= query_offset + i and, with a
    window of W, j > query_offset + i - W; minus infinity elsewhere."""
    query = torch.arange(query_offset, query_offset + query_count, device=device)[:, None]
    position = torch.arange(context, device=device)
    hidden = position > query
    if window is not None:
        hidden |= position <= query - window
    return _additive(hidden, dtype)


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def gather_context(pages: Tensor, block_table: Tensor) -> Tensor:
    """Copy the pages of a block table (int64 [n]) behind one another: [n * P, 2, K, D]."""
    return pages.index_select(0, block_table).flatten(0, 1)


def paged_attention_decode(queries: Tensor, pages: Tensor, block_table: Tensor, mask: Tensor) -> Tensor:
    """One query per sequence over its pages: softmax(q k / sqrt(D) + mask) v.

    queries: [n, H * D] (head-major), block_table: int64 [n, width], rows padded with any page that the sequence owns;
    mask: [n, 1, 1, width * P], as from decode_mask. Returns [n, H * D]. Scores and sums are in float32.
    """
    count, width = block_table.shape
    _, page_tokens, _, kv_heads, head_dim = pages.shape
    # The heads that share keys and values become query rows of one head: nothing has to be repeated.
    grouped = queries.view(count, kv_heads, -1, head_dim)
    context = pages.index_select(0, block_table.view(-1)).view(count, width * page_tokens, 2, kv_heads, head_dim)
    keys, values = context.permute(2, 0, 3, 1, 4).unbind(0)
    return scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(count, -1)


def attention_prompt(queries: Tensor, keys_values: Tensor, mask: Tensor | None) -> Tensor:
    """Consecutive tokens of one prompt over the keys and values up to the last of them.

    queries: [n, H * D] (head-major). keys_values: [context, 2, K, D]. mask: [n, context] as from prompt_mask; None when
    the queries are exactly the context and there is no window: plain causal. Returns [n, H * D].
    """
    _, _, kv_heads, head_dim = keys_values.shape
    grouped = queries.view(queries.shape[0], kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    # Key/value heads stand in the place of the batch, and their group is a dimension of stride 0: nothing is repeated.
    keys, values = keys_values.permute(1, 2, 0, 3).unsqueeze(2).expand(-1, -1, grouped.shape[1], -1, -1).unbind(0)
    attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, is_causal=mask is None)
    return attended.permute(2, 0, 1, 3).reshape(queries.shape[0], -1)
