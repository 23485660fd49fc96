"""The content of a latent slot: the complete state of a request. It is frozen, and each step replaces it."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import torch

from trioserve.contracts.ids import RequestId
from trioserve.model.diffusion.solver_steps import Schedule

__all__ = ["Inputs", "LatentState", "Original"]

Inputs: TypeAlias = dict[str, torch.Tensor]
"""Inputs of the network for one row, besides latent and timestep, by argument name. Each tensor is [1, ...]."""


class Original(msgspec.Struct, frozen=True):
    """The image that a request edits within a mask.

    Attributes:
        latent: its latent, [1, channels, height, width].
        noise: the noise that is added to it before each step, [1, channels, height, width].
        mask: [1, 1, height, width], 1 where the image may change.
    """

    latent: torch.Tensor
    noise: torch.Tensor
    mask: torch.Tensor


class LatentState(msgspec.Struct, frozen=True, kw_only=True):
    """State of one request between two steps.

    Attributes:
        request_id: the request.
        steps_done: denoising steps computed so far.
        schedule: steps of the request.
        latent: float32 [1, channels, height, width].
        rows: network inputs of each row of a step. The first row has the prompt, a second one is for guidance.
        earlier: results of earlier steps that the solver needs, newest first.
        original: the edited image, or None.
    """

    request_id: RequestId
    steps_done: int
    schedule: Schedule
    latent: torch.Tensor
    rows: tuple[Inputs, ...]
    earlier: tuple[torch.Tensor, ...] = ()
    original: Original | None = None
