"""Plain torch, batch-invariant: the bits of a row depend on its own token and context, and on nothing beside it.

torch chooses how it sums, and whether it computes a number in a vector register or behind the last full one, by the
shapes of a call and by how it divides the call between threads. So whatever is not exactly rounded is computed here in
calls of one shape:

- products and norms of ROW_TILE rows, the last ones padded with zeros;
- attention of as many rows, of one sequence, over tiles of CONTEXT_TILE tokens that begin at absolute positions, one
  tile after the other, in float32: a decode is a prompt's row. Of a tile that a row does not see, it gets zeros;
- exponentials and sigmoids of FLAT_NUMBERS at a time: whole vectors, and too few for a second thread.

What is left is that a row's place among the ROW_TILE does not count. `differing_rows` and `differing_attended_rows`
look at this.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from trioserve_kernels import reference
from trioserve_kernels.kv_format import head_dim_of
from trioserve_kernels.paged import DecodeWork
from trioserve_kernels.reference import (
    attention_prompt,
    choose_tokens,
    clear_slots_,
    four_bit_linear,
    gather_context,
    paged_attention_decode,
    store_kv_,
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
    "gather_context",
    "linear",
    "linear_by_head",
    "paged_attention_decode",
    "paged_chunks_",
    "paged_decode_",
    "paged_latents_",
    "rms_norm",
    "rotary_",
    "rotary_and_store_kv_",
    "activate_and_mul",
    "store_kv_",
]

NAME = "torch, batch-invariant"
FUSED = False
WALKS = True
KEEPS_FOUR_BITS = False

ROW_TILE = 16
CONTEXT_TILE = 64
FLAT_NUMBERS = 2_048  # the fewest that torch gives a second thread


def linear(values: Tensor, weight: Tensor, bias: Tensor | None, product: reference.Product) -> Tensor:
    return _in_row_tiles(lambda tile: product(tile, weight, bias), values)


def linear_by_head(values: Tensor, weight: Tensor) -> Tensor:
    return _in_row_tiles(lambda tile: reference.linear_by_head(tile, weight), values)


def differing_rows(compute: Callable[[Tensor], Tensor], columns: int, dtype: torch.dtype) -> list[int]:
    """The rows of a tile of which compute ([ROW_TILE, columns] to [ROW_TILE, n]) makes something else than of the same
    numbers in the first row, beside other rows; empty where the place of a row does not count."""
    return _differing(lambda tile, place: compute(tile)[place], columns, dtype)


def differing_attended_rows(
    kv_heads: int, group: int, head_dim: int, dtype: torch.dtype, latent_dim: int | None = None
) -> list[int]:
    """The same for attention: which rows of a tile get something else than the same query in the first row does, at the
    same position of the same context. latent_dim: of pages of latents."""
    position = CONTEXT_TILE + ROW_TILE
    generator = torch.Generator().manual_seed(1)
    parts = 2 if latent_dim is None else 1
    pages = torch.randn(1, position + ROW_TILE, parts, kv_heads, head_dim, generator=generator).to(dtype)
    table = torch.zeros(1, dtype=torch.int32)

    def attended(queries: Tensor, place: int) -> Tensor:
        result = queries.new_empty(len(queries), kv_heads * group * (latent_dim or head_dim))
        _attend_(result, queries, pages, table, position - place + ROW_TILE, None, latent_dim=latent_dim)
        return result[place]

    return _differing(attended, kv_heads * group * head_dim, dtype)


def _differing(compute: Callable[[Tensor, int], Tensor], columns: int, dtype: torch.dtype) -> list[int]:
    """compute: a tile and a place in it to what becomes of the row that is there."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(columns, generator=generator)
    results = []
    for place in range(ROW_TILE):
        tile = torch.randn(ROW_TILE, columns, generator=generator)
        tile[place] = row
        results.append(compute(tile.to(dtype), place))
    return [place for place, result in enumerate(results) if not torch.equal(result, results[0])]


def rms_norm(values: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return _in_row_tiles(lambda tile: reference.rms_norm(tile, weight, eps), values)


def add_rms_norm_(hidden: Tensor, product: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    if product is not None:
        hidden.add_(product)  # a sum of two numbers is exactly rounded
    return rms_norm(hidden, weight, eps)


def rotary_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    # Each product and each sum by itself, so that nothing is left to fused operations.
    swapped = heads.roll(heads.shape[-1] // 2, -1).float()
    heads.copy_((heads.float() * cos.float()) + (swapped * sin.float()))


def rotary_and_store_kv_(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots_of_layer: Tensor, slots: Tensor, kv_heads: int
) -> None:
    keys_values = 2 * kv_heads * cos.shape[-1]
    heads = qkv.view(qkv.shape[0], -1, cos.shape[-1])
    rotary_(heads[:, : heads.shape[1] - kv_heads], cos, sin)
    store_kv_(slots_of_layer, qkv[:, qkv.shape[1] - keys_values :], slots)


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
) -> None:
    for row, context in enumerate(contexts.tolist()):
        attended[row] = 0
        if context:
            rows = slice(row, row + 1)
            _attend_(attended[rows], queries[rows], pages, block_tables[row], context, window, score_cap, sinks)


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
    starts = row_starts.tolist()
    for table, context, start, end in zip(block_tables, contexts.tolist(), starts, starts[1:], strict=False):
        _attend_(attended[start:end], queries[start:end], pages, table, context, window, score_cap, sinks)


def paged_latents_(
    attended: Tensor,
    queries: Tensor,
    pages: Tensor,
    block_tables: Tensor,
    contexts: Tensor,
    row_starts: Tensor,
    latent_dim: int,
) -> None:
    starts = row_starts.tolist()
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
) -> None:
    """The last len(queries) of the context's tokens over its pages."""
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
        # The rows and the heads that share keys and values are the rows of one product.
        shared = padded.view(ROW_TILE, kv_heads, group, head_dim).transpose(0, 1).reshape(kv_heads, -1, head_dim)
        positions = start + first + torch.arange(ROW_TILE)
        seen = -(-(start + first + rows) // CONTEXT_TILE) - first_tile  # of the tiles, by any of these rows
        scores = []
        for number in range(seen):
            place = (first_tile + number) * CONTEXT_TILE + torch.arange(CONTEXT_TILE)
            hidden = place[None, :] > positions[:, None]
            if window is not None:
                hidden |= place[None, :] <= positions[:, None] - window
            tile = torch.bmm(shared, keys[number].transpose(1, 2)).mul_(1.0 / math.sqrt(head_dim))
            if score_cap is not None:
                tile = _in_flat_pieces(torch.tanh, tile.mul_(1.0 / score_cap)).mul_(score_cap)
            tile.view(kv_heads, ROW_TILE, group, -1).masked_fill_(hidden[None, :, None], float("-inf"))
            scores.append(tile)
        # A maximum is exact in any order, so the weights need no second look.
        best = torch.stack([tile.amax(-1) for tile in scores]).amax(0)
        if sinks is None:
            best.masked_fill_(best == float("-inf"), 0.0)  # of the padding
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
    """Keys and values of the positions from begin (of a tile) to end: each float32 [tiles, K, CONTEXT_TILE, D], zeros
    before the first that is seen, whose page may be somebody else's, and behind the end. dtype: of what is kept in 8
    bits."""
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
    """values: [n, ...]. compute: row by row of a contiguous [ROW_TILE, ...]."""
    count = values.shape[0]
    padded = values.new_zeros(count + -count % ROW_TILE, *values.shape[1:])
    padded[:count] = values
    return torch.cat([compute(tile) for tile in torch.split(padded, ROW_TILE)])[:count]


def _in_flat_pieces(compute: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """compute: number by number. Returns a new tensor in the shape of values."""
    count = values.numel()
    padded = values.new_zeros(count + -count % FLAT_NUMBERS)
    padded[:count].view(values.shape).copy_(values)
    for piece in torch.split(padded, FLAT_NUMBERS):
        piece.copy_(compute(piece))
    return padded[:count].view(values.shape)
