"""Reference implementation of the kernels in plain torch. All other implementations are compared with it.

Names in shapes: T tokens of a step, H query heads, K key/value heads, G = H / K query heads per key/value head, D
numbers per head. A page is one KV block of P tokens. `pages` is one layer's cache, [pages, P, 2, K, D], with keys at
index 0 and values at index 1.

In latent attention, `pages` is [pages, P, 1, 1, D]. All heads share one key, and the key's first `latent_dim` numbers
are also the value. Attention then returns H * latent_dim numbers per row instead of H * D. If keys and values are
stored in 8 bits, kv_format.py defines the last dimension.

A row's result depends only on its own token and context, except for rounding. With a different number of rows or a
different padded length, a product or softmax may be split differently and then sums in a different order. In float32,
the difference is about 1e-6 of the largest term. In bfloat16 and float16, it is the last one or two bits. Padded
positions are masked with minus infinity and add exactly 0, provided that their content is finite (see `clear_slots_`).
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import gelu, relu, scaled_dot_product_attention, silu
from torch.nn.functional import rms_norm as _rms_norm

from trioserve_kernels.four_bits import FourBitWeight
from trioserve_kernels.fp8 import fp8_rows
from trioserve_kernels.kv_format import SCALE_BYTES, encode, head_dim_of, is_coded, taken
from trioserve_kernels.paged import DecodeWork

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "CLAMPED_LIMIT",
    "CLAMPED_SLOPE",
    "DRAW_TILES",
    "FUSED",
    "KEEPS_FOUR_BITS",
    "NAME",
    "Flaw",
    "Product",
    "WALKS",
    "add_rms_norm_",
    "attention_prompt",
    "choose_tokens",
    "clear_slots_",
    "decode_mask",
    "four_bit_linear",
    "fp8_rows",
    "gather_context",
    "grouped_linear",
    "has_grouped_mm",
    "linear",
    "linear_by_group",
    "linear_by_head",
    "multiplier",
    "paged_chunks_",
    "paged_attention_decode",
    "paged_decode_",
    "paged_latents_",
    "prompt_mask",
    "rms_norm",
    "rotary_",
    "rotary_and_store_kv_",
    "activate",
    "activate_and_mul",
    "store_kv_",
    "weighted_sum",
]

NAME = "torch"
FUSED = False
WALKS = False
KEEPS_FOUR_BITS = False

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu"]
CLAMPED_SLOPE, CLAMPED_LIMIT = 1.702, 7.0


def _swish_of_clamped(gate: Tensor) -> Tensor:
    clamped = gate.clamp(max=CLAMPED_LIMIT)
    return clamped * torch.sigmoid(CLAMPED_SLOPE * clamped)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": functools.partial(gelu, approximate="tanh"),
    "relu": relu,
    "relu2": lambda values: relu(values).square_(),
    "clamped_swiglu": _swish_of_clamped,
}
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

DRAW_TILES = 512


class Flaw(enum.IntFlag):
    """Unusual scores of a row. Minus infinity is allowed, because it hides a token."""

    NO_NUMBER = 1  # NaN or plus infinity
    HIDDEN = 2  # at least one minus infinity
    ALL_HIDDEN = 4  # all tokens are hidden by minus infinity, a mask, or both


def linear(values: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
    """Multiply by a transposed weight and add a bias.

    Args:
        values: [n, in].
        weight: [out, in], in the memory layout that `product` expects.
        bias: [out], or None.
        product: function that computes the result, unless an implementation has a better kernel.

    Returns:
        [n, out].
    """
    return product(values, weight, bias)


def four_bit_linear(values: Tensor, weight: FourBitWeight, bias: Tensor | None) -> Tensor:
    """Multiply by a transposed 4-bit weight and add a bias.

    Args:
        values: [n, in].
        weight: [out, in]. Its values are rounded to the dtype of `values`.
        bias: [out], or None.

    Returns:
        [n, out].
    """
    return functional.linear(values, weight.numbers(values.dtype), bias)


def grouped_linear(values: Tensor, weight: Tensor | FourBitWeight, ends: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply each group of consecutive rows by its own transposed weight and add its bias.

    Where torch has no grouped product, this implementation loops over the groups and reads their ends back to the host.

    Args:
        values: [n, in], rows in the order of their groups.
        weight: [groups, out, in], or [groups * out, in] in 4 bits, see `four_bit_linear`.
        ends: int32 [groups], the row after the last row of each group. A group may be empty.
        bias: [groups, out], or None.

    Returns:
        [n, out]. Rows after the last group are undefined.
    """
    if isinstance(weight, Tensor) and has_grouped_mm(values, weight):
        product = functional.grouped_mm(values, weight.transpose(1, 2), offs=ends)
        if bias is None:
            return product
        rows = torch.arange(values.shape[0], device=values.device, dtype=ends.dtype)
        groups = torch.searchsorted(ends, rows, right=True).clamp_(max=len(ends) - 1)
        return product.add_(bias.index_select(0, groups))
    return linear_by_group(values, weight, ends, bias, functional.linear)


def linear_by_group(
    values: Tensor, weight: Tensor | FourBitWeight, ends: Tensor, bias: Tensor | None, product: Product
) -> Tensor:
    """Multiply the groups one after the other, see `grouped_linear`.

    Args:
        product: function that multiplies the rows of one group.
    """
    if isinstance(weight, FourBitWeight):
        weight = weight.numbers(values.dtype).view(len(ends), -1, weight.inputs)
    result = values.new_zeros(values.shape[0], weight.shape[1])
    first = 0
    for group, end in enumerate(ends.tolist()):
        if end > first:
            result[first:end] = product(values[first:end], weight[group], None if bias is None else bias[group])
        first = end
    return result


def has_grouped_mm(values: Tensor, weight: Tensor) -> bool:
    """Return True if torch's grouped product computes these tensors on the device without a read by the host.

    torch has this kernel for bfloat16 on compute capability 9 and 10. Elsewhere, it loops and waits for the device.

    Args:
        values: [n, in].
        weight: [groups, out, in].
    """
    if values.device.type != "cuda" or values.dtype != torch.bfloat16:
        return False
    # Each row of both tensors must begin at a multiple of 16 bytes.
    if weight.shape[1] % 8 or weight.shape[2] % 8:
        return False
    return torch.cuda.get_device_capability(values.device)[0] in (9, 10)


def weighted_sum(products: Tensor, weights: Tensor) -> Tensor:
    """Add up the weighted results of each row's experts, in float32 and in their order.

    Args:
        products: [n, k, N].
        weights: float32 [n, k]. A product with the weight 0 is left out and may be undefined.

    Returns:
        [n, N] in the dtype of `products`.
    """
    total = torch.zeros_like(products[:, 0], dtype=torch.float32)
    for place in range(products.shape[1]):
        weight = weights[:, place, None]
        total += torch.where(weight == 0, 0.0, products[:, place].float()) * weight
    return total.to(products.dtype)


def rms_norm(values: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Compute values / sqrt(mean(values ** 2) + eps) * weight over the last dimension (arXiv 1910.07467).

    The mean is computed in float32 for every dtype.

    Args:
        values: [..., N].
        weight: [N], or None for ones.
        eps: added to the mean.

    Returns:
        Shape and dtype of `values`.
    """
    return _rms_norm(values, values.shape[-1:], weight, eps)


def add_rms_norm_(hidden: Tensor, product: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add `product` to `hidden` in place, and return the norm of the sum.

    Args:
        hidden: [T, N]. The sum is rounded to its dtype before the norm.
        product: [T, N], or None to add nothing.
        weight: [N].
        eps: see `rms_norm`.

    Returns:
        [T, N].
    """
    if product is not None:
        hidden.add_(product)
    return rms_norm(hidden, weight, eps)


def rotary_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the pairs (j, j + D / 2) of every head by its token's angles, in place (RoFormer, arXiv 2104.09864).

    The result is heads * cos + swapped halves * sin.

    Args:
        heads: [T, heads, D]. The last two dimensions are contiguous.
        cos: [T, 1, D] in the dtype of `heads`. Both halves have the same angles.
        sin: [T, 1, D] in the dtype of `heads`. The first half is negated.
    """
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(cos).addcmul_(swapped, sin)


def activate_and_mul(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """Multiply the activation of the first half by the second half (GLU variants, arXiv 2002.05202).

    clamped_swiglu limits the first half to at most CLAMPED_LIMIT. Its activation is g * sigmoid(CLAMPED_SLOPE * g). The
    second half is clamped to -CLAMPED_LIMIT .. CLAMPED_LIMIT, and 1 is added.

    Args:
        gate_up: [T, 2 * I].
        activation: the activation function.

    Returns:
        [T, I].
    """
    gate, up = gate_up.chunk(2, -1)
    return ACTIVATIONS[activation](gate).mul_(multiplier(up, activation))


def activate(values: Tensor, activation: Activation) -> Tensor:
    """Return the activation of each number, for an MLP without a gate.

    Args:
        values: [T, I].
        activation: the activation function.

    Returns:
        [T, I].
    """
    return ACTIVATIONS[activation](values)


def multiplier(up: Tensor, activation: Activation) -> Tensor:
    """Return the factor that activate_and_mul computes from the second half.

    Args:
        up: [T, I].
        activation: the activation function.

    Returns:
        [T, I].
    """
    return up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT) + 1 if activation == "clamped_swiglu" else up


def store_kv_(slots_of_layer: Tensor, keys_values: Tensor, slots: Tensor) -> None:
    """Write each token's keys and values into its slot.

    Args:
        slots_of_layer: the layer's pages as rows, [pages * P, 2 * K * D].
        keys_values: [T, 2 * K * D] in the same dtype, or in any dtype if the pages have 8 bits.
        slots: int64 [T], page * P + offset. No slot occurs twice.
    """
    if not is_coded(slots_of_layer):
        slots_of_layer.index_copy_(0, slots, keys_values)
        return
    heads = (slots_of_layer.shape[1] - keys_values.shape[1]) // SCALE_BYTES
    coded = encode(keys_values.reshape(keys_values.shape[0], heads, -1), slots_of_layer.dtype)
    slots_of_layer.view(torch.uint8).index_copy_(0, slots, coded.flatten(1))


def norm_heads_(heads: Tensor, weight: Tensor, eps: float, norm: Callable[[Tensor, None, float], Tensor]) -> None:
    """Normalize each head in place, and multiply it with its part of the weight.

    Args:
        heads: [T, n, D].
        weight: [n * D].
        eps: see `rms_norm`.
        norm: `rms_norm` of an implementation.
    """
    torch.mul(norm(heads, None, eps), weight.view(-1, heads.shape[-1]), out=heads)


def rotary_and_store_kv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots_of_layer: Tensor,
    slots: Tensor,
    kv_heads: int,
    head_norm: tuple[Tensor, float] | None = None,
) -> None:
    """Rotate query and key heads in place like rotary_, and write keys and values like store_kv_.

    Args:
        qkv: [T, (H + 2 K) * D]: query heads, then key heads, then value heads.
        cos: see `rotary_`.
        sin: see `rotary_`.
        slots_of_layer: see `store_kv_`.
        slots: see `store_kv_`.
        kv_heads: K.
        head_norm: weight [(H + K) * D] and eps of the RMS norm of each query and key head before it is rotated, or
            None.
    """
    keys_values = 2 * kv_heads * cos.shape[-1]
    heads = qkv.view(qkv.shape[0], -1, cos.shape[-1])
    if head_norm is not None:
        norm_heads_(heads[:, : heads.shape[1] - kv_heads], *head_norm, rms_norm)
    rotary_(heads[:, : heads.shape[1] - kv_heads], cos, sin)
    store_kv_(slots_of_layer, qkv[:, qkv.shape[1] - keys_values :], slots)


def clear_slots_(slots_of_layer: Tensor, slots: Tensor) -> None:
    """Zero the slots of a page after its last token.

    Masked positions are multiplied by exactly 0, but 0 * NaN is NaN. Therefore, numbers that an earlier owner of the
    page has written must be overwritten.

    Args:
        slots_of_layer: see `store_kv_`.
        slots: int64 [n].
    """
    rows = slots_of_layer.view(torch.uint8) if is_coded(slots_of_layer) else slots_of_layer
    rows.index_fill_(0, slots, 0)


def decode_mask(visible_from: Tensor, visible_to: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Create the mask of decodes. Positions count from the first slot of the row's block table.

    Args:
        visible_from: int64 [n], first visible position of each row.
        visible_to: int64 [n], position after the last visible position.
        width: number of positions.
        dtype: dtype of the mask.

    Returns:
        [n, 1, 1, width]: 0 for visible positions, minus infinity for others.
    """
    position = torch.arange(width, device=visible_to.device)
    hidden = (position >= visible_to[:, None]) | (position < visible_from[:, None])
    return _additive(hidden, dtype)[:, None, None]


def prompt_mask(
    query_offset: int,
    query_count: int,
    context: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    ends: Tensor | None = None,
) -> Tensor:
    """Create the mask of consecutive prompt tokens.

    Query i has position query_offset + i. It attends to positions up to its own position, or before ends[i]. With a
    window of W, it does not attend to positions that are W or more before its own.

    Args:
        query_offset: position of the first query.
        query_count: number of queries.
        context: number of positions.
        window: W, or None.
        dtype: dtype of the mask.
        device: device of the mask.
        ends: int64 [query_count], position after the last one that each query attends to. None: its own position.

    Returns:
        [query_count, context]: 0 for visible positions, minus infinity for others.
    """
    query = torch.arange(query_offset, query_offset + query_count, device=device)[:, None]
    position = torch.arange(context, device=device)
    hidden = position > query if ends is None else position >= ends[:, None]
    if window is not None:
        hidden |= position <= query - window
    return _additive(hidden, dtype)


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def gather_context(pages: Tensor, block_table: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy the pages of a block table into one tensor.

    Args:
        pages: one layer's cache.
        block_table: int64 [n], page indexes.
        dtype: dtype of the result if the pages have 8 bits.

    Returns:
        [n * P, 2, K, D].
    """
    return taken(pages, block_table, dtype).flatten(0, 1)


def linear_by_head(values: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head's values by its own transposed weight.

    Args:
        values: [n, H, in].
        weight: [H, out, in].

    Returns:
        [n, H, out].
    """
    return torch.bmm(values.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


def paged_attention_decode(
    queries: Tensor,
    pages: Tensor,
    block_table: Tensor,
    mask: Tensor,
    score_cap: float | None = None,
    sinks: Tensor | None = None,
    latent_dim: int | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Compute attention of one query per sequence over the sequence's pages: softmax(q k / sqrt(D) + mask) v.

    Scores and sums are float32.

    Args:
        queries: [n, H * D], head-major.
        pages: one layer's cache.
        block_table: int64 [n, width]. Rows are padded with any page that the sequence owns.
        mask: [n, 1, 1, width * P], see `decode_mask`.
        score_cap: with the cap c, scores become c * tanh(q k / sqrt(D) / c). None: there is no cap.
        sinks: float32 [H], an additional score of each head, whose value vector is 0. None: no additional score.
        latent_dim: size of a value, for pages of latents. None for other pages.
        slopes: float32 [H]. A head's slope times the distance to a token is subtracted from the score (ALiBi, arXiv
            2108.12409). None: scores do not depend on distances.

    Returns:
        [n, H * D].
    """
    count, width = block_table.shape
    _, page_tokens, parts, kv_heads, _ = pages.shape
    head_dim = head_dim_of(pages)
    # Query heads that share keys and values become query rows of one head, so keys and values are not copied.
    grouped = queries.view(count, kv_heads, -1, head_dim)
    found = taken(pages, block_table.view(-1), queries.dtype)
    context = found.view(count, width * page_tokens, parts, kv_heads, head_dim)
    keys, values = _keys_values(context.permute(2, 0, 3, 1, 4), latent_dim)
    by_row, by_slope = (None if each is None else each.view(kv_heads, -1, 1) for each in (sinks, slopes))
    return _attention(grouped, keys, values, mask, score_cap, by_row, by_slope).reshape(count, -1)


def _keys_values(context: Tensor, latent_dim: int | None) -> tuple[Tensor, Tensor]:
    """Split [2, ...] into keys and values. For latents [1, ...], values are the first numbers of the keys."""
    if latent_dim is None:
        keys, values = context.unbind(0)
        return keys, values
    return context[0], context[0, ..., :latent_dim]


def attention_prompt(
    queries: Tensor,
    keys_values: Tensor,
    mask: Tensor | None,
    score_cap: float | None = None,
    sinks: Tensor | None = None,
    latent_dim: int | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Compute attention of consecutive tokens of one prompt, over keys and values up to the last of these tokens.

    Args:
        queries: [n, H * D], head-major.
        keys_values: [context, 2, K, D], or [context, 1, 1, D] of latents.
        mask: [n, context], see `prompt_mask`. None is a causal mask without a window. It is allowed if there is one
            query for each position of the context.
        score_cap: see `paged_attention_decode`.
        sinks: see `paged_attention_decode`.
        latent_dim: see `paged_attention_decode`.
        slopes: see `paged_attention_decode`.

    Returns:
        [n, H * D].
    """
    _, _, kv_heads, head_dim = keys_values.shape
    grouped = queries.view(queries.shape[0], kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    # Key/value heads are the batch dimension. Their group is a dimension with stride 0, so they are not copied.
    repeated = keys_values.permute(1, 2, 0, 3).unsqueeze(2).expand(-1, -1, grouped.shape[1], -1, -1)
    keys, values = _keys_values(repeated, latent_dim)
    by_row, by_slope = (None if each is None else each.view(kv_heads, -1, 1, 1) for each in (sinks, slopes))
    attended = _attention(grouped, keys, values, mask, score_cap, by_row, by_slope)
    return attended.permute(2, 0, 1, 3).reshape(queries.shape[0], -1)


def _attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    score_cap: float | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
) -> Tensor:
    """Compute attention of prepared tensors.

    Args:
        queries: [K, G, n, D] or [n, K, G, D].
        keys: shape of `queries`, with the context as second to last dimension.
        values: shape of `keys`.
        mask: added to the scores. None is a causal mask.
        score_cap: see `paged_attention_decode`.
        sinks: shape of the scores, with a last dimension of 1.
        slopes: shape of `sinks`.
    """
    if score_cap is None and sinks is None and slopes is None:
        return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None)
    scores = (queries.float() @ keys.float().transpose(-1, -2)).mul_(1.0 / math.sqrt(queries.shape[-1]))
    if score_cap is not None:
        scores = scores.mul_(1.0 / score_cap).tanh_().mul_(score_cap)
    if slopes is not None:
        # Distances to the last token differ from distances to a row's token by a number that the softmax removes.
        scores.add_(slopes * torch.arange(1 - scores.shape[-1], 1, device=scores.device))
    if mask is None:
        count, context = scores.shape[-2:]
        mask = prompt_mask(context - count, count, context, None, scores.dtype, scores.device)
    scores.add_(mask)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1)[..., : keys.shape[-2]]
    return (weights @ values.float()).to(queries.dtype)


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
    """Compute attention of one query per sequence over the sequence's pages.

    Row i attends to the last `window` of its contexts[i] tokens. Tokens outside of the window are not read. A row with
    a context of 0 is unused, and its result is 0. This implementation loops over rows and reads lengths back to the
    host.

    Args:
        attended: output, [n, H * D]. The numbers of a row are contiguous.
        queries: [n, H * D]. The numbers of a row are contiguous.
        pages: one layer's cache.
        block_tables: int32 [n, width] with any strides. Entries of pages outside of a row's window may have any value.
        contexts: int32 [n].
        window: number of tokens that a row attends to, or None for all tokens.
        parts: `split_count` of the longest context, or more, up to the parts of `work`.
        work: buffers for partial results. This implementation does not use them.
        score_cap: see `paged_attention_decode`.
        sinks: see `paged_attention_decode`.
        slopes: see `paged_attention_decode`.
    """
    starts = torch.arange(len(contexts) + 1, dtype=torch.int32)
    _attend_one_by_one(
        attended, queries, pages, block_tables, contexts, starts, window, score_cap, sinks, slopes=slopes
    )


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
    """Compute attention of chunks of consecutive tokens over their pages.

    Rows row_starts[i] to row_starts[i + 1] - 1 are the last of the contexts[i] tokens of chunk i. Each row attends to
    the last `window` tokens up to its own token. This implementation loops over chunks and reads lengths back to the
    host.

    Args:
        attended: output, [T, H * D].
        queries: [T, H * D].
        pages: one layer's cache.
        block_tables: int32 [m, width].
        contexts: int32 [m].
        row_starts: int32 [m + 1].
        tiles: int32 [t, 2], contiguous. Each tile has the index of a chunk, and the number of the tile's first row in
            the chunk. A tile has chunk_tile_tokens rows. This implementation does not use tiles.
        window: number of tokens that a row attends to, or None for all tokens.
        score_cap: see `paged_attention_decode`.
        sinks: see `paged_attention_decode`.
        slopes: see `paged_attention_decode`.
    """
    _attend_one_by_one(
        attended, queries, pages, block_tables, contexts, row_starts, window, score_cap, sinks, slopes=slopes
    )


def paged_latents_(
    attended: Tensor,
    queries: Tensor,
    pages: Tensor,
    block_tables: Tensor,
    contexts: Tensor,
    latent_dim: int,
    row_starts: Tensor | None = None,
    tiles: Tensor | None = None,
    parts: int = 1,
    work: DecodeWork | None = None,
) -> None:
    """Compute attention over pages of latents, of decodes or of chunks. A row attends to all tokens up to its own.

    Args:
        attended: output, [T, H * latent_dim].
        queries: [T, H * D].
        pages: one layer's cache of latents.
        block_tables: int32 [m, width].
        contexts: int32 [m].
        latent_dim: size of a value.
        row_starts: int32 [m + 1], see `paged_chunks_`. None: row i is the last of contexts[i] tokens, or is unused if
            its context is 0.
        tiles: see `paged_chunks_`. None for decodes.
        parts: `split_count` of the longest context of decodes, up to the parts of `work`. 1 for chunks.
        work: see `paged_decode_`. None for chunks.
    """
    if row_starts is None:
        row_starts = torch.arange(len(contexts) + 1, dtype=torch.int32)
    _attend_one_by_one(attended, queries, pages, block_tables, contexts, row_starts, None, None, None, latent_dim)


def _attend_one_by_one(
    attended: Tensor,
    queries: Tensor,
    pages: Tensor,
    block_tables: Tensor,
    contexts: Tensor,
    row_starts: Tensor,
    window: int | None,
    score_cap: float | None,
    sinks: Tensor | None,
    latent_dim: int | None = None,
    slopes: Tensor | None = None,
) -> None:
    page_tokens = pages.shape[1]
    starts = row_starts.tolist()
    for table, context, start, end in zip(block_tables, contexts.tolist(), starts, starts[1:], strict=False):
        if context == 0:
            attended[start:end] = 0
            continue
        offset = context - (end - start)
        first_page = 0 if window is None else max(0, offset - window + 1) // page_tokens
        before = first_page * page_tokens
        blocks = table[first_page : -(-context // page_tokens)].to(torch.int64)
        seen = gather_context(pages, blocks, queries.dtype)[: context - before]
        mask = prompt_mask(offset - before, end - start, context - before, window, queries.dtype, queries.device)
        attended[start:end] = attention_prompt(queries[start:end], seen, mask, score_cap, sinks, latent_dim, slopes)


def choose_tokens(
    scores: Tensor, parameters: Tensor, words: Tensor, masks: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Choose the next token of every row.

    Tokens are drawn by a race of exponential clocks (arXiv 1411.0030), whose rates are the tokens' weights. The race
    has two rounds. In the first round, DRAW_TILES tiles compete. The tile of a token is the token's id modulo
    DRAW_TILES. In the second round, the tokens of the winning tile compete. Clock i is -log of number i of the
    splitmix64 stream that starts at the row's word. i is the tile's number, or the token's id plus DRAW_TILES.

    Args:
        scores: [n, vocab_size]. The numbers of a row are contiguous. Minus infinity hides a token.
        parameters: float64 [n, 4]: temperature, top_k, top_p, min_p. Temperature 0 chooses the token with the largest
            score, and the lowest id among equal scores. top_k 0 keeps all tokens. After min_p and top_k, only the
            nucleus is kept, whose weight is the fraction top_p of the remaining weight. Tokens of equal weight are
            either all kept or all dropped.
        words: int64 [n], 64 random bits for the row's request and position.
        masks: bits int32 [m, words of a row] and rows int32 [n], or None. Row i may choose token id if bit id % 32 of
            word id // 32 is set in row rows[i] of the bits. A negative rows[i] allows all tokens. NO_NUMBER and HIDDEN
            refer to the scores before masking.

    Returns:
        int64 [2, n]: token ids, and Flaws. A row with NO_NUMBER or ALL_HIDDEN has an arbitrary id of the vocabulary,
        because the next step may use the id as an index.
    """
    scores = scores.float()
    vocab_size = scores.shape[1]
    given = scores
    if masks is not None:
        bits, mask_rows = masks
        token = torch.arange(vocab_size, device=scores.device)
        hidden = (bits[mask_rows.clamp(min=0)][:, token // 32] >> (token % 32)) & 1 == 0
        scores = scores.masked_fill(hidden & (mask_rows >= 0)[:, None], float("-inf"))
    best, ids = scores.max(-1)
    flaws = torch.zeros_like(ids)
    for flaw, found in (
        (Flaw.NO_NUMBER, ~(given < float("inf")).all(-1)),
        (Flaw.HIDDEN, (given == float("-inf")).any(-1)),
        (Flaw.ALL_HIDDEN, best == float("-inf")),
    ):
        flaws += found.long() * int(flaw)
    for row, (temperature, top_k, top_p, min_p) in enumerate(parameters.tolist()):
        if temperature == 0 or int(flaws[row]) & (Flaw.NO_NUMBER | Flaw.ALL_HIDDEN):
            continue
        weights = ((scores[row] - best[row]) / temperature).exp()
        ordered = weights.sort(descending=True).values
        threshold = max(min_p, float(ordered[int(top_k) - 1]) if 0 < top_k < vocab_size else 0.0)
        weights = torch.where(weights >= threshold, weights, 0.0)
        if top_p < 1:
            ordered = weights.sort(descending=True).values.double()
            in_nucleus = ordered.cumsum(0) - ordered < top_p * ordered.sum()
            threshold = float(ordered[in_nucleus].min())
            weights = torch.where(weights >= threshold, weights, 0.0)
        numbers = torch.arange(vocab_size, device=scores.device)
        tiles = torch.zeros(DRAW_TILES, dtype=torch.float64, device=scores.device)
        tiles.index_add_(0, numbers % DRAW_TILES, weights.double())
        tile = (tiles / _clocks(words[row], torch.arange(DRAW_TILES, device=scores.device))).argmax()
        inside = numbers[numbers % DRAW_TILES == tile]
        ids[row] = inside[(weights[inside] / _clocks(words[row], inside + DRAW_TILES)).argmax()]
    return torch.stack((ids, flaws))


def _clocks(word: Tensor, indices: Tensor) -> Tensor:
    """Convert numbers of the splitmix64 stream (Steele, Lea, Flood, OOPSLA 2014) to exponential clocks, float64.

    int64 arithmetic wraps at 64 bits, as the algorithm requires.
    """
    state = word + (indices + 1) * (0x9E3779B97F4A7C15 - 2**64)
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1)):
        # torch's shift copies the sign bit. The mask removes the copies.
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
    return -((((state >> 12) & ((1 << 52) - 1)).double() + 0.5) / 2**52).log()
