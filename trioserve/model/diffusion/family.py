"""The interface of an image model family: encodes prompts into network inputs and calls the network."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from trioserve.contracts.image_generation import ImageTask
from trioserve.model.diffusion.latent_state import Inputs

__all__ = ["MASKED", "BadTask", "Family", "Parts", "clip_tokens", "prompt_of", "with_masked"]

MASKED = "masked"
"""Name in Inputs, for inpainting networks: the mask and the latent of the unmasked part, [rows, 1 + channels, ...]."""


CLIP_TOKENS_MAX = 1024  # tokens of a prompt, against bad tokenizer files. CLIP's limit is 77.


class BadTask(Exception):
    """A task that this model cannot do. Its text is sent to the client."""


class Parts:
    """The loaded components of a directory, in evaluation mode.

    Args:
        components: components by their names in model_index.json.
        options: the entries of model_index.json that are not components.
        device: device of the networks.
        dtype: dtype of the networks.
    """

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
    """The code of one model family.

    Args:
        parts: components of a directory.

    Attributes:
        channels: channels of the latents.
        network: computes the denoising steps.
        apart: its modules whose output is equal for all rows and whose input tensors have no row dimension.
    """

    channels: int
    network: Any
    apart: tuple[torch.nn.Module, ...]

    def __init__(self, parts: Parts) -> None: ...

    def encode(self, task: ImageTask, *, is_guided: bool) -> tuple[Inputs, ...]:
        """Encode a task.

        Args:
            task: prompt, size and guidance of the image.
            is_guided: True to add a second row without the prompt, or with the negative prompt.

        Returns:
            Network inputs of each row.

        Raises:
            BadTask: the model cannot do the task.
        """
        ...

    def predict(self, latents: torch.Tensor, timesteps: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """Call the network.

        Args:
            latents: [rows, channels, height, width] in the network's dtype.
            timesteps: float32 [rows].
            inputs: inputs of all rows, concatenated.

        Returns:
            The prediction, with the shape of `latents`.
        """
        ...


def prompt_of(task: ImageTask) -> str:
    """Return the text prompt of a task.

    Args:
        task: the task.

    Raises:
        BadTask: the prompt is the number of a class.
    """
    if not isinstance(task.prompt, str):
        raise BadTask(f"the prompt is {task.prompt!r}, but this model needs a text")
    return task.prompt


def with_masked(latents: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Append the input of an inpainting network to the latents, if there is one.

    Args:
        latents: [rows, channels, height, width].
        inputs: inputs of all rows. MASKED holds the mask and the latent of the unmasked part.

    Returns:
        [rows, channels, height, width], or [rows, 2 * channels + 1, height, width] with the additional input.
    """
    return torch.cat([latents, inputs[MASKED]], dim=1) if MASKED in inputs else latents


def clip_tokens(tokenizer: Any, text: str, device: torch.device) -> Any:
    """Tokenize a text for a CLIP encoder. Longer texts are truncated.

    Args:
        tokenizer: a tokenizer of transformers.
        text: the prompt.
        device: device of the result.

    Returns:
        A BatchEncoding with int64 tensors [1, tokens].
    """
    tokens_max = min(tokenizer.model_max_length, CLIP_TOKENS_MAX)
    return tokenizer(text, padding="max_length", max_length=tokens_max, truncation=True, return_tensors="pt").to(device)
