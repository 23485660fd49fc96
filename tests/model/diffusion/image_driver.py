"""Builds plans as the core does, to test a runner without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from trioserve.contracts.events import IterativePhase
from trioserve.contracts.ids import RequestId
from trioserve.contracts.image_generation import (
    ImageTask,
    IterativePlan,
    IterativeRequest,
    IterativeResult,
    LatentMove,
    LatentWork,
    RGBImage,
)
from trioserve.contracts.step import IsAbandoned, never_abandoned
from trioserve.model.diffusion.directory import ImageDirectory, ImageModelSettings
from trioserve.model.diffusion.runner import DiffusionRunner
from trioserve.text.tokenizer_directory import check_tokenizer


def load(path: Path, **settings: object) -> DiffusionRunner:
    chosen = ImageModelSettings(**{"dtype": "float32", **settings})
    return DiffusionRunner.load(ImageDirectory(path), chosen, check_tokenizer=check_tokenizer)


def request(
    name: str,
    prompt: str | int,
    *,
    steps: int = 3,
    skipped: int = 0,
    seed: int = 0,
    guidance: float = 1.0,
    has_guided_rows: bool = True,
    size: tuple[int, int],
    sampler: str,
    negative: str | None = None,
    partial_every: int | None = None,
    image: RGBImage | None = None,
    mask: RGBImage | None = None,
) -> IterativeRequest:
    return IterativeRequest(
        id=RequestId(name),
        step_count=steps - skipped,
        seed=seed,
        is_guided=has_guided_rows and guidance > 1,
        partial_every=partial_every,
        task=ImageTask(
            prompt=prompt,
            negative_prompt=negative,
            width=size[0],
            height=size[1],
            step_count=steps,
            guidance=guidance,
            sampler=sampler,
            image=image,
            mask=mask,
        ),
    )


class Driver:
    """Runs plans. A request's slot is its index in the list."""

    def __init__(self, runner: DiffusionRunner, requests: Sequence[IterativeRequest]) -> None:
        self.runner = runner
        self.slots = {one.id: slot for slot, one in enumerate(requests)}
        self.steps_done = dict.fromkeys(self.slots, 0)
        self._plans = 0

    def run(
        self,
        phase: IterativePhase,
        requests: Sequence[IterativeRequest],
        *,
        moves: tuple[LatentMove, ...] = (),
        is_abandoned: IsAbandoned = never_abandoned,
    ) -> IterativeResult | None:
        works = tuple(
            LatentWork(
                one,
                self.slots[one.id],
                self.steps_done[one.id] if phase is IterativePhase.DENOISE else 0,
                phase is IterativePhase.DENOISE
                and one.partial_every is not None
                and (self.steps_done[one.id] + 1) % one.partial_every == 0,
            )
            for one in requests
        )
        plan = IterativePlan(self._plans, phase, works, len(works), moves)
        self._plans += 1
        result = self.runner.execute(plan, is_abandoned)
        if result is not None and phase is IterativePhase.DENOISE:
            for one in requests:
                self.steps_done[one.id] += 1
        return result

    def latent(self, one: IterativeRequest) -> torch.Tensor:
        state = self.runner.slots[self.slots[one.id]]
        assert state is not None
        return state.latent

    def finish(self, requests: Sequence[IterativeRequest]) -> None:
        """Denoise all requests to their last step, in joint passes."""
        while waiting := [one for one in requests if self.steps_done[one.id] < one.step_count]:
            result = self.run(IterativePhase.DENOISE, waiting)
            assert result is not None
            assert not result.errors, result.errors


def latents(runner: DiffusionRunner, requests: Sequence[IterativeRequest]) -> list[torch.Tensor]:
    driver = Driver(runner, requests)
    result = driver.run(IterativePhase.ENCODE, requests)
    assert result is not None
    assert not result.errors, result.errors
    driver.finish(requests)
    return [driver.latent(one) for one in requests]
