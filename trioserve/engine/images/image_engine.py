"""The engine of a model that generates images, as a Trio program sees it.

`EngineLifecycle` provides what it shares with the engine for text: queue, leases, deadlines, aborts by id, drain,
pauses and faults. `ImageWork` prepares requests for images, and hands them to the core.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from random import Random

import msgspec
import trio
from msgspec import UNSET

from trioserve.admission.local_endpoint import LOCAL_ENDPOINT
from trioserve.admission.router_metrics import show_router
from trioserve.contracts.arguments import to_str
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.endpoint import EndpointLoad
from trioserve.contracts.ids import RequestId
from trioserve.contracts.image_generation import ImageModelDescription, ImageParams, ImageRequestLimits
from trioserve.contracts.iterative import IterativePlan, IterativeRequest, IterativeStats
from trioserve.contracts.live import LiveImageView
from trioserve.contracts.tracing import NO_SPAN, NO_TRACER, Span
from trioserve.core.iterative.engine import IterativeCore
from trioserve.core.settings import IterativeSettings
from trioserve.engine.engine_parts import CacheRelease
from trioserve.engine.images.image_delivery import ImageDelivery
from trioserve.engine.images.image_parts import ImageParts, ImageSteps, no_image_parts
from trioserve.engine.images.image_preparation import ImagePreparation
from trioserve.engine.images.image_stream import ImageStream
from trioserve.engine.images.image_trace import OPERATION, SpannedImage, image_attributes
from trioserve.engine.images.open_image import ImageChoice, OpenImage, view_of
from trioserve.engine.lifecycle.engine_lifecycle import EngineLifecycle
from trioserve.engine.lifecycle.request_admission import new_request_id
from trioserve.engine.lifecycle.request_trace import NO_TRACE, RequestTrace, request_span
from trioserve.engine.lifecycle.step_times import PlanTimes, StepCounts
from trioserve.engine.lifecycle.work import Guard, Host
from trioserve.engine.request_preparation import instance_of
from trioserve.engine.settings import EngineSettings
from trioserve.metrics.image_gauges import ImageGauges
from trioserve.metrics.registry import Metrics
from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["ImageEngine"]

DRAWN_SEED_BITS = 53  # clients may send a drawn seed back, and JavaScript's numbers are exact up to this size


class ImageStepTimes(PlanTimes[IterativePlan]):
    """Step times of an engine for images."""

    def _counts(self, plan: IterativePlan) -> StepCounts:
        return StepCounts(len(plan.works), phase=plan.phase.value, work_count=plan.work_count)


@uninterrupted
class ImageWork:
    """The `Work` of an engine for images. `ImageEngine` documents the arguments."""

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
        self._parts_total = 0  # parts of all requests so far, to make their ids in the core unique

    def attach(self, engine: Host) -> None:
        self._engine = engine

    def install(self, parts: ImageParts) -> ImageDelivery:
        self._core = parts.core
        self._gauges = ImageGauges(self._metrics, parts.core.stats())
        return ImageDelivery(parts.core, self._metrics, wake=self._engine.wake, step_watch=self._engine.step_watch)

    def no_parts(self) -> ImageParts:
        return no_image_parts(self._core_settings)

    def continued(self) -> Callable[[ImageChoice], IterativeRequest | None]:
        # No latent is saved. The seed and the steps reproduce it.
        return lambda choice: choice.asked

    # --- a request ---

    def check(self, request: OpenImage) -> None:
        request.wanted = self._preparation.wanted(request.prompt, request.params, priority=request.priority)

    def begin(self, request: OpenImage, *, is_waiting: bool) -> list[ImageChoice]:
        request.trace = self._trace(request)
        if is_waiting:
            self._make_way(request)
        return [self._new_choice(request, index) for index in range(request.sequence_count)]

    def _new_choice(self, request: OpenImage, index: int) -> ImageChoice:
        self._parts_total += 1
        return ImageChoice(request, index, RequestId(f"{request.id}#{self._parts_total}"))

    def _make_way(self, request: OpenImage) -> None:
        """Lend a lease to a request that can take the slot of a running request with a higher priority number.

        In the queue it would wait until another request has ended.
        """
        if any(live.request.priority > request.priority for live in self._core.live_requests()):
            self._engine.dispatch.lend(LOCAL_ENDPOINT, request.sequence_count)

    async def prepare(self, request: OpenImage) -> None:
        """Do nothing, because `check` has prepared everything. The model encodes the prompt."""

    def sequences(self, request: OpenImage) -> Sequence[IterativeRequest]:
        asked = []
        for choice in request.choices:
            if not choice.is_ended:
                seed = request.seeds[choice.index]
                choice.asked = request.wanted.asked(choice.sequence_id, seed=seed, priority=request.priority)
                asked.append(choice.asked)
        return asked

    def release(self, request: OpenImage) -> None:
        """Do nothing, because a request acquires nothing outside of the core."""

    def keeps_hold(self, request: OpenImage) -> bool:
        return False

    def gives_away(self, request: OpenImage) -> bool:
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
        """Do nothing, because nobody follows single requests."""

    def note_leaving(self) -> None:
        """Do nothing, because there are no subscribers."""

    def note_over(self) -> None:
        """Do nothing, because there are no subscribers."""

    def show(self, stats: IterativeStats) -> int:
        self._gauges.show(stats)
        return 0


@uninterrupted
class ImageEngine(EngineLifecycle[OpenImage, ImageParts]):
    """An engine that serves one image model. `open_image_engine` makes it.

    Args:
        model: description of the model.
        core: scheduler and owner of the slots.
        steps: computes the plans of the core.
        metrics: registry with the part "images".
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
        """Make a request. Await it for all images, or enter it with `async with`. Until then it uses nothing.

        All images of a request are one request with one place in the queue and one lease.

        Args:
            prompt: describes the image. For a model of classes: the name of a class, or its index as text.
            params: size, steps and other options. Default: the model's defaults.
            request_id: the caller's id. It need not be unique: an abort by id ends all requests with this id. Default:
                a new id.
            priority: PRIORITY_MIN to PRIORITY_MAX (-100 to 100). A lower number runs sooner. An image that has begun
                can lose its slot to a request with a lower number, and later continues where it stopped.
            deadlines: seconds from entering. A request that passes a deadline ends with finish reason DEADLINE. For
                `ttft_timeout`, the first partial or complete image counts as the first token.
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
        """Describe every request that is entered and not left, the oldest first.

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
        """Return counts of images and slots, as a frozen snapshot."""
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
