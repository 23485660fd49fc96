"""How one denoising step changes a latent, as numbers: every solver here is a sum of what it knows, with weights.

A step knows the latent, what the network made of it, the picture that these two let expect (clean), one of these two
from the steps before, and noise. With weights alone, requests at different steps and of different solvers need no
scheduler objects with a state, and what they need lies in their slots.
"""

from __future__ import annotations

import msgspec

__all__ = ["Schedule", "SolverStep"]


class SolverStep(msgspec.Struct, frozen=True, kw_only=True):
    """timestep: what the network is told. input_scale: the latent is multiplied with it for the network.
    clean_of_latent, clean_of_output: what is expected, which is then cut to -clean_limit .. clean_limit. next_of_*: the
    weights of the next latent; next_of_earlier: of what is remembered of the steps before, the last one first."""

    timestep: float
    input_scale: float = 1.0
    clean_of_latent: float
    clean_of_output: float
    clean_limit: float | None = None
    next_of_latent: float = 0.0
    next_of_output: float = 0.0
    next_of_clean: float = 0.0
    next_of_earlier: tuple[float, ...] = ()
    next_of_noise: float = 0.0


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a request, from its own first to the last. initial_scale: of the noise that a picture is begun with
    that nothing is known of. noised: before each step, how much of a given picture and how much of noise a latent is.
    history_count: of so many earlier steps something is needed at most: what they expected, or, where it
    remembers_outputs, what the network made."""

    steps: tuple[SolverStep, ...]
    initial_scale: float
    noised: tuple[tuple[float, float], ...]
    history_count: int = 0
    remembers_outputs: bool = False
