"""Stable Diffusion 1 and 2 (arXiv 2112.10752): a UNet that attends to CLIP's embeddings of a text."""

from __future__ import annotations

import torch

from trioserve.contracts.image_generation import ImageTask
from trioserve.model.diffusion.family import Inputs, Parts, clip_tokens, prompt_of, with_masked

__all__ = ["Model"]


class Model:
    """The family of Stable Diffusion 1 and 2, see `Family`."""

    apart: tuple[torch.nn.Module, ...] = ()

    def __init__(self, parts: Parts) -> None:
        self.network = parts["unet"]
        self._tokenizer = parts["tokenizer"]
        self._encoder = parts["text_encoder"]
        self._device, self._dtype = parts.device, parts.dtype
        self.channels: int = self.network.config.out_channels

    def encode(self, task: ImageTask, *, is_guided: bool) -> tuple[Inputs, ...]:
        texts = (prompt_of(task), task.negative_prompt or "") if is_guided else (prompt_of(task),)
        return tuple({"encoder_hidden_states": self._embed(text)} for text in texts)

    def predict(self, latents: torch.Tensor, timesteps: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        predicted: torch.Tensor = self.network(
            with_masked(latents, inputs),
            timesteps,
            encoder_hidden_states=inputs["encoder_hidden_states"],
            return_dict=False,
        )[0]
        return predicted

    def _embed(self, text: str) -> torch.Tensor:
        tokens = clip_tokens(self._tokenizer, text, self._device)
        takes_mask = getattr(self._encoder.config, "use_attention_mask", False)
        embedded: torch.Tensor = self._encoder(
            tokens.input_ids, attention_mask=tokens.attention_mask if takes_mask else None
        )[0]
        return embedded.to(self._dtype)
