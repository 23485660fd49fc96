"""Computes the rotary frequency of each pair of a head's dimensions, with the config's scaling. Kernels rotate."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from trioserve.model.layer_config import RopeScaling, RotaryConfig
from trioserve.model.number_formats import Float32Array

__all__ = ["rotary_frequencies"]

_Float64Array = npt.NDArray[np.float64]


def rotary_frequencies(rotary: RotaryConfig | None, head_dim: int) -> tuple[Float32Array, Float32Array]:
    """Return the rotary frequencies of one head (RoFormer, arXiv 2104.09864).

    Args:
        rotary: rotary config. None: no pair is rotated.
        head_dim: size of one head.

    Returns:
        Frequencies in radians per token, and factors of cosine and sine. Each is float32 [head_dim / 2]. Pairs that are
        not rotated have frequency 0 and factor 1.
    """
    frequencies, magnitudes = np.zeros(head_dim // 2, dtype=np.float32), np.ones(head_dim // 2, dtype=np.float32)
    if rotary is None:
        return frequencies, magnitudes
    plain: _Float64Array = rotary.theta ** -(np.arange(0, rotary.rotated_dims, 2) / rotary.rotated_dims)
    magnitude = 1.0
    scaling = rotary.scaling
    if scaling is not None and scaling.kind == "linear":
        plain = plain / scaling.factor
    elif scaling is not None and scaling.kind == "llama3":
        plain = _llama3_frequencies(plain, scaling)
    elif scaling is not None and scaling.kind == "longrope":
        plain, magnitude = _longrope_frequencies(plain, scaling)
    elif scaling is not None:
        plain, magnitude = _yarn_frequencies(plain, scaling, rotary)
    frequencies[: plain.size], magnitudes[: plain.size] = plain, magnitude
    return frequencies, magnitudes


def _llama3_frequencies(plain: _Float64Array, scaling: RopeScaling) -> _Float64Array:
    """Scale frequencies as in Llama 3.1: divide low ones by the factor, keep high ones, and blend linearly between."""
    if scaling.frequency_factors is not None:
        return plain / np.array(scaling.frequency_factors, dtype=np.float64)
    turns = scaling.original_context_tokens * plain / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _longrope_frequencies(plain: _Float64Array, scaling: RopeScaling) -> tuple[_Float64Array, float]:
    assert scaling.frequency_factors is not None, "longrope without frequency factors"
    magnitude = scaling.attention_factor
    if magnitude is None:
        stretch = math.log(max(scaling.factor, 1.0)) / math.log(scaling.original_context_tokens)
        magnitude = math.sqrt(1.0 + stretch)
    return plain / np.array(scaling.frequency_factors, dtype=np.float64), magnitude


def _yarn_frequencies(plain: _Float64Array, scaling: RopeScaling, rotary: RotaryConfig) -> tuple[_Float64Array, float]:
    """Scale frequencies as in YaRN (arXiv 2309.00071): like Llama 3.1, but the blend is linear in the pair's index.

    Returns:
        Frequencies, and the factor of cosine and sine.
    """

    def index_of(turns: float) -> float:
        """Return the index (not rounded) of the pair that rotates this number of times over the original context."""
        wavelength = scaling.original_context_tokens / (turns * 2 * math.pi)
        return rotary.rotated_dims * math.log(wavelength) / (2 * math.log(rotary.theta))

    first, last = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.rounds_ends:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary.rotated_dims - 1)
    ramp = (np.arange(plain.size) - first) / max(last - first, 0.001)
    stretched = np.clip(ramp, 0.0, 1.0)
    magnitude = scaling.attention_factor
    if magnitude is None:
        magnitude = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return stretched * plain / scaling.factor + (1 - stretched) * plain, magnitude
