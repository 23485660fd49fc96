"""How long steps take, and for how many of them what was cancelled kept what it had, as metrics."""

from __future__ import annotations

from typing import NamedTuple

from trioserve.contracts.events import IterativePhase, Phase
from trioserve.metrics.registry import Metrics

__all__ = ["Cancelled", "StepTimings"]


class Cancelled(NamedTuple):
    """When a sequence was aborted, and how many steps had ended then."""

    at: float
    step_count: int


class StepTimings:
    """All times are seconds of Trio's clock."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._step_count = 0  # steps that have ended

    def note_step(self, step_seconds: float) -> None:
        """A step has ended, and is delivered now."""
        self._step_count += 1
        self._metrics.step_seconds.observe(step_seconds)

    def cancelled(self, now: float) -> Cancelled:
        """A sequence is aborted now; to be kept until what it has is back."""
        return Cancelled(now, self._step_count)

    def steps_since(self, cancelled: Cancelled) -> int:
        """How many have ended."""
        return self._step_count - cancelled.step_count

    def note_abort(self, phase: Phase | IterativePhase, cancelled: Cancelled, now: float) -> None:
        """What a sequence had that was aborted is back."""
        self._metrics.aborts_total.labels(phase.value).inc()
        self._metrics.cancel_to_free_seconds.labels(phase.value).observe(now - cancelled.at)
        self._metrics.cancel_to_free_steps.labels(phase.value).observe(self.steps_since(cancelled))

    def note_left_queue(self, count: int) -> None:
        """So many sequences were aborted before the core had them: nothing had to be freed."""
        phase = Phase.QUEUED.value
        self._metrics.aborts_total.labels(phase).inc(count)
        for _ in range(count):
            self._metrics.cancel_to_free_seconds.labels(phase).observe(0.0)
            self._metrics.cancel_to_free_steps.labels(phase).observe(0)
