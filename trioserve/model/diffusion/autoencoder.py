"""The VAE: converts images to latents of about unit variance and back, one at a time because it needs most memory."""

from __future__ import annotations

from typing import Any

import torch

from trioserve.contracts.errors import ModelLoadError

__all__ = ["Autoencoder"]


class Autoencoder:
    """Encodes and decodes images.

    Args:
        network: an AutoencoderKL of diffusers.

    Attributes:
        scale: image pixels per side of one latent pixel.

    Raises:
        ModelLoadError: the VAE's config does not contain the scale of its latents.
    """

    def __init__(self, network: Any) -> None:
        self._network = network
        config = network.config
        self.scale: int = 2 ** (len(config.block_out_channels) - 1)
        self._dtype = next(network.parameters()).dtype
        means, deviations = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
        factor = torch.tensor(_number(config, "scaling_factor"))
        shift = torch.tensor(_number(config, "shift_factor") if getattr(config, "shift_factor", None) else 0.0)
        if means is not None and deviations is not None:  # one value for each channel
            shift = torch.tensor(means, dtype=torch.float32).view(1, -1, 1, 1)
            factor = factor / torch.tensor(deviations, dtype=torch.float32).view(1, -1, 1, 1)
        device = next(network.parameters()).device
        self._factor, self._shift = factor.to(device), shift.to(device)

    def encode(self, image: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
        """Encode an image into a latent.

        Args:
            picture: [1, 3, height, width], values from -1 to 1.
            noise: draws the latent from the distribution that the VAE predicts.

        Returns:
            float32 [1, channels, height / scale, width / scale].
        """
        distribution = self._network.encode(image.to(self._dtype)).latent_dist
        latent: torch.Tensor = distribution.sample(generator=noise)
        return (latent.float() - self._shift) * self._factor

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        """Decode a latent into an image.

        Args:
            latent: float32 [1, channels, height, width].

        Returns:
            [3, height * scale, width * scale] in the VAE's dtype, values from about -1 to 1.
        """
        image: torch.Tensor = self._network.decode(
            (latent / self._factor + self._shift).to(self._dtype), return_dict=False
        )[0]
        return image[0]


def _number(config: Any, name: str) -> float:
    value = getattr(config, name)
    if not isinstance(value, int | float):
        raise ModelLoadError(f"vae/config.json: {name} is {value!r}, but must be a number")
    return float(value)
