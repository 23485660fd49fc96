"""Tests that tokens chosen on the device equal those of the CPU's sampler, for all settings and flaws."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import ScheduledChunk
from trioserve.model.step_model import NOT_FINITE, NOTHING_ALLOWED, NOTHING_LEFT, Samples
from trioserve.model.step_rows import FilledMasks
from trioserve.model.torch_step.device_sampler import DeviceSampler
from trioserve.model.torch_step.sampler import DRAW_TILES, sample
from trioserve_kernels import reference, triton
from trioserve_kernels.reference import Flaw

VOCAB_SIZE = 1_300  # Each tile of the draw has several tokens, and the size is no multiple of the number of tiles.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GREEDY = (0.0, 0.0, 1.0, 0.0)


def choose(scores: Tensor, settings: list[tuple[float, ...]], words: list[int] | None = None) -> Tensor:
    words = words or [0] * len(settings)
    parameters = torch.tensor(settings, dtype=torch.float64, device=scores.device)
    return triton.choose_tokens(scores, parameters, torch.tensor(words, device=scores.device))


def row(
    sampling: SamplingParams, *, output: tuple[int, ...] = (), seed: int = 0, stop: tuple[int, ...] = (7,)
) -> ScheduledChunk:
    prompt = (1, 2, 3)
    request = EngineRequest(
        id="r",
        prompt_token_ids=prompt,
        sampling=sampling,
        output_tokens_max=100,
        stop_token_ids=frozenset(stop),
        seed=seed,
    )
    return ScheduledChunk(request, (*prompt, *output), 2 + len(output), 1, range(100), True)


def launched(logits: Tensor, chunks: list[ScheduledChunk], masks: FilledMasks | None = None) -> Samples:
    """Sample a token for each chunk. Each chunk gets a request of its own, and no request was sampled before."""
    rows = [
        structs.replace(chunk, request=structs.replace(chunk.request, id=f"r{place}"))
        for place, chunk in enumerate(chunks)
    ]
    kept_ids = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    inputs = torch.tensor([chunk.tokens[chunk.start] for chunk in rows], device=logits.device)
    return DeviceSampler(triton, logits.shape[1], kept_ids).launch(logits, rows, lambda: inputs, masks)()


def test_greedy_choice_is_the_lowest_id_among_the_best(dtype: torch.dtype, device: str) -> None:
    scores = torch.zeros(4, 9_000, device=device, dtype=dtype)
    scores[0, [8_999, 8_500, 300]] = 2.0  # The largest logit occurs in both parts of a row.
    scores[1, [8_999, 8_500]] = 2.0
    scores[2] = -1.0
    scores[3, 4_000:4_100] = 3.0
    assert choose(scores, [GREEDY] * 4).tolist() == [[300, 8_500, 0, 4_000], [0] * 4]


def test_each_flaw_of_a_sampled_row_is_reported(numbers: Callable[..., Tensor]) -> None:
    scores = numbers(6, 9_000)
    scores[1, 8_999] = math.nan
    scores[2, 0] = math.inf
    scores[3, 5] = -math.inf
    scores[4] = -math.inf
    scores[5, 1:] = -math.inf
    settings = [GREEDY, (1.0, 0, 1.0, 0), (1.0, 0, 0.9, 0), GREEDY, (1.0, 5, 0.9, 0.1), (1.0, 5, 0.9, 0.1)]
    ids, flaws = choose(scores, settings).tolist()
    wanted = [0, Flaw.NO_NUMBER, Flaw.NO_NUMBER, Flaw.HIDDEN, Flaw.HIDDEN | Flaw.ALL_HIDDEN, Flaw.HIDDEN]
    assert flaws == wanted
    assert flaws == reference.choose_tokens(scores, torch.zeros(6, 4), torch.zeros(6)).tolist()[1]
    assert (ids[0], ids[3], ids[5]) == (scores[0].argmax(), scores[3].argmax(), 0)


def test_row_without_a_best_token_gets_an_id_of_the_vocabulary(numbers: Callable[..., Tensor]) -> None:
    scores = torch.full_like(numbers(6, 9_000), math.nan)
    scores[2:4] = -math.inf
    scores[4, 8_000:] = -math.inf
    scores[5, :8_500] = math.inf
    words = torch.arange(6, device=scores.device)
    for setting in (GREEDY, (1.0, 5, 0.9, 0.1)):
        parameters = torch.tensor([setting] * 6, dtype=torch.float64, device=scores.device)
        for kernels in (triton, reference):
            ids, flaws = kernels.choose_tokens(scores, parameters, words).tolist()
            assert all(flaws)
            assert all(0 <= token < 9_000 for token in ids)


@pytest.mark.parametrize("vocab_size, spread", ((VOCAB_SIZE, 1.0), (20_011, 4.0)))
def test_drawn_tokens_equal_the_reference(vocab_size: int, spread: float, numbers: Callable[..., Tensor]) -> None:
    """Use flat and steep distributions, each filter alone and all together, and words with and without a sign bit.

    One vocabulary is larger than the block of tokens that is read at a time.
    """
    filters = list(itertools.product((0, 20, vocab_size - 1), (1.0, 0.9, 0.1), (0.0, 0.05)))
    settings = [(1.0 + 0.1 * index, *values) for index, values in enumerate(filters)]
    words = [(-1) ** index * (0x9E3779B97F4A7C15 * (index + 1) % 2**63) for index in range(len(settings))]
    scores = numbers(len(settings), vocab_size) * spread
    wanted = reference.choose_tokens(
        scores, torch.tensor(settings, dtype=torch.float64), torch.tensor(words, device=scores.device)
    )
    got = choose(scores, settings, words)
    assert got.tolist() == wanted.tolist()
    assert len(set(got[0].tolist())) > len(settings) // 3


@pytest.mark.parametrize("setting", ((1.0, 3.0, 1.0, 0.0), (1.0, 0.0, 2.5 / 200, 0.0), (1.0, 0.0, 1.0, 0.9985)))
def test_sampling_filter_keeps_exactly_its_tokens(setting: tuple[float, ...], device: str) -> None:
    """Use 200 tokens of almost equal probability, of which each filter keeps the best three."""
    scores = (-torch.arange(200, device=device) * 0.0007).roll(50).expand(14, -1).contiguous()
    drawn = choose(scores, [setting] * 14, list(range(14)))[0]
    assert set(drawn.tolist()) == {50, 51, 52}


def test_tokens_of_equal_weight_are_kept_or_dropped_together(device: str) -> None:
    """Use top_k and top_p with a best token and 40 equal tokens. If one of the equal tokens is kept, all 40 are
    kept.
    """
    scores = torch.full((32, 200), -10.0, device=device)
    scores[:, 0] = 1.0
    scores[:, 100:140] = 0.5
    settings = [(1.0, 2.0, 1.0, 0.0)] * 16 + [(1.0, 0.0, 0.2, 0.0)] * 16
    drawn = choose(scores, settings, list(range(32)))[0]
    for half in drawn.view(2, 16):
        assert set(half.tolist()) <= {0, *range(100, 140)}
        assert len(set(half.tolist())) > 8


def check_equals_reference(scores: Tensor, settings: list[tuple[float, ...]]) -> None:
    words = [(index + 1) * 0x9E3779B97F4A7C for index in range(len(settings))]
    wanted = reference.choose_tokens(
        scores, torch.tensor(settings, dtype=torch.float64), torch.tensor(words, device=scores.device)
    )
    assert choose(scores, settings, words).tolist() == wanted.tolist()


def test_thresholds_among_many_similar_tokens(numbers: Callable[..., Tensor]) -> None:
    """Use filters that keep more tokens than the list has places, and thresholds with more neighbours than that."""
    settings = [
        (1.0, 2_000.0, 1.0, 0.0),
        (1.0, 2_000.0, 0.5, 0.0),
        (1.0, 600.0, 0.999, 0.0),
        (1.0, 0.0, 0.5, 0.0),
        (1.0, 0.0, 0.99999, 0.0),
        (1.0, 3_000.0, 0.7, 0.6),
        (1.0, 1.0, 0.5, 0.0),
        (1.0, 0.0, 1e-9, 0.0),
    ]
    check_equals_reference(numbers(len(settings), 5_003) * 0.1, settings)


def test_many_tokens_of_equal_weight_at_the_threshold(device: str) -> None:
    """Use more equal tokens than the list has places, with a better token, and below a filter's threshold."""
    scores = torch.full((32, 3_000), 0.5, device=device)
    scores[:, 0] = 1.0
    scores[:, 2_900:] = -3.0
    settings = [(1.0, 2.0, 1.0, 0.0)] * 16 + [(1.0, 0.0, 0.1, 0.0)] * 16
    drawn = choose(scores, settings, list(range(32)))[0]
    assert int(drawn.max()) < 2_900
    assert all(len(set(half.tolist())) > 8 for half in drawn.view(2, 16))


def test_sampling_works_for_the_largest_vocabulary(numbers: Callable[..., Tensor]) -> None:
    settings = [(1.0, 50.0, 0.95, 0.0), (0.7, 0.0, 0.9, 0.0), (1.0, 1.0, 1.0, 0.0)]
    check_equals_reference(numbers(3, 262_144) * 3, settings)


def test_logits_of_a_trained_model_need_few_passes(
    numbers: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the blocks that are read: one pass with pivots, two for the list, and one for the draw."""
    if not INTERPRETED:
        pytest.skip("only the interpreter can count calls")
    from trioserve_kernels.triton import sampling

    read = []
    weights = sampling._weights
    monkeypatch.setattr(sampling, "_weights", lambda *args: read.append(None) or weights(*args))
    scores = numbers(1, 8 * sampling.TOKEN_BLOCK)
    scores[0, 100:160] += torch.linspace(8, 14, 60, device=scores.device)
    for setting in ((1.0, 40.0, 1.0, 0.0), (1.0, 0.0, 0.9, 0.0), (1.0, 40.0, 0.9, 0.05)):
        read.clear()
        choose(scores, [setting])
        assert len(read) == 4 * 8 + 1


@pytest.mark.parametrize("vocab_size", (VOCAB_SIZE, 9_001))
def test_masked_rows_equal_the_reference(vocab_size: int, numbers: Callable[..., Tensor]) -> None:
    """Use masks of no, one, few and many tokens, each filter, and rows without a mask in the same batch."""
    filters = [*itertools.product((0, 20), (1.0, 0.8), (0.0, 0.05)), (0, 1.0, 0.0)]
    settings = [(0.0 if index % 3 == 2 else 1.3, *values) for index, values in enumerate(filters * 2)]
    count = len(settings)
    scores = numbers(count, vocab_size) * 3
    scores[3, 40] = math.nan
    words = torch.arange(count, device=scores.device) * 0x9E3779B97F4A7C
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (7, (vocab_size + 31) // 32), generator=generator, dtype=torch.int32)
    bits[1:3] &= torch.randint(-(2**31), 2**31, bits[1:3].shape, generator=generator, dtype=torch.int32)
    bits[3], bits[4], bits[5] = 0, -1, 0
    bits[5, 11] = -(2**31)
    masks = bits.to(scores.device), torch.tensor([index % 8 - 1 for index in range(count)]).int().to(scores.device)
    parameters = torch.tensor(settings, dtype=torch.float64, device=scores.device)
    got = triton.choose_tokens(scores, parameters, words, masks).tolist()
    wanted = reference.choose_tokens(scores, parameters, words, masks).tolist()
    got[0][3] = wanted[0][3] = 0  # This id has no meaning.
    assert got == wanted
    flawed = {3: Flaw.NO_NUMBER, 4: Flaw.ALL_HIDDEN, 12: Flaw.ALL_HIDDEN}
    assert got[1] == [flawed.get(index, 0) for index in range(count)]
    assert got[0][6] == got[0][14] == 11 * 32 + 31
    chosen = reference.choose_tokens(scores, parameters, words).tolist()
    for index in range(count):
        if masks[1][index] in (-1, 4):
            assert got[0][index] == chosen[0][index]


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "filters": {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.02},
    "penalties": {"temperature": 1.2, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bias": {"temperature": 0.0, "logit_bias": {11: 100.0}},
    "min_tokens": {"temperature": 3.0, "min_tokens": 5, "logprobs": 2},
    "logprobs": {"temperature": 1.0, "logprobs": 3},
}


@pytest.mark.parametrize("names", (("greedy", "plain", "filters", "logprobs"), tuple(SAMPLINGS)))
def test_sampler_result_equals_that_of_its_plain_path(
    names: tuple[str, ...], dtype: torch.dtype, numbers: Callable[..., Tensor]
) -> None:
    """Compare without and with rows whose scores are changed first. One row is not finite."""
    logits = (numbers(len(names) + 1, VOCAB_SIZE, seed=3) * 3).to(dtype)
    logits[-1, 17] = -math.inf
    logits[:, 7] = 12.0  # This is a stop token.
    before = logits.clone()
    chunks = [row(SamplingParams(**SAMPLINGS[name]), output=(9, 9, 4), seed=index) for index, name in enumerate(names)]
    chunks.append(row(SamplingParams(temperature=1.0, logprobs=1)))
    got, wanted = launched(logits, chunks), sample(logits, chunks)
    assert got.token_ids == wanted.token_ids
    assert got.errors == wanted.errors == {len(names): NOT_FINITE}
    assert got.logprobs == wanted.logprobs
    assert torch.equal(logits, before)


def test_sampler_result_with_masks_equals_that_of_its_plain_path(numbers: Callable[..., Tensor]) -> None:
    names = tuple(SAMPLINGS)
    logits = numbers(len(names) + 2, VOCAB_SIZE, seed=3) * 3
    allowed = [range(index, VOCAB_SIZE, 5 * index + 1) for index in range(len(names))]
    chunks = [
        structs.replace(row(SamplingParams(**SAMPLINGS[name]), output=(9, 9, 4), seed=index), mask_row=index)
        for index, name in enumerate(names)
    ]
    chunks += [structs.replace(row(SamplingParams()), mask_row=len(names)), row(SamplingParams())]
    masks = FilledMasks((*allowed, ()), VOCAB_SIZE)
    got, wanted = launched(logits, chunks, masks), sample(logits, chunks, masks=masks)
    assert got.token_ids == wanted.token_ids
    assert got.errors == wanted.errors == {len(names): NOTHING_ALLOWED}
    assert got.logprobs == wanted.logprobs


def test_row_without_any_allowed_token_fails_only_its_own_request(numbers: Callable[..., Tensor]) -> None:
    logits = numbers(2, 3)
    chunks = [row(SamplingParams(temperature=1.0, min_tokens=5), stop=(0, 1, 2)), row(SamplingParams(temperature=0.0))]
    assert launched(logits, chunks).errors == sample(logits, chunks).errors == {0: NOTHING_LEFT}


def test_all_implementations_use_the_same_number_of_tiles() -> None:
    from trioserve_kernels.triton import sampling

    assert DRAW_TILES == reference.DRAW_TILES == sampling.DRAW_TILES
