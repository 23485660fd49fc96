"""Tests of the native kernels against float64, at every instruction level of this machine.

Tolerance: inputs are exact, so only the order of float32 sums and the rounding of results differ. The tolerance of a
product is relative to the sum of the absolute terms, because the error of a float32 sum grows with it. Attention in
bfloat16 also rounds the weights of values (2 ** -9 of each) and the result (2 ** -9), with values up to 4.
"""

from __future__ import annotations

import ctypes
import math
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from trioserve_kernels.kv_format import CODED_DTYPES, decode, encode, head_dim_of
from trioserve_kernels.native import Engine, Library, WeightMemory, address
from trioserve_kernels.structs import DTYPES, KV_FORMATS, LayerStruct, ModelStruct, StepStruct, WeightFormat, matrix_of

DTYPE_IDS = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
ATTENTION_TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_array(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a tensor's memory as a numpy array, bfloat16 as its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def as_tensor(array: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(array).view(torch.bfloat16 if array.dtype == np.uint16 else torch.float32)


# --- products -------------------------------------------------------------------------------------------------------


@DTYPE_IDS
@pytest.mark.parametrize(
    "rows, outputs, inputs",
    (
        (1, 16, 32),
        (1, 50, 576),
        (3, 64, 48),
        (4, 33, 31),
        (5, 32, 64),
        (8, 96, 576),
        (9, 17, 1056),
        (16, 48, 1100),
        (17, 80, 96),
        (33, 64, 2080),
        (96, 40, 64),
        (97, 64, 160),
        (191, 16, 32),
        (300, 70, 1088),
        (1100, 40, 64),
    ),
)
def test_native_products_equal_float64(
    engine: Engine, dtype: torch.dtype, rows: int, outputs: int, inputs: int
) -> None:
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1)
    library = engine.library
    # Memory after a weight is read ahead but must not affect the result. Here it is NaN.
    size = library.packed_bytes(outputs, inputs, name_of(dtype))
    memory = WeightMemory(library, size + 4096)
    packed = memory.take(size)
    library.pack(as_array(weight), packed)
    ctypes.memset(memory.take(4096), 0xFF, 4096)
    matrix = matrix_of((packed, outputs, inputs, WeightFormat.DENSE))
    product = as_tensor(engine.product(as_array(x), matrix, outputs))
    memory.close()
    exact = x.double() @ weight.double().T
    terms = x.double().abs() @ weight.double().abs().T
    assert ((product.double() - exact).abs() <= 1e-6 * terms + 1e-6).all()


@pytest.mark.slow
def test_native_product_of_interleaved_matrices_equals_float64(engine: Engine) -> None:
    """Interleave two matrices block by block, as gate and up projections are stored."""
    x, gate, up = random(6, 64), random(48, 64, seed=1), random(48, 64, seed=2)
    library = engine.library
    size = library.packed_bytes(96, 64, "float32")
    memory = WeightMemory(library, size)
    packed = memory.take(size)
    library.pack(gate.numpy(), packed, first_block=0, block_step=2)
    library.pack(up.numpy(), packed, first_block=1, block_step=2)
    matrix = matrix_of((packed, 96, 64, WeightFormat.DENSE))
    product = as_tensor(engine.product(x.numpy(), matrix, 96)).view(6, 3, 2, 16)
    memory.close()
    torch.testing.assert_close(product[:, :, 0].reshape(6, 48), x @ gate.T, atol=1e-4, rtol=0)
    torch.testing.assert_close(product[:, :, 1].reshape(6, 48), x @ up.T, atol=1e-4, rtol=0)


# --- attention ------------------------------------------------------------------------------------------------------


def expected_attention(
    queries: Tensor,
    pages: Tensor,
    tables: list[list[int]],
    chunks: list[tuple[int, int]],
    window: int | None,
    score_cap: float | None = None,
    sinks: Tensor | None = None,
    latent_dim: int = 0,
    slopes: Tensor | None = None,
) -> Tensor:
    """Compute the attention of each row alone in float64."""
    rows = []
    kv_heads, dim = pages.shape[3:]
    for (start, count), table in zip(chunks, tables, strict=True):
        context = pages[table].flatten(0, 1).double()
        for position in range(start, start + count):
            first = 0 if window is None else max(0, position - window + 1)
            seen = context[first : position + 1]
            query = queries[len(rows)].double().view(kv_heads, -1, dim)
            scores = torch.einsum("kgd,tkd->kgt", query, seen[:, 0]) / math.sqrt(dim)
            if score_cap is not None:
                scores = score_cap * torch.tanh(scores / score_cap)
            if slopes is not None:
                distances = position - torch.arange(first, position + 1, dtype=torch.float64)
                scores = scores - slopes.double().view(kv_heads, -1, 1) * distances
            if sinks is not None:
                scores = torch.cat((scores, sinks.double().view(kv_heads, -1, 1)), -1)
            weights = scores.softmax(-1)[..., : len(seen)]
            values = seen[:, 0, :, :latent_dim] if latent_dim else seen[:, 1]
            rows.append(torch.einsum("kgt,tkd->kgd", weights, values).flatten())
    return torch.stack(rows)


def attention_of(
    engine: Engine,
    queries: Tensor,
    pages: Tensor,
    tables: list[list[int]],
    chunks: list[tuple[int, int]],
    *,
    window: int | None = None,
    score_cap: float | None = None,
    sinks: Tensor | None = None,
    latent_dim: int = 0,
    slopes: Tensor | None = None,
) -> Tensor:
    page_tokens, _, kv_heads, _ = pages.shape[1:]
    head_dim = head_dim_of(pages)
    kv_format = next((name for name, dtype in CODED_DTYPES.items() if pages.dtype == dtype), "plain")

    def array(values: list[int]) -> npt.NDArray[np.int32]:
        return np.array(values, dtype=np.int32)

    starts, counts = array([start for start, _ in chunks]), array([count for _, count in chunks])
    firsts = array([sum(map(len, tables[:index])) for index in range(len(tables))])
    blocks = array([block for table in tables for block in table])
    padded = np.zeros(64, dtype=np.float32)
    if sinks is not None:
        padded[: len(sinks)] = sinks.numpy()
    unscaled = None if slopes is None else (slopes * math.sqrt(head_dim)).numpy()
    layer = LayerStruct(
        head_count=queries.shape[1] // head_dim,
        kv_head_count=kv_heads,
        head_dim=head_dim,
        window=window or 0,
        score_cap=score_cap or 0.0,
        sinks=None if sinks is None else address(padded),
        slopes=None if unscaled is None else address(unscaled),
    )
    model = ModelStruct(
        dtype=DTYPES[name_of(queries.dtype)],
        layer_count=1,
        latent_dim=latent_dim,
        page_tokens=page_tokens,
        kv_format=KV_FORMATS[kv_format],
        layers=ctypes.addressof(layer),
    )
    page_addresses = (ctypes.c_void_p * 1)(pages.data_ptr())
    step = StepStruct(
        row_count=len(queries),
        chunk_count=len(chunks),
        chunk_starts=address(starts),
        chunk_counts=address(counts),
        table_firsts=address(firsts),
        tables=address(blocks),
        pages=ctypes.addressof(page_addresses),
    )
    return as_tensor(engine.attention(model, step, as_array(queries)))


def check_attention(
    engine: Engine,
    dtype: torch.dtype,
    *,
    chunks: list[tuple[int, int]],
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
    page_tokens: int = 16,
    window: int | None = None,
    shared: dict[int, tuple[int, int]] | None = None,
    spread: float = 1.0,
    score_cap: float | None = None,
    sink: float | None = None,
    latent_dim: int = 0,
    has_slopes: bool = False,
) -> None:
    """Compare the attention of a step with float64. Every slot that no row sees holds NaN.

    Args:
        engine: engine under test.
        dtype: dtype of queries, keys and values.
        chunks: (start, count) of each sequence.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: numbers per head.
        page_tokens: tokens per page.
        window: tokens that a row sees, or None for all.
        shared: for some sequences, (earlier sequence, number of first blocks) that both share.
        spread: approximate spread of the scores.
        score_cap: limit of the scores, or None.
        sink: approximate sinks of the heads, or None.
        latent_dim: numbers of a value in latent attention, or 0.
        has_slopes: subtract distances times slopes from 0.5 to 2 ** -8, as ALiBi does.
    """
    widths = [-(-(start + count) // page_tokens) for start, count in chunks]
    order = torch.randperm(sum(widths) + 3, generator=torch.Generator().manual_seed(5)).tolist()
    tables: list[list[int]] = []
    for index, width in enumerate(widths):
        other, common = (shared or {}).get(index, (0, 0))
        table = tables[other][:common] if common else []
        tables.append([*table, *(order.pop() for _ in range(width - len(table)))])
    pages = random(sum(widths) + 3, page_tokens, 1 if latent_dim else 2, kv_heads, head_dim, dtype=dtype, seed=7)
    seen = torch.zeros(len(pages), page_tokens, dtype=torch.bool)
    for (start, count), table in zip(chunks, tables, strict=True):
        for position in range(0 if window is None else max(0, start - window + 1), start + count):
            seen[table[position // page_tokens], position % page_tokens] = True
    pages[~seen] = float("nan")
    row_count = sum(count for _, count in chunks)
    queries = (random(row_count, heads * head_dim, seed=8) * spread).to(dtype)
    sinks = None if sink is None else random(heads, seed=9) + sink
    slopes = 2.0 ** -torch.linspace(1, 8, heads) if has_slopes else None
    options = {"score_cap": score_cap, "sinks": sinks, "latent_dim": latent_dim, "slopes": slopes}
    attended = attention_of(engine, queries, pages, tables, chunks, window=window, **options)
    expected = expected_attention(queries, pages, tables, chunks, window, **options)
    assert (attended.double() - expected).abs().max() < ATTENTION_TOLERANCES[dtype]


@DTYPE_IDS
@pytest.mark.parametrize(
    "chunks",
    (
        [(0, 1)],
        [(14, 1), (15, 1), (16, 1), (17, 1)],
        [(63, 1), (64, 1), (127, 1), (200, 1)],
        [(2500, 1)],
        [(1000, 1), (3, 1)],
        [(0, 2), (30, 3)],
        [(0, 4)],
        [(0, 64), (0, 65)],
        [(5, 40), (61, 30)],
        [(0, 200), (130, 1), (64, 64), (9, 2)],
    ),
    ids=str,
)
def test_native_attention_of_decodes_and_prompts_equals_float64(
    engine: Engine, dtype: torch.dtype, chunks: list[tuple[int, int]]
) -> None:
    check_attention(engine, dtype, chunks=chunks)


@DTYPE_IDS
@pytest.mark.parametrize("window", (1, 7, 16, 64, 100))
def test_native_attention_in_a_window_equals_float64(engine: Engine, dtype: torch.dtype, window: int) -> None:
    check_attention(engine, dtype, chunks=[(0, 1), (6, 1), (90, 1), (300, 1), (0, 130), (77, 50)], window=window)


@DTYPE_IDS
@pytest.mark.parametrize("head_dim", (16, 32, 48, 80, 96, 128, 256))
@pytest.mark.parametrize("heads, kv_heads", ((1, 1), (4, 4), (5, 1), (14, 2)))
def test_native_attention_of_other_head_shapes_equals_float64(
    engine: Engine, dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int
) -> None:
    chunks = [(33, 1), (0, 20), (16, 1)]
    check_attention(engine, dtype, chunks=chunks, head_dim=head_dim, heads=heads, kv_heads=kv_heads)


@DTYPE_IDS
@pytest.mark.parametrize("heads, head_dim, latent_dim", ((1, 48, 32), (5, 80, 48), (16, 576, 512), (40, 288, 256)))
def test_native_attention_of_latents_equals_float64(
    engine: Engine, dtype: torch.dtype, heads: int, head_dim: int, latent_dim: int
) -> None:
    """Use one key for all heads, whose first numbers are also its value."""
    shape = {"heads": heads, "kv_heads": 1, "head_dim": head_dim, "latent_dim": latent_dim}
    check_attention(engine, dtype, chunks=[(33, 1), (0, 150), (300, 1), (20, 3)], **shape)
    check_attention(engine, dtype, chunks=[(310, 1), (300, 1), (290, 2)], shared={1: (0, 16), 2: (0, 16)}, **shape)


@DTYPE_IDS
@pytest.mark.parametrize("window", (None, 200))
@pytest.mark.parametrize("spread", (1.0, 8.0))
def test_native_attention_of_long_prompts_equals_float64(
    engine: Engine, dtype: torch.dtype, window: int | None, spread: float
) -> None:
    """Use prompts of several pieces, in which later spans have much larger scores than earlier spans."""
    chunks = [(0, 300), (203, 120), (5, 7)]
    check_attention(engine, dtype, chunks=chunks, heads=9, kv_heads=3, window=window, spread=spread)


@DTYPE_IDS
@pytest.mark.parametrize("head_dim", (48, 64, 256))
@pytest.mark.parametrize("score_cap", (0.5, 50.0))
def test_native_attention_with_capped_scores_equals_float64(
    engine: Engine, dtype: torch.dtype, head_dim: int, score_cap: float
) -> None:
    """Use decodes alone and on shared blocks, short chunks, and prompts of several spans."""
    chunks = [(0, 1), (90, 1), (300, 1), (310, 1), (30, 3), (0, 130), (77, 50)]
    check_attention(
        engine,
        dtype,
        chunks=chunks,
        head_dim=head_dim,
        window=None,
        shared={3: (2, 18)},
        spread=8.0,
        score_cap=score_cap,
    )
    check_attention(engine, dtype, chunks=chunks, head_dim=head_dim, window=40, spread=8.0, score_cap=score_cap)


@DTYPE_IDS
@pytest.mark.parametrize("sink", (-300.0, 0.0, 4.0, 300.0))
@pytest.mark.parametrize("heads, kv_heads, head_dim", ((6, 2, 64), (20, 4, 48), (5, 1, 96)))
def test_native_attention_with_sinks_equals_float64(
    engine: Engine, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, sink: float
) -> None:
    """Use decodes alone and on shared blocks, short chunks, and prompts of several spans."""
    chunks = [(0, 1), (90, 1), (300, 1), (310, 1), (30, 3), (0, 130), (77, 50)]
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "sink": sink}
    check_attention(engine, dtype, chunks=chunks, shared={3: (2, 18)}, spread=4.0, **shape)
    check_attention(engine, dtype, chunks=chunks, window=40, **shape)


@DTYPE_IDS
@pytest.mark.parametrize("heads, kv_heads, head_dim", ((6, 2, 64), (5, 1, 48), (4, 4, 128)))
@pytest.mark.parametrize("window", (None, 40))
def test_native_attention_with_slopes_equals_float64(
    engine: Engine, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int | None
) -> None:
    """Use decodes alone and on shared blocks, short chunks, prompts of several spans, and distances of 3,000 tokens."""
    chunks = [(0, 1), (3000, 1), (300, 1), (310, 1), (30, 3), (0, 130), (777, 50)]
    shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "window": window}
    check_attention(engine, dtype, chunks=chunks, shared={3: (2, 18)}, spread=4.0, has_slopes=True, **shape)
    check_attention(engine, dtype, chunks=chunks, score_cap=2.0, sink=1.0, has_slopes=True, **shape)


@pytest.mark.slow
@DTYPE_IDS
@pytest.mark.parametrize("head_dim, window", ((64, None), (80, 600), (128, 70)))
def test_native_attention_of_prompts_longer_than_a_span_equals_float64(
    engine: Engine, dtype: torch.dtype, window: int | None, head_dim: int
) -> None:
    chunks = [(0, 650), (1000, 40), (490, 70)]
    check_attention(engine, dtype, chunks=chunks, heads=4, kv_heads=2, head_dim=head_dim, window=window)
    check_attention(engine, dtype, chunks=chunks, heads=1, kv_heads=1, head_dim=head_dim, window=window, spread=8)


@DTYPE_IDS
@pytest.mark.parametrize("kv_format", ("int8", "fp8"))
@pytest.mark.parametrize("head_dim, heads, kv_heads", ((64, 9, 3), (48, 4, 2), (128, 5, 1)))
@pytest.mark.parametrize("page_tokens", (16, 5))
@pytest.mark.parametrize("window", (None, 70))
def test_attention_over_8_bits_equals_attention_over_decoded_numbers(
    engine: Engine,
    kv_format: str,
    dtype: torch.dtype,
    head_dim: int,
    heads: int,
    kv_heads: int,
    page_tokens: int,
    window: int | None,
) -> None:
    """Compare all bits. Use prompts, chunks of prompts, decodes alone, and decodes that share their first 100 tokens.

    Slots that no row sees are NaN.
    """
    chunks = [(0, 130), (77, 50), (30, 3), (0, 1), (300, 1), (100, 1), (120, 1), (131, 1)]
    widths = [-(-(start + count) // page_tokens) for start, count in chunks]
    order = torch.randperm(sum(widths), generator=torch.Generator().manual_seed(5)).tolist()
    tables = [[order.pop() for _ in range(width)] for width in widths]
    for index in (6, 7):
        tables[index][: 100 // page_tokens] = tables[5][: 100 // page_tokens]
    kind = CODED_DTYPES[kv_format]
    pages = encode(random(sum(widths), page_tokens, 2, kv_heads, head_dim, seed=7), kind).view(kind)
    seen = torch.zeros(len(pages), page_tokens, dtype=torch.bool)
    for (start, count), table in zip(chunks, tables, strict=True):
        for position in range(0 if window is None else max(0, start - window + 1), start + count):
            seen[table[position // page_tokens], position % page_tokens] = True
    pages.view(torch.uint8)[~seen] = 0xFF
    queries = random(sum(count for _, count in chunks), heads * head_dim, dtype=dtype, seed=8)
    attended = attention_of(engine, queries, pages, tables, chunks, window=window)
    expected = attention_of(engine, queries, decode(pages, dtype), tables, chunks, window=window)
    assert attended.isfinite().all()
    assert torch.equal(attended, expected)


@DTYPE_IDS
@pytest.mark.parametrize("growth", (4, 6, 9, 11, 80, 95, 200, 280, 400, 700, 1e5))
def test_scores_far_above_all_earlier_scores_give_the_attention_of_float64(
    engine: Engine, dtype: torch.dtype, growth: float
) -> None:
    """Give tokens 70, 135 and 270 scores far above all earlier ones, in even rows only."""
    dim = 32
    pages = random(25, 16, 2, 1, dim, dtype=dtype, seed=3)
    pages[:, :, 0, :, 0] = 0
    for times, token in enumerate((70, 135, 270), 1):
        pages[token // 16, token % 16, 0, 0, 0] = times * growth * dim**0.5 / 16
    queries = random(400, dim, dtype=dtype, seed=4)
    queries[::2, 0] = 16
    attended = attention_of(engine, queries, pages, [list(range(25))], [(0, 400)])
    expected = expected_attention(queries, pages, [list(range(25))], [(0, 400)], None)
    assert (attended.double() - expected).abs().max() < ATTENTION_TOLERANCES[dtype]


@DTYPE_IDS
@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf")))
@pytest.mark.parametrize("slope", (None, 0.25))
def test_nan_key_of_a_prompt_affects_only_rows_that_attend_to_it(
    engine: Engine, dtype: torch.dtype, value: float, slope: float | None
) -> None:
    pages = random(13, 16, 2, 1, 32, dtype=dtype, seed=3)
    pages[6, 4, 0, 0, 7] = value
    queries = random(200, 32, dtype=dtype, seed=4)
    table = [list(range(13))]
    slopes = None if slope is None else torch.tensor([slope])
    attended = attention_of(engine, queries, pages, table, [(0, 200)], slopes=slopes)
    expected = expected_attention(queries, pages, table, [(0, 200)], None, slopes=slopes)
    is_number = torch.isfinite(expected).all(dim=1)  # A score of minus infinity gives a weight of 0.
    assert is_number[:100].all()
    assert not is_number[100:].all()
    assert (attended.double() - expected)[is_number].abs().max() < ATTENTION_TOLERANCES[dtype]
    assert not torch.isfinite(attended[~is_number]).any()


@pytest.mark.parametrize("growth", (3.0, 6.0, 8.0, 30.0))
def test_row_has_the_same_bits_beside_rows_with_growing_scores(engine: Engine, growth: float) -> None:
    if not engine.library.level.startswith("amx"):
        pytest.skip("weights are powers of 2 of fixed point with AMX alone")
    dim, heads, rows = 32, 8, 400
    pages = random(25, 16, 2, heads, dim, dtype=torch.bfloat16, seed=3)
    pages[:, :, 0, :, :2] = 0
    # This key raises the scores of all rows, but too little in odd rows to change their result.
    pages[5, 3, 0, :, 0] = 1
    pages[9, 7, 0, :, 1] = 1
    queries = random(rows, heads, dim, dtype=torch.bfloat16, seed=4)
    queries[:, :, 0] = torch.linspace(5.2, 9.0, rows)[:, None] * dim**0.5
    loud = queries.clone()
    loud[::2, :, :2] = growth * dim**0.5
    table = [list(range(25))]
    among_quiet = attention_of(engine, queries.flatten(1), pages, table, [(0, rows)])
    among_loud = attention_of(engine, loud.flatten(1), pages, table, [(0, rows)])
    assert torch.equal(among_quiet[1::2], among_loud[1::2])


@DTYPE_IDS
@pytest.mark.parametrize("page_tokens", (1, 4, 5, 24, 32, 256))
def test_native_attention_over_other_page_sizes_equals_float64(
    engine: Engine, dtype: torch.dtype, page_tokens: int
) -> None:
    chunks = [(70, 1), (0, 37), (3, 9), (300, 1), (127, 2)]
    check_attention(engine, dtype, chunks=chunks, page_tokens=page_tokens)
    check_attention(engine, dtype, chunks=chunks, page_tokens=page_tokens, window=90)


@DTYPE_IDS
def test_infinite_score_spoils_only_its_row(engine: Engine, dtype: torch.dtype) -> None:
    """Let sixteen sequences share 256 tokens, so that their rows are in one vector.

    In the second span, one row has an infinite score, as in the first span. The scores of another row grow.
    """
    count, dim = 16, 32
    pages = random(16 + count, 16, 2, 1, dim, dtype=dtype, seed=3)
    pages[:, :, 0] = 0
    pages[:, :, 0, :, 0] = 1
    pages[4:, :, 0, :, 1] = 10
    tables = [[*range(16), 16 + index] for index in range(count)]
    chunks = [(256, 1)] * count
    for infinite, growing in ((0, 4), (0, 8), (1, 5), (8, 0), (15, 14)):
        queries = torch.zeros(count, dim, dtype=dtype)
        queries[infinite, 0] = float("inf")
        queries[growing, 1] = 10
        attended = attention_of(engine, queries, pages, tables, chunks).double()
        expected = expected_attention(queries, pages, tables, chunks, None)
        others = [row for row in range(count) if row != infinite]
        assert (attended - expected)[others].abs().max() < ATTENTION_TOLERANCES[dtype]
        assert not torch.isfinite(attended[infinite]).all()


@pytest.mark.parametrize("bits", (0x7FC00000, 0x7FC00001, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF))
@pytest.mark.parametrize("chunk", ((0, 8), (7, 1)), ids=("prompt", "decode"))
def test_every_encoding_of_nan_in_keys_or_values_gives_nan(engine: Engine, chunk: tuple[int, int], bits: int) -> None:
    pages = random(1, 16, 2, 1, 32, seed=0)
    pages.view(torch.int32)[0, 3, 0, 0, 5] = int(np.uint32(bits).view(np.int32))
    attended = attention_of(engine, random(chunk[1], 32, seed=2), pages, [[0]], [chunk])
    assert not torch.isfinite(attended[-1]).any()


SHARINGS: dict[str, tuple[list[tuple[int, int]], dict[int, tuple[int, int]]]] = {
    "two": ([(100, 1), (130, 1)], {1: (0, 5)}),
    "blocks that are full with the last token": ([(127, 1), (127, 1), (200, 1)], {1: (0, 7), 2: (0, 8)}),
    "forty": ([(300 + 3 * index, 1) for index in range(40)], dict.fromkeys(range(1, 40), (0, 17))),
    "groups in groups": (
        [(1000, 1), (1001, 1), (700, 1), (90, 1), (333, 1), (720, 1), (15, 1), (500, 1), (330, 1)],
        {1: (0, 60), 2: (0, 30), 4: (3, 5), 5: (2, 40), 7: (0, 10), 8: (4, 20)},
    ),
    "beside prompts": ([(200, 1), (150, 40), (210, 1), (199, 3), (0, 64)], {1: (0, 9), 2: (0, 11), 3: (0, 12)}),
    "the rows of one chunk": ([(80, 3), (200, 2)], {}),
    "too little": ([(60, 1), (70, 1)], {1: (0, 2)}),
}


@pytest.mark.slow
@DTYPE_IDS
@pytest.mark.parametrize("name", SHARINGS)
def test_native_attention_of_sequences_that_share_blocks_equals_float64(
    engine: Engine, dtype: torch.dtype, name: str
) -> None:
    chunks, shared = SHARINGS[name]
    check_attention(engine, dtype, chunks=chunks, shared=shared)
    check_attention(engine, dtype, chunks=chunks, shared=shared, heads=5, kv_heads=1, head_dim=48)


@DTYPE_IDS
@pytest.mark.parametrize("page_tokens", (1, 5, 48))
def test_native_attention_over_shared_blocks_of_other_sizes_equals_float64(
    engine: Engine, dtype: torch.dtype, page_tokens: int
) -> None:
    chunks = [(400 + 7 * index, 1) for index in range(9)]
    shared = {index: (index - 1, (380 - 30 * index) // page_tokens) for index in range(1, 9)}
    check_attention(engine, dtype, chunks=chunks, shared=shared, page_tokens=page_tokens)


@pytest.mark.parametrize("window", (64, 300, 2000))
def test_native_attention_over_shared_blocks_in_a_window_equals_float64(engine: Engine, window: int) -> None:
    """Mix rows whose window has left the shared blocks with rows that still see them."""
    chunks = [(250, 1), (280, 1), (290, 1), (310, 1), (900, 1)]
    check_attention(engine, torch.float32, chunks=chunks, shared=dict.fromkeys(range(1, 5), (0, 14)), window=window)


@pytest.mark.slow
@DTYPE_IDS
def test_native_attention_of_many_decodes_equals_float64(engine: Engine, dtype: torch.dtype) -> None:
    """Use more pieces than a thread takes at once, with all lengths within a block and within a span."""
    chunks = [(17 * index % 331, 1) for index in range(80)]
    for heads, kv_heads, head_dim in ((9, 3, 64), (8, 1, 32), (10, 2, 128)):
        check_attention(engine, dtype, chunks=chunks, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


# --- threads --------------------------------------------------------------------------------------------------------


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("threads", (1, 2, 3, 8))
def test_engine_computes_with_any_number_of_threads_and_closes(threads: int, library: Library) -> None:
    before = thread_count()
    engine = Engine(library, threads)
    assert thread_count() == before + threads - 1
    for rows in (1, 7, 130):
        test_native_products_equal_float64(engine, torch.float32, rows, 80, 96)
    check_attention(engine, torch.bfloat16, chunks=[(200, 1), (0, 70), (80, 1)])
    engine.close()
    engine.close()
    assert thread_count() == before
