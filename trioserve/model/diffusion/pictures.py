"""Pictures as tensors, and back."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from trioserve.contracts.image_generation import Picture

__all__ = ["mask_tensor", "picture_of", "picture_tensor"]

MASK_BRIGHT = 128  # of 255: from here on a picture may change


def picture_of(values: torch.Tensor) -> Picture:
    """values: [3, height, width], from -1 to 1; what lies beyond is cut, and what is no number is black."""
    pixels = (
        (values.float().nan_to_num(-1.0) / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8).permute(1, 2, 0).cpu()
    )
    height, width, _ = pixels.shape
    return Picture(width, height, pixels.contiguous().numpy().tobytes())


def picture_tensor(picture: Picture, width: int, height: int) -> torch.Tensor:
    """float32 [1, 3, height, width], from -1 to 1; of another size it is resized."""
    values = np.asarray(_resized(picture, width, height), dtype=np.float32) / 255
    return torch.from_numpy(values).permute(2, 0, 1)[None] * 2 - 1


def mask_tensor(mask: Picture, width: int, height: int, scale: int) -> torch.Tensor:
    """float32 [1, 1, height / scale, width / scale]: 1 where it may change, else 0."""
    colours = np.asarray(_resized(mask, width, height), dtype=np.float32).mean(axis=2)
    values = torch.from_numpy((colours >= MASK_BRIGHT).astype(np.float32))[None, None]
    return torch.nn.functional.interpolate(values, size=(height // scale, width // scale))


def _resized(picture: Picture, width: int, height: int) -> Image.Image:
    image = Image.frombytes("RGB", (picture.width, picture.height), picture.rgb)
    if (picture.width, picture.height) == (width, height):
        return image
    return image.resize((width, height), Image.Resampling.LANCZOS)
