"""What lies in a latent slot: all that a request has become. Frozen: a step puts another one in its place."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import torch

from trioserve.contracts.ids import RequestId
from trioserve.model.diffusion.solver_steps import Schedule

__all__ = ["Inputs", "LatentState", "Original"]

Inputs: TypeAlias = dict[str, torch.Tensor]
"""What the network is told of a row besides the latent and the timestep, by the names of its arguments; each tensor
[1, ...]."""


class Original(msgspec.Struct, frozen=True):
    """Of a picture that is changed in part. latent, noise: [1, channels, height, width]. mask: [1, 1, height, width], 1
    where it may change."""

    latent: torch.Tensor
    noise: torch.Tensor
    mask: torch.Tensor


class LatentState(msgspec.Struct, frozen=True, kw_only=True):
    """latent: float32 [1, channels, height, width]. earlier: what the schedule remembers of the steps
    before, the last one first. rows: the network's inputs of each row that a step computes, with the prompt first."""

    request_id: RequestId
    steps_done: int
    schedule: Schedule
    latent: torch.Tensor
    rows: tuple[Inputs, ...]
    earlier: tuple[torch.Tensor, ...] = ()
    original: Original | None = None
