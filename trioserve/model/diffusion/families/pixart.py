"""PixArt alpha and sigma (arXiv 2310.00426, 2403.04692): a transformer that attends to T5's embeddings of a text."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import get_2d_sincos_pos_embed

from trioserve.contracts.image_generation import ImageTask
from trioserve.model.diffusion.family import Inputs, Parts, prompt_of

__all__ = ["Model"]

TOKENS_ALPHA, TOKENS_SIGMA = 120, 300
TABLES_MAX = 16  # Cached tables of position embeddings. The table for an image of one megapixel has 19 MB.


class Model:
    """The family of PixArt, see `Family`."""

    def __init__(self, parts: Parts) -> None:
        self.network = parts["transformer"]
        self._tokenizer = parts["tokenizer"]
        self._encoder = parts["text_encoder"]
        self._device, self._dtype = parts.device, parts.dtype
        self._tokens_max = TOKENS_SIGMA if parts.options["_class_name"] == "PixArtSigmaPipeline" else TOKENS_ALPHA
        self.channels: int = self.network.config.in_channels
        self._positions = _Positions(self.network.pos_embed)
        self.apart: tuple[torch.nn.Module, ...] = (self._positions,)

    def encode(self, task: ImageTask, *, is_guided: bool) -> tuple[Inputs, ...]:
        texts = (prompt_of(task), task.negative_prompt or "") if is_guided else (prompt_of(task),)
        size: Inputs = {}
        if self.network.use_additional_conditions:
            size = {
                "resolution": self._numbers(task.height, task.width),
                "aspect_ratio": self._numbers(task.height / task.width),
            }
        return tuple({**self._embed(text), **size} for text in texts)

    def predict(self, latents: torch.Tensor, timesteps: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        self._positions(latents.shape[2], latents.shape[3])
        predicted: torch.Tensor = self.network(
            latents,
            encoder_hidden_states=inputs["encoder_hidden_states"],
            encoder_attention_mask=inputs["encoder_attention_mask"],
            timestep=timesteps,
            added_cond_kwargs={name: inputs.get(name) for name in ("resolution", "aspect_ratio")},
            return_dict=False,
        )[0]
        return predicted[:, : self.channels]  # The other channels are learned variances.

    def _numbers(self, *numbers: float) -> torch.Tensor:
        return torch.tensor([numbers], dtype=self._dtype, device=self._device)

    def _embed(self, text: str) -> Inputs:
        tokens = self._tokenizer(
            text.lower().strip(),
            padding="max_length",
            max_length=self._tokens_max,
            truncation=True,
            return_tensors="pt",
        ).to(self._device)
        embedded: torch.Tensor = self._encoder(tokens.input_ids, attention_mask=tokens.attention_mask)[0]
        return {
            "encoder_hidden_states": embedded.to(self._dtype),
            "encoder_attention_mask": tokens.attention_mask,
        }


class _Positions(torch.nn.Module):
    """Cache of position embeddings. Without this cache, the network computes embeddings for untrained sizes in each
    pass.
    """

    def __init__(self, patches: Any) -> None:
        super().__init__()
        self._patches = (patches,)  # torch does not register a module inside a tuple as a child.
        self._tables: dict[tuple[int, int], torch.Tensor] = {}

    def forward(self, height: int, width: int) -> None:
        """Set the network's position embeddings for latents of a size.

        Args:
            height: height of the latents.
            width: width of the latents.
        """
        (patches,) = self._patches
        size = height // patches.patch_size, width // patches.patch_size
        table = self._tables.get(size)
        if table is None:
            if len(self._tables) >= TABLES_MAX:
                self._tables.clear()
            made = get_2d_sincos_pos_embed(
                patches.pos_embed.shape[-1],
                size,
                base_size=patches.base_size,
                interpolation_scale=patches.interpolation_scale,
                device=patches.pos_embed.device,
                output_type="pt",
            )
            table = self._tables[size] = made.float()[None]
        patches.height, patches.width = size
        patches.pos_embed = table
