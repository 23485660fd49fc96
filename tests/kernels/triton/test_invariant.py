"""Tests of the batch-invariant kernels: a row has the same bits as alone. Products are also compared in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from trioserve.model.torch_step import layers
from trioserve.model.torch_step import step_model as torch_step_model
from trioserve_kernels.paged import DecodeWork, chunk_tile_tokens
from trioserve_kernels.triton import invariant
from trioserve_kernels.triton.product import OUTPUT_BLOCK, ROW_BLOCK, product

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}  # as in conftest.py


@pytest.mark.parametrize("rows", (1, ROW_BLOCK, ROW_BLOCK + 1, 3 * ROW_BLOCK))
@pytest.mark.parametrize("depth, outputs", ((64, OUTPUT_BLOCK), (80, 40), (576, 2 * OUTPUT_BLOCK + 8)))
@pytest.mark.parametrize("has_bias", (False, True))
def test_batch_invariant_product_equals_the_reference(
    rows: int, depth: int, outputs: int, has_bias: bool, product_dtype: torch.dtype, numbers: Callable[..., Tensor]
) -> None:
    values, weight = numbers(rows, depth, dtype=product_dtype), numbers(outputs, depth, dtype=product_dtype, seed=1)
    weight /= depth**0.5
    bias = numbers(outputs, dtype=product_dtype, seed=2) if has_bias else None
    wanted = values.double() @ weight.double().T + (0 if bias is None else bias.double())
    tolerance = TOLERANCES[product_dtype]
    torch.testing.assert_close(product(values, weight, bias).double(), wanted, atol=tolerance, rtol=tolerance)


def test_row_of_an_invariant_product_has_the_same_bits_without_the_other_rows(
    product_dtype: torch.dtype, numbers: Callable[..., Tensor]
) -> None:
    """Check each index of a tile, in the first tile and in others. The last tile has few rows."""
    values, weight = (
        numbers(2 * ROW_BLOCK + 3, 200, dtype=product_dtype),
        numbers(150, 200, dtype=product_dtype, seed=1),
    )
    together = product(values, weight, None)
    for row in range(values.shape[0]):
        assert torch.equal(product(values[row : row + 1], weight, None)[0], together[row])
    assert torch.equal(product(values[5:100], weight, None), together[5:100])


@pytest.mark.parametrize("window, has_sinks", ((None, False), (5, False), (70, False), (None, True), (70, True)))
@pytest.mark.parametrize("head_dim, kv_heads, group, page_tokens", ((64, 2, 3, 16), (80, 1, 1, 8), (16, 1, 5, 12)))
def test_decode_has_the_same_bits_as_a_row_of_a_prompt(
    window: int | None,
    has_sinks: bool,
    head_dim: int,
    kv_heads: int,
    group: int,
    page_tokens: int,
    product_dtype: torch.dtype,
    numbers: Callable[..., Tensor],
    device: str,
) -> None:
    """Use chunks that begin at any position, and pages at any position."""
    context, size = 150, kv_heads * group * head_dim
    queries = numbers(context, size, dtype=product_dtype)
    sinks = numbers(kv_heads * group, seed=2) if has_sinks else None
    keys_values = numbers(context, 2, kv_heads, head_dim, dtype=product_dtype, seed=1)
    width = -(-context // page_tokens)
    places = list(range(2 * width))
    random.Random(0).shuffle(places)

    def paged(first: int) -> tuple[Tensor, Tensor]:
        pages = torch.full((2 * width, page_tokens, 2, kv_heads, head_dim), float("nan"), dtype=product_dtype)
        table = places[first : first + width]
        for position in range(context):
            pages[table[position // page_tokens], position % page_tokens] = keys_values[position]
        return pages.to(device), torch.tensor([table], dtype=torch.int32, device=device)

    def chunk(start: int, end: int, pages: Tensor, table: Tensor) -> Tensor:
        attended = torch.full((end - start, size), float("nan"), dtype=product_dtype, device=device)
        step = chunk_tile_tokens(group)
        tiles = torch.tensor([(0, first) for first in range(0, end - start, step)], dtype=torch.int32, device=device)
        ends = [torch.tensor(value, dtype=torch.int32, device=device) for value in ([end], [0, end - start])]
        invariant.paged_chunks_(attended, queries[start:end], pages, table, *ends, tiles, window, None, sinks)
        return attended

    whole = chunk(0, context, *paged(0))
    pages, table = paged(width)
    pieces = [chunk(start, end, pages, table) for start, end in ((0, 7), (7, 70), (70, 71), (71, context))]
    assert torch.equal(torch.cat(pieces), whole)
    rows = [3, 149, 0, 64, 100]
    # The batch also has an unused row.
    contexts = torch.tensor([row + 1 for row in rows] + [0], dtype=torch.int32, device=device)
    decoded = torch.full((len(rows) + 1, size), float("nan"), dtype=product_dtype, device=device)
    work = DecodeWork.make(1, 1, 1, 1, torch.device(device))
    # The table has a stride, as in graphs.
    wide = torch.stack((table[0], table[0]), 1).repeat(len(rows) + 1, 1, 1)[:, :, 0]
    invariant.paged_decode_(decoded, queries[[*rows, 0]], pages, wide, contexts, window, 1, work, None, sinks)
    assert torch.equal(decoded[:-1], whole[rows])
    assert not decoded[-1].any()


def test_model_gives_the_same_response_in_a_batch_and_alone(
    tiny_checkpoints: ModuleType,
    step_driver: ModuleType,
    histories: ModuleType,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run in float32, with recorded decodes and other steps, a prefix cache hit, chunks and a preemption."""
    tiny_checkpoints.write_checkpoint(tmp_path, "qwen2-sliding", dtype="float32", sharded=False, layers=2)
    monkeypatch.setattr(torch_step_model, "pick_kernels", lambda *_, **__: invariant)
    monkeypatch.setattr(layers, "_can_pack", lambda _: False)  # Only products on a CPU use packed weights.
    runner = step_driver.load_runner(tmp_path, device=device, cpu_kernels="torch", block_count=24, max_num_seqs=4)
    prompts = [[(7 * number + 3 * place) % 320 for place in range(count)] for number, count in enumerate((30, 3, 22))]
    requests = [histories.request(f"r{n}", prompt, 4, seed=n) for n, prompt in enumerate(prompts)]
    again = histories.request("again", [*prompts[0][:20], 5, 6], 3, temperature=0.9)
    arrivals = [histories.Arrival(one, number) for number, one in enumerate((*requests, again))]
    history = histories.History(tuple(arrivals), step_tokens_max=21, max_num_seqs=4, block_count=18, overlap_steps=True)
    played = histories.play(runner, history)
    assert played.hit_tokens
    assert played.largest_batch > 2
    for arrival in arrivals:
        wanted = histories.alone(runner, arrival.request)
        got = played.responses[arrival.request.id]
        assert got.token_ids == wanted.token_ids
        assert got.logprobs == wanted.logprobs
