"""One token out of each row's probabilities, by random numbers that belong to the tokens themselves.

Every token of the vocabulary has a random number of its own, made from the request's seed, the position and the token's
id; the token for which it is largest beside the probability wins (the Gumbel-max trick; Maddison, Tarlow, Minka: A*
Sampling, arXiv 1411.0030, in the form of a race of exponential clocks). Each token wins exactly with its probability,
as with any fair way to draw. What this way adds: where two computations of the same distribution differ a little, by
rounding for instance, they see the same numbers and nearly always agree. They differ with a probability of at most
2 d / (1 + d), d being the total variation distance (Daliri, Musco, Suresh: Coupling without Communication, arXiv
2408.07978), while a running sum in the order of ids moves every later border and lets any token take another's place.

The race is run twice, since a number for each of 50,000 tokens takes milliseconds: between tiles of tokens by their
sums, then inside the tile that won. The bound becomes 6 d: 2 d for the tiles, whose distance is at most d, and 4 d
inside, where renormalizing may double it. In practice the most probable tokens lie in tiles of their own, and the two
races agree as often as one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["DRAW_TILES", "draw", "draw_word", "draw_words", "exponentials", "signed"]

DRAW_TILES = 512  # of 96 tokens at 50,000; id modulo this, because frequent tokens have neighbouring ids

_WORD = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def draw(weights: Tensor, words: Sequence[int]) -> Tensor:
    """int64 [m]: a token of each row, with a probability that is proportional to its weight.

    weights: float32 [m, vocab_size], not negative, at least one above 0 in each row. words: see draw_word.
    """
    count, vocab_size = weights.shape
    seeds = torch.tensor([signed(word) for word in words], device=weights.device)[:, None]
    tiles = torch.nn.functional.pad(weights, (0, -vocab_size % DRAW_TILES)).view(count, -1, DRAW_TILES)
    tile = _first(tiles.sum(1, dtype=torch.float64), seeds, torch.arange(DRAW_TILES, device=weights.device))
    inside = tiles.gather(2, tile[:, None].expand(-1, tiles.shape[1], -1))[:, :, 0]
    ids = torch.arange(tiles.shape[1], device=weights.device) * DRAW_TILES + tile
    # The tiles have taken the first numbers of the stream, so a token's comes that much later.
    return ids.gather(1, _first(inside.double(), seeds, ids + DRAW_TILES))[:, 0]


def draw_word(seed: int, position: int) -> int:
    """64 random bits, the state of the stream of numbers for this position of a request with this seed.

    It is number `position` of the splitmix64 stream (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
    Generators, OOPSLA 2014) that starts at the seed's own splitmix64 hash; without that hash two seeds whose difference
    is the generator's step would share a stream.
    """
    return _mixed(_mixed(seed + _GAMMA) + (position + 1) * _GAMMA)


def draw_words(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """draw_word of many requests at once, each signed."""
    streams = _mixed_array(seeds + np.uint64(_GAMMA))
    words = _mixed_array(streams + (positions + 1).astype(np.uint64) * np.uint64(_GAMMA))
    return words.view(np.int64)


def exponentials(seeds: Tensor, indices: Tensor) -> Tensor:
    """float64, in the shape that seeds and indices broadcast to: exponentially distributed numbers, above 0.

    Each is -log(u), u being number `index` of the splitmix64 stream that starts at the seed, its upper 52 bits as a
    fraction in the middle of its step: neither 0 nor 1. seeds, indices: int64; seeds are words as two's complement.
    """
    state = seeds + (indices + 1) * signed(_GAMMA)  # int64 arithmetic drops what exceeds 64 bits, as it should here
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        state = (state ^ _shifted(state, shift)) * signed(multiplier)
    state = state ^ _shifted(state, 31)
    return -((_shifted(state, 12).double() + 0.5) / 2**52).log()


def _first(weights: Tensor, seeds: Tensor, indices: Tensor) -> Tensor:
    """int64 [m, 1]: whose clock rings first, if each runs as fast as its weight says; one of weight 0 never rings."""
    return (weights / exponentials(seeds, indices)).argmax(-1, keepdim=True)


def _mixed(state: int) -> int:
    """splitmix64's output function; bits above 64 are dropped."""
    state &= _WORD
    state = (state ^ (state >> 30)) * _MULTIPLIERS[0] & _WORD
    state = (state ^ (state >> 27)) * _MULTIPLIERS[1] & _WORD
    return state ^ (state >> 31)


def _mixed_array(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """_mixed of each."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(multiplier)
    return state ^ (state >> np.uint64(31))


def signed(word: int) -> int:
    """The int64 with the same 64 bits."""
    return word - 2**64 if word >= 2**63 else word


def _shifted(state: Tensor, count: int) -> Tensor:
    """Right by `count` bits, zeros coming in; torch's own shift brings in the sign."""
    return (state >> count) & ((1 << (64 - count)) - 1)
