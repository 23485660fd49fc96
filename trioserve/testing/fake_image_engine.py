"""An engine of pictures without weights: everything is real but the model, and a test can say when it steps."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.image_generation import ImageModelDescription, ImageRequestLimits, Picture
from trioserve.contracts.iterative import IterativePlan, IterativeResult
from trioserve.core.iterative.engine import IterativeCore
from trioserve.core.iterative.settings import IterativeSettings
from trioserve.engine.images.image_engine import ImageEngine
from trioserve.engine.images.image_parts import ImageParts
from trioserve.engine.images.image_stream import ImageStream
from trioserve.engine.images.open_image import OpenImage
from trioserve.engine.settings import EngineSettings
from trioserve.engine.shell.supervisor import supervise
from trioserve.metrics.registry import IMAGE_SERVER_PARTS, Metrics
from trioserve.testing.accounting import assert_all_free
from trioserve.testing.controlled_steps import ControlledSteps
from trioserve.testing.fake_nap import FakeNap
from trioserve.testing.fake_pictures import FakePictureExecutor, picture_after
from trioserve.testing.gated_core import GatedImageCore
from trioserve.testing.iterative_invariants import check_iterative_idle
from trioserve.testing.own_seeds import next_own_seed
from trioserve.testing.stepped_by_hand import InjectedFault, SteppedByHand
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
"""It takes texts, and images to be changed. A picture costs one unit of work in each phase, or two if it is guided."""

FAKE_CLASSES = ("zero", "one", "two", "three", "four")


class FakeImageEngine(SteppedByHand[IterativePlan], ImageEngine):
    """Made by open_fake_image_engine: an ImageEngine, and what a test needs besides.

    core, steps, executor: its inside, to look at.
    """

    core: GatedImageCore
    steps: ControlledSteps[IterativePlan, IterativeResult]
    executor: FakePictureExecutor

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
            nap=parts.nap,
        )

    def reopen(self, parts: ImageParts) -> None:
        self._look_into(parts)
        super().reopen(parts)

    def _look_into(self, parts: ImageParts) -> None:
        assert isinstance(parts.core, GatedImageCore)
        assert isinstance(parts.steps, ControlledSteps)
        assert isinstance(parts.steps.executor, FakePictureExecutor)
        self.core, self.steps, self.executor = parts.core, parts.steps, parts.steps.executor

    # --- what it makes, and what is left ---

    @property
    def current_core(self) -> IterativeCore:
        """`core`, but of an engine that sleeps or is opened anew one that has nobody."""
        return self._core

    @property
    def open_requests(self) -> list[OpenImage]:
        """Those that are entered and not left."""
        return list(self._requests)

    def expected(self, stream: ImageStream, *, steps_done: int | None = None) -> list[Picture]:
        """What each picture of a stream that was entered is after so many steps, and at the end by default: the same
        whatever else runs."""
        (request,) = [request for request in self._requests.of(stream.id) if request.seeds == stream.seeds]
        asked = [
            request.wanted.asked(choice.sequence_id, seed=seed, priority=request.priority)
            for choice, seed in zip(request.choices, request.seeds, strict=True)
        ]
        return [picture_after(one, one.step_count if steps_done is None else steps_done) for one in asked]

    def assert_all_free(self) -> None:
        """Assert that nothing of any request is left: no latent slot, no place, no state. See assert_all_free."""
        assert_all_free(self)
        check_iterative_idle(self._core)


@opened_once
async def open_fake_image_engine(
    *,
    slot_count: int = 4,
    kept_slot_count: int = 2,
    step_work_max: int = 8,
    waiting_requests_max: int = 16,
    waiting_seconds_max: float = 600.0,
    step_seconds: float = 0.0,
    paused: bool = False,
    model: ImageModelDescription = FAKE_IMAGE_MODEL,
    limits: ImageRequestLimits | None = None,
    deadlines: Deadlines | None = None,
    deadlines_max: Deadlines | None = None,
    step_seconds_max: float | None = None,
    engine_restarts: int = 0,
    opening_seconds: float = 0.0,
    seed: int | None = None,
    new_executor: Callable[[int], FakePictureExecutor] = FakePictureExecutor,
) -> AsyncIterator[FakeImageEngine]:
    """An engine as open_image_engine gives it, but for the model: a picture has one colour, which follows from what was
    asked, its seed and its steps (FakeImageEngine.expected), and a forward pass takes step_seconds.

    The limits are the engine's: latent slots, further ones for the latents of preempted pictures, what one step may
    cost, requests that wait and for how long. paused: no step begins until step(), held_step() or resume(). model: what
    it says of itself, and so what it takes; FAKE_IMAGE_MODEL takes texts. limits, deadlines, deadlines_max,
    step_seconds_max: as in ImageEngine and EngineSettings. engine_restarts: how often it is opened anew after a fault,
    which takes opening_seconds; so does waking up. seed: of the seeds of requests that name none; None: one that
    is the same in every run, and another one for each engine that a Trio program opens.

    Inside, the slots are watched: a step that reads what another request wrote is an AssertionError. Leaving does what
    leaving open_image_engine does.
    """
    core_settings = IterativeSettings(
        slot_count=slot_count, kept_slot_count=kept_slot_count, step_work_max=step_work_max
    )
    settings = EngineSettings(
        waiting_requests_max=waiting_requests_max,
        waiting_seconds_max=waiting_seconds_max,
        deadlines=deadlines or Deadlines(),
        deadlines_max=deadlines_max or Deadlines(),
        step_seconds_max=step_seconds_max,
        restarts_max=engine_restarts,
        seed=next_own_seed() if seed is None else seed,
    )
    opened: list[FakeImageEngine] = []

    async def make_parts() -> ImageParts:
        if opened:
            await trio.sleep(opening_seconds)
            if opened[0].broken_openings:
                opened[0].broken_openings -= 1
                raise InjectedFault("a test broke the opening")
        executor = new_executor(slot_count + kept_slot_count)
        core = GatedImageCore(core_settings, is_paused=opened[0].core.is_paused if opened else paused)
        steps = ControlledSteps(executor, seconds=opened[0].step_seconds if opened else step_seconds)
        return ImageParts(core, steps, nap=FakeNap(make_parts))

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
