"""Metrics of the duration of steps, and of how many steps cancelled sequences kept their blocks."""

from __future__ import annotations

from typing import NamedTuple

from trioserve.contracts.events import IterativePhase, Phase
from trioserve.metrics.registry import Metrics

__all__ = ["Cancelled", "StepTimings"]


class Cancelled(NamedTuple):
    """The moment at which a sequence was aborted.

    Attributes:
        at: time of the abort.
        step_count: steps that had ended by then.
    """

    at: float
    step_count: int


class StepTimings:
    """Observes step times and aborts. All times are seconds of Trio's clock.

    Args:
        metrics: receives the observations.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._step_count = 0  # steps that have ended

    def note_step(self, step_seconds: float) -> None:
        """Count a step that has ended and is delivered now.

        Args:
            step_seconds: duration of the step.
        """
        self._step_count += 1
        self._metrics.step_seconds.observe(step_seconds)

    def cancelled(self, now: float) -> Cancelled:
        """Return the moment of an abort, to be kept until the blocks of the sequence are free.

        Args:
            now: current time.
        """
        return Cancelled(now, self._step_count)

    def steps_since(self, cancelled: Cancelled) -> int:
        """Return how many steps have ended since an abort.

        Args:
            cancelled: moment of the abort.
        """
        return self._step_count - cancelled.step_count

    def note_abort(self, phase: Phase | IterativePhase, cancelled: Cancelled, now: float) -> None:
        """Observe how long an aborted sequence kept its blocks.

        Args:
            phase: phase of the sequence when it was aborted.
            cancelled: moment of the abort.
            now: time at which the blocks are free.
        """
        self._metrics.aborts_total.labels(phase.value).inc()
        self._metrics.cancel_to_free_seconds.labels(phase.value).observe(now - cancelled.at)
        self._metrics.cancel_to_free_steps.labels(phase.value).observe(self.steps_since(cancelled))

    def note_left_queue(self, count: int) -> None:
        """Count sequences that were aborted before they reached the core. They had no blocks.

        Args:
            count: number of sequences.
        """
        phase = Phase.QUEUED.value
        self._metrics.aborts_total.labels(phase).inc(count)
        for _ in range(count):
            self._metrics.cancel_to_free_seconds.labels(phase).observe(0.0)
            self._metrics.cancel_to_free_steps.labels(phase).observe(0)
