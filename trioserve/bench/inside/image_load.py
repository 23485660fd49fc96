"""The images that image_bench requests, the diffusers pipeline that makes the same ones, and a watch on the engine.

The watch identifies requests by their seed, since a client over HTTP does not choose the engine's ids.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import msgspec
import trio

from trioserve.admission.dispatch import AdmissionScope, Dispatch
from trioserve.contracts.events import IterativePhase
from trioserve.contracts.image_generation import ImageParams, IterativePlan, IterativeResult, RGBImage
from trioserve.contracts.step import IsAbandoned
from trioserve.engine.images.image_engine import ImageEngine
from trioserve.engine.images.open_image import OpenImage
from trioserve.engine.lifecycle.engine_loop import ThreadedExecutor
from trioserve.engine.lifecycle.request_admission import RequestAdmission

__all__ = ["ImageRequester", "ForwardPass", "ImageWatch", "PlainPipeline"]

CLASSES_MAX = 10
# Allowed difference of a color value of 255. A batch adds numbers in another order, so rounding may differ.
LEVELS_APART_MAX = 2


class ImageRequester:
    """Requests and results, by seed. The seed also chooses the prompt.

    Args:
        engine: the engine.
        steps: default number of denoising steps.
        guidance: guidance scale.
    """

    def __init__(self, engine: ImageEngine, *, steps: int, guidance: float) -> None:
        self._engine = engine
        self.steps, self.guidance = steps, guidance
        self.steps_max = engine.limits.steps_max
        self._made: dict[int, RGBImage] = {}

    def prompt(self, seed: int) -> str:
        classes = self._engine.model.classes
        return f"image {seed}" if classes is None else classes[seed % min(CLASSES_MAX, len(classes))]

    def prompts(self, count: int) -> list[str]:
        return [self.prompt(seed) for seed in range(count)]

    def body(self, seed: int) -> dict[str, Any]:
        """Return the JSON body of a request over HTTP.

        Args:
            seed: seed of the image.
        """
        return {
            "prompt": self.prompt(seed),
            "seed": seed,
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance,
        }

    async def draw(
        self, seed: int, *, steps: int | None = None, on_step: Callable[[int], None] = lambda steps_done: None
    ) -> None:
        """Generate one image.

        Args:
            seed: seed of the image.
            steps: number of denoising steps. None: the default number, whose result must be the same each time.
            on_step: called with the number of steps done.
        """
        params = ImageParams(seed=seed, steps=steps or self.steps, guidance=self.guidance)
        image: RGBImage | None = None
        async with self._engine.generate_image(self.prompt(seed), params) as stream:
            async for delta in stream:
                on_step(delta.steps_done)
                image = delta.image
        assert image is not None, f"there is no image with seed {seed}"
        if steps is None:
            self.note(seed, image)

    def note(self, seed: int, image: RGBImage) -> None:
        """Record an image, and assert that the engine made no other image with that seed.

        Args:
            seed: seed of the image.
            image: the image.
        """
        assert self._made.setdefault(seed, image) == image, f"seed {seed} gave two different images"

    def compare(self, seeds: Sequence[int], pictures: Sequence[RGBImage]) -> None:
        """Assert that the pipeline made the same images, except for rounding.

        Args:
            seeds: seeds of the images.
            pictures: images of the pipeline.
        """
        for seed, image in zip(seeds, pictures, strict=True):
            made = self._made[seed]
            assert (made.width, made.height) == (image.width, image.height)
            apart = max(abs(one - other) for one, other in zip(made.rgb, image.rgb, strict=True))
            assert apart <= LEVELS_APART_MAX, f"seed {seed}: the pipeline's image differs by {apart} levels"


class PlainPipeline:
    """A diffusers pipeline. It computes in the thread that calls it.

    Args:
        directory: folder of the saved model.

    Attributes:
        on_step: called before each denoising step, in that thread.
    """

    def __init__(self, directory: Path) -> None:
        from diffusers import DiffusionPipeline

        self._pipeline = DiffusionPipeline.from_pretrained(directory)
        self._pipeline.set_progress_bar_config(disable=True)
        self.on_step: Callable[[], None] = lambda: None
        denoiser = getattr(self._pipeline, "unet", None) or self._pipeline.transformer
        denoiser.register_forward_pre_hook(lambda *_: self.on_step())

    def draw(self, prompts: Sequence[str], seeds: Sequence[int], step_count: int, guidance: float) -> list[RGBImage]:
        """Return one batch of images in the model's default size.

        Args:
            prompts: prompt of each image.
            seeds: seed of each image.
            step_count: number of denoising steps.
            guidance: guidance scale.
        """
        import torch

        pipeline = self._pipeline
        asked = {"prompt": list(prompts)}
        if hasattr(pipeline, "get_label_ids"):
            asked = {"class_labels": pipeline.get_label_ids(list(prompts))}
        images = pipeline(
            **asked,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            num_inference_steps=step_count,
            guidance_scale=guidance,
        ).images
        return [RGBImage(image.width, image.height, image.convert("RGB").tobytes()) for image in images]


class ForwardPass(msgspec.Struct):
    """One forward pass. Times are seconds of perf_counter, and include the transfer to the compute thread and back."""

    phase: IterativePhase
    seeds: tuple[int, ...]
    began_at: float
    ended_at: float = inf


class ImageWatch:
    """Watches all image engines of this process. It must be used in Trio's thread.

    Attributes:
        passes: the forward passes, oldest first.
        released_at: time at which a request released everything, by seed.
    """

    def __init__(self) -> None:
        self.passes: list[ForwardPass] = []
        self.released_at: dict[int, float] = {}
        self._awaited: list[tuple[Callable[[], bool], trio.Event]] = []
        self._seeds: dict[AdmissionScope, int] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch all engines of this process inside of the context."""
        run_step, begin, leave = ThreadedExecutor.run_step, RequestAdmission.begin, Dispatch.leave

        def noted_step(
            steps: ThreadedExecutor[Any, Any], plan: IterativePlan, is_abandoned: IsAbandoned
        ) -> Coroutine[Any, Any, IterativeResult | None]:
            seeds = tuple(work.request.seed for work in plan.works)
            self.passes.append(ForwardPass(plan.phase, seeds, perf_counter()))
            return self._until_done(self.passes[-1], run_step(steps, plan, is_abandoned))

        def noted_begin(admissions: RequestAdmission, request: OpenImage) -> AdmissionScope:
            admission = begin(admissions, request)
            self._seeds[admission] = request.seeds[0]
            self._look()
            return admission

        def noted_leave(dispatch: Dispatch, admission: AdmissionScope) -> None:
            leave(dispatch, admission)
            seed = self._seeds.pop(admission, None)
            if seed is not None:  # The request had not released everything before.
                self.released_at[seed] = perf_counter()
                self._look()

        ThreadedExecutor.run_step = noted_step  # type: ignore[method-assign, assignment]
        RequestAdmission.begin = noted_begin  # type: ignore[method-assign, assignment]
        Dispatch.leave = noted_leave  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            ThreadedExecutor.run_step = run_step  # type: ignore[method-assign]
            RequestAdmission.begin, Dispatch.leave = begin, leave  # type: ignore[method-assign]

    def forget(self) -> None:
        """Forget all passes and releases."""
        self.passes.clear()
        self.released_at.clear()

    async def wait_for_queue(self, seed: int) -> None:
        await self._wait(lambda: seed in self._seeds.values())

    async def wait_for_release(self, seed: int) -> float:
        await self._wait(lambda: seed in self.released_at)
        return self.released_at[seed]

    async def wait_for_pass(self, seed: int, phase: IterativePhase, count: int = 1) -> None:
        """Wait until a number of passes of a phase with a request have begun.

        Args:
            seed: seed of the request.
            phase: the phase.
            count: number of passes.
        """
        await self._wait(lambda: sum(seed in one.seeds for one in self.passes if one.phase is phase) >= count)

    def denoising_between(self, begin: float, end: float) -> int:
        """Return the number of denoising steps that ended between two times.

        Args:
            begin: first time.
            end: last time.
        """
        return sum(one.phase is IterativePhase.DENOISE and begin < one.ended_at < end for one in self.passes)

    def denoising_seconds(self) -> float:
        """Return the median duration of a finished denoising step, or 0 if there is none."""
        steps = [one.ended_at - one.began_at for one in self.passes if one.phase is IterativePhase.DENOISE]
        return median([seconds for seconds in steps if seconds < inf] or [0.0])

    def denoised_a_second(self, count: int) -> float:
        """Return denoising steps of all requests per second, between the first and the last pass with `count` requests.

        Args:
            count: number of requests of a full pass.
        """
        full = [one for one in self.passes if one.phase is IterativePhase.DENOISE and len(one.seeds) == count]
        assert full, f"no pass had all {count} requests"
        within = [one for one in self.passes if full[0].began_at <= one.began_at and one.ended_at <= full[-1].ended_at]
        denoised = sum(len(one.seeds) for one in within if one.phase is IterativePhase.DENOISE)
        return denoised / (full[-1].ended_at - full[0].began_at)

    async def _until_done(
        self, noted: ForwardPass, step: Coroutine[Any, Any, IterativeResult | None]
    ) -> IterativeResult | None:
        self._look()
        result = await step
        noted.ended_at = perf_counter()
        return result

    async def _wait(self, is_so: Callable[[], bool]) -> None:
        if not is_so():
            event = trio.Event()
            self._awaited.append((is_so, event))
            await event.wait()

    def _look(self) -> None:
        for entry in [entry for entry in self._awaited if entry[0]()]:
            self._awaited.remove(entry)
            entry[1].set()
