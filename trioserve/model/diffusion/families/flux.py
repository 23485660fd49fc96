"""Flux.1: a transformer over the tokens of a text and of an image. An image token packs four latent pixels.

Guidance is a number in the network's input. The distilled variant has no guidance.
"""

from __future__ import annotations

import torch

from trioserve.contracts.image_generation import ImageTask
from trioserve.model.diffusion.family import Inputs, Parts, clip_tokens, prompt_of

__all__ = ["Model", "packed", "unpacked"]

TOKENS_MAX, TOKENS_MAX_DISTILLED = 512, 256
TIME_SCALE = 1000.0  # The network multiplies timesteps by this factor again.


class Model:
    """The family of Flux.1, see `Family`."""

    def __init__(self, parts: Parts) -> None:
        self.network = parts["transformer"]
        self.apart: tuple[torch.nn.Module, ...] = (self.network.pos_embed,)
        self._tokenizers = parts["tokenizer"], parts["tokenizer_2"]
        self._encoders = parts["text_encoder"], parts["text_encoder_2"]
        self._device, self._dtype = parts.device, parts.dtype
        self._takes_guidance = bool(self.network.config.guidance_embeds)
        self.channels: int = self.network.config.in_channels // 4

    def encode(self, task: ImageTask, *, is_guided: bool) -> tuple[Inputs, ...]:
        assert not is_guided, "Flux needs no second row for guidance"
        text = prompt_of(task)
        short = clip_tokens(self._tokenizers[0], text, self._device)
        long = self._tokenizers[1](
            text,
            padding="max_length",
            max_length=TOKENS_MAX if self._takes_guidance else TOKENS_MAX_DISTILLED,
            truncation=True,
            return_tensors="pt",
        ).to(self._device)
        inputs = {
            "pooled_projections": self._encoders[0](short.input_ids).pooler_output.to(self._dtype),
            "encoder_hidden_states": self._encoders[1](long.input_ids)[0].to(self._dtype),
        }
        if self._takes_guidance:
            inputs["guidance"] = torch.tensor([task.guidance], dtype=torch.float32, device=self._device)
        return (inputs,)

    def predict(self, latents: torch.Tensor, timesteps: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        height, width = latents.shape[2:]
        positions = torch.zeros(height // 2, width // 2, 3, device=self._device, dtype=self._dtype)
        positions[..., 1] = positions[..., 1] + torch.arange(height // 2, device=self._device)[:, None]
        positions[..., 2] = positions[..., 2] + torch.arange(width // 2, device=self._device)[None, :]
        tokens = inputs["encoder_hidden_states"].shape[1]
        predicted: torch.Tensor = self.network(
            hidden_states=packed(latents),
            timestep=timesteps.to(self._dtype) / TIME_SCALE,
            img_ids=positions.reshape(-1, 3),
            txt_ids=torch.zeros(tokens, 3, device=self._device, dtype=self._dtype),
            return_dict=False,
            **inputs,
        )[0]
        return unpacked(predicted, height, width)


def packed(latents: torch.Tensor) -> torch.Tensor:
    """Pack squares of 2 by 2 latent pixels into tokens.

    Args:
        latents: [rows, channels, height, width].

    Returns:
        [rows, height / 2 * width / 2, channels * 4].
    """
    rows, channels, height, width = latents.shape
    squares = latents.reshape(rows, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return squares.reshape(rows, (height // 2) * (width // 2), channels * 4)


def unpacked(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Unpack tokens into latents, the inverse of `packed`.

    Args:
        tokens: [rows, height / 2 * width / 2, channels * 4].
        height: height of the latents.
        width: width of the latents.

    Returns:
        [rows, channels, height, width].
    """
    rows, _, numbers = tokens.shape
    squares = tokens.reshape(rows, height // 2, width // 2, numbers // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return squares.reshape(rows, numbers // 4, height, width)
