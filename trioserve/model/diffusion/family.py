"""The interface of an image model family: encodes prompts into network inputs and calls the network.

A latent slot contains the complete state of a request. The state is frozen, and each step replaces it by a new state.

A denoising step computes a weighted sum of several tensors: the latent, the network's output, the clean latent that
these two predict, noise, and results of earlier steps (outputs or clean latents). Diffusers' schedulers are objects
that keep a state. Here a solver only supplies weights, which have no state. Therefore, requests at different steps and
with different solvers can share a forward pass.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import msgspec
import torch

from trioserve.contracts.ids import RequestId
from trioserve.contracts.image_generation import ImageTask

__all__ = [
    "Schedule",
    "SolverStep",
    "Inputs",
    "LatentState",
    "Original",
    "MASKED",
    "BadTask",
    "Family",
    "Parts",
    "clip_tokens",
    "prompt_of",
    "with_masked",
]


class SolverStep(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients of one denoising step. Each is the factor of one term in a sum of latents.

    Attributes:
        timestep: input of the network.
        input_scale: factor on the latent before it enters the network.
        clean_of_latent: weight of the latent in the predicted clean latent.
        clean_of_output: weight of the network's output in the predicted clean latent.
        clean_limit: the clean latent is clamped to -clean_limit .. clean_limit. None disables clamping.
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
        noised: for each step, the weights of the edited image's latent and of noise in the latent before the step.
        history_count: number of earlier results that a step needs.
        remembers_outputs: True if earlier results are outputs of the network, False if they are clean latents.
    """

    steps: tuple[SolverStep, ...]
    initial_scale: float
    noised: tuple[tuple[float, float], ...]
    history_count: int = 0
    remembers_outputs: bool = False


Inputs: TypeAlias = dict[str, torch.Tensor]
"""Inputs of the network for one row, besides latent and timestep, by argument name. Each tensor is [1, ...]."""


class Original(msgspec.Struct, frozen=True):
    """The image that a request edits within a mask.

    Attributes:
        latent: latent of the image, [1, channels, height, width].
        noise: noise that is added to the latent before each step, [1, channels, height, width].
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
        rows: network inputs of each row of a step. The first row has the prompt. A second row is for guidance.
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


MASKED = "masked"
"""Name in Inputs, for inpainting networks: the mask and the latent of the unmasked part, [rows, 1 + channels, ...]."""


CLIP_TOKENS_MAX = 1024  # Maximum tokens of a prompt, which bad tokenizer files cannot exceed. CLIP's limit is 77.


class BadTask(Exception):
    """The task is not possible with this model. The message is sent to the client."""


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
        apart: modules of the network whose output is equal for all rows, and whose input tensors have no row dimension.
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
        inputs: inputs of all rows. The entry MASKED contains the mask and the latent of the unmasked part.

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
