"""Tests of attention over pages of latents against the reference in float64.

The pages of each sequence are at random positions. Slots after a sequence's last token hold NaN, and so does page 0,
which pads tables.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trioserve_kernels import reference, triton
from trioserve_kernels.paged import SPLIT_TOKENS, DecodeWork, chunk_tile_tokens, latent_parts_max, split_count

TURNED = 16
# Query heads, size of a latent, tokens per page. Heads that fill no block, several tokens in a tile of a chunk, and
# more heads than a block.
SHAPES = pytest.mark.parametrize("heads, latent_dim, page_tokens", ((4, 32, 16), (20, 48, 8), (72, 32, 16)))


def sequences(
    contexts: tuple[int, ...], latent_dim: int, page_tokens: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    widths = [-(-context // page_tokens) for context in contexts]
    free = list(range(1, sum(widths) + 5))
    random.Random(0).shuffle(free)
    pages = torch.full((len(free) + 1, page_tokens, 1, 1, latent_dim + TURNED), float("nan"))
    tables = torch.zeros(len(contexts), max(widths), dtype=torch.int32)
    draw = torch.Generator().manual_seed(0)
    for row, (context, width) in enumerate(zip(contexts, widths, strict=True)):
        table = [free.pop() for _ in range(width)]
        tables[row, :width] = torch.tensor(table)
        for position in range(context):
            entry = torch.randn(latent_dim + TURNED, generator=draw)
            pages[table[position // page_tokens], position % page_tokens] = entry
    lengths = torch.tensor(contexts, dtype=torch.int32)
    return pages.to(dtype).to(device), tables.to(device), lengths.to(device)


@pytest.mark.parametrize("parts_of", ("longest context", "a longer context"))
@SHAPES
def test_decodes_of_latents_equal_the_reference(
    heads: int,
    latent_dim: int,
    page_tokens: int,
    parts_of: str,
    product_dtype: torch.dtype,
    numbers: Callable[..., Tensor],
    check_close: Callable[[Tensor, Tensor], None],
    device: str,
) -> None:
    """Use an unused row, and contexts around the borders of pages and parts. A recorded step has more parts."""
    contexts = (0, 1, 16, 17, SPLIT_TOKENS, SPLIT_TOKENS + 1) if parts_of == "longest context" else (1, 0, 33)
    pages, tables, lengths = sequences(contexts, latent_dim, page_tokens, product_dtype, device)
    queries = numbers(len(contexts), heads * (latent_dim + TURNED), dtype=product_dtype)
    longest = max(contexts) if parts_of == "longest context" else 100 * SPLIT_TOKENS
    parts = split_count(longest, None, latent_parts_max(heads))
    work = DecodeWork.make(len(contexts), heads, parts, latent_dim, pages.device)
    got = queries.new_full((len(contexts), heads * latent_dim), float("nan"))
    triton.paged_latents_(got, queries, pages, tables, lengths, latent_dim, parts=parts, work=work)
    wanted = torch.empty(got.shape, dtype=torch.float64, device=device)
    reference.paged_latents_(wanted, queries.double(), pages.double(), tables, lengths, latent_dim)
    check_close(got, wanted)


@SHAPES
def test_chunks_of_latents_equal_the_reference(
    heads: int,
    latent_dim: int,
    page_tokens: int,
    product_dtype: torch.dtype,
    numbers: Callable[..., Tensor],
    check_close: Callable[[Tensor, Tensor], None],
    device: str,
) -> None:
    """Use a chunk that is its whole context, and chunks that begin at any position."""
    counts, contexts = (19, 2, 7), (19, 40, 23)
    pages, tables, lengths = sequences(contexts, latent_dim, page_tokens, product_dtype, device)
    queries = numbers(sum(counts), heads * (latent_dim + TURNED), dtype=product_dtype)
    starts = torch.tensor((0, *counts)).cumsum(0).to(torch.int32).to(device)
    step = chunk_tile_tokens(heads)
    tiles = [(chunk, first) for chunk, count in enumerate(counts) for first in range(0, count, step)]
    got = queries.new_full((sum(counts), heads * latent_dim), float("nan"))
    tile_table = torch.tensor(tiles, dtype=torch.int32, device=device)
    triton.paged_latents_(got, queries, pages, tables, lengths, latent_dim, starts, tile_table)
    wanted = torch.empty(got.shape, dtype=torch.float64, device=device)
    reference.paged_latents_(wanted, queries.double(), pages.double(), tables, lengths, latent_dim, starts)
    check_close(got, wanted)
