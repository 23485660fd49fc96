"""DiT (arXiv 2212.09748): a transformer whose prompt is the number of a class."""

from __future__ import annotations

import torch

from trioserve.contracts.image_generation import ImageTask
from trioserve.model.diffusion.family import BadTask, Inputs, Parts

__all__ = ["Model"]


class Model:
    """The family of DiT, see `Family`."""

    apart: tuple[torch.nn.Module, ...] = ()

    def __init__(self, parts: Parts) -> None:
        self.network = parts["transformer"]
        self._device = parts.device
        self.channels: int = self.network.config.in_channels
        self._class_count: int = self.network.config.num_embeds_ada_norm

    def encode(self, task: ImageTask, *, is_guided: bool) -> tuple[Inputs, ...]:
        index = task.prompt
        if not isinstance(index, int) or not 0 <= index < self._class_count:
            raise BadTask(f"the class is {index!r}, this model has classes 0 to {self._class_count - 1}")
        # The embedding with the index `class_count` was trained for rows without a class.
        indices = (index, self._class_count) if is_guided else (index,)
        return tuple({"class_labels": torch.tensor([index], device=self._device)} for index in indices)

    def predict(self, latents: torch.Tensor, timesteps: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        predicted: torch.Tensor = self.network(latents, timestep=timesteps, return_dict=False, **inputs)[0]
        return predicted[:, : self.channels]  # The other channels are learned variances.
