"""Noise that a step adds: a function of the request's seed and of the step, whatever else is drawn."""

from __future__ import annotations

import hashlib

import torch

__all__ = ["step_noise"]


def step_noise(seed: int, step: int, latent: torch.Tensor) -> torch.Tensor:
    """As `latent` is shaped, of unit variance. Drawn on the CPU, so that every device has the same."""
    digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randn(latent.shape, generator=generator).to(latent.device)
