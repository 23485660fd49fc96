"""An image engine without weights: only the model is fake. A test determines when a step runs."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from trioserve.contracts.image_generation import ImageModelDescription, ImageRequestLimits, RGBImage
from trioserve.contracts.iterative import IterativePlan, IterativeResult
from trioserve.core.iterative.engine import IterativeCore
from trioserve.core.settings import IterativeSettings
from trioserve.engine.images.image_engine import ImageEngine, ImageStream
from trioserve.engine.images.image_work import ImageParts
from trioserve.engine.images.open_image import OpenImage
from trioserve.engine.lifecycle.supervisor import supervise
from trioserve.engine.settings import EngineSettings, deadlines_of
from trioserve.metrics.registry import IMAGE_SERVER_PARTS, Metrics
from trioserve.testing.accounting import assert_all_free
from trioserve.testing.fake_engine_options import next_own_seed, options_named
from trioserve.testing.fake_iterative_executor import FakeImageExecutor, image_after
from trioserve.testing.fake_weights import FakeCacheRelease
from trioserve.testing.invariants import check_iterative_idle
from trioserve.testing.stepped_by_hand import ControlledSteps, GatedImageCore, InjectedFault, SteppedByHand
from trioserve.testing.waits import WATCH
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.own_run import opened_once

__all__ = ["FAKE_CLASSES", "FAKE_IMAGE_MODEL", "FakeImageEngine", "open_fake_image_engine"]

FAKE_IMAGE_MODEL = ImageModelDescription(
    served_names=("fake",),
    source="fake",
    family="fake",
    width=16,
    height=16,
    steps=4,
    guidance=1.0,
    samplers=("euler", "ddim"),
    side_multiple=8,
    side_min=8,
    side_max=64,
    takes_images=True,
    fingerprint="fake+exact",
    pixels_per_work=256,
)
"""The model reads texts and source images. An image costs one unit of work per phase, or two with guidance."""

FAKE_CLASSES = ("zero", "one", "two", "three", "four")


class FakeImageEngine(SteppedByHand[IterativePlan], ImageEngine):
    """An ImageEngine without weights, with additional controls for tests. `open_fake_image_engine` creates it.

    Attributes:
        core: the scheduler core, whose steps a test can hold back.
        steps: the step runner.
        executor: the fake model's executor.
    """

    core: GatedImageCore
    steps: ControlledSteps[IterativePlan, IterativeResult]
    executor: FakeImageExecutor

    def __init__(
        self, parts: ImageParts, settings: EngineSettings, model: ImageModelDescription, limits: ImageRequestLimits
    ) -> None:
        self._look_into(parts)
        super().__init__(
            model=model,
            core=parts.core,
            steps=parts.steps,
            metrics=Metrics(model.name, parts=IMAGE_SERVER_PARTS),
            settings=settings,
            limits=limits,
            new_request_id=map("req-{}".format, itertools.count(1)).__next__,
            cache_release=parts.cache_release,
        )

    def reopen(self, parts: ImageParts) -> None:
        self._look_into(parts)
        super().reopen(parts)

    def _look_into(self, parts: ImageParts) -> None:
        assert isinstance(parts.core, GatedImageCore)
        assert isinstance(parts.steps, ControlledSteps)
        assert isinstance(parts.steps.executor, FakeImageExecutor)
        self.core, self.steps, self.executor = parts.core, parts.steps, parts.steps.executor
        WATCH.add(self)

    def _leave(self, request: OpenImage) -> None:
        WATCH.note_leaving(self, request)
        super()._leave(request)

    # --- expected output, and resources that are still in use ---

    @property
    def current_core(self) -> IterativeCore:
        """The core that the engine uses now. While the engine sleeps or restarts, this core has no requests."""
        return self._core

    @property
    def open_requests(self) -> list[OpenImage]:
        """Requests of the engine whose scope has not ended."""
        return list(self.requests)

    def expected(self, stream: ImageStream, *, steps_done: int | None = None) -> list[RGBImage]:
        """Return the images of a stream after a number of denoising steps. They do not depend on other requests.

        Args:
            stream: a stream that is still open.
            steps_done: number of denoising steps. The default is all steps of the request.
        """
        (request,) = [request for request in self.requests.of(stream.id) if request.seeds == stream.seeds]
        asked = [
            request.wanted.asked(choice.sequence_id, seed=seed, priority=request.priority)
            for choice, seed in zip(request.choices, request.seeds, strict=True)
        ]
        return [image_after(task, task.step_count if steps_done is None else steps_done) for task in asked]

    def assert_all_free(self) -> None:
        """Assert that no request has a latent slot or other state in the engine. See `testing.assert_all_free`."""
        assert_all_free(self)
        check_iterative_idle(self._core)


@opened_once
async def open_fake_image_engine(
    *,
    max_num_seqs: int = 4,
    kept_slots: int = 2,
    step_work_max: int = 8,
    max_queued_requests: int = 16,
    max_queue_wait: float = 600.0,
    queue_timeout: float | None = None,
    ttft_timeout: float | None = None,
    request_timeout: float | None = None,
    max_queue_timeout: float | None = None,
    max_ttft_timeout: float | None = None,
    max_request_timeout: float | None = None,
    step_seconds: float = 0.0,
    paused: bool = False,
    model: ImageModelDescription = FAKE_IMAGE_MODEL,
    limits: ImageRequestLimits | None = None,
    step_timeout: float | None = None,
    engine_restarts: int = 0,
    opening_seconds: float = 0.0,
    seed: int | None = None,
    new_executor: Callable[[int], FakeImageExecutor] = FakeImageExecutor,
) -> AsyncIterator[FakeImageEngine]:
    """Open an image engine without weights. Everything except the model is the code of open_image_engine.

    An image has one colour, which depends on the request, its seed and its number of steps (FakeImageEngine.expected).
    The fake model watches the latent slots: a step that reads a slot which another request wrote raises AssertionError.
    Leaving the context manager does the same as leaving open_image_engine.

    Args:
        max_num_seqs: maximum number of images that are computed at the same time, each in one latent slot.
        kept_slots: additional slots, for the latents of preempted images.
        step_work_max: maximum cost of one forward pass, in the units of FAKE_IMAGE_MODEL.
        max_queued_requests, max_queue_wait: maximum number of waiting requests, and of seconds that a request waits.
        queue_timeout, ttft_timeout, request_timeout: default deadlines in seconds. A request may name others.
        max_queue_timeout, max_ttft_timeout, max_request_timeout: the longest deadlines in seconds that a request may
            name.
        step_seconds: seconds of one forward pass, by the clock of the Trio program.
        paused: if True, no step begins until step(), held_step() or resume() is called.
        model: description of the model, which decides what a request may contain.
        limits: limits of the fields of a request.
        step_timeout, engine_restarts: as in open_image_engine.
        opening_seconds: seconds that a restart of the engine takes, after a fault or after sleep.
        seed: source of the seeds of requests that have none. Default: the same in every run, but different for each
            engine of a Trio program.
        new_executor: FakeImageExecutor, or a subclass.

    Raises:
        StartupError: an option is out of range. The message uses the names of this function's parameters.
    """
    WATCH.note_use()
    with options_named():
        core_settings = IterativeSettings(
            slot_count=max_num_seqs, kept_slot_count=kept_slots, step_work_max=step_work_max
        )
        settings = EngineSettings(
            waiting_requests_max=max_queued_requests,
            waiting_seconds_max=max_queue_wait,
            deadlines=deadlines_of(queue_timeout, ttft_timeout, request_timeout),
            deadlines_max=deadlines_of(max_queue_timeout, max_ttft_timeout, max_request_timeout),
            step_seconds_max=step_timeout,
            restarts_max=engine_restarts,
            seed=next_own_seed() if seed is None else seed,
        )
    opened: list[FakeImageEngine] = []

    async def make_parts() -> ImageParts:
        if opened:
            await trio.sleep(opening_seconds)
            if opened[0].broken_openings:
                opened[0].broken_openings -= 1
                raise InjectedFault("a test made the restart fail")
        executor = new_executor(max_num_seqs + kept_slots)
        core = GatedImageCore(core_settings, is_paused=opened[0].core.is_paused if opened else paused)
        steps = ControlledSteps(executor, seconds=opened[0].step_seconds if opened else step_seconds)
        return ImageParts(core, steps, cache_release=FakeCacheRelease(make_parts))

    @asynccontextmanager
    async def open_parts() -> AsyncIterator[ImageParts]:
        yield await make_parts()

    def make_engine(parts: ImageParts) -> FakeImageEngine:
        opened.append(FakeImageEngine(parts, settings, model, limits or ImageRequestLimits()))
        return opened[0]

    with errors_unwrapped():
        async with trio.open_nursery() as nursery:
            engine = await nursery.start(supervise, open_parts, make_engine)
            nursery.start_soon(engine.keep_deadlines)
            yield engine
            nursery.cancel_scope.cancel()
