"""Builds the engine of a model that generates images, as assemble.py does for text."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import trio

from trioserve.assemble_model import LoadProgress, LoadReport, LoggedProgress, default_served_name
from trioserve.asyncio.engine import ImageEngine as AsyncioImageEngine
from trioserve.asyncio.engine import for_asyncio
from trioserve.config import Config
from trioserve.contracts.errors import StartupError
from trioserve.contracts.image_generation import ImageModelDescription, ImageRequestLimits
from trioserve.core.iterative_core import IterativeCore
from trioserve.core.settings import IterativeSettings
from trioserve.engine.image_engine import ImageEngine, ImageParts
from trioserve.engine.lifecycle.engine_loop import ThreadedExecutor
from trioserve.engine.lifecycle.supervisor import supervise
from trioserve.metrics.registry import IMAGE_SERVER_PARTS, Metrics
from trioserve.model.device import torch_now
from trioserve.model.diffusion.directory import (
    ImageDirectory,
    ImageModelSettings,
    check_image_extra,
    describe,
    name_of_weights,
)
from trioserve.model.fingerprint import fingerprint_of
from trioserve.model.settings import MAX_NUM_SEQS_CPU
from trioserve.options.engine import STEP_PIXELS, ImageEngineOptions
from trioserve.options.option import about, checked_parameters, parameters_of
from trioserve.text.tokenizer_directory import check_tokenizer
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.interrupts import uninterrupted, uninterrupted_context
from trioserve.trio_tools.own_run import check_is_in_trio, opened_once
from trioserve.trio_tools.worker_thread import LongJob, WorkerThread

if TYPE_CHECKING:
    from trioserve.model.diffusion.runner import DiffusionRunner

__all__ = ["open_asyncio_image_engine", "open_configured_image_engine", "open_image_engine"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ImageEngineParameters(ImageEngineOptions):
    """Parameters of `open_image_engine`: the options of an engine for images, and `progress`."""

    progress: Annotated[LoadReport | None, about("as in `open_engine`; default: none")] = None


@opened_once
@parameters_of(ImageEngineParameters)
async def open_image_engine(**options: Any) -> AsyncIterator[ImageEngine]:
    """Open an engine for images in the scope of an `async with`, in the caller's own Trio program.

    Inside of the scope, `engine.generate_image(...)` creates a request. The exit of the scope, faults, tasks and
    threads behave as described for `open_engine`. The engine needs `pip install 'trioserve[image]'`. In float32, the
    bytes of an image do not depend on other images of the step. In 16 bits, the bytes may differ slightly.
    `max_queued_requests` counts images. The first partial or complete image counts as the first token of
    `ttft_timeout`.

    Args:
        options: the fields of ImageEngineParameters. `help()` and the Python reference describe them.

    Raises:
        ModelLoadError: the model cannot be loaded.
        StartupError: a parameter has a wrong type or is out of range. The message says what is allowed.
        EngineFault: a step failed, at any time, and the engine is not reopened again.
    """
    check_is_in_trio("trioserve.open_image_engine")
    progress = LoggedProgress(options.pop("progress", None))
    config = checked_parameters(ImageEngineOptions, options | {"model": str(options["model"])})
    async with open_configured_image_engine(
        config, kept_slots=config.kept_slots, step_pixels=config.step_pixels, on_progress=progress
    ) as engine:
        yield engine


open_asyncio_image_engine = for_asyncio(open_image_engine, AsyncioImageEngine)
"""The function `trioserve.asyncio.open_image_engine`."""


@uninterrupted_context
async def open_configured_image_engine(
    config: Config | ImageEngineOptions,
    *,
    kept_slots: int | None = None,
    step_pixels: int = STEP_PIXELS,
    on_progress: LoadReport = lambda progress: None,
) -> AsyncIterator[ImageEngine]:
    """Open an engine for images from its options.

    Args:
        config: the options.
        kept_slots: see `open_image_engine`.
        step_pixels: see `open_image_engine`.
        on_progress: receives the progress of loading.

    Raises:
        ModelLoadError: the model cannot be loaded.
        StartupError: an option is wrong.
        EngineFault: the engine broke, and is not reopened again.
    """
    check_image_extra()
    if kept_slots is not None and kept_slots < 0:
        raise StartupError(f"kept_slots is {kept_slots}, it must be 0 or more")
    with errors_unwrapped():
        opening = _Opening(config, kept_slots, step_pixels, on_progress)
        async with trio.open_nursery() as nursery:
            engine = await nursery.start(supervise, opening.open_parts, opening.make_engine)
            nursery.start_soon(engine.keep_deadlines)
            yield engine
            nursery.cancel_scope.cancel()


class _CacheRelease:
    """Releases the latents and the memory of steps. The weights stay loaded."""

    def __init__(self, runner: DiffusionRunner, compute: WorkerThread, new_parts: Callable[[], ImageParts]) -> None:
        self._runner = runner
        self._compute = compute
        self._new_parts = new_parts

    async def release_cache(self) -> None:
        await self._compute.run(self._runner.release_latents)

    async def rebuild_parts(self) -> ImageParts:
        await trio.lowlevel.checkpoint()
        return self._new_parts()  # The memory of slots is allocated later, when latents need it.


@uninterrupted
class _Opening:
    """Opens the parts of one image engine, at the start and again after each fault. Each opening reads the weights."""

    def __init__(
        self,
        config: Config | ImageEngineOptions,
        kept_slots: int | None,
        step_pixels: int,
        on_progress: LoadReport,
    ) -> None:
        self._config = config
        self._model = str(config.model)
        self._slot_count = config.max_num_seqs or MAX_NUM_SEQS_CPU
        self._kept_slots = self._slot_count if kept_slots is None else kept_slots
        self._step_pixels = step_pixels
        self._limits = ImageRequestLimits(
            pixels_max=config.max_image_pixels, steps_max=config.max_image_steps, n_max=config.max_images
        )
        self._on_progress = on_progress
        self._settings = ImageModelSettings(
            dtype=config.dtype,
            device=config.device,
            threads=config.threads,
            slot_count=self._slot_count + self._kept_slots,
        )
        self._served_names = config.served_model_name or (default_served_name(self._model),)
        self._description: ImageModelDescription | None = None

    @asynccontextmanager
    async def open_parts(self) -> AsyncIterator[ImageParts]:
        """Open the parts, and close them at the end of the scope. Raises ModelLoadError and StartupError."""
        started_at = time.perf_counter()
        async with WorkerThread("compute") as compute:
            job = LongJob()
            runners: list[DiffusionRunner] = []
            try:
                await job.run(compute, self._load, job, runners)
                (runner,) = runners
                logger.info(
                    "the image model is loaded model=%s dtype=%s device=%s by=%s seconds=%.1f",
                    self._model,
                    runner.dtype,
                    runner.device,
                    runner.computed_by,
                    time.perf_counter() - started_at,
                )
                yield self._new_parts(runner, compute)
            finally:
                for made in runners:
                    await compute.run(made.close)  # A cancel does not interrupt this call.

    def _new_parts(self, runner: DiffusionRunner, compute: WorkerThread) -> ImageParts:
        return ImageParts(
            IterativeCore(self._core_settings()),
            ThreadedExecutor(runner, compute, takes_cpu=runner.takes_every_cpu),
            cache_release=_CacheRelease(runner, compute, lambda: self._new_parts(runner, compute)),
        )

    def make_engine(self, parts: ImageParts) -> ImageEngine:
        """Create the engine from its first parts.

        Args:
            parts: result of the first `open_parts`.
        """
        config, description = self._config, self._description
        assert description is not None, "no parts were opened"
        return ImageEngine(
            model=description,
            core=parts.core,
            steps=parts.steps,
            metrics=Metrics(description.name, parts=IMAGE_SERVER_PARTS),
            settings=msgspec.structs.replace(
                config.engine_settings(),
                step_seconds_max=config.step_timeout,
                restarts_max=config.engine_restarts,
                seed=config.seed,
            ),
            limits=self._limits,
            cache_release=parts.cache_release,
        )

    def _load(self, job: LongJob, runners: list[DiffusionRunner]) -> None:
        """Load the weights in the compute thread. The caller must close all `runners`, even after an error."""
        directory = ImageDirectory(self._model)
        description = describe(directory, served_names=self._served_names, source=self._model)
        weights = name_of_weights(directory)
        # This call must come before diffusers imports torch, because it sets how torch's threads wait.
        torch_now("a model that generates images")
        from trioserve.model.diffusion.runner import DiffusionRunner

        def report(component: str) -> None:
            job.check()
            if self._description is None:
                self._on_progress(LoadProgress(f"loading {component} of {self._model}", 0))

        runner = DiffusionRunner.load(directory, self._settings, check_tokenizer=check_tokenizer, progress=report)
        runners.append(runner)
        fingerprint = fingerprint_of(
            weights=weights,
            arithmetic=f"{runner.computed_by}, {runner.dtype}",
            dtype=runner.dtype,
            batch_invariant=False,
            tokenizer="",  # The name of the weights already covers the files of the tokenizer.
            others=(),
        )
        if self._description is None:
            self._description = msgspec.structs.replace(description, fingerprint=fingerprint)
        elif self._description.fingerprint != fingerprint:
            raise StartupError(
                f"{self._model} has changed since the engine was opened, and images cannot be resumed with "
                "another model: restart the server"
            )

    def _core_settings(self) -> IterativeSettings:
        description = self._description
        assert description is not None, "no parts were opened"
        rows = 2 if description.takes_guidance and description.has_guided_rows else 1
        return IterativeSettings(
            slot_count=self._slot_count,
            kept_slot_count=self._kept_slots,
            # A step must always have space for one image in the model's default size.
            step_work_max=max(
                self._step_pixels // description.pixels_per_work,
                rows * description.image_work(description.width, description.height),
            ),
        )
