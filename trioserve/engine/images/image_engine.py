"""The engine of a model that makes pictures, as a Trio program sees it. It keeps every promise that the engine of texts
keeps, by the same code: a place and a lease, deadlines, aborts by id, drain, pauses, faults (see EngineShell and
EngineLife). What is different stands here: what is asked, and what the core gets of it.
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
from trioserve.engine.engine_parts import Nap
from trioserve.engine.images.image_delivery import ImageDelivery
from trioserve.engine.images.image_parts import ImageParts, ImageSteps, no_image_parts
from trioserve.engine.images.image_preparation import ImagePreparation
from trioserve.engine.images.image_stream import ImageStream
from trioserve.engine.images.image_trace import OPERATION, SpannedImage, image_attributes
from trioserve.engine.images.open_image import ImageChoice, OpenImage, view_of
from trioserve.engine.request_preparation import instance_of
from trioserve.engine.settings import EngineSettings
from trioserve.engine.shell.engine_life import SERVER_STOPPING, Guard
from trioserve.engine.shell.engine_loop import EngineLoop
from trioserve.engine.shell.engine_shell import EngineShell, new_request_id
from trioserve.engine.shell.request_trace import NO_TRACE, RequestTrace
from trioserve.engine.shell.step_times import PlanTimes, StepCounts
from trioserve.metrics.image_gauges import ImageGauges
from trioserve.metrics.registry import Metrics
from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["ImageEngine"]

DRAWN_SEED_BITS = 53  # whoever reads a seed that was drawn may send it back: JavaScript's numbers hold so many


class ImageStepTimes(PlanTimes[IterativePlan]):
    """PlanTimes of steps that compute images."""

    def _counts(self, plan: IterativePlan) -> StepCounts:
        return StepCounts(len(plan.works), phase=plan.phase.value, work_count=plan.work_count)


@uninterrupted
class ImageEngine(EngineShell[OpenImage, ImageChoice, IterativeRequest, ImageParts]):
    """Made by open_image_engine.

    core, steps, guard, nap: see ImageParts. metrics: with the part "images". limits: what is taken of callers beside
    what the model takes.
    """

    _delivery: ImageDelivery
    _part_name = "pictures"

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
        nap: Nap[ImageParts] | str = ImageParts._field_defaults["nap"],
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
        self._parts_total = 0  # of all requests: what makes their ids in the core unique
        self._install(ImageParts(core, steps, guard, nap))
        self._show_sleep()
        metrics.on_scrape(self._set_gauges)
        show_router(metrics, self.dispatch)

    def _install(self, parts: ImageParts) -> None:
        core, steps, guard, nap = parts
        self._guard = guard
        self._why_no_nap = nap if isinstance(nap, str) else None
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

    # --- what it is asked ---

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
        """A request, to be awaited, or entered with `async with`; until then it holds nothing. However many pictures it
        is for, it is one scope, with one place in the queue and one lease.

        Args:
            prompt: what is to be seen. Of a model that knows classes, the name of one, or its index, as text.
            params: size, steps and the like. Default: all is left to the model.
            request_id: the caller's own; it need not be unique, and an abort by it ends all that bear it. Default: a
                new one.
            priority: PRIORITY_MIN to PRIORITY_MAX (-100 to 100), a lower number runs sooner. A picture that has begun
                leaves its slot to a better one, and goes on later from where it was.
            deadlines: in seconds from entering; what passes one ends with finish_reason DEADLINE. For ttft_timeout,
                what is first to be seen of a picture stands for the first token: a partial result, or the whole.
            owner: who may see it and abort it by its id, besides those who may see everything.
            tenant: the queue is fair between them. Default: the owner.
            part_of: the span of what it is made for, where requests are traced.

        Raises:
            InvalidRequest: an argument has a wrong type; its `param` names it. What this model cannot do rises on
                entering.
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
        """Every request that is entered and not left, oldest first. owner: only theirs."""
        self._own_run.check("engine.live_requests")
        lives = {live.request.id: live for live in self._core.live_requests()}
        now = trio.current_time()
        requests = [request for request in self._requests if owner in (None, request.owner)]
        return [
            view_of(request, [lives.get(choice.sequence_id) for choice in request.choices], now)
            for request in sorted(requests, key=lambda request: request.entered_at)
        ]

    def stats(self) -> IterativeStats:
        """How many pictures are worked on and wait, and how many slots are taken: a frozen snapshot."""
        self._own_run.check_process("engine.stats")
        return self._core.stats()

    def load(self) -> EndpointLoad:
        """How much there is to do, as a router asks."""
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
        """End every request; readers get a last delta for each picture that is not made, with this message."""
        for request in self._requests:
            self._delivery.end_with_final_delta(request, FinishReason.ABORT, message, stop_reason=SERVER_STOPPING)

    # --- how a request gets in and out; see EngineShell ---

    def _check(self, request: OpenImage) -> None:
        request.wanted = self._preparation.wanted(request.prompt, request.params, priority=request.priority)

    def _new_choices(self, request: OpenImage) -> list[ImageChoice]:
        return [self._new_choice(request, index) for index in range(request.sequence_count)]

    def _new_choice(self, request: OpenImage, index: int) -> ImageChoice:
        self._parts_total += 1
        return ImageChoice(request, index, RequestId(f"{request.id}#{self._parts_total}"))

    def _make_way(self, request: OpenImage) -> None:
        """A better priority takes the slot of a worse one; in the queue it would wait until somebody is done."""
        if any(live.request.priority > request.priority for live in self._core.live_requests()):
            self.dispatch.lend(LOCAL_ENDPOINT, request.sequence_count)

    async def _prepare(self, request: OpenImage) -> None:
        """All was made when it was checked: encoding the prompt is the model's."""

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
        # Nothing is left of a latent, and nothing has to be: its seed and its steps make the same one.
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
