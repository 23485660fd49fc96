"""Creates the state of a request before its first step: network inputs, schedule and first latent.

Random numbers are drawn in the order of diffusers' pipelines from a generator of the request. So a seed gives the same
image as in diffusers.
"""

from __future__ import annotations

import torch

from trioserve.contracts.image_generation import ImageTask
from trioserve.contracts.iterative import IterativeRequest
from trioserve.model.diffusion.autoencoder import Autoencoder
from trioserve.model.diffusion.family import MASKED, BadTask, Family
from trioserve.model.diffusion.image_tensors import image_tensor, mask_tensor
from trioserve.model.diffusion.latent_state import LatentState, Original
from trioserve.model.diffusion.solver_steps import Schedule
from trioserve.model.diffusion.solvers import Solver

__all__ = ["Beginning"]

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
