"""Tests that random numbers equal a slow reference, that draws follow the distribution, and that small changes of
probabilities change few draws.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from trioserve.model.torch_step.sampler import DRAW_TILES, draw, draw_word, draw_words, exponentials

WORD = 2**64


def stream(state: int) -> Any:
    """Yield splitmix64's numbers from a state, as in the reference implementation (prng.di.unimi.it/splitmix64.c)."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % WORD
        word = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % WORD
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % WORD
        yield word ^ (word >> 31)


def signed(words: list[int]) -> torch.Tensor:
    return torch.tensor([word - WORD if word >= WORD // 2 else word for word in words])


def words_of(count: int, *, position: int = 7) -> list[int]:
    return [draw_word(seed, position) for seed in range(count)]


def frequencies(weights: torch.Tensor, count: int) -> list[int]:
    tokens = torch.cat([draw(weights.expand(500, -1), words_of(count)[i : i + 500]) for i in range(0, count, 500)])
    return torch.bincount(tokens, minlength=weights.shape[-1]).tolist()


def running_sum_draw(weights: torch.Tensor, words: list[int]) -> torch.Tensor:
    """Draw with the inverse distribution function in the order of ids, for comparison."""
    running = weights.double().cumsum(-1)
    numbers = torch.tensor([(word >> 11) / 2**53 for word in words], dtype=torch.float64)
    return torch.searchsorted(running, numbers[:, None] * running[:, -1:], right=True)[:, 0]


# --- the numbers ----------------------------------------------------------------------------------------------------


def test_random_word_of_a_position_is_the_output_of_splitmix64() -> None:
    """Seed 0 hashes to 0xE220A8397B1DCDAF, the first number of splitmix64's published test vector."""
    assert next(stream(0)) == 0xE220A8397B1DCDAF
    words = stream(0xE220A8397B1DCDAF)
    assert [draw_word(0, position) for position in range(5)] == [next(words) for _ in range(5)]


def test_random_words_of_many_requests_equal_single_words() -> None:
    seeds = [0, 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15, 12345]
    positions = [0, 1, 7, 2**31 - 1, 4096, 0]
    words = draw_words(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.int64))
    expected = [draw_word(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    assert words.tolist() == signed(expected).tolist()


def test_random_number_of_a_token_is_the_output_of_splitmix64_as_exponential() -> None:
    words = [0, 1, WORD - 1, WORD // 2, *words_of(20)]
    numbers = exponentials(signed(words)[:, None], torch.arange(300)).tolist()
    for word, row in zip(words, numbers, strict=True):
        for number, output in zip(row, stream(word), strict=False):
            assert number == pytest.approx(-math.log(((output >> 12) + 0.5) / 2**52), rel=1e-12)


def test_extreme_random_numbers_are_finite_and_above_zero() -> None:
    """States whose outputs are 0 and 2**64 - 1: 0 gives 0, and the output function can be inverted."""

    def unshifted(word: int, shift: int) -> int:
        found = word
        for _ in range(64 // shift):
            found = word ^ (found >> shift)
        return found

    state = unshifted(WORD - 1, 31) * pow(0x94D049BB133111EB, -1, WORD) % WORD
    state = unshifted(state, 27) * pow(0xBF58476D1CE4E5B9, -1, WORD) % WORD
    state = unshifted(state, 30)
    starts = [(end - 0x9E3779B97F4A7C15) % WORD for end in (0, state)]
    assert [next(stream(start)) for start in starts] == [0, WORD - 1]
    assert exponentials(signed(starts), torch.tensor(0)).tolist() == [
        pytest.approx(53 * math.log(2)),
        pytest.approx(2.0**-53),
    ]


def test_random_numbers_of_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    numbers = {(seed, position): draw_word(seed, position) / WORD for seed in range(60) for position in range(60)}
    assert len(set(numbers.values())) == 3600
    neighbours = [
        (numbers[s, p] - 0.5) * (draw_word(s + ds, p + dp) / WORD - 0.5)
        for s in range(60)
        for p in range(1, 60)
        for ds, dp in ((0, 1), (1, 0), (0x9E3779B97F4A7C15, -1))
    ]
    # A mean of 10,620 products, each with standard deviation 1 / 12. Four standard deviations of the mean are allowed.
    assert abs(sum(neighbours) / len(neighbours)) < 4 / 12 / math.sqrt(len(neighbours))


# --- the draw -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [1, 2, DRAW_TILES, DRAW_TILES + 1, 3 * DRAW_TILES - 1])
def test_tokens_are_drawn_in_proportion_to_their_weights(vocab_size: int) -> None:
    """Chi-square over 6,000 draws with weights from 1 to 12, which need not sum to 1. Five standard deviations are
    allowed.
    """
    weights = torch.arange(vocab_size) % 12 + 1.0
    counts = frequencies(weights, 6000)
    expected = (weights * 6000 / weights.sum()).tolist()
    statistic = sum((count - mean) ** 2 / mean for count, mean in zip(counts, expected, strict=True))
    assert statistic <= vocab_size - 1 + 5 * math.sqrt(2 * (vocab_size - 1))


def test_tokens_in_one_tile_and_in_two_tiles_are_drawn_fairly() -> None:
    """Draw from three tokens of one tile and one token of another tile. All other weights are 0."""
    weights = torch.zeros(4 * DRAW_TILES)
    kept = [5, 5 + DRAW_TILES, 5 + 3 * DRAW_TILES, 9]
    weights[kept] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    counts = frequencies(weights, 6000)
    assert sum(counts[token] for token in kept) == 6000
    statistic = sum(
        (counts[token] - 600 * share) ** 2 / (600 * share) for token, share in zip(kept, (1, 2, 3, 4), strict=True)
    )
    assert statistic < 3 + 5 * math.sqrt(6)


def test_token_of_weight_zero_is_never_drawn_and_tiny_weight_can_be() -> None:
    weights = torch.zeros(1000)
    weights[700] = 1e-45  # the smallest float32
    assert draw(weights.expand(200, -1), words_of(200)).tolist() == [700] * 200


def test_row_draws_an_equal_token_in_any_batch() -> None:
    weights = torch.randn(40, 1000, generator=torch.Generator().manual_seed(1)).exp()
    words = words_of(40)
    together = draw(weights, words).tolist()
    assert together == [int(draw(weights[i : i + 1], words[i : i + 1])) for i in range(40)]


@pytest.mark.slow
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_small_change_of_probabilities_changes_few_tokens(spread: float) -> None:
    """Compare the share of 4,000 draws that a perturbation changes with the mean total variation distance d.

    The share is below the proven 6 d, near the 2 d of a single race, and far below the share of a running sum in the
    order of ids.
    """
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4000, 2000, generator=generator) * spread
    weights = logits.softmax(-1)
    shifted = (logits + 0.03 * torch.randn(4000, 2000, generator=generator)).softmax(-1)
    distance = float((weights - shifted).abs().sum(-1).mean()) / 2
    words = words_of(4000)
    changed = float((draw(weights, words) != draw(shifted, words)).double().mean())
    changed_by_order = float((running_sum_draw(weights, words) != running_sum_draw(shifted, words)).double().mean())
    assert changed < 3 * distance
    assert changed_by_order > 4 * changed


def test_dropping_a_token_changes_no_draw_in_other_tiles() -> None:
    """Rounding can drop a token when it moves the edge of a nucleus."""
    weights = torch.randn(500, generator=torch.Generator().manual_seed(4)).exp()
    without = weights.clone()
    without[3] = 0.0
    words = words_of(3000)
    before, after = draw(weights.expand(3000, -1), words), draw(without.expand(3000, -1), words)
    changed = before != after
    mates = before % DRAW_TILES == 3 % DRAW_TILES
    assert bool((before == 3).any())
    assert bool((changed <= mates).all())
