"""A denoising step as numbers: the next latent is a weighted sum of known tensors.

The known tensors are the latent, the network's output, the clean latent that these two predict, noise, and results of
earlier steps (outputs or clean latents). Diffusers' schedulers are objects with a state. Weights have none, so requests
at different steps and with different solvers share a pass, and all state is in their slots.
"""

from __future__ import annotations

import msgspec

__all__ = ["Schedule", "SolverStep"]


class SolverStep(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of one denoising step.

    Attributes:
        timestep: input of the network.
        input_scale: factor on the latent before it enters the network.
        clean_of_latent: weight of the latent in the predicted clean latent.
        clean_of_output: weight of the network's output in the predicted clean latent.
        clean_limit: the clean latent is clamped to -clean_limit .. clean_limit. None does not clamp.
        next_of_latent: weight of the latent in the next latent.
        next_of_output: weight of the network's output in the next latent.
        next_of_clean: weight of the clean latent in the next latent.
        next_of_earlier: weights of the results of earlier steps in the next latent, newest first.
        next_of_noise: weight of new noise in the next latent.
    """

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
    """Denoising steps of a request, without steps that it skips.

    Attributes:
        steps: the steps in order.
        initial_scale: factor on the noise that a new image starts from.
        noised: for each step, the weights of a given image's latent and of noise in the latent before the step.
        history_count: number of earlier results that a step needs.
        remembers_outputs: True if those results are outputs of the network, False if they are clean latents.
    """

    steps: tuple[SolverStep, ...]
    initial_scale: float
    noised: tuple[tuple[float, float], ...]
    history_count: int = 0
    remembers_outputs: bool = False
