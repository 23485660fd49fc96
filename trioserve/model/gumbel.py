"""Drawing of one token from each row's probabilities, with random numbers that belong to the tokens themselves.

Every token of the vocabulary has its own random number, made from the request's seed, the position and the token id.
The token with the largest combination of probability and random number wins. This is the Gumbel-max trick (Maddison,
Tarlow, Minka: A* Sampling, arXiv 1411.0030), written as a race of exponential clocks. Each token wins exactly with its
probability, as in any fair method.

The method adds stability. Two computations of one distribution may differ a little, for example by rounding. They use
the same random numbers and nearly always choose the same token. They differ with a probability of at most 2 d / (1 +
d), where d is the total variation distance (Daliri, Musco, Suresh: Coupling without Communication, arXiv 2408.07978). A
running sum in the order of ids moves every later border instead, so any token may change into its neighbour.

The race is run twice, because a random number for each of 50,000 tokens takes milliseconds: first between tiles of
tokens by their sums, then inside the winning tile. The bound becomes 6 d: 2 d for the tiles, whose distance is at most
d, and 4 d inside a tile, where renormalizing may double the distance. In practice the most probable tokens lie in
different tiles, and two races agree as often as one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["DRAW_TILES", "draw", "draw_word", "draw_words", "exponentials", "signed"]

# 96 tokens each for a vocabulary of 49,152. The tile of a token is its id modulo DRAW_TILES, because frequent tokens
# have neighbouring ids.
DRAW_TILES = 512

_WORD = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def draw(weights: Tensor, words: Sequence[int]) -> Tensor:
    """Draw one token of each row, with a probability proportional to its weight.

    Args:
        weights: float32 [m, vocab_size], not negative, at least one weight above 0 in each row.
        words: m random words, see draw_word.

    Returns:
        int64 [m], token ids.
    """
    count, vocab_size = weights.shape
    seeds = torch.tensor([signed(word) for word in words], device=weights.device)[:, None]
    tiles = torch.nn.functional.pad(weights, (0, -vocab_size % DRAW_TILES)).view(count, -1, DRAW_TILES)
    tile = _first(tiles.sum(1, dtype=torch.float64), seeds, torch.arange(DRAW_TILES, device=weights.device))
    inside = tiles.gather(2, tile[:, None].expand(-1, tiles.shape[1], -1))[:, :, 0]
    ids = torch.arange(tiles.shape[1], device=weights.device) * DRAW_TILES + tile
    # Tiles use the first DRAW_TILES numbers of the stream, so the numbers of tokens start after them.
    return ids.gather(1, _first(inside.double(), seeds, ids + DRAW_TILES))[:, 0]


def draw_word(seed: int, position: int) -> int:
    """Return 64 random bits: the start state of the random stream for one position of a request.

    The word is number `position` of the splitmix64 stream (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
    Generators, OOPSLA 2014) that starts at the splitmix64 hash of the seed. Without that hash, two seeds that differ by
    the generator's increment would share a stream.

    Args:
        seed: seed of the request.
        position: position of the drawn token in its sequence.
    """
    return _mixed(_mixed(seed + _GAMMA) + (position + 1) * _GAMMA)


def draw_words(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return draw_word of many requests at once, as signed numbers.

    Args:
        seeds: uint64 [n].
        positions: int64 [n].

    Returns:
        int64 [n].
    """
    streams = _mixed_array(seeds + np.uint64(_GAMMA))
    words = _mixed_array(streams + (positions + 1).astype(np.uint64) * np.uint64(_GAMMA))
    return words.view(np.int64)


def exponentials(seeds: Tensor, indices: Tensor) -> Tensor:
    """Return exponentially distributed random numbers above 0.

    Each number is -log(u). u is number `index` of the splitmix64 stream that starts at the seed: its upper 52 bits plus
    one half, as a fraction. So u is neither 0 nor 1.

    Args:
        seeds: int64, words in two's complement.
        indices: int64, broadcastable with seeds.

    Returns:
        float64, in the broadcast shape.
    """
    state = seeds + (indices + 1) * signed(_GAMMA)  # int64 arithmetic drops bits above 64, as splitmix64 requires
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        state = (state ^ _shifted(state, shift)) * signed(multiplier)
    state = state ^ _shifted(state, 31)
    return -((_shifted(state, 12).double() + 0.5) / 2**52).log()


def _first(weights: Tensor, seeds: Tensor, indices: Tensor) -> Tensor:
    """Return the index of the clock that rings first, int64 [m, 1]. A clock runs at the rate of its weight, so weight 0
    never rings.
    """
    return (weights / exponentials(seeds, indices)).argmax(-1, keepdim=True)


def _mixed(state: int) -> int:
    """Return splitmix64's output for a state. Bits above 64 are dropped."""
    state &= _WORD
    state = (state ^ (state >> 30)) * _MULTIPLIERS[0] & _WORD
    state = (state ^ (state >> 27)) * _MULTIPLIERS[1] & _WORD
    return state ^ (state >> 31)


def _mixed_array(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply _mixed to each element."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(multiplier)
    return state ^ (state >> np.uint64(31))


def signed(word: int) -> int:
    """Return the int64 with the bits of an unsigned word.

    Args:
        word: 0 to 2**64 - 1.
    """
    return word - 2**64 if word >= 2**63 else word


def _shifted(state: Tensor, count: int) -> Tensor:
    """Shift right by `count` bits and fill with zeros. torch's own shift fills with the sign bit."""
    return (state >> count) & ((1 << (64 - count)) - 1)
