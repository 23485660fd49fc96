"""Plain torch: what each kernel means. Every other implementation is compared with this one.

Shapes: T tokens of a step; H heads, K key/value heads, G = H / K heads to each of them, D numbers a head; a page is one
KV block of P tokens, and `pages` is one layer's cache, [pages, P, 2, K, D], keys at index 0 and values at index 1. In
latent attention it is [pages, P, 1, 1, D], a key for all heads, whose first `latent_dim` numbers are its value, too:
then the H * D of what is attended to are H * latent_dim. Where keys and values are kept in 8 bits, the last length is
that of kv_format.py.

What a row's numbers depend on: its own token and its own context, and nothing else up to rounding. A product or a
softmax may be blocked differently for another number of rows or another padded length, and then sums in another order:
about 1e-6 of the largest term in float32, the last bit or two in bfloat16 and float16. Padded positions are masked with
minus infinity and add an exact 0, provided that what lies there is finite; see `clear_slots_`.
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
from torch.nn.functional import gelu, scaled_dot_product_attention, silu
from torch.nn.functional import rms_norm as _rms_norm

from trioserve_kernels.four_bits import FourBitWeight
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
    "gather_context",
    "linear",
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
    "activate_and_mul",
    "store_kv_",
]

NAME = "torch"
FUSED = False
WALKS = False
KEEPS_FOUR_BITS = False

Activation = Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"]
CLAMPED_SLOPE, CLAMPED_LIMIT = 1.702, 7.0


def _swish_of_clamped(gate: Tensor) -> Tensor:
    clamped = gate.clamp(max=CLAMPED_LIMIT)
    return clamped * torch.sigmoid(CLAMPED_SLOPE * clamped)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": functools.partial(gelu, approximate="tanh"),
    "clamped_swiglu": _swish_of_clamped,
}
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

DRAW_TILES = 512


class Flaw(enum.IntFlag):
    """What is wrong with a row of scores. Minus infinity is legal where tokens have been hidden."""

    NO_NUMBER = 1  # NaN or infinity
    HIDDEN = 2  # minus infinity somewhere
    ALL_HIDDEN = 4  # by scores of minus infinity, by a mask, or by both


def linear(values: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
    """[n, in] to [n, out]: values times the transposed weight ([out, in], in whichever order product wants it), plus
    bias. product: multiplies where the kernels have nothing better."""
    return product(values, weight, bias)


def four_bit_linear(values: Tensor, weight: FourBitWeight, bias: Tensor | None) -> Tensor:
    """As linear, of a weight of 4 bits, whose numbers are rounded to the dtype of values."""
    return functional.linear(values, weight.numbers(values.dtype), bias)


def rms_norm(values: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """values / sqrt(mean(values ** 2) + eps) * weight over the last dimension (arXiv 1910.07467).

    The mean is taken in float32 whatever the dtype. weight: [last dimension], or None for ones.
    """
    return _rms_norm(values, values.shape[-1:], weight, eps)


def add_rms_norm_(hidden: Tensor, product: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add product to hidden, in place, and return the norm of the sum; without a product, of hidden as it is.

    hidden, product: [T, N]. The sum is rounded to hidden's dtype before it is normed.
    """
    if product is not None:
        hidden.add_(product)
    return rms_norm(hidden, weight, eps)


def rotary_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn the pairs (j, j + D / 2) of every head by its token's angles, in place (RoFormer, arXiv 2104.09864).

    heads: [T, heads, D], the last two dimensions contiguous. cos, sin: [T, 1, D] in the dtype of heads; both halves
    hold the same angles, and the first half of sin is negated, so that the turn is heads * cos + swapped halves * sin.
    """
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(cos).addcmul_(swapped, sin)


def activate_and_mul(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """[T, 2 * I] to [T, I]: the activation of the first half times the second half (GLU variants, arXiv 2002.05202).

    clamped_swiglu: the first half is at most CLAMPED_LIMIT, g, and its activation g * sigmoid(CLAMPED_SLOPE * g); the
    second is within CLAMPED_LIMIT of 0, and 1 is added.
    """
    gate, up = gate_up.chunk(2, -1)
    return ACTIVATIONS[activation](gate).mul_(multiplier(up, activation))


def multiplier(up: Tensor, activation: Activation) -> Tensor:
    """What the second half of activate_and_mul's numbers becomes."""
    return up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT) + 1 if activation == "clamped_swiglu" else up


def store_kv_(slots_of_layer: Tensor, keys_values: Tensor, slots: Tensor) -> None:
    """Write each token's keys and values into its slot.

    slots_of_layer: [pages * P, 2 * K * D], the layer's pages seen as rows. keys_values: [T, 2 * K * D] in the same
    dtype, or any where they are kept in 8 bits. slots: int64 [T], page * P + offset; all different.
    """
    if not is_coded(slots_of_layer):
        slots_of_layer.index_copy_(0, slots, keys_values)
        return
    heads = (slots_of_layer.shape[1] - keys_values.shape[1]) // SCALE_BYTES
    coded = encode(keys_values.reshape(keys_values.shape[0], heads, -1), slots_of_layer.dtype)
    slots_of_layer.view(torch.uint8).index_copy_(0, slots, coded.flatten(1))


def rotary_and_store_kv_(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots_of_layer: Tensor, slots: Tensor, kv_heads: int
) -> None:
    """Turn query and key heads in place, as rotary_ does; write keys and values into their slots, as store_kv_ does.

    qkv: [T, (H + 2 K) * D]: query heads, then key heads, then value heads.
    """
    keys_values = 2 * kv_heads * cos.shape[-1]
    heads = qkv.view(qkv.shape[0], -1, cos.shape[-1])
    rotary_(heads[:, : heads.shape[1] - kv_heads], cos, sin)
    store_kv_(slots_of_layer, qkv[:, qkv.shape[1] - keys_values :], slots)


def clear_slots_(slots_of_layer: Tensor, slots: Tensor) -> None:
    """Zero the slots (int64 [n]) of a page that come after its last token.

    Masked positions are multiplied by an exact 0, and 0 * NaN is NaN: what an earlier user of the page left there must
    not reach this one.
    """
    rows = slots_of_layer.view(torch.uint8) if is_coded(slots_of_layer) else slots_of_layer
    rows.index_fill_(0, slots, 0)


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


def gather_context(pages: Tensor, block_table: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy the pages of a block table (int64 [n]) behind one another: [n * P, 2, K, D]. dtype: of numbers that are kept
    in 8 bits."""
    return taken(pages, block_table, dtype).flatten(0, 1)


def linear_by_head(values: Tensor, weight: Tensor) -> Tensor:
    """[n, H, in] to [n, H, out]: each head's values times its own transposed weight, of [H, out, in]."""
    return torch.bmm(values.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


def paged_attention_decode(
    queries: Tensor,
    pages: Tensor,
    block_table: Tensor,
    mask: Tensor,
    score_cap: float | None = None,
    sinks: Tensor | None = None,
    latent_dim: int | None = None,
) -> Tensor:
    """One query per sequence over its pages: softmax(q k / sqrt(D) + mask) v. score_cap: c bounds q k / sqrt(D) to
    c * tanh(q k / sqrt(D) / c). sinks: float32 [H], each head's stands in its softmax as one score more, whose value is
    0. So in all that attends.

    queries: [n, H * D] (head-major), block_table: int64 [n, width], rows padded with any page that the sequence owns;
    mask: [n, 1, 1, width * P], as from decode_mask. latent_dim: of pages of latents. Returns [n, H * D].
    Scores and sums are in float32.
    """
    count, width = block_table.shape
    _, page_tokens, parts, kv_heads, _ = pages.shape
    head_dim = head_dim_of(pages)
    # The heads that share keys and values become query rows of one head: nothing has to be repeated.
    grouped = queries.view(count, kv_heads, -1, head_dim)
    found = taken(pages, block_table.view(-1), queries.dtype)
    context = found.view(count, width * page_tokens, parts, kv_heads, head_dim)
    keys, values = _keys_values(context.permute(2, 0, 3, 1, 4), latent_dim)
    by_row = None if sinks is None else sinks.view(kv_heads, -1, 1)
    return _attention(grouped, keys, values, mask, score_cap, by_row).reshape(count, -1)


def _keys_values(context: Tensor, latent_dim: int | None) -> tuple[Tensor, Tensor]:
    """context: [2, ...], or [1, ...] of latents."""
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
) -> Tensor:
    """Consecutive tokens of one prompt over the keys and values up to the last of them.

    queries: [n, H * D] (head-major). keys_values: [context, 2, K, D]. mask: [n, context] as from prompt_mask; None when
    the queries are exactly the context and there is no window: plain causal. latent_dim: keys_values is [context, 1, 1,
    D], of latents. Returns [n, H * D].
    """
    _, _, kv_heads, head_dim = keys_values.shape
    grouped = queries.view(queries.shape[0], kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    # Key/value heads stand in the place of the batch, and their group is a dimension of stride 0: nothing is repeated.
    repeated = keys_values.permute(1, 2, 0, 3).unsqueeze(2).expand(-1, -1, grouped.shape[1], -1, -1)
    keys, values = _keys_values(repeated, latent_dim)
    by_row = None if sinks is None else sinks.view(kv_heads, -1, 1, 1)
    attended = _attention(grouped, keys, values, mask, score_cap, by_row)
    return attended.permute(2, 0, 1, 3).reshape(queries.shape[0], -1)


def _attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    score_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """mask: None is plain causal. sinks: as the scores, with a last dimension of 1."""
    if score_cap is None and sinks is None:
        return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None)
    scores = (queries.float() @ keys.float().transpose(-1, -2)).mul_(1.0 / math.sqrt(queries.shape[-1]))
    if score_cap is not None:
        scores = scores.mul_(1.0 / score_cap).tanh_().mul_(score_cap)
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
) -> None:
    """One query per sequence over its pages: row i sees the last `window` of its contexts[i] tokens. A row with a
    context of 0 stands for nobody, and its result is 0.

    attended (written), queries: [n, H * D], a row's numbers contiguous. block_tables: int32 [n, width], with any
    strides, beyond a row's context anything, and so before the page in which what it sees begins. contexts: int32 [n].
    parts: split_count of the longest context, or of more; at most work has room for. Tokens that a row does not see are
    not read. Here in a loop that reads the lengths back; work is not used.
    """
    starts = torch.arange(len(contexts) + 1, dtype=torch.int32)
    _attend_one_by_one(attended, queries, pages, block_tables, contexts, starts, window, score_cap, sinks)


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
) -> None:
    """Chunks of consecutive tokens over their pages: rows row_starts[i] .. row_starts[i + 1] - 1 are the last ones of
    the contexts[i] tokens of chunk i, and each sees the last `window` tokens up to itself.

    attended (written), queries: [T, H * D]. block_tables: int32 [m, width]. contexts: int32 [m]. row_starts: int32
    [m + 1]. tiles: int32 [t, 2], contiguous: of each chunk's every chunk_tile_tokens-th row, the chunk and the row's
    number in it. Here in a loop as above; tiles are not used.
    """
    _attend_one_by_one(attended, queries, pages, block_tables, contexts, row_starts, window, score_cap, sinks)


def paged_latents_(
    attended: Tensor,
    queries: Tensor,
    pages: Tensor,
    block_tables: Tensor,
    contexts: Tensor,
    row_starts: Tensor,
    latent_dim: int,
) -> None:
    """As paged_chunks_ does, over pages of latents: chunks of any length see all tokens up to themselves.

    attended (written): [T, H * latent_dim].
    """
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
        attended[start:end] = attention_prompt(queries[start:end], seen, mask, score_cap, sinks, latent_dim)


def choose_tokens(
    scores: Tensor, parameters: Tensor, words: Tensor, masks: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """The next token of every row. Returns int64 [2, n]: token ids, and Flaws; a row with NO_NUMBER or ALL_HIDDEN
    has an id without meaning, which is one of the vocabulary nevertheless: the next step may look it up.

    scores: [n, vocab_size], a row's numbers contiguous; minus infinity hides a token. parameters: float64 [n, 4]:
    temperature (0: the best token, the lowest id among equals), top_k (0: all), top_p, min_p; kept are tokens that
    pass min_p and top_k, of these the nucleus that holds top_p of what they hold, and equals stay or go together.
    words: int64 [n], 64 random bits that belong to the row's request and position.

    The draw is a race of exponential clocks (arXiv 1411.0030), each as fast as its weight: between DRAW_TILES tiles, a
    token being in tile id modulo DRAW_TILES, then inside the tile that won. Clock i is -log of number i of the
    splitmix64 stream that starts at the word; a tile's i is its number, a token's its id plus DRAW_TILES.

    masks: bits int32 [m, words of a row] and rows int32 [n]: of row i only the tokens may be chosen whose bit is set in
    row rows[i] of the bits (bit id % 32 of word id // 32); all, where that is below 0. NO_NUMBER and HIDDEN are said of
    the scores as they are given.
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
    """float64: splitmix64 (Steele, Lea, Flood, OOPSLA 2014); int64 drops what exceeds 64 bits, as it should here."""
    state = word + (indices + 1) * (0x9E3779B97F4A7C15 - 2**64)
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1)):
        # torch's shift brings in the sign; the mask takes it out again.
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
    return -((((state >> 12) & ((1 << 52) - 1)).double() + 0.5) / 2**52).log()
