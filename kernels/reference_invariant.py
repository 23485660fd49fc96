"""Kernels in torch that are batch-invariant: the bits of a row depend only on its own token and context.

The order of torch's sums depends on the shapes of a call, and on how torch divides the call between threads. These also
determine if a number is computed in a full vector register or in the remainder, whose code may round differently.
Therefore, all operations that are not exactly rounded are computed in calls of one fixed shape:

- products and norms in tiles of ROW_TILE rows, the last one padded with zeros;
- attention in tiles of ROW_TILE rows of one sequence, over tiles of CONTEXT_TILE tokens at absolute positions, in
  order and in float32. A decode is computed like a row of a prompt. Masked positions are zeros;
- exponentials and sigmoids on FLAT_NUMBERS numbers at a time, which are full vectors and too few for a second thread.

One assumption remains: a row's index within its tile does not matter. `differing_rows` and `differing_attended_rows`
check it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from trioserve_kernels import reference
from trioserve_kernels.four_bits import FourBitWeight
from trioserve_kernels.kv_format import head_dim_of
from trioserve_kernels.paged import DecodeWork
from trioserve_kernels.reference import (
    attention_prompt,
    choose_tokens,
    clear_slots_,
    four_bit_linear,
    fp8_rows,
    gather_context,
    paged_attention_decode,
    store_kv_,
    weighted_sum,
)

__all__ = [
    "CONTEXT_TILE",
    "FUSED",
    "KEEPS_FOUR_BITS",
    "NAME",
    "ROW_TILE",
    "WALKS",
    "add_rms_norm_",
    "attention_prompt",
    "choose_tokens",
    "clear_slots_",
    "differing_attended_rows",
    "differing_rows",
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

NAME = "torch, batch-invariant"
FUSED = False
WALKS = True
KEEPS_FOUR_BITS = False

ROW_TILE = 16
CONTEXT_TILE = 64
FLAT_NUMBERS = 2_048  # For more numbers, torch uses a second thread.


def linear(values: Tensor, weight: Tensor, bias: Tensor | None, product: reference.Product) -> Tensor:
    return _in_row_tiles(lambda tile: product(tile, weight, bias), values)


def grouped_linear(values: Tensor, weight: Tensor | FourBitWeight, ends: Tensor, bias: Tensor | None) -> Tensor:
    def product(rows: Tensor, factors: Tensor, added: Tensor | None) -> Tensor:
        return linear(rows, factors, added, functional.linear)

    return reference.linear_by_group(values, weight, ends, bias, product)


def linear_by_head(values: Tensor, weight: Tensor) -> Tensor:
    return _in_row_tiles(lambda tile: reference.linear_by_head(tile, weight), values)


def differing_rows(compute: Callable[[Tensor], Tensor], columns: int, dtype: torch.dtype) -> list[int]:
    """Return the indexes within a tile at which a row's result differs from its result at index 0.

    The row is equal at each index, and all other rows are different random numbers each time. If the list is empty, the
    index does not matter.

    Args:
        compute: function that maps [ROW_TILE, columns] to [ROW_TILE, n].
        columns: numbers per row.
        dtype: dtype of the rows.
    """
    return _differing(lambda tile, index: compute(tile)[index], columns, dtype)


def differing_attended_rows(
    kv_heads: int, group: int, head_dim: int, dtype: torch.dtype, latent_dim: int | None = None
) -> list[int]:
    """Return the indexes within a tile at which a query's attention differs from its attention at index 0.

    The query has the same position and the same context at each index.

    Args:
        kv_heads: key/value heads.
        group: query heads per key/value head.
        head_dim: numbers per head.
        dtype: dtype of queries and pages.
        latent_dim: numbers of a value, for pages of latents. None for other pages.
    """
    position = CONTEXT_TILE + ROW_TILE
    generator = torch.Generator().manual_seed(1)
    parts = 2 if latent_dim is None else 1
    pages = torch.randn(1, position + ROW_TILE, parts, kv_heads, head_dim, generator=generator).to(dtype)
    table = torch.zeros(1, dtype=torch.int32)

    def attended(queries: Tensor, index: int) -> Tensor:
        result = queries.new_empty(len(queries), kv_heads * group * (latent_dim or head_dim))
        _attend_(result, queries, pages, table, position - index + ROW_TILE, None, latent_dim=latent_dim)
        return result[index]

    return _differing(attended, kv_heads * group * head_dim, dtype)


def _differing(compute: Callable[[Tensor, int], Tensor], columns: int, dtype: torch.dtype) -> list[int]:
    """Compare the result of one row at all indexes of a tile.

    Args:
        compute: function of a tile and an index. It returns the result of the row at that index.
        columns: numbers per row.
        dtype: dtype of the rows.
    """
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(columns, generator=generator)
    results = []
    for index in range(ROW_TILE):
        tile = torch.randn(ROW_TILE, columns, generator=generator)
        tile[index] = row
        results.append(compute(tile.to(dtype), index))
    return [index for index, result in enumerate(results) if not torch.equal(result, results[0])]


def rms_norm(values: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return _in_row_tiles(lambda tile: reference.rms_norm(tile, weight, eps), values)


def add_rms_norm_(hidden: Tensor, product: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    if product is not None:
        hidden.add_(product)  # The sum of two numbers is always correctly rounded.
    return rms_norm(hidden, weight, eps)


def rotary_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    # Products and sums are separate calls, so that no fused operation rounds differently.
    swapped = heads.roll(heads.shape[-1] // 2, -1).float()
    heads.copy_((heads.float() * cos.float()) + (swapped * sin.float()))


def rotary_and_store_kv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots_of_layer: Tensor,
    slots: Tensor,
    kv_heads: int,
    head_norm: tuple[Tensor, float] | None = None,
) -> None:
    keys_values = 2 * kv_heads * cos.shape[-1]
    heads = qkv.view(qkv.shape[0], -1, cos.shape[-1])
    if head_norm is not None:
        reference.norm_heads_(heads[:, : heads.shape[1] - kv_heads], *head_norm, rms_norm)
    rotary_(heads[:, : heads.shape[1] - kv_heads], cos, sin)
    store_kv_(slots_of_layer, qkv[:, qkv.shape[1] - keys_values :], slots)


def activate(values: Tensor, activation: reference.Activation) -> Tensor:
    return _in_flat_pieces(reference.ACTIVATIONS[activation], values)


def activate_and_mul(gate_up: Tensor, activation: reference.Activation = "silu") -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return _in_flat_pieces(reference.ACTIVATIONS[activation], gate).mul_(reference.multiplier(up, activation))


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
    for row, context in enumerate(contexts.tolist()):
        attended[row] = 0
        if context:
            rows = slice(row, row + 1)
            _attend_(
                attended[rows],
                queries[rows],
                pages,
                block_tables[row],
                context,
                window,
                score_cap,
                sinks,
                slopes=slopes,
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
    starts = row_starts.tolist()
    for table, context, start, end in zip(block_tables, contexts.tolist(), starts, starts[1:], strict=False):
        _attend_(
            attended[start:end], queries[start:end], pages, table, context, window, score_cap, sinks, slopes=slopes
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
    starts = list(range(len(contexts) + 1)) if row_starts is None else row_starts.tolist()
    for table, context, start, end in zip(block_tables, contexts.tolist(), starts, starts[1:], strict=False):
        _attend_(attended[start:end], queries[start:end], pages, table, context, None, latent_dim=latent_dim)


def _attend_(
    attended: Tensor,
    queries: Tensor,
    pages: Tensor,
    block_table: Tensor,
    context: int,
    window: int | None,
    score_cap: float | None = None,
    sinks: Tensor | None = None,
    latent_dim: int | None = None,
    slopes: Tensor | None = None,
) -> None:
    """Compute attention of the last len(queries) tokens of one context, and write `attended`. See reference.py for
    the arguments.
    """
    count = queries.shape[0]
    kv_heads, head_dim = pages.shape[-2], head_dim_of(pages)
    group = queries.shape[1] // head_dim // kv_heads
    start = context - count
    first_seen = 0 if window is None else max(0, start - window + 1)
    first_tile = first_seen // CONTEXT_TILE
    keys, values = _context_tiles(
        pages, block_table, first_tile * CONTEXT_TILE, first_seen, context, latent_dim, queries.dtype
    )
    for first in range(0, count, ROW_TILE):
        rows = min(ROW_TILE, count - first)
        padded = queries.new_zeros(ROW_TILE, queries.shape[1], dtype=torch.float32)
        padded[:rows] = queries[first : first + rows]
        # The rows of one product are all combinations of a row and a query head of the group.
        shared = padded.view(ROW_TILE, kv_heads, group, head_dim).transpose(0, 1).reshape(kv_heads, -1, head_dim)
        positions = start + first + torch.arange(ROW_TILE)
        seen = -(-(start + first + rows) // CONTEXT_TILE) - first_tile  # number of tiles up to the last row's token
        scores = []
        for number in range(seen):
            place = (first_tile + number) * CONTEXT_TILE + torch.arange(CONTEXT_TILE)
            hidden = place[None, :] > positions[:, None]
            if window is not None:
                hidden |= place[None, :] <= positions[:, None] - window
            tile = torch.bmm(shared, keys[number].transpose(1, 2)).mul_(1.0 / math.sqrt(head_dim))
            if score_cap is not None:
                tile = _in_flat_pieces(torch.tanh, tile.mul_(1.0 / score_cap)).mul_(score_cap)
            if slopes is not None:
                distances = (place[None, :] - positions[:, None])[None, :, None]
                tile.view(kv_heads, ROW_TILE, group, -1).add_(slopes.view(kv_heads, 1, group, 1) * distances)
            tile.view(kv_heads, ROW_TILE, group, -1).masked_fill_(hidden[None, :, None], float("-inf"))
            scores.append(tile)
        # A maximum is exact in any order, so the tiles' maxima need no fixed order.
        best = torch.stack([tile.amax(-1) for tile in scores]).amax(0)
        if sinks is None:
            best.masked_fill_(best == float("-inf"), 0.0)  # Padding rows attend to no tokens.
            total = torch.zeros_like(best)
        else:
            by_row = sinks.view(kv_heads, 1, group).expand(-1, ROW_TILE, -1).reshape(kv_heads, -1)
            best = torch.maximum(best, by_row)
            total = _in_flat_pieces(torch.exp, by_row - best)
        result = shared.new_zeros(*shared.shape[:-1], values.shape[-1])
        for number, tile in enumerate(scores):
            weights = _in_flat_pieces(torch.exp, tile.sub_(best[..., None]))
            total += weights.sum(-1)
            result += torch.bmm(weights, values[number])
        result /= total[..., None]
        merged = result.view(kv_heads, ROW_TILE, group, -1).transpose(0, 1).reshape(ROW_TILE, -1)
        attended[first : first + rows] = merged[:rows].to(attended.dtype)


def _context_tiles(
    pages: Tensor,
    block_table: Tensor,
    begin: int,
    first_seen: int,
    end: int,
    latent_dim: int | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Gather keys and values of the positions from `begin` to `end`, in tiles.

    Args:
        pages: one layer's cache.
        block_table: int32, pages of the sequence.
        begin: first position of the first tile.
        first_seen: first visible position. Earlier positions become zeros, because their pages may already be freed.
        end: position after the last token. Later positions of the last tile become zeros.
        latent_dim: size of a value, for pages of latents.
        dtype: dtype to which 8-bit pages are decoded first.

    Returns:
        Keys and values, each float32 [tiles, K, CONTEXT_TILE, D].
    """
    _, page_tokens, parts, kv_heads, _ = pages.shape
    blocks = block_table[first_seen // page_tokens : -(-end // page_tokens)].to(torch.int64)
    found = gather_context(pages, blocks, dtype)[first_seen % page_tokens :][: end - first_seen]
    tiles = -(-(end - begin) // CONTEXT_TILE)
    head_dim = head_dim_of(pages)
    context = torch.zeros(tiles * CONTEXT_TILE, parts, kv_heads, head_dim, dtype=torch.float32, device=pages.device)
    context[first_seen - begin : end - begin] = found
    cut = context.view(tiles, CONTEXT_TILE, parts, kv_heads, head_dim).permute(2, 0, 3, 1, 4).contiguous()
    return cut[0], cut[1] if latent_dim is None else cut[0, ..., :latent_dim].contiguous()


def _in_row_tiles(compute: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Apply a function that computes each row independently, in tiles of ROW_TILE rows.

    Args:
        compute: maps a contiguous [ROW_TILE, ...] to [ROW_TILE, ...].
        values: [n, ...].
    """
    count = values.shape[0]
    padded = values.new_zeros(count + -count % ROW_TILE, *values.shape[1:])
    padded[:count] = values
    return torch.cat([compute(tile) for tile in torch.split(padded, ROW_TILE)])[:count]


def _in_flat_pieces(compute: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Apply a function that computes each number independently, in pieces of FLAT_NUMBERS numbers.

    Args:
        compute: maps [FLAT_NUMBERS] to [FLAT_NUMBERS].
        values: any shape.

    Returns:
        A new tensor with the shape of `values`.
    """
    count = values.numel()
    padded = values.new_zeros(count + -count % FLAT_NUMBERS)
    padded[:count].view(values.shape).copy_(values)
    for piece in torch.split(padded, FLAT_NUMBERS):
        piece.copy_(compute(piece))
    return padded[:count].view(values.shape)
