"""The engine of a model that generates images, as a Trio program sees it.

`EngineShell` and `EngineLife` provide what it shares with the engine for text: queue, leases, deadlines, aborts by id,
drain, pauses and faults. This module defines requests for images, and how the core gets them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from random import Random

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
from trioserve.contracts.image_generation import ImageModelDescription, ImageParams, ImageRequestLimits
from trioserve.contracts.iterative import IterativePlan, IterativeRequest, IterativeStats
from trioserve.contracts.live import LiveImageView
from trioserve.contracts.tracing import NO_SPAN, NO_TRACER, Span
from trioserve.core.iterative.engine import IterativeCore
from trioserve.engine.engine_parts import CacheRelease
from trioserve.engine.images.image_delivery import ImageDelivery
from trioserve.engine.images.image_parts import ImageParts, ImageSteps, no_image_parts
from trioserve.engine.images.image_preparation import ImagePreparation
from trioserve.engine.images.image_stream import ImageStream
from trioserve.engine.images.image_trace import OPERATION, SpannedImage, image_attributes
from trioserve.engine.images.open_image import ImageChoice, OpenImage, view_of
from trioserve.engine.lifecycle.engine_life import SERVER_STOPPING, Guard
from trioserve.engine.lifecycle.engine_loop import EngineLoop
from trioserve.engine.lifecycle.engine_shell import EngineShell, new_request_id
from trioserve.engine.lifecycle.request_trace import NO_TRACE, RequestTrace
from trioserve.engine.lifecycle.step_times import PlanTimes, StepCounts
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
class ImageEngine(EngineShell[OpenImage, ImageChoice, IterativeRequest, ImageParts]):
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

    _delivery: ImageDelivery
    _part_name = "images"

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
        super().__init__(
            metrics=metrics,
            settings=settings,
            sequences_max=core.settings.slot_count,
            lent_max=core.settings.kept_slot_count,
            new_request_id=new_request_id,
        )
        self.model = model
        limits = limits or ImageRequestLimits()
        self.limits = msgspec.structs.replace(limits, steps_max=min(limits.steps_max, model.steps_max))
        self._draw_bits = secrets.randbits if settings.seed is None else Random(settings.seed).getrandbits
        self._preparation = ImagePreparation(model, self.limits, step_work_max=core.settings.step_work_max)
        self.step_times = ImageStepTimes()
        self._parts_total = 0  # parts of all requests so far, to make their ids in the core unique
        self._install(ImageParts(core, steps, guard, cache_release))
        self._show_sleep()
        metrics.on_scrape(self._set_gauges)
        show_router(metrics, self.dispatch)

    def _install(self, parts: ImageParts) -> None:
        core, steps, guard, cache_release = parts
        self._guard = guard
        self._why_no_cache_release = cache_release if isinstance(cache_release, str) else None
        self._core = core
        self._delivery = ImageDelivery(core, self.metrics, wake=self.wake, step_watch=self.step_watch)
        self._install_loop(
            EngineLoop(
                core,
                steps,
                self._delivery,
                after_step=self._after_step,
                step_times=self.step_times,
                gate=self._gate,
            )
        )
        self._gauges = ImageGauges(self.metrics, core.stats())

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
            **self._scope_arguments(
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
        requests = [request for request in self._requests if owner in (None, request.owner)]
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
            waiting=stats.waiting_count + self._preparing_count,
            max_num_seqs=self._core.settings.slot_count,
            kv_usage=stats.slots_used / stats.slots_total,
            fingerprint=UNSET if self.model.fingerprint is None else self.model.fingerprint,
        )

    def abort_all(self, message: str) -> None:
        """End every request. Each reader gets a last delta for each unfinished image.

        Args:
            message: message for the readers.
        """
        for request in self._requests:
            self._delivery.end_with_final_delta(request, FinishReason.ABORT, message, stop_reason=SERVER_STOPPING)

    # --- hooks of EngineShell ---

    def _check(self, request: OpenImage) -> None:
        request.wanted = self._preparation.wanted(request.prompt, request.params, priority=request.priority)

    def _new_choices(self, request: OpenImage) -> list[ImageChoice]:
        return [self._new_choice(request, index) for index in range(request.sequence_count)]

    def _new_choice(self, request: OpenImage, index: int) -> ImageChoice:
        self._parts_total += 1
        return ImageChoice(request, index, RequestId(f"{request.id}#{self._parts_total}"))

    def _make_way(self, request: OpenImage) -> None:
        """Lend a lease to a request that can take the slot of a running request with a higher priority number.

        In the queue it would wait until another request has ended.
        """
        if any(live.request.priority > request.priority for live in self._core.live_requests()):
            self.dispatch.lend(LOCAL_ENDPOINT, request.sequence_count)

    async def _prepare(self, request: OpenImage) -> None:
        """Do nothing, because `_check` has prepared everything. The model encodes the prompt."""

    def _sequences(self, request: OpenImage) -> Sequence[IterativeRequest]:
        asked = []
        for choice in request.choices:
            if not choice.is_ended:
                seed = request.seeds[choice.index]
                choice.asked = request.wanted.asked(choice.sequence_id, seed=seed, priority=request.priority)
                asked.append(choice.asked)
        return asked

    def _begin_next(self, request: OpenImage) -> None:
        choice, asked = request.upcoming.popleft()
        self._core.add(asked)
        self._delivery.add(choice)

    def _take_down(self) -> Callable[[ImageChoice], IterativeRequest | None]:
        self._install(no_image_parts(self._core.settings))
        # No latent is saved. The seed and the steps reproduce it.
        return lambda choice: choice.asked

    def _trace(self, request: OpenImage) -> RequestTrace:
        if self.tracer is NO_TRACER:
            return NO_TRACE
        span = self._span_of(request, OPERATION, model_name=self.model.name, attributes=image_attributes(request))
        return SpannedImage(span) if span.is_recording else NO_TRACE

    def _set_gauges(self) -> None:
        stats = self._core.stats()
        self._show_shell(running_count=stats.running_count, waiting_count=stats.waiting_count, deferred_count=0)
        self._gauges.show(stats)
