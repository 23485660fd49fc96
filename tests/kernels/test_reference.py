"""Tests of the reference kernels against a dense float64 computation of one row at a time.

Tolerance: inputs are exact in every format, so only the kernel's own rounding differs. That is sums in float32 (1e-5),
one rounding of the result in 16 bits (2 ** -8 of its size in bfloat16), and two if a kernel rounds in between.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import ScheduledChunk
from trioserve.model.torch_step.sampler import draw_word, sample, signed
from trioserve_kernels import pick_kernels, reference
from trioserve_kernels.paged import DecodeWork

PAGE_TOKENS, KV_HEADS, GROUP, HEAD_DIM = 4, 2, 3, 8
HEADS = KV_HEADS * GROUP
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
DEVICES = pytest.mark.parametrize(
    "device",
    (
        "cpu",
        pytest.param(
            "cuda",
            marks=(
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ),
        ),
    ),
)


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def check_close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    assert got.shape == wanted.shape
    assert (got.double().cpu() - wanted.double().cpu()).abs().max() < TOLERANCES[dtype]


def dense_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend with one query [H, D] to all keys and values [n, K, D]. Returns float64 [H * D]."""
    rows = []
    for head in range(HEADS):
        key, value = (part[:, head // GROUP].double() for part in (keys, values))
        weights = (key @ query[head].double() / math.sqrt(HEAD_DIM)).softmax(0)
        rows.append(weights @ value)
    return torch.cat(rows)


@DTYPES
@DEVICES
def test_reference_rms_norm_equals_float64(dtype: torch.dtype, device: str) -> None:
    x, weight = values(5, 33, dtype=dtype, device=device), values(33, dtype=dtype, seed=1, device=device)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt()
    check_close(reference.rms_norm(x, weight, 1e-3), exact * weight.double(), dtype)
    check_close(reference.rms_norm(x, None, 1e-3), exact, dtype)


@DTYPES
@DEVICES
def test_rotary_rotates_each_pair_by_its_angle(dtype: torch.dtype, device: str) -> None:
    rows, half = 3, HEAD_DIM // 2
    buffer = values(rows, (HEADS + 2) * HEAD_DIM, dtype=dtype, device=device)
    before = buffer.clone()
    angles = torch.arange(rows)[:, None] * torch.linspace(0.1, 1.0, half)
    cos = torch.cat((angles.cos(), angles.cos()), -1)[:, None].to(dtype).to(device)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)[:, None].to(dtype).to(device)
    heads = buffer.view(rows, -1, HEAD_DIM)[:, :HEADS]
    reference.rotary_(heads, cos, sin)
    pairs = before.view(rows, -1, HEAD_DIM)[:, :HEADS].double().cpu()
    turned = torch.complex(pairs[..., :half], pairs[..., half:]) * torch.exp(1j * angles.double())[:, None]
    check_close(heads, torch.cat((turned.real, turned.imag), -1), dtype)
    assert torch.equal(buffer[:, HEADS * HEAD_DIM :], before[:, HEADS * HEAD_DIM :])


@DTYPES
@DEVICES
def test_activation_times_up_equals_the_formula(dtype: torch.dtype, device: str) -> None:
    x = values(4, 20, dtype=dtype, device=device)
    gate, up = x.double().chunk(2, -1)
    check_close(reference.activate_and_mul(x), gate / (1 + (-gate).exp()) * up, dtype)


@pytest.mark.parametrize("activation", ("gelu", "gelu_tanh"))
def test_other_activation_functions_equal_the_formula(activation: reference.Activation) -> None:
    gate, up = values(4, 20).chunk(2, -1)
    x = gate.double()
    exact = x * (1 + torch.erf(x / math.sqrt(2))) / 2
    if activation == "gelu_tanh":
        exact = x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    check_close(reference.activate_and_mul(torch.cat((gate, up), -1), activation), exact * up, torch.float32)


def test_activations_without_a_gate_equal_their_formulas() -> None:
    x = values(4, 20)
    assert torch.equal(reference.activate(x, "relu"), x.clamp(min=0))
    assert torch.equal(reference.activate(x, "relu2"), x.clamp(min=0) ** 2)
    check_close(reference.activate(x, "silu"), x.double() / (1 + (-x.double()).exp()), torch.float32)


def test_clamped_activation_equals_its_formula() -> None:
    """Use numbers on both sides of each bound."""
    gate, up = (values(4, 20, seed=seed) * 10 for seed in (0, 1))
    low, near = gate.double().clamp(max=7.0), up.double().clamp(-7.0, 7.0)
    assert (low != gate.double()).any()
    assert (near != up.double()).any()
    exact = low / (1 + (-1.702 * low).exp()) * (near + 1)
    got = reference.activate_and_mul(torch.cat((gate, up), -1), "clamped_swiglu")
    torch.testing.assert_close(got.double(), exact, atol=1e-4, rtol=1e-5)


def test_slopes_times_distances_are_subtracted_from_scores() -> None:
    pages = values(3, PAGE_TOKENS, 2, KV_HEADS, HEAD_DIM)
    context = pages.flatten(0, 1)
    queries = values(len(context), HEADS * HEAD_DIM, seed=1)
    slopes = 0.5 ** torch.arange(1, HEADS + 1, dtype=torch.float32)
    seen = context.repeat_interleave(HEADS // KV_HEADS, 2).double()
    scores = torch.einsum("hd,thd->ht", queries[-1].view(HEADS, HEAD_DIM).double(), seen[:, 0]) / math.sqrt(HEAD_DIM)
    distances = len(context) - 1 - torch.arange(len(context))
    weights = (scores - slopes[:, None] * distances).softmax(-1)
    wanted = torch.einsum("ht,thd->hd", weights, seen[:, 1]).flatten()
    got = reference.attention_prompt(queries, context, None, slopes=slopes)
    check_close(got[-1], wanted, torch.float32)
    last = torch.full((1,), len(context))
    mask = reference.decode_mask(torch.zeros(1, dtype=torch.int64), last, len(context), torch.float32)
    decoded = reference.paged_attention_decode(queries[-1:], pages, torch.arange(3)[None], mask, slopes=slopes)
    check_close(decoded[0], wanted, torch.float32)


@pytest.mark.parametrize("sink", (-1e4, 0.0, 3.0, 1e4))
@pytest.mark.parametrize("score_cap", (None, 2.0))
def test_sink_changes_attention_of_prompts_and_decodes_as_an_extra_score(sink: float, score_cap: float | None) -> None:
    """A sink is an extra score with value 0. Far below all scores, a sink has no effect. Far above, the result is 0."""
    pages = values(3, PAGE_TOKENS, 2, KV_HEADS, HEAD_DIM)
    context = pages.flatten(0, 1)
    queries = values(2, HEADS * HEAD_DIM, seed=1) * 3
    sinks = values(HEADS, seed=2) + sink
    wanted = []
    for row in range(2):
        seen = context[: len(context) - 1 + row].repeat_interleave(HEADS // KV_HEADS, 2).double()
        scores = torch.einsum("hd,thd->ht", queries[row].view(HEADS, HEAD_DIM).double(), seen[:, 0])
        scores = scores / math.sqrt(HEAD_DIM)
        if score_cap is not None:
            scores = score_cap * torch.tanh(scores / score_cap)
        weights = torch.cat((scores, sinks[:, None].double()), -1).softmax(-1)[:, :-1]
        wanted.append(torch.einsum("ht,thd->hd", weights, seen[:, 1]).flatten())
    mask = reference.prompt_mask(len(context) - 2, 2, len(context), None, torch.float32, torch.device("cpu"))
    got = reference.attention_prompt(queries, context, mask, score_cap, sinks)
    check_close(got, torch.stack(wanted), torch.float32)
    first, last = torch.zeros(1, dtype=torch.int64), torch.full((1,), len(context))
    whole = reference.decode_mask(first, last, len(context), torch.float32)
    decoded = reference.paged_attention_decode(queries[1:], pages, torch.arange(3)[None], whole, score_cap, sinks)
    check_close(decoded, torch.stack(wanted[1:]), torch.float32)
    if sink < -1:
        plain = reference.attention_prompt(queries, context, mask, score_cap)
        torch.testing.assert_close(got, plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("score_cap", (0.5, 30.0))
def test_capped_scores_of_prompts_and_decodes_equal_the_formula(score_cap: float) -> None:
    """Compare capped scores with the formula. A cap far above all scores must have no effect."""
    pages = values(3, PAGE_TOKENS, 2, KV_HEADS, HEAD_DIM)
    context = pages.flatten(0, 1)
    queries = values(2, HEADS * HEAD_DIM, seed=1) * 5
    wanted = []
    for row in range(2):
        keys = context[: len(context) - 1 + row, 0].repeat_interleave(HEADS // KV_HEADS, 1).double()
        found = context[: len(context) - 1 + row, 1].repeat_interleave(HEADS // KV_HEADS, 1).double()
        scores = torch.einsum("hd,thd->ht", queries[row].view(HEADS, HEAD_DIM).double(), keys) / math.sqrt(HEAD_DIM)
        weights = (score_cap * torch.tanh(scores / score_cap)).softmax(-1)
        wanted.append(torch.einsum("ht,thd->hd", weights, found).flatten())
    mask = reference.prompt_mask(len(context) - 2, 2, len(context), None, torch.float32, torch.device("cpu"))
    got = reference.attention_prompt(queries, context, mask, score_cap)
    check_close(got, torch.stack(wanted), torch.float32)
    first, last = torch.zeros(1, dtype=torch.int64), torch.full((1,), len(context))
    whole = reference.decode_mask(first, last, len(context), torch.float32)
    decoded = reference.paged_attention_decode(queries[1:], pages, torch.arange(3)[None], whole, score_cap)
    check_close(decoded, torch.stack(wanted[1:]), torch.float32)
    plain = reference.attention_prompt(queries, context, mask)
    torch.testing.assert_close(reference.attention_prompt(queries, context, mask, 1e4), plain, atol=1e-4, rtol=0)


def test_store_and_clear_of_kv_change_only_their_slots() -> None:
    pages = values(3, PAGE_TOKENS, 2, KV_HEADS, HEAD_DIM)
    rows = pages.view(3 * PAGE_TOKENS, -1)
    wanted = rows.clone()
    wide = values(3, 100, seed=1)
    keys_values = wide[:, 60 : 60 + 2 * KV_HEADS * HEAD_DIM]
    reference.store_kv_(rows, keys_values, torch.tensor([9, 0, 6]))
    reference.clear_slots_(rows, torch.tensor([10, 11]))
    wanted[[9, 0, 6]] = keys_values
    wanted[[10, 11]] = 0
    assert torch.equal(rows, wanted)


@pytest.mark.parametrize("window", (None, 1, 3))
def test_prompt_mask_shows_the_window_up_to_the_query(window: int | None) -> None:
    mask = reference.prompt_mask(2, 4, 6, window, torch.float32, torch.device("cpu"))
    for row in range(4):
        for position in range(6):
            query = row + 2
            visible = position <= query and (window is None or query - position < window)
            assert mask[row, position] == (0.0 if visible else -math.inf)


@DTYPES
@DEVICES
def test_paged_decode_equals_dense_attention(dtype: torch.dtype, device: str) -> None:
    """Use different lengths, shuffled pages, a row with a window, and rows padded with their own page."""
    pages = values(20, PAGE_TOKENS, 2, KV_HEADS, HEAD_DIM, dtype=dtype, device=device)
    queries = values(3, HEADS * HEAD_DIM, dtype=dtype, seed=1, device=device)
    table = torch.tensor([[7, 3, 19], [4, 11, 11], [2, 2, 2]], device=device)
    visible = [(0, 11), (2, 6), (0, 1)]
    first, last = (torch.tensor(ends, device=device) for ends in zip(*visible, strict=True))
    mask = reference.decode_mask(first, last, 3 * PAGE_TOKENS, dtype)
    wanted = []
    for row, (start, end) in enumerate(visible):
        context = pages[table[row]].flatten(0, 1)[start:end]
        wanted.append(dense_attention(queries[row].view(HEADS, HEAD_DIM), context[:, 0], context[:, 1]))
    check_close(reference.paged_attention_decode(queries, pages, table, mask), torch.stack(wanted), dtype)


@DTYPES
@DEVICES
@pytest.mark.parametrize("start, window", ((0, None), (5, None), (0, 3), (5, 3)))
def test_prompt_attention_equals_dense_attention(
    start: int, window: int | None, dtype: torch.dtype, device: str
) -> None:
    count = 6
    context = start + count
    keys_values = values(context, 2, KV_HEADS, HEAD_DIM, dtype=dtype, device=device)
    # The queries are columns of a wider product, as in a model.
    queries = values(count, HEADS * HEAD_DIM + 10, dtype=dtype, seed=1, device=device)[:, : HEADS * HEAD_DIM]
    mask = None
    if start or window:
        mask = reference.prompt_mask(start, count, context, window, dtype, torch.device(device))
    wanted = []
    for row in range(count):
        end = start + row + 1
        seen = keys_values[max(0, end - (window or end)) : end]
        wanted.append(dense_attention(queries[row].view(HEADS, HEAD_DIM), seen[:, 0], seen[:, 1]))
    check_close(reference.attention_prompt(queries, keys_values, mask), torch.stack(wanted), dtype)


@DTYPES
@pytest.mark.parametrize("window", (None, 3))
def test_attention_over_block_tables_equals_dense_attention(window: int | None, dtype: torch.dtype) -> None:
    """Use a chunk of three tokens after a prefix, and a decode with a padded table. Tokens out of sight are NaN."""
    pages = values(20, PAGE_TOKENS, 2, KV_HEADS, HEAD_DIM, dtype=dtype)
    pages[[0, 5]] = math.nan
    pages[19, 3:] = pages[4, 1:] = math.nan
    tables = torch.tensor([[7, 3, 19], [11, 4, 0]], dtype=torch.int32)
    contexts, starts = torch.tensor([11, 5], dtype=torch.int32), torch.tensor([0, 3, 4], dtype=torch.int32)
    queries = values(4, HEADS * HEAD_DIM, dtype=dtype, seed=1)
    wanted = []
    for row, (sequence, end) in enumerate(((0, 9), (0, 10), (0, 11), (1, 5))):
        seen = pages[tables[sequence]].flatten(0, 1)[max(0, end - (window or end)) : end]
        wanted.append(dense_attention(queries[row].view(HEADS, HEAD_DIM), seen[:, 0], seen[:, 1]))
    got = torch.full_like(queries, math.nan)
    reference.paged_chunks_(got, queries, pages, tables, contexts, starts, torch.empty(0), window)
    check_close(got, torch.stack(wanted), dtype)
    work = DecodeWork.make(1, HEADS, 1, HEAD_DIM, queries.device)
    reference.paged_decode_(got[3:], queries[:1], pages, tables[:1], contexts[:1], window, 1, work)
    last = pages[tables[0]].flatten(0, 1)[max(0, 11 - (window or 11)) : 11]
    alone = dense_attention(queries[0].view(HEADS, HEAD_DIM), last[:, 0], last[:, 1])
    check_close(got[3:], alone[None], dtype)


def test_choose_tokens_equals_the_sampler() -> None:
    settings = [
        {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        for temperature in (0.0, 0.8, 2.0)
        for top_k in (0, 5)
        for top_p in (1.0, 0.7)
        for min_p in (0.0, 0.1)
    ]
    logits = values(len(settings), 1_300) * 3
    chunks = []
    for seed, setting in enumerate(settings):
        request = EngineRequest(
            id="r",
            prompt_token_ids=(1, 2),
            sampling=SamplingParams(**setting),
            output_tokens_max=9,
            stop_token_ids=frozenset(),
            seed=seed,
        )
        chunks.append(ScheduledChunk(request, (1, 2), 1, 1, range(9), True))
    parameters = torch.tensor([tuple(setting.values()) for setting in settings], dtype=torch.float64)
    words = torch.tensor([signed(draw_word(seed, 2)) for seed in range(len(settings))])
    ids, flaws = reference.choose_tokens(logits, parameters, words).tolist()
    assert ids == sample(logits, chunks).token_ids
    assert not any(flaws)


def test_pages_of_other_sequences_do_not_affect_a_row() -> None:
    """Fill pages outside a row's table with NaN."""
    pages = values(6, PAGE_TOKENS, 2, KV_HEADS, HEAD_DIM)
    queries = values(2, HEADS * HEAD_DIM, seed=1)
    table = torch.tensor([[0, 1], [2, 2]])
    mask = reference.decode_mask(torch.tensor([0, 0]), torch.tensor([7, 2]), 2 * PAGE_TOKENS, torch.float32)
    before = reference.paged_attention_decode(queries, pages, table, mask)
    pages[3:] = math.nan
    pages[:2] += 1
    after = reference.paged_attention_decode(queries, pages, table, mask)
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0], after[0])


def test_selected_kernels_have_their_name() -> None:
    assert pick_kernels().NAME == "torch"
