"""An image engine without weights: only the model is fake. A test determines when a step runs.

A fake latent is a number that depends only on its request and on the number of completed denoising steps. So every
schedule must give the same output. The executor writes the latent to its slot after each step, and reads it back before
the next step. So the next read detects a slot that has two owners, was freed too early, or was moved to a wrong index.
The fake image model turns a latent into an image of one colour.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import trio

from trioserve.contracts.events import IterativePhase
from trioserve.contracts.ids import RequestId
from trioserve.contracts.image_generation import (
    ImageModelDescription,
    ImageRequestLimits,
    ImageTask,
    IterativePlan,
    IterativeRequest,
    IterativeResult,
    LatentWork,
    RGBImage,
)
from trioserve.contracts.step import IsAbandoned, never_abandoned
from trioserve.core.iterative_core import IterativeCore
from trioserve.core.settings import IterativeSettings
from trioserve.engine.image_engine import ImageEngine, ImageParts, ImageStream
from trioserve.engine.lifecycle.supervisor import supervise
from trioserve.engine.open_image import OpenImage
from trioserve.engine.settings import EngineSettings, deadlines_of
from trioserve.metrics.registry import IMAGE_SERVER_PARTS, Metrics
from trioserve.testing.accounting import WATCH, assert_all_free
from trioserve.testing.fake_weights import FakeCacheRelease, next_own_seed, options_named
from trioserve.testing.invariants import check_iterative_idle
from trioserve.testing.stepped_by_hand import ControlledSteps, GatedImageCore, InjectedFault, ManualSteps
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.own_run import opened_once

__all__ = [
    "FAKE_CLASSES",
    "FAKE_IMAGE_MODEL",
    "FakeImageEngine",
    "FakeImageExecutor",
    "FakeIterativeExecutor",
    "denoised",
    "image_after",
    "latent_after",
    "open_fake_image_engine",
]


def latent_after(request: IterativeRequest, steps_done: int) -> int:
    """Return the latent of a request after a number of denoising steps.

    Args:
        steps_done: number of steps.
    """
    return denoised(request, _encoded(request), steps_done)


def denoised(request: IterativeRequest, latent: int, steps_done: int) -> int:
    """Return a latent after a number of denoising steps, beginning with step 0.

    Args:
        request: request whose seed determines the latent.
        latent: latent before step 0.
        steps_done: number of steps.
    """
    for step in range(steps_done):
        latent = _denoised(request, latent, step)
    return latent


def _encoded(request: IterativeRequest) -> int:
    return zlib.crc32(f"{request.id} {request.seed} {request.is_guided}".encode())


def _denoised(request: IterativeRequest, latent: int, step: int) -> int:
    return zlib.crc32(f"{latent} {step} of {request.step_count}".encode())


class _SlotContent(msgspec.Struct, frozen=True):
    request_id: RequestId
    steps_done: int
    latent: int


class FakeIterativeExecutor:
    """Executor of a fake iterative model.

    Args:
        slot_count: number of latent slots, including the slots for latents of preempted requests.

    Attributes:
        errors: requests that fail in their next step, each with the error text.
    """

    def __init__(self, slot_count: int) -> None:
        self._slots: list[_SlotContent | None] = [None] * slot_count
        self.errors: dict[RequestId, str] = {}

    @property
    def held_ids(self) -> set[RequestId]:
        """Ids of the requests that have a latent in a slot."""
        return {held.request_id for held in self._slots if held is not None}

    def execute(self, plan: IterativePlan, is_abandoned: IsAbandoned = never_abandoned) -> IterativeResult | None:
        for slot in plan.freed:
            self._slots[slot] = None
        for move in plan.moves:
            assert self._slots[move.source] is not None, f"slot {move.source} is empty, but the plan moves it"
            self._slots[move.target] = self._slots[move.source]
            self._slots[move.source] = None
        result = IterativeResult()
        for work in plan.works:
            message = self.errors.pop(work.request.id, None)
            if is_abandoned() or message is not None:
                self._slots[work.slot] = None  # The slot has garbage now, which no step may read.
                if message is not None:
                    result.errors[work.request.id] = message
                continue
            self._compute(plan.phase, work, result)
        return None if is_abandoned() else result

    def _compute(self, phase: IterativePhase, work: LatentWork, result: IterativeResult) -> None:
        request = work.request
        if phase is IterativePhase.ENCODE:
            self._slots[work.slot] = _SlotContent(request.id, 0, self.encoded(request))
            return
        held = self._slots[work.slot]
        assert held is not None, f"{request.id}: slot {work.slot} is empty"
        assert held.request_id == request.id, f"{request.id}: slot {work.slot} has the latent of {held.request_id}"
        if phase is IterativePhase.DECODE:
            assert held.steps_done == request.step_count, f"{request.id} is decoded after {held.steps_done} steps"
            result.outputs[request.id] = self.shown(request, held.latent)
            return
        assert held.steps_done == work.step, f"{request.id}: step {work.step} follows {held.steps_done} steps"
        latent = _denoised(request, held.latent, work.step)
        self._slots[work.slot] = _SlotContent(request.id, work.step + 1, latent)
        if work.wants_partial:
            result.partials[request.id] = self.shown(request, latent)

    def encoded(self, request: IterativeRequest) -> int:
        """Return the latent of a request before step 0."""
        return _encoded(request)

    def shown(self, request: IterativeRequest, latent: int) -> object:
        """Return the partial result or the output that corresponds to a latent.

        Args:
            request: request whose task determines the size.
            latent: its latent.
        """
        return latent


def image_after(request: IterativeRequest, steps_done: int) -> RGBImage:
    """Return the image of a request after a number of steps. It does not depend on other requests.

    Args:
        request: a request whose task is an ImageTask.
        steps_done: number of denoising steps.
    """
    return _image(request, denoised(request, _encoded_task(request), steps_done))


class FakeImageExecutor(FakeIterativeExecutor):
    """Executor of a fake image model.

    Like FakeIterativeExecutor, it raises AssertionError if a slot has wrong content.
    """

    def encoded(self, request: IterativeRequest) -> int:
        return _encoded_task(request)

    def shown(self, request: IterativeRequest, latent: int) -> RGBImage:
        return _image(request, latent)


def _encoded_task(request: IterativeRequest) -> int:
    task = request.task
    assert isinstance(task, ImageTask), f"{request.id} does not request an image"
    asked = msgspec.msgpack.encode((request.seed, request.step_count, request.is_guided, task))
    return zlib.crc32(asked)


def _image(request: IterativeRequest, latent: int) -> RGBImage:
    task = request.task
    assert isinstance(task, ImageTask)
    return RGBImage(task.width, task.height, latent.to_bytes(4, "big")[1:] * (task.width * task.height))


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


class FakeImageEngine(ManualSteps[IterativePlan], ImageEngine):
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
        self._inspect(parts)
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
        self._inspect(parts)
        super().reopen(parts)

    def _inspect(self, parts: ImageParts) -> None:
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
            request.spec.core_request(choice.sequence_id, seed=seed, priority=request.priority)
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
