"""Converts images to tensors and back."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from trioserve.contracts.image_generation import RGBImage

__all__ = ["mask_tensor", "image_of", "image_tensor"]

MASK_BRIGHT = 128  # of 255. Pixels of a mask from this brightness on may change.


def image_of(values: torch.Tensor) -> RGBImage:
    """Convert a tensor to an image.

    Args:
        values: [3, height, width], from -1 to 1. Values outside are clamped, and NaN becomes black.
    """
    pixels = (
        (values.float().nan_to_num(-1.0) / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8).permute(1, 2, 0).cpu()
    )
    height, width, _ = pixels.shape
    return RGBImage(width, height, pixels.contiguous().numpy().tobytes())


def image_tensor(picture: RGBImage, width: int, height: int) -> torch.Tensor:
    """Convert an image to a tensor. It is resized if its size differs.

    Args:
        picture: the image.
        width: width of the result in pixels.
        height: height of the result in pixels.

    Returns:
        float32 [1, 3, height, width], from -1 to 1.
    """
    values = np.asarray(_resized(picture, width, height), dtype=np.float32) / 255
    return torch.from_numpy(values).permute(2, 0, 1)[None] * 2 - 1


def mask_tensor(mask: RGBImage, width: int, height: int, scale: int) -> torch.Tensor:
    """Convert a mask image to a tensor. It is resized if its size differs.

    Args:
        mask: the image. The mean of a pixel's colours counts, see MASK_BRIGHT.
        width: width of the edited image in pixels.
        height: height of the edited image in pixels.
        scale: image pixels per side of one value.

    Returns:
        float32 [1, 1, height / scale, width / scale]: 1 where the image may change, else 0.
    """
    colours = np.asarray(_resized(mask, width, height), dtype=np.float32).mean(axis=2)
    values = torch.from_numpy((colours >= MASK_BRIGHT).astype(np.float32))[None, None]
    return torch.nn.functional.interpolate(values, size=(height // scale, width // scale))


def _resized(picture: RGBImage, width: int, height: int) -> Image.Image:
    image = Image.frombytes("RGB", (picture.width, picture.height), picture.rgb)
    if (picture.width, picture.height) == (width, height):
        return image
    return image.resize((width, height), Image.Resampling.LANCZOS)
