"""How a picture is begun: its prompt as the network's inputs, the schedule of its steps, and its first latent.

What is random is drawn in the order of diffusers' pipelines from a generator that only this request has, so a seed
makes the same picture here and there.
"""

from __future__ import annotations

import torch

from trioserve.contracts.image_generation import ImageTask
from trioserve.contracts.iterative import IterativeRequest
from trioserve.model.diffusion.autoencoder import Autoencoder
from trioserve.model.diffusion.family import MASKED, BadTask, Family
from trioserve.model.diffusion.latent_state import LatentState, Original
from trioserve.model.diffusion.pictures import mask_tensor, picture_tensor
from trioserve.model.diffusion.solver_steps import Schedule
from trioserve.model.diffusion.solvers import Solver

__all__ = ["Beginning"]

MASK_SPLIT = 0.5


class Beginning:
    """patch_side: see Pipeline. fills_in: the network is told what is masked, and what lies around it."""

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
        """Raises BadTask."""
        task = request.task
        assert isinstance(task, ImageTask), f"{request.id} is no picture"
        scale = self._autoencoder.scale
        height, width = task.height // scale, task.width // scale
        schedule = self._schedule(task, request.step_count, height * width // self._patch_side**2)
        rows = self._family.encode(task, is_guided=request.is_guided)
        generator = torch.Generator().manual_seed(request.seed)
        begins_with_noise = task.image is None or (task.mask is not None and request.step_count == task.step_count)
        given = None
        if task.image is not None and not (begins_with_noise and self._fills_in):
            given = self._encoded(picture_tensor(task.image, task.width, task.height), generator)
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
            raise BadTask(f"the sampler is {task.sampler!r}, this model has {', '.join(self.solvers)}")
        try:
            return solver.schedule(task.step_count, task.step_count - step_count, token_count)
        except ValueError as error:
            raise BadTask(f"{task.step_count} steps cannot be made by {task.sampler}: {error}") from None

    def _masked(self, task: ImageTask, scale: int, generator: torch.Generator) -> torch.Tensor:
        """[1, 1 + channels, height, width]: where it may change, and the latent of what is around. Without a picture,
        or without a mask, all of it may."""
        shape = (1, 1, task.height, task.width)
        whole = torch.ones(shape) if task.mask is None else mask_tensor(task.mask, task.width, task.height, 1)
        picture = torch.zeros((1, 3, task.height, task.width))
        if task.image is not None:
            picture = picture_tensor(task.image, task.width, task.height)
        around = self._encoded(picture * (whole < MASK_SPLIT), generator)
        mask = torch.nn.functional.interpolate(whole, size=(task.height // scale, task.width // scale))
        return torch.cat([mask.to(self._device), around], dim=1)

    def _encoded(self, picture: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return self._autoencoder.encode(picture.to(self._device), generator)
