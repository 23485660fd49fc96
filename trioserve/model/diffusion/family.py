"""What a family of models has to say: how a prompt becomes inputs of the network, and how the network is called."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from trioserve.contracts.image_generation import ImageTask
from trioserve.model.diffusion.latent_state import Inputs

__all__ = ["MASKED", "BadTask", "Family", "Parts", "clip_tokens", "prompt_of", "with_masked"]

MASKED = "masked"
"""Of Inputs: of a network that fills in, a mask and the latent of what is around, [rows, 1 + channels, ...]."""


CLIP_TOKENS_MAX = 1024  # of a prompt, whatever a tokenizer's file says; CLIP has 77


class BadTask(Exception):
    """A task that this model cannot do; its text is for the client."""


class Parts:
    """The components of a directory, by their names in model_index.json, in evaluation mode and on their device.
    options: what else that file says."""

    def __init__(
        self, components: dict[str, Any], options: dict[str, Any], device: torch.device, dtype: torch.dtype
    ) -> None:
        self._components = components
        self.options = options
        self.device = device
        self.dtype = dtype

    def __getitem__(self, name: str) -> Any:
        return self._components[name]

    def networks(self) -> list[torch.nn.Module]:
        return [part for part in self._components.values() if isinstance(part, torch.nn.Module)]


class Family(Protocol):
    """Made of a directory's parts. channels: of its latents. network: computes the steps. apart: modules of it that
    compute the same for every row, from tensors without rows."""

    channels: int
    network: Any
    apart: tuple[torch.nn.Module, ...]

    def __init__(self, parts: Parts) -> None: ...

    def encode(self, task: ImageTask, *, is_guided: bool) -> tuple[Inputs, ...]:
        """The inputs of its rows: with the prompt, and, if it is guided, without. Raises BadTask."""
        ...

    def predict(self, latents: torch.Tensor, timesteps: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """latents: [rows, channels, height, width] in the network's dtype; timesteps: float32 [rows]; inputs: of all
        rows. Returns what the network makes of them, shaped as the latents."""
        ...


def prompt_of(task: ImageTask) -> str:
    """Raises BadTask for the index of a class."""
    if not isinstance(task.prompt, str):
        raise BadTask(f"the prompt is {task.prompt!r}, this model takes a text")
    return task.prompt


def with_masked(latents: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """What the network takes of latents."""
    return torch.cat([latents, inputs[MASKED]], dim=1) if MASKED in inputs else latents


def clip_tokens(tokenizer: Any, text: str, device: torch.device) -> Any:
    """What its text encoder takes of a text; the rest is cut."""
    tokens_max = min(tokenizer.model_max_length, CLIP_TOKENS_MAX)
    return tokenizer(text, padding="max_length", max_length=tokens_max, truncation=True, return_tensors="pt").to(device)
