"""Stable Diffusion XL (arXiv 2307.01952): two text encoders, and a UNet whose input includes the image size."""

from __future__ import annotations

from typing import Any

import torch

from trioserve.contracts.image_generation import ImageTask
from trioserve.model.diffusion.family import Inputs, Parts, clip_tokens, prompt_of, with_masked

__all__ = ["Model"]


class Model:
    """The family of Stable Diffusion XL, see `Family`."""

    apart: tuple[torch.nn.Module, ...] = ()

    def __init__(self, parts: Parts) -> None:
        self.network = parts["unet"]
        self._encoders = [(parts[f"tokenizer{end}"], parts[f"text_encoder{end}"]) for end in ("", "_2")]
        self._device, self._dtype = parts.device, parts.dtype
        self._has_zeros_for_empty = bool(parts.options.get("force_zeros_for_empty_prompt", True))
        self.channels: int = self.network.config.out_channels

    def encode(self, task: ImageTask, *, is_guided: bool) -> tuple[Inputs, ...]:
        sides = (task.height, task.width)
        # The six numbers are the original size, the crop's top left corner and the target size, as in training.
        times = torch.tensor([[*sides, 0, 0, *sides]], dtype=self._dtype, device=self._device)
        rows = [{**self._embed(prompt_of(task)), "time_ids": times}]
        if is_guided and task.negative_prompt is None and self._has_zeros_for_empty:
            rows.append({**{name: torch.zeros_like(value) for name, value in rows[0].items()}, "time_ids": times})
        elif is_guided:
            rows.append({**self._embed(task.negative_prompt or ""), "time_ids": times})
        return tuple(rows)

    def predict(self, latents: torch.Tensor, timesteps: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        predicted: torch.Tensor = self.network(
            with_masked(latents, inputs),
            timesteps,
            encoder_hidden_states=inputs["encoder_hidden_states"],
            added_cond_kwargs={"text_embeds": inputs["text_embeds"], "time_ids": inputs["time_ids"]},
            return_dict=False,
        )[0]
        return predicted

    def _embed(self, text: str) -> Inputs:
        hidden: list[torch.Tensor] = []
        found: Any = None
        for tokenizer, encoder in self._encoders:
            tokens = clip_tokens(tokenizer, text, self._device)
            found = encoder(tokens.input_ids, output_hidden_states=True)
            hidden.append(found.hidden_states[-2])
        return {
            "encoder_hidden_states": torch.cat(hidden, dim=-1).to(self._dtype),
            "text_embeds": found.text_embeds.to(self._dtype),  # The second text encoder computes this embedding.
        }
