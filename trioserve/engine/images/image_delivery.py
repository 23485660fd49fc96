"""Turns the results of steps into deltas of generated images. `CoreDelivery` handles requests that end from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.image_generation import RGBImage
from trioserve.contracts.iterative import IterativeEvent, IterativePlan, OutputReady, StepDone
from trioserve.core.iterative.engine import IterativeCore
from trioserve.engine.images.open_image import ImageChoice, OpenImage
from trioserve.engine.lifecycle.core_delivery import CoreDelivery
from trioserve.engine.lifecycle.step_timings import StepTimings
from trioserve.engine.lifecycle.step_watch import StepWatch
from trioserve.metrics.registry import Metrics

__all__ = ["ImageDelivery"]


class ImageDelivery(CoreDelivery[OpenImage, ImageChoice, IterativePlan, IterativeEvent]):
    """Delivery of an engine for images. See `CoreDelivery`.

    Args:
        core: the core.
        metrics: registry of the engine's metrics.
        wake: called when the step loop may have something new to do.
        step_watch: receives the begin and end of each step.
    """

    def __init__(
        self, core: IterativeCore, metrics: Metrics, *, wake: Callable[[], None], step_watch: StepWatch
    ) -> None:
        super().__init__(core, StepTimings(metrics), wake=wake, step_watch=step_watch)
        self._metrics = metrics
        self._ended = {reason: metrics.request_success_total.labels(reason.value) for reason in FinishReason}

    def _deliver(self, events: list[IterativeEvent], now: float) -> None:
        for event in events:
            if isinstance(event, StepDone):
                self._on_step(self._choices[event.request_id], event, now)
            elif isinstance(event, OutputReady):
                assert isinstance(event.output, RGBImage), f"{event.request_id} gave {type(event.output).__name__}"
                self._choices[event.request_id].image = event.output  # its end comes next
            else:
                has_reader = not self._is_cancelled(event, now)
                choice = self._choices[event.request_id]
                if has_reader and event.reason is FinishReason.STOP:
                    self._note_shown(choice, now)
                    choice.request.push_whole(choice)
                elif has_reader:
                    choice.request.push_end(choice, event.reason, event.message)
                self._let_go(event, now, event.reason, has_reader=has_reader)

    def _on_step(self, choice: ImageChoice, event: StepDone, now: float) -> None:
        if event.steps_done <= choice.steps_done:
            return  # delivered before the engine broke, and computed again
        choice.steps_done = event.steps_done
        assert event.partial is None or isinstance(event.partial, RGBImage), "a partial result that is not an image"
        if event.partial is not None:
            self._note_shown(choice, now)
        choice.request.push(choice.request.delta(choice, event.partial))

    def _note_shown(self, choice: ImageChoice, now: float) -> None:
        """Observe when the first output of an image, partial or complete, was delivered."""
        if choice.first_shown_at is None:
            choice.first_shown_at = now
            self._metrics.time_to_first_picture_seconds.observe(now - choice.request.entered_at)
            choice.request.note_first_token()

    def _ids_of(self, plan: IterativePlan) -> Iterable[RequestId]:
        return (work.request.id for work in plan.works)

    def _count_run(self, choice: ImageChoice, now: float) -> None:
        self._metrics.request_queue_time_seconds.observe(now - choice.request.entered_at)

    def _count_step(self, plan: IterativePlan, now: float) -> None:
        self._metrics.step_work.labels(plan.phase.value).observe(plan.work_count)

    def _count_end(self, choice: ImageChoice, reason: FinishReason, now: float) -> None:
        self._ended[reason].inc()
        if reason is FinishReason.STOP:
            self._metrics.images_total.inc()
            self._metrics.e2e_request_latency_seconds.observe(now - choice.request.entered_at)
            if choice.running_at is not None:
                self._metrics.request_inference_time_seconds.observe(now - choice.running_at)

    def _count_all_ended(self, request: OpenImage) -> None:
        if request.has_run:
            self._metrics.request_params_n.observe(request.params.n)
