"""Builds the engine of a model that makes pictures, as assemble.py builds one of texts."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import trio

from trioserve.assemble import LoadProgress, LoadReport, default_served_name, for_asyncio
from trioserve.asyncio.image_engine import ImageEngine as AsyncioImageEngine
from trioserve.config import Config, engine_settings, make_config
from trioserve.contracts.errors import StartupError
from trioserve.contracts.image_generation import ImageModelDescription, ImageRequestLimits
from trioserve.core.iterative.engine import IterativeCore
from trioserve.core.iterative.settings import IterativeSettings
from trioserve.engine.images.image_engine import ImageEngine
from trioserve.engine.images.image_parts import ImageParts
from trioserve.engine.shell.engine_loop import ThreadedExecutor
from trioserve.engine.shell.supervisor import supervise
from trioserve.metrics.registry import IMAGE_SERVER_PARTS, Metrics
from trioserve.model.device import torch_now
from trioserve.model.diffusion.description import describe
from trioserve.model.diffusion.directory import ImageDirectory, check_image_extra, name_of_weights
from trioserve.model.diffusion.settings import ImageModelSettings
from trioserve.model.fingerprint import fingerprint_of
from trioserve.text.tokenizer_patterns import check_tokenizer
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.interrupts import uninterrupted, uninterrupted_context
from trioserve.trio_tools.long_job import LongJob
from trioserve.trio_tools.own_run import check_is_in_trio, opened_once
from trioserve.trio_tools.worker_thread import WorkerThread

if TYPE_CHECKING:
    from trioserve.model.diffusion.runner import DiffusionRunner

__all__ = ["open_asyncio_image_engine", "open_configured_image_engine", "open_image_engine"]

logger = logging.getLogger(__name__)

STEP_PIXELS = 8 * 2**20  # eight rows of a megapixel: 20 GiB of activations in a network such as SDXL's, in 16 bits


@opened_once
async def open_image_engine(
    model: str | Path,
    *,
    served_model_name: tuple[str, ...] = (),
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    threads: int | None = None,
    max_num_seqs: int = 64,
    kept_slots: int | None = None,
    step_pixels: int = STEP_PIXELS,
    max_image_pixels: int = ImageRequestLimits().pixels_max,
    max_image_steps: int = ImageRequestLimits().steps_max,
    max_images: int = ImageRequestLimits().n_max,
    step_timeout: float | None = None,
    engine_restarts: int = 3,
    seed: int | None = None,
    max_queued_requests: int = 256,
    max_queue_wait: float = 300.0,
    queue_timeout: float | None = None,
    ttft_timeout: float | None = None,
    request_timeout: float | None = None,
    max_queue_timeout: float | None = None,
    max_ttft_timeout: float | None = None,
    max_request_timeout: float | None = None,
) -> AsyncIterator[ImageEngine]:
    """An engine of pictures in the scope of this `async with`, in the caller's own Trio program.

    Inside, `engine.generate_image(...)` gives a request. All that open_engine says of leaving, of faults and of tasks
    and threads goes for this one, too. It needs `pip install 'trioserve[image]'`.

    Args:
        model: a directory that diffusers' save_pretrained has written.
        served_model_name: its names. Default: the last part of model.
        dtype: type of the weights; "auto" takes the checkpoint's. In float32 a picture has the same bytes whatever else
            is made; in 16 bits about the same.
        device: where to compute; "auto" takes a GPU if there is one.
        threads: CPU threads of a forward pass. Default: one per core.
        max_num_seqs: pictures that are worked on at a time.
        kept_slots: further pictures whose latents are kept while others, of a better priority, have their slots.
            Default: as many.
        step_pixels: that all rows of one forward pass may have together; a guided picture has two rows. It bounds the
            memory that a step takes, and how long an abort waits.
        max_image_pixels, max_image_steps, max_images: what a request may ask for: width times height of a picture,
            denoising steps, and pictures.
        step_timeout, engine_restarts, seed, max_queued_requests, max_queue_wait, queue_timeout, ttft_timeout,
            request_timeout, max_queue_timeout, max_ttft_timeout, max_request_timeout: as in open_engine, where a
            picture stands for a sequence and what is first seen of it for the first token.

    Raises:
        ModelLoadError: the model cannot be loaded.
        StartupError: a parameter has a wrong type or is out of range; the message names it and what it takes.
        EngineFault: a step failed, at any time, and the engine is not opened anew (any more).
    """
    check_is_in_trio("trioserve.open_image_engine")
    config = make_config(
        model=str(model),
        served_model_name=served_model_name,
        dtype=dtype,
        device=device,
        threads=threads,
        max_num_seqs=max_num_seqs,
        max_image_pixels=max_image_pixels,
        max_image_steps=max_image_steps,
        max_images=max_images,
        step_timeout=step_timeout,
        engine_restarts=engine_restarts,
        seed=seed,
        max_queued_requests=max_queued_requests,
        max_queue_wait=max_queue_wait,
        queue_timeout=queue_timeout,
        ttft_timeout=ttft_timeout,
        request_timeout=request_timeout,
        max_queue_timeout=max_queue_timeout,
        max_ttft_timeout=max_ttft_timeout,
        max_request_timeout=max_request_timeout,
    )
    async with open_configured_image_engine(config, kept_slots=kept_slots, step_pixels=step_pixels) as engine:
        yield engine


open_asyncio_image_engine = for_asyncio(open_image_engine, AsyncioImageEngine)
"""trioserve.asyncio.open_image_engine."""


@uninterrupted_context
async def open_configured_image_engine(
    config: Config,
    *,
    kept_slots: int | None = None,
    step_pixels: int = STEP_PIXELS,
    on_progress: LoadReport = lambda progress: None,
) -> AsyncIterator[ImageEngine]:
    """The same from a Config, of which it takes what open_image_engine names. on_progress: is told what is loaded."""
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
    """Latents go, and with them the memory of steps; the weights stay."""

    def __init__(self, runner: DiffusionRunner, compute: WorkerThread, new_parts: Callable[[], ImageParts]) -> None:
        self._runner = runner
        self._compute = compute
        self._new_parts = new_parts

    async def release_cache(self) -> None:
        await self._compute.run(self._runner.release_latents)

    async def rebuild_parts(self) -> ImageParts:
        await trio.lowlevel.checkpoint()
        return self._new_parts()  # slots are made as latents come


@uninterrupted
class _Opening:
    """How such an engine is opened, and opened anew: then the weights are read again."""

    def __init__(
        self,
        config: Config,
        kept_slots: int | None,
        step_pixels: int,
        on_progress: LoadReport,
    ) -> None:
        self._config = config
        self._kept_slots = config.max_num_seqs if kept_slots is None else kept_slots
        self._step_pixels = step_pixels
        self._limits = ImageRequestLimits(
            pixels_max=config.max_image_pixels, steps_max=config.max_image_steps, n_max=config.max_images
        )
        self._on_progress = on_progress
        self._settings = ImageModelSettings(
            dtype=config.dtype,
            device=config.device,
            threads=config.threads,
            slot_count=config.max_num_seqs + self._kept_slots,
        )
        self._served_names = config.served_model_name or (default_served_name(config.model),)
        self._description: ImageModelDescription | None = None

    @asynccontextmanager
    async def open_parts(self) -> AsyncIterator[ImageParts]:
        """Raises ModelLoadError and StartupError."""
        started_at = time.perf_counter()
        async with WorkerThread("compute") as compute:
            job = LongJob()
            runners: list[DiffusionRunner] = []
            try:
                await job.run(compute, self._load, job, runners)
                (runner,) = runners
                logger.info(
                    "the model makes pictures model=%s dtype=%s device=%s by=%s seconds=%.1f",
                    self._config.model,
                    runner.dtype,
                    runner.device,
                    runner.computed_by,
                    time.perf_counter() - started_at,
                )
                yield self._new_parts(runner, compute)
            finally:
                for made in runners:
                    await compute.run(made.close)  # ends also when cancelled

    def _new_parts(self, runner: DiffusionRunner, compute: WorkerThread) -> ImageParts:
        return ImageParts(
            IterativeCore(self._core_settings()),
            ThreadedExecutor(runner, compute, takes_cpu=runner.takes_every_cpu),
            cache_release=_CacheRelease(runner, compute, lambda: self._new_parts(runner, compute)),
        )

    def make_engine(self, parts: ImageParts) -> ImageEngine:
        """To be called when they have been opened first."""
        config, description = self._config, self._description
        assert description is not None, "nothing was opened"
        return ImageEngine(
            model=description,
            core=parts.core,
            steps=parts.steps,
            metrics=Metrics(description.name, parts=IMAGE_SERVER_PARTS),
            settings=msgspec.structs.replace(
                engine_settings(config),
                step_seconds_max=config.step_timeout,
                restarts_max=config.engine_restarts,
                seed=config.seed,
            ),
            limits=self._limits,
            cache_release=parts.cache_release,
        )

    def _load(self, job: LongJob, runners: list[DiffusionRunner]) -> None:
        """In the compute thread. What is put in `runners` is the caller's to close, also when this raises."""
        directory = ImageDirectory(self._config.model)
        description = describe(directory, served_names=self._served_names, source=self._config.model)
        weights = name_of_weights(directory)
        torch_now("a model that makes pictures")  # before diffusers imports it, since it is told how to wait
        from trioserve.model.diffusion.runner import DiffusionRunner

        def tell(component: str) -> None:
            job.check()
            if self._description is None:
                self._on_progress(LoadProgress(f"loading {component} of {self._config.model}", 0))

        runner = DiffusionRunner.load(directory, self._settings, check_tokenizer=check_tokenizer, progress=tell)
        runners.append(runner)
        fingerprint = fingerprint_of(
            weights=weights,
            arithmetic=f"{runner.computed_by}, {runner.dtype}",
            dtype=runner.dtype,
            batch_invariant=False,
            tokenizer="",  # its files are named with the weights
            others=(),
        )
        if self._description is None:
            self._description = msgspec.structs.replace(description, fingerprint=fingerprint)
        elif self._description.fingerprint != fingerprint:
            raise StartupError(
                f"{self._config.model} has changed since the engine was opened, and pictures cannot go on with another "
                "model: start the server anew"
            )

    def _core_settings(self) -> IterativeSettings:
        description = self._description
        assert description is not None, "nothing was opened"
        rows = 2 if description.takes_guidance and description.has_guided_rows else 1
        return IterativeSettings(
            slot_count=self._config.max_num_seqs,
            kept_slot_count=self._kept_slots,
            # One picture as the model makes it always fits.
            step_work_max=max(
                self._step_pixels // description.pixels_per_work,
                rows * description.picture_work(description.width, description.height),
            ),
        )
