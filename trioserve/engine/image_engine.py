"""The engine of a model that generates images, as a Trio program uses it.

`EngineLifecycle` has the code that this engine shares with the engine for text: queue, leases, deadlines, aborts by id,
drain, pauses and faults. `ImageWork` prepares requests for images, and passes them to the core.

`EngineLifecycle` calls `ImageWork` when a request enters, gets its lease, begins, and leaves. `ImageParts` are lost
when the engine breaks. They are created again when the engine is reopened.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterable, Awaitable, Callable, Generator, Iterable, Sequence
from random import Random
from typing import Any, NamedTuple, TypeAlias

import msgspec
import trio
from msgspec import UNSET

from trioserve.admission.local_endpoint import LOCAL_ENDPOINT
from trioserve.admission.router_metrics import show_router
from trioserve.contracts.arguments import to_str
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.endpoint import EndpointLoad
from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.image_generation import (
    ImageDelta,
    ImageModelDescription,
    ImageParams,
    ImageRequestLimits,
    IterativeEvent,
    IterativePlan,
    IterativeRequest,
    IterativeResult,
    IterativeStats,
    OutputReady,
    RGBImage,
    StepDone,
)
from trioserve.contracts.page import LiveImageView
from trioserve.contracts.tracing import NO_SPAN, NO_TRACER, Span
from trioserve.core.iterative_core import IterativeCore
from trioserve.core.settings import IterativeSettings
from trioserve.engine.lifecycle.core_delivery import CoreDelivery, StepTimings
from trioserve.engine.lifecycle.engine_lifecycle import EngineLifecycle
from trioserve.engine.lifecycle.engine_loop import StepRunnerOf
from trioserve.engine.lifecycle.request_admission import new_request_id
from trioserve.engine.lifecycle.request_scope import ScopeStream, error_of
from trioserve.engine.lifecycle.request_trace import NO_TRACE, RequestTrace, request_span
from trioserve.engine.lifecycle.step_times import PlanTimes, StepCounts, StepWatch
from trioserve.engine.lifecycle.work import CacheRelease, Guard, Host, NoSteps
from trioserve.engine.open_image import (
    OPERATION,
    ImageChoice,
    ImagePreparation,
    OpenImage,
    SpannedImage,
    image_attributes,
    view_of,
)
from trioserve.engine.request_preparation import instance_of
from trioserve.engine.settings import EngineSettings
from trioserve.metrics.engine_gauges import ImageGauges
from trioserve.metrics.registry import Metrics
from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["ImageDelivery", "ImageEngine", "ImageParts", "ImageSteps", "ImageStream", "ImageWork", "images_of"]

ImageSteps: TypeAlias = StepRunnerOf[IterativePlan, IterativeResult]


class ImageParts(NamedTuple):
    """Objects that an image engine opens together. Only engines for text use the fields from `connector` on.

    Attributes:
        core: a core without requests.
        steps: computes the core's plans, such as a `ThreadedExecutor` around an `IterativeExecutor`.
        guard: see `EngineParts`.
        cache_release: see `EngineParts`. It releases the latents.
    """

    core: IterativeCore
    steps: ImageSteps
    guard: Guard | None = None
    cache_release: CacheRelease[ImageParts] | str = "this engine cannot release its latents alone"
    connector: None = None
    readers_first: bool = False
    when_idle: None = None
    weights: str = "this engine has no weights"


class ImageTimings(StepTimings[IterativePlan]):
    """Observes the steps of an engine for images."""

    def note_step(self, plan: IterativePlan, step_seconds: float, now: float) -> None:
        self._metrics.step_seconds.observe(step_seconds)
        self._metrics.step_work.labels(plan.phase.value).observe(plan.work_count)


class ImageCounts:
    """Counts images, and measures their times.

    Args:
        metrics: receives the observations.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._ended = {reason: metrics.request_success_total.labels(reason.value) for reason in FinishReason}

    def note_run(self, choice: ImageChoice, now: float) -> None:
        self._metrics.request_queue_time_seconds.observe(now - choice.request.entered_at)

    def note_end(self, choice: ImageChoice, reason: FinishReason, now: float) -> None:
        self._ended[reason].inc()
        if reason is FinishReason.STOP:
            self._metrics.images_total.inc()
            self._metrics.e2e_request_latency_seconds.observe(now - choice.request.entered_at)
            if choice.running_at is not None:
                self._metrics.request_inference_time_seconds.observe(now - choice.running_at)

    def note_all_ended(self, request: OpenImage) -> None:
        if request.has_run:
            self._metrics.request_params_n.observe(request.params.n)


class ImageDelivery(CoreDelivery[OpenImage, ImageChoice, IterativePlan, IterativeEvent]):
    """Delivers the results of an engine for images. See `CoreDelivery`.

    Args:
        core: the core, which plans the steps.
        metrics: registry of the engine's metrics.
        wake: called when the step loop may have new work.
        step_watch: receives the begin and end of each step.
    """

    def __init__(
        self, core: IterativeCore, metrics: Metrics, *, wake: Callable[[], None], step_watch: StepWatch
    ) -> None:
        super().__init__(core, ImageTimings(metrics), ImageCounts(metrics), wake=wake, step_watch=step_watch)
        self._metrics = metrics

    def _deliver(self, events: list[IterativeEvent], now: float) -> None:
        for event in events:
            if isinstance(event, StepDone):
                self._on_step(self._choices[event.request_id], event, now)
            elif isinstance(event, OutputReady):
                assert isinstance(event.output, RGBImage), f"{event.request_id} gave {type(event.output).__name__}"
                self._choices[event.request_id].image = event.output  # The next event of this image is its end.
            else:
                has_reader = not self._is_cancelled(event, now)
                choice = self._choices[event.request_id]
                if has_reader and event.reason is FinishReason.STOP:
                    self._note_shown(choice, now)
                    choice.request.push_whole(choice)
                elif has_reader:
                    choice.request.push_end(choice, event.reason, event.message)
                self._note_sequence_end(event, now, event.reason, has_reader=has_reader)

    def _on_step(self, choice: ImageChoice, event: StepDone, now: float) -> None:
        if event.steps_done <= choice.steps_done:
            return  # This progress was delivered before the engine broke. The reopened engine computes the step again.
        choice.steps_done = event.steps_done
        assert event.partial is None or isinstance(event.partial, RGBImage), "a partial result that is not an image"
        if event.partial is not None:
            self._note_shown(choice, now)
        choice.request.push(choice.request.delta(choice, event.partial))

    def _note_shown(self, choice: ImageChoice, now: float) -> None:
        """Observe the time at which the first output of an image, partial or complete, was delivered."""
        if choice.first_shown_at is None:
            choice.first_shown_at = now
            self._metrics.time_to_first_picture_seconds.observe(now - choice.request.entered_at)
            choice.request.note_first_token()

    def _ids_of(self, plan: IterativePlan) -> Iterable[RequestId]:
        return (work.request.id for work in plan.works)


class ImageStepTimes(PlanTimes[IterativePlan]):
    """Records the step times of an engine for images."""

    def _counts(self, plan: IterativePlan) -> StepCounts:
        return StepCounts(len(plan.works), phase=plan.phase.value, work_count=plan.work_count)


@uninterrupted
class ImageWork:
    """Implements `Work` for an engine for images. `ImageEngine` documents the arguments."""

    part_name = "images"
    tasks: Sequence[Callable[[], Awaitable[None]]] = ()

    def __init__(
        self,
        model: ImageModelDescription,
        core_settings: IterativeSettings,
        limits: ImageRequestLimits,
        metrics: Metrics,
    ) -> None:
        self.model = model
        self._metrics = metrics
        self._core_settings = core_settings
        self._preparation = ImagePreparation(model, limits, step_work_max=core_settings.step_work_max)
        self.step_times = ImageStepTimes()
        self._parts_total = 0  # Number of images of all requests so far. It makes their ids in the core unique.

    def attach(self, engine: Host) -> None:
        self._engine = engine

    def install(self, parts: ImageParts) -> tuple[IterativeCore, ImageDelivery]:
        core, *_ = parts
        self._core = core
        self._gauges = ImageGauges(self._metrics, core.stats())
        return core, ImageDelivery(core, self._metrics, wake=self._engine.wake, step_watch=self._engine.step_watch)

    def no_parts(self) -> ImageParts:
        return ImageParts(IterativeCore(self._core_settings), NoSteps())

    def continued(self) -> Callable[[ImageChoice], IterativeRequest | None]:
        # No latent needs to be saved, because the seed and the steps reproduce it.
        return lambda choice: choice.core_request

    # --- the stages of a request ---

    def check(self, request: OpenImage) -> None:
        request.spec = self._preparation.spec(request.prompt, request.params, priority=request.priority)

    def begin(self, request: OpenImage, *, is_waiting: bool) -> list[ImageChoice]:
        request.trace = self._trace(request)
        if is_waiting:
            self._lend_lease(request)
        return [self._new_choice(request, index) for index in range(request.sequence_count)]

    def _new_choice(self, request: OpenImage, index: int) -> ImageChoice:
        self._parts_total += 1
        return ImageChoice(request, index, RequestId(f"{request.id}#{self._parts_total}"))

    def _lend_lease(self, request: OpenImage) -> None:
        """Lend an additional lease to a request that can preempt a running request with a higher priority number.

        Without this lease, the request would wait in the queue until another request has ended.
        """
        if any(live.request.priority > request.priority for live in self._core.live_requests()):
            self._engine.dispatch.lend(LOCAL_ENDPOINT, request.sequence_count)

    async def prepare(self, request: OpenImage) -> None:
        pass  # `check` has prepared everything, and the model itself encodes the prompt.

    def sequences(self, request: OpenImage) -> Sequence[tuple[ImageChoice, IterativeRequest]]:
        spec, requests = request.spec, []
        for choice in request.choices:
            if not choice.is_ended:
                seed = request.seeds[choice.index]
                choice.core_request = spec.core_request(choice.sequence_id, seed=seed, priority=request.priority)
                requests.append((choice, choice.core_request))
        return requests

    def release(self, request: OpenImage) -> None:
        pass  # A request for images acquires nothing outside of the core.

    def keeps_hold(self, request: OpenImage) -> bool:
        return False

    def try_hand_over(self, request: OpenImage) -> bool:
        return False

    def use_weights(self, version: str | None, *, recomputes: bool = False) -> None:
        raise AssertionError("an engine for images has no weights to replace")

    def _trace(self, request: OpenImage) -> RequestTrace:
        if self._engine.tracer is NO_TRACER:
            return NO_TRACE
        span = request_span(
            self._engine.tracer, request, OPERATION, model_name=self.model.name, attributes=image_attributes(request)
        )
        return SpannedImage(span) if span.is_recording else NO_TRACE

    # --- observers ---

    def note_left(self, request: OpenImage) -> None:
        pass  # Image engines have no observers of single requests.

    def note_leaving(self) -> None:
        pass  # Image engines have no subscribers.

    def note_stopped(self) -> None:
        pass  # Image engines have no subscribers.

    def show(self, stats: IterativeStats) -> int:
        self._gauges.show(stats)
        return 0


@uninterrupted
class ImageStream(ScopeStream[OpenImage, ImageDelta]):
    """The images of a request: `pictures = await engine.generate_image("a cat")`.

    To see partial results: `async with engine.generate_image("a cat") as stream: async for delta in stream: ...`.
    `ScopeStream` documents entering, iterating and leaving.

    A slow reader gets the newest delta of each image. The last delta of an image is always delivered.
    """

    def __await__(self) -> Generator[Any, Any, tuple[RGBImage, ...]]:
        return self._all().__await__()

    async def _all(self) -> tuple[RGBImage, ...]:
        async with self:
            return await self.pictures()

    async def pictures(self) -> tuple[RGBImage, ...]:
        """Wait for all images.

        Returns:
            The images, in the order of their indexes.

        Raises:
            RequestFailed, RequestAborted, DeadlinePassed: an image was not generated. The first failed image decides
                which error is raised.
            EngineFault: the engine broke.
        """
        return await images_of(self)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each image of the request."""
        return self._request.seeds

    @property
    def step_count(self) -> int:
        """Number of denoising steps of each image. Available after entering."""
        return self._request.spec.step_count

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of each image. Available after entering."""
        task = self._request.spec.task
        return task.width, task.height


async def images_of(deltas: AsyncIterable[ImageDelta]) -> tuple[RGBImage, ...]:
    """Wait for all images of a stream and return them. See `ImageStream.pictures`.

    Args:
        deltas: an entered stream.
    """
    made: dict[int, RGBImage] = {}
    async for delta in deltas:
        if (error := error_of(delta)) is not None:
            raise error
        if delta.finish_reason is not None:
            assert delta.image is not None, "a finished image is missing"
            made[delta.index] = delta.image
    return tuple(made[index] for index in sorted(made))


DRAWN_SEED_BITS = 53  # Clients may send this seed back to the server. JavaScript's numbers are exact up to 53 bits.


@uninterrupted
class ImageEngine(EngineLifecycle[OpenImage, ImageParts]):
    """An engine that serves one image model. `open_image_engine` creates it.

    Args:
        model: description of the model.
        core: scheduler and owner of the slots.
        steps: computes the plans of the core.
        metrics: registry that contains the image metrics.
        settings: limits of the engine.
        limits: limits of requests, in addition to those of the model. None: default limits.
        new_request_id: makes the id of a request whose caller gives none.
        guard: see `EngineParts`.
        cache_release: see `EngineParts`.
    """

    _core: IterativeCore

    def __init__(
        self,
        *,
        model: ImageModelDescription,
        core: IterativeCore,
        steps: ImageSteps,
        metrics: Metrics,
        settings: EngineSettings,
        limits: ImageRequestLimits | None = None,
        new_request_id: Callable[[], str] = new_request_id,
        guard: Guard | None = None,
        cache_release: CacheRelease[ImageParts] | str = ImageParts._field_defaults["cache_release"],
    ) -> None:
        limits = limits or ImageRequestLimits()
        self.model = model
        self.limits = msgspec.structs.replace(limits, steps_max=min(limits.steps_max, model.steps_max))
        self._draw_bits = secrets.randbits if settings.seed is None else Random(settings.seed).getrandbits
        work = ImageWork(model, core.settings, self.limits, metrics)
        self.step_times = work.step_times
        super().__init__(
            work,
            ImageParts(core, steps, guard, cache_release),
            metrics=metrics,
            settings=settings,
            sequences_max=core.settings.slot_count,
            lent_max=core.settings.kept_slot_count,
            new_request_id=new_request_id,
        )
        show_router(metrics, self.dispatch)

    # --- requests ---

    def generate_image(
        self,
        prompt: str,
        params: ImageParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadlines: Deadlines | None = None,
        owner: str | None = None,
        tenant: str | None = None,
        part_of: Span = NO_SPAN,
    ) -> ImageStream:
        """Create a request for images. Await it for all images, or enter it with `async with`. It uses no resources
        before.

        All images of a request are one request: they wait in the queue once, and use one lease.

        Args:
            prompt: description of the image. For a model of classes: the name of a class, or its index as text.
            params: size, steps and other options. Default: the model's defaults.
            request_id: the caller's id. It need not be unique: an abort by id ends all requests with this id. Default:
                a new id.
            priority: PRIORITY_MIN to PRIORITY_MAX (-100 to 100). A lower number runs sooner. A running image can lose
                its slot to a request with a lower number. It later continues from the step where it stopped.
            deadlines: limits in seconds, counted from entering. A request that passes a deadline ends with finish
                reason DEADLINE. For `ttft_timeout`, the first partial or complete image counts as the first token.
            owner: user who may see and abort the request by its id, besides users who may see all requests.
            tenant: the queue is fair between tenants. Default: the owner.
            part_of: parent span of the request's trace.

        Returns:
            The stream, to be awaited or entered.

        Raises:
            InvalidRequest: an argument has a wrong type. `param` names it. Options that this model does not support are
                reported on entering.
        """
        params = instance_of(ImageParams, "params", params, ImageParams())
        request = OpenImage(
            to_str("prompt", prompt),
            params,
            seed=self._draw_bits(DRAWN_SEED_BITS) if params.seed is None else params.seed,
            **self._admission.arguments(
                request_id=request_id,
                priority=priority,
                deadlines=deadlines,
                owner=owner,
                tenant=tenant,
                part_of=part_of,
            ),
        )
        return ImageStream(request, submit=self._submit, leave=self._leave, own_run=self._own_run)

    def live_requests(self, *, owner: str | None = None) -> list[LiveImageView]:
        """Describe every request whose scope is entered. The oldest request comes first.

        Args:
            owner: only requests of this user. None: all requests.
        """
        self._own_run.check("engine.live_requests")
        lives = {live.request.id: live for live in self._core.live_requests()}
        now = trio.current_time()
        requests = [request for request in self.requests if owner in (None, request.owner)]
        return [
            view_of(request, [lives.get(choice.sequence_id) for choice in request.choices], now)
            for request in sorted(requests, key=lambda request: request.entered_at)
        ]

    def stats(self) -> IterativeStats:
        """Return the numbers of images and slots in each state, as a frozen snapshot."""
        self._own_run.check_process("engine.stats")
        return self._core.stats()

    def load(self) -> EndpointLoad:
        """Return the load of this engine, for a router."""
        self._own_run.check_process("engine.load")
        stats = self._core.stats()
        return EndpointLoad(
            running=stats.running_count,
            waiting=stats.waiting_count + self.preparing_count,
            max_num_seqs=self._core.settings.slot_count,
            kv_usage=stats.slots_used / stats.slots_total,
            fingerprint=UNSET if self.model.fingerprint is None else self.model.fingerprint,
        )
