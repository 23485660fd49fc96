"""The VAE: pictures to latents of about unit variance, and back. One picture at a time, since it takes most memory."""

from __future__ import annotations

from typing import Any

import torch

from trioserve.contracts.errors import ModelLoadError

__all__ = ["Autoencoder"]


class Autoencoder:
    """network: an AutoencoderKL. Latents are float32 [1, channels, height, width]. Raises ModelLoadError where its file
    does not say how latents are scaled."""

    def __init__(self, network: Any) -> None:
        self._network = network
        config = network.config
        self.scale: int = 2 ** (len(config.block_out_channels) - 1)  # pixels in the side of a latent pixel
        self._dtype = next(network.parameters()).dtype
        means, deviations = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
        factor = torch.tensor(_number(config, "scaling_factor"))
        shift = torch.tensor(_number(config, "shift_factor") if getattr(config, "shift_factor", None) else 0.0)
        if means is not None and deviations is not None:  # of each channel
            shift = torch.tensor(means, dtype=torch.float32).view(1, -1, 1, 1)
            factor = factor / torch.tensor(deviations, dtype=torch.float32).view(1, -1, 1, 1)
        device = next(network.parameters()).device
        self._factor, self._shift = factor.to(device), shift.to(device)

    def encode(self, picture: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
        """picture: [1, 3, height, width], from -1 to 1. noise: decides which latent of its distribution it is."""
        distribution = self._network.encode(picture.to(self._dtype)).latent_dist
        latent: torch.Tensor = distribution.sample(generator=noise)
        return (latent.float() - self._shift) * self._factor

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        """[3, height, width], about -1 to 1."""
        picture: torch.Tensor = self._network.decode(
            (latent / self._factor + self._shift).to(self._dtype), return_dict=False
        )[0]
        return picture[0]


def _number(config: Any, name: str) -> float:
    value = getattr(config, name)
    if not isinstance(value, int | float):
        raise ModelLoadError(f"vae/config.json: {name} is {value!r}, and no number")
    return float(value)
