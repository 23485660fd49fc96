"""Tests of paged attention of decodes and prompt chunks against the reference.

The pages of each sequence are at random positions. Slots after a sequence's last token, pages without an owner, and
page 0, which pads tables, hold NaN.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from trioserve_kernels import paged as paged_sizes
from trioserve_kernels import reference, triton
from trioserve_kernels.kv_format import CODED_DTYPES, encode, head_dim_of
from trioserve_kernels.paged import DECODE_PARTS_MAX, SPLIT_TOKENS, DecodeWork, chunk_tile_tokens, split_count

# head_dim, key/value heads, query heads per key/value head, tokens per page, window
SHAPES = pytest.mark.parametrize(
    "head_dim, kv_heads, group, page_tokens, window",
    ((64, 2, 3, 16, None), (80, 1, 1, 8, 300), (96, 2, 4, 16, 5), (128, 1, 8, 12, None), (16, 1, 3, 16, 16)),
)
# Contexts: an unused row, and lengths around the borders of pages (16) and of parts.
CONTEXTS = (0, 1, 16, 17, SPLIT_TOKENS, SPLIT_TOKENS + 1)


@dataclass(slots=True)
class Paged:
    pages: Tensor
    block_tables: Tensor
    contexts: Tensor


@pytest.fixture(scope="session")
def paged(device: str) -> Callable[..., Paged]:
    """Return paged(contexts, page_tokens, kv_heads, head_dim, dtype), which makes sequences."""

    def make(contexts: tuple[int, ...], page_tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Paged:
        widths = [-(-context // page_tokens) for context in contexts]
        free = list(range(1, sum(widths) + 5))
        random.Random(0).shuffle(free)
        pages = torch.full((len(free) + 1, page_tokens, 2, kv_heads, head_dim), float("nan"))
        tables = torch.zeros(len(contexts), max(widths), dtype=torch.int32)
        draw = torch.Generator().manual_seed(0)
        for row, (context, width) in enumerate(zip(contexts, widths, strict=True)):
            table = [free.pop() for _ in range(width)]
            tables[row, :width] = torch.tensor(table)
            for position in range(context):
                page = table[position // page_tokens]
                pages[page, position % page_tokens] = torch.randn(2, kv_heads, head_dim, generator=draw)
        lengths = torch.tensor(contexts, dtype=torch.int32)
        return Paged(pages.to(dtype).to(device), tables.to(device), lengths.to(device))

    return make


def decode(
    queries: Tensor,
    case: Paged,
    window: int | None,
    parts: int | None = None,
    score_cap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    attended = torch.full(queries.shape, float("nan"), dtype=queries.dtype, device=queries.device)
    head_dim = head_dim_of(case.pages)
    parts = parts or split_count(int(case.contexts.max()), window)
    work = DecodeWork.make(len(queries), queries.shape[1] // head_dim, parts, head_dim, queries.device)
    work.sums.fill_(float("nan"))
    work.scales.fill_(float("nan"))
    triton.paged_decode_(
        attended, queries, case.pages, case.block_tables, case.contexts, window, parts, work, score_cap, sinks, slopes
    )
    return attended


@SHAPES
def test_paged_attention_of_decodes_equals_the_reference(
    head_dim: int,
    kv_heads: int,
    group: int,
    page_tokens: int,
    window: int | None,
    product_dtype: torch.dtype,
    numbers: Callable[..., Tensor],
    paged: Callable[..., Paged],
    check_close: Callable[..., None],
) -> None:
    case = paged(CONTEXTS, page_tokens, kv_heads, head_dim, product_dtype)
    size = kv_heads * group * head_dim
    # The queries are columns of a wider product, as in a model.
    queries = numbers(len(CONTEXTS), size + 2 * kv_heads * head_dim, dtype=product_dtype)[:, :size]
    wanted = torch.empty(queries.shape, dtype=torch.float64, device=queries.device)
    parts = split_count(max(CONTEXTS), window)
    work = DecodeWork.make(0, 0, 0, 0, queries.device)
    reference.paged_decode_(
        wanted, queries.double(), case.pages.double(), case.block_tables, case.contexts, window, parts, work
    )
    got = decode(queries, case, window)
    check_close(got, wanted)
    assert got[0].count_nonzero() == 0


@pytest.mark.parametrize("score_cap", (0.5, 50.0))
def test_paged_attention_with_capped_scores_equals_the_reference(
    score_cap: float,
    numbers: Callable[..., Tensor],
    paged: Callable[..., Paged],
    check_close: Callable[..., None],
) -> None:
    """Compare decodes, and the same rows as chunks of one token."""
    contexts = (17, SPLIT_TOKENS + 1)
    case = paged(contexts, 16, 2, 64, torch.float32)
    queries = numbers(2, 4 * 64) * 5
    wanted = torch.empty(queries.shape, dtype=torch.float64, device=queries.device)
    work = DecodeWork.make(0, 0, 0, 0, queries.device)
    pages = case.pages.double()
    reference.paged_decode_(wanted, queries.double(), pages, case.block_tables, case.contexts, None, 2, work, score_cap)
    check_close(decode(queries, case, None, score_cap=score_cap), wanted)
    starts = torch.arange(3, dtype=torch.int32, device=queries.device)
    tiles = torch.tensor([[0, 0], [1, 0]], dtype=torch.int32, device=queries.device)
    got = torch.empty_like(queries)
    triton.paged_chunks_(got, queries, case.pages, case.block_tables, case.contexts, starts, tiles, None, score_cap)
    check_close(got, wanted)


@pytest.mark.parametrize("window", (None, 40))
@pytest.mark.parametrize("sink", (-100.0, 0.0, 5.0, 100.0))
def test_paged_attention_with_sinks_equals_the_reference(
    sink: float,
    window: int | None,
    numbers: Callable[..., Tensor],
    paged: Callable[..., Paged],
    check_close: Callable[..., None],
) -> None:
    """Compare decodes of one part, of several parts, and of an unused row, and the same rows as chunks of one token."""
    contexts = (17, 0, 3 * SPLIT_TOKENS + 1, SPLIT_TOKENS)
    case = paged(contexts, 16, 2, 64, torch.float32)
    queries = numbers(len(contexts), 6 * 64) * 3
    sinks = numbers(6, seed=4) + sink
    wanted = torch.empty(queries.shape, dtype=torch.float64, device=queries.device)
    work = DecodeWork.make(0, 0, 0, 0, queries.device)
    pages = case.pages.double()
    tables = case.block_tables
    reference.paged_decode_(wanted, queries.double(), pages, tables, case.contexts, window, 2, work, None, sinks)
    got = decode(queries, case, window, sinks=sinks)
    check_close(got, wanted)
    assert got[1].count_nonzero() == 0
    starts = torch.arange(len(contexts) + 1, dtype=torch.int32, device=queries.device)
    tiles = torch.tensor([[chunk, 0] for chunk in range(4)], dtype=torch.int32, device=queries.device)
    got = torch.empty_like(queries)
    triton.paged_chunks_(got, queries, case.pages, tables, case.contexts, starts, tiles, window, None, sinks)
    check_close(got, wanted)


@pytest.mark.parametrize("window", (None, 40))
def test_paged_attention_with_slopes_equals_the_reference(
    window: int | None,
    numbers: Callable[..., Tensor],
    paged: Callable[..., Paged],
    check_close: Callable[..., None],
) -> None:
    """Compare decodes of one part and of several parts, and the same rows as chunks of one token."""
    contexts = (17, 3 * SPLIT_TOKENS + 1, SPLIT_TOKENS)
    case = paged(contexts, 16, 2, 64, torch.float32)
    queries = numbers(len(contexts), 6 * 64) * 3
    slopes = 0.5 ** torch.arange(1, 7, dtype=torch.float32, device=queries.device)
    wanted = torch.empty(queries.shape, dtype=torch.float64, device=queries.device)
    work = DecodeWork.make(0, 0, 0, 0, queries.device)
    pages, tables = case.pages.double(), case.block_tables
    reference.paged_decode_(wanted, queries.double(), pages, tables, case.contexts, window, 2, work, slopes=slopes)
    check_close(decode(queries, case, window, slopes=slopes), wanted)
    starts = torch.arange(len(contexts) + 1, dtype=torch.int32, device=queries.device)
    tiles = torch.tensor([[chunk, 0] for chunk in range(3)], dtype=torch.int32, device=queries.device)
    got = torch.empty_like(queries)
    triton.paged_chunks_(got, queries, case.pages, tables, case.contexts, starts, tiles, window, slopes=slopes)
    check_close(got, wanted)


def test_unused_row_is_zero_if_attention_has_only_one_part(
    numbers: Callable[..., Tensor], paged: Callable[..., Paged]
) -> None:
    case = paged((0, 5), 16, 1, 64, torch.float32)
    got = decode(numbers(2, 64), case, None)
    assert got[0].count_nonzero() == 0
    assert got[1].isfinite().all()


def test_block_tables_may_have_any_strides(numbers: Callable[..., Tensor], paged: Callable[..., Paged]) -> None:
    case = paged((100, 7, 40), 16, 1, 64, torch.float32)
    turned = Paged(case.pages, case.block_tables.t().contiguous().t(), case.contexts)
    queries = numbers(3, 64)
    assert torch.equal(decode(queries, turned, None), decode(queries, case, None))


@pytest.mark.parametrize("window", (None, 40))
def test_attention_of_a_row_has_the_same_bits_in_any_batch(
    window: int | None, numbers: Callable[..., Tensor], paged: Callable[..., Paged]
) -> None:
    """Include buffers for more parts than any row has, as in a captured graph."""
    case = paged((280, 100, 16), 16, 1, 64, torch.float32)
    queries = numbers(3, 3 * 64)
    together = decode(queries, case, window, parts=5)
    for row in range(3):
        alone = Paged(case.pages, case.block_tables[row : row + 1], case.contexts[row : row + 1])
        assert torch.equal(decode(queries[row : row + 1], alone, window)[0], together[row])


def test_many_parts_of_a_context_are_joined(paged: Callable[..., Paged], check_close: Callable[..., None]) -> None:
    """Use more parts than are read at a time. The best key is in the last part, so all earlier sums must shrink."""
    contexts = (17 * SPLIT_TOKENS + 3,)
    case = paged(contexts, 64, 1, 16, torch.float32)
    check_last_key(case, check_close)


@pytest.mark.parametrize("window", (None, 300))
def test_long_context_is_split_into_at_most_the_maximum_of_parts(
    window: int | None, paged: Callable[..., Paged], check_close: Callable[..., None]
) -> None:
    """Compare a long row, and a shorter row in the same batch."""
    longest = DECODE_PARTS_MAX * SPLIT_TOKENS + 3
    assert split_count(longest, None) == DECODE_PARTS_MAX
    check_last_key(paged((longest, 300), 64, 1, 16, torch.float32), check_close, window)


@pytest.mark.parametrize("window", (None, 300))
def test_number_of_programs_does_not_change_any_bit(
    window: int | None,
    numbers: Callable[..., Tensor],
    paged: Callable[..., Paged],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = paged((1100, 700), 16, 1, 64, torch.float32)
    queries = numbers(2, 3 * 64)
    together = decode(queries, case, window)
    for programs in (2, 4):  # one or two programs for each row
        monkeypatch.setattr(paged_sizes, "DECODE_PROGRAMS", programs)
        assert torch.equal(decode(queries, case, window), together)


def check_last_key(case: Paged, check_close: Callable[..., None], window: int | None = None) -> None:
    """Use queries that resemble a key in each row's last page."""
    rows = torch.arange(len(case.contexts), device=case.contexts.device)
    last = case.block_tables[rows, (case.contexts - 1) // case.pages.shape[1]]
    queries = 2 * case.pages[last.long(), 2, 0, 0]
    wanted = torch.empty(queries.shape, dtype=torch.float64, device=queries.device)
    reference.paged_chunks_(
        wanted,
        queries.double(),
        case.pages.double(),
        case.block_tables,
        case.contexts,
        torch.arange(len(queries) + 1, device=queries.device),
        torch.empty(0),
        window,
    )
    check_close(decode(queries, case, window), wanted)


@SHAPES
def test_chunks_of_different_lengths_in_one_launch_equal_the_reference(
    head_dim: int,
    kv_heads: int,
    group: int,
    page_tokens: int,
    window: int | None,
    product_dtype: torch.dtype,
    numbers: Callable[..., Tensor],
    paged: Callable[..., Paged],
    check_close: Callable[..., None],
    device: str,
) -> None:
    """Use whole prompts, a chunk after a prefix, a chunk of one token, and one longer than a tile."""
    contexts, counts = (16, 5, 40, 17, 33, 310), (16, 5, 23, 1, 32, 70)
    case = paged(contexts, page_tokens, kv_heads, head_dim, product_dtype)
    starts = torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32)
    tile_tokens = chunk_tile_tokens(group)
    tiles = [(chunk, first) for chunk, count in enumerate(counts) for first in range(0, count, tile_tokens)]
    tiles_there = torch.tensor(tiles, dtype=torch.int32, device=device)
    size = kv_heads * group * head_dim
    queries = numbers(sum(counts), size + 2 * kv_heads * head_dim, dtype=product_dtype)[:, :size]
    attended = torch.full(queries.shape, float("nan"), dtype=product_dtype, device=device)
    triton.paged_chunks_(attended, queries, case.pages, case.block_tables, case.contexts, starts, tiles_there, window)
    wanted = torch.empty(queries.shape, dtype=torch.float64, device=device)
    reference.paged_chunks_(
        wanted, queries.double(), case.pages.double(), case.block_tables, case.contexts, starts, tiles_there, window
    )
    check_close(attended, wanted)


def run_chunks(
    case: Paged, counts: tuple[int, ...], queries: Tensor, window: int | None, spare_tiles: int = 0
) -> Tensor:
    """Compute chunks of the last `counts` tokens of each context. Spare tiles begin after the end of chunk 0."""
    device = queries.device
    starts = torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32)
    tile_tokens = chunk_tile_tokens(queries.shape[1] // head_dim_of(case.pages) // case.pages.shape[3])
    tiles = [(chunk, first) for chunk, count in enumerate(counts) for first in range(0, count, tile_tokens)]
    tiles += [(0, counts[0] + index * tile_tokens) for index in range(spare_tiles)]
    attended = torch.full(queries.shape, float("nan"), dtype=queries.dtype, device=device)
    tiles_there = torch.tensor(tiles, dtype=torch.int32, device=device)
    triton.paged_chunks_(attended, queries, case.pages, case.block_tables, case.contexts, starts, tiles_there, window)
    return attended


def wanted_chunks(case: Paged, counts: tuple[int, ...], queries: Tensor, window: int | None) -> Tensor:
    wanted = torch.empty(queries.shape, dtype=torch.float64, device=queries.device)
    starts = torch.tensor([0, *counts], device=queries.device).cumsum(0).to(torch.int32)
    pages = case.pages if case.pages.dtype in CODED_DTYPES.values() else case.pages.double()
    reference.paged_chunks_(
        wanted, queries.double(), pages, case.block_tables, case.contexts, starts, torch.empty(0), window
    )
    return wanted


@pytest.mark.parametrize("window", (None, 20))
@pytest.mark.parametrize("kv_format", CODED_DTYPES)
def test_keys_and_values_in_8_bits(
    kv_format: str,
    window: int | None,
    numbers: Callable[..., Tensor],
    paged: Callable[..., Paged],
    check_close: Callable[..., None],
) -> None:
    """Compare decodes of one part and of several, a whole prompt, and a chunk with whole tiles before it."""
    dtype = torch.float16
    contexts = (17, 2 * SPLIT_TOKENS + 3, 0)
    case = paged(contexts, 16, 2, 80, torch.float32)
    case.pages = encode(case.pages, CODED_DTYPES[kv_format]).view(CODED_DTYPES[kv_format])
    queries = numbers(3, 6 * 80, dtype=dtype)
    check_close(decode(queries, case, window), wanted_chunks(case, (1, 1, 1), queries, window))
    counts = (17, 30, 0)
    queries = numbers(sum(counts), 6 * 80, dtype=dtype)
    check_close(run_chunks(case, counts, queries, window), wanted_chunks(case, counts, queries, window))


@pytest.mark.parametrize("window", (None, 150))
def test_attention_of_chunks_that_begin_near_a_tile_border_equals_the_reference(
    window: int | None,
    numbers: Callable[..., Tensor],
    paged: Callable[..., Paged],
    check_close: Callable[..., None],
) -> None:
    """Use chunks that begin before, at and after the border of a tile of keys. With a window, its first tile is cut."""
    contexts, counts = (400, 256, 255), (70, 64, 1)
    case = paged(contexts, 16, 1, 64, torch.float32)
    queries = numbers(sum(counts), 64)
    check_close(run_chunks(case, counts, queries, window), wanted_chunks(case, counts, queries, window))


def test_tiles_after_the_end_belong_to_no_row(numbers: Callable[..., Tensor], paged: Callable[..., Paged]) -> None:
    contexts, counts = (40, 17), (23, 1)
    case = paged(contexts, 16, 1, 64, torch.float32)
    queries = numbers(sum(counts), 3 * 64)
    got = run_chunks(case, counts, queries, None, spare_tiles=3)
    assert torch.equal(got, run_chunks(case, counts, queries, None))


def test_large_heads_in_float32_are_computed_in_pieces_of_a_tile(
    numbers: Callable[..., Tensor], paged: Callable[..., Paged], check_close: Callable[..., None]
) -> None:
    contexts, counts = (50, 21), (50, 5)
    case = paged(contexts, 16, 1, 256, torch.float32)
    queries = numbers(sum(counts), 3 * 256)
    check_close(run_chunks(case, counts, queries, None), wanted_chunks(case, counts, queries, None))


def test_buffers_of_decodes_can_be_used_again(numbers: Callable[..., Tensor], paged: Callable[..., Paged]) -> None:
    """Replay a launch, as a graph does: the last program of each row must set its count back to 0."""
    case = paged((3 * SPLIT_TOKENS, 5, 0), 16, 2, 64, torch.float32)
    queries = numbers(3, 4 * 64)
    work = DecodeWork.make(3, 4, 3, 64, queries.device)
    results = []
    for _ in range(2):
        attended = torch.full_like(queries, float("nan"))
        triton.paged_decode_(attended, queries, case.pages, case.block_tables, case.contexts, None, 3, work)
        assert work.arrivals.count_nonzero() == 0
        results.append(attended)
    assert torch.equal(*results)
    assert results[0].isfinite().all()
