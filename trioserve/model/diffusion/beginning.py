"""Creates the state of a request before its first step: network inputs, schedule and first latent.

Each request has its own random generator, and draws its numbers in the order in which diffusers' pipelines draw them.
Therefore, a seed gives the same image as in diffusers.

The VAE converts images to latents of about unit variance, and latents to images. It converts one image at a time,
because it needs more memory than all other components.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.image_generation import ImageTask, IterativeRequest, RGBImage
from trioserve.model.diffusion.family import MASKED, BadTask, Family, LatentState, Original, Schedule
from trioserve.model.diffusion.solvers import Solver

__all__ = ["mask_tensor", "image_of", "image_tensor", "Autoencoder", "Beginning"]

MASK_BRIGHT = 128  # Brightness from 0 to 255. Where a mask has at least this brightness, the image may change.


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
    """Convert an image to a tensor. The image is resized if its size differs.

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
    """Convert a mask image to a tensor. The mask is resized if its size differs.

    Args:
        mask: the mask image. The brightness of a pixel is the mean of its colours, see MASK_BRIGHT.
        width: width of the edited image in pixels.
        height: height of the edited image in pixels.
        scale: side length, in image pixels, of the square that one value of the result stands for.

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
        # Means and deviations are lists with one value for each channel.
        if means is not None and deviations is not None:
            shift = torch.tensor(means, dtype=torch.float32).view(1, -1, 1, 1)
            factor = factor / torch.tensor(deviations, dtype=torch.float32).view(1, -1, 1, 1)
        device = next(network.parameters()).device
        self._factor, self._shift = factor.to(device), shift.to(device)

    def encode(self, image: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
        """Encode an image into a latent.

        Args:
            image: [1, 3, height, width], values from -1 to 1.
            noise: random generator that draws the latent from the distribution that the VAE predicts.

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


MASK_SPLIT = 0.5


class Beginning:
    """Creates first states.

    Args:
        family: encodes prompts.
        autoencoder: encodes images that a request edits.
        solvers: samplers by name.
        device: device of the latents.
        dtype: dtype in which noise is drawn.
        patch_side: latent pixels per side of one network token, see `Pipeline`.
        fills_in: True for an inpainting network, whose input includes the mask and the latent of the unmasked part.
    """

    def __init__(
        self,
        family: Family,
        autoencoder: Autoencoder,
        solvers: dict[str, Solver],
        device: torch.device,
        dtype: torch.dtype,
        *,
        patch_side: int = 1,
        fills_in: bool = False,
    ) -> None:
        self.solvers = solvers
        self._family = family
        self._autoencoder = autoencoder
        self._device, self._dtype = device, dtype
        self._patch_side = patch_side
        self._fills_in = fills_in

    def begin(self, request: IterativeRequest) -> LatentState:
        """Create the state of a request.

        Args:
            request: a request with an image task.

        Raises:
            BadTask: the model or the sampler cannot do this task.
        """
        task = request.task
        assert isinstance(task, ImageTask), f"{request.id} has no image task"
        scale = self._autoencoder.scale
        height, width = task.height // scale, task.width // scale
        schedule = self._schedule(task, request.step_count, height * width // self._patch_side**2)
        rows = self._family.encode(task, is_guided=request.is_guided)
        generator = torch.Generator().manual_seed(request.seed)
        begins_with_noise = task.image is None or (task.mask is not None and request.step_count == task.step_count)
        given = None
        if task.image is not None and not (begins_with_noise and self._fills_in):
            given = self._encoded(image_tensor(task.image, task.width, task.height), generator)
        noise = torch.randn((1, self._family.channels, height, width), generator=generator, dtype=self._dtype)
        noise = noise.to(self._device).float()
        latent = noise * schedule.initial_scale
        if not begins_with_noise:
            assert given is not None
            of_given, of_noise = schedule.noised[0]
            latent = given * of_given + noise * of_noise
        original = None
        if self._fills_in:
            masked = self._masked(task, scale, generator).to(self._dtype)
            rows = tuple({**inputs, MASKED: masked} for inputs in rows)
        elif task.mask is not None:
            assert given is not None
            original = Original(given, noise, mask_tensor(task.mask, task.width, task.height, scale).to(self._device))
        return LatentState(
            request_id=request.id, steps_done=0, schedule=schedule, latent=latent, rows=rows, original=original
        )

    def _schedule(self, task: ImageTask, step_count: int, token_count: int) -> Schedule:
        solver = self.solvers.get(task.sampler)
        if solver is None:
            raise BadTask(f"the sampler is {task.sampler!r}, but this model supports {', '.join(self.solvers)}")
        try:
            return solver.schedule(task.step_count, task.step_count - step_count, token_count)
        except ValueError as error:
            raise BadTask(f"{task.step_count} steps are not possible with {task.sampler}: {error}") from None

    def _masked(self, task: ImageTask, scale: int, generator: torch.Generator) -> torch.Tensor:
        """Build the additional input of an inpainting network.

        Without an input image or without a mask, the whole image may change.

        Returns:
            float32 [1, 1 + channels, height, width]: the mask, 1 where the image may change, and the latent of the
            unmasked part.
        """
        shape = (1, 1, task.height, task.width)
        whole = torch.ones(shape) if task.mask is None else mask_tensor(task.mask, task.width, task.height, 1)
        picture = torch.zeros((1, 3, task.height, task.width))
        if task.image is not None:
            picture = image_tensor(task.image, task.width, task.height)
        around = self._encoded(picture * (whole < MASK_SPLIT), generator)
        mask = torch.nn.functional.interpolate(whole, size=(task.height // scale, task.width // scale))
        return torch.cat([mask.to(self._device), around], dim=1)

    def _encoded(self, picture: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return self._autoencoder.encode(picture.to(self._device), generator)
