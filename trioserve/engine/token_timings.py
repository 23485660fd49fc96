"""When tokens came and how long cancelled sequences kept their blocks, as metrics.

What a step's tokens have in common is counted once a step: most of them follow one that came at the same time.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from trioserve.contracts.events import IterativePhase, Phase
from trioserve.engine.open_request import Choice
from trioserve.metrics.registry import Metrics

__all__ = ["Cancelled", "TokenTimings"]


class Cancelled(NamedTuple):
    """When a sequence was aborted, and how many steps had ended then."""

    at: float
    step_count: int


class TokenTimings:
    """All times are seconds of Trio's clock."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._step_count = 0  # steps that have ended
        self._token_count = 0  # of the step that is being delivered, without those in _followed
        self._followed: list[float] = []  # of each of its tokens that came alone, when the one before it had come

    def note_step(self, step_seconds: float) -> None:
        """A step has ended, and is delivered now."""
        self._step_count += 1
        self._metrics.step_seconds.observe(step_seconds)

    def note_tokens(self, choice: Choice, count: int, now: float) -> bool:
        """The step has brought a choice so many tokens. Returns whether these are its first."""
        if count == 0:
            return False
        before, choice.last_token_at = choice.last_token_at, now
        if choice.first_token_at is None:
            choice.first_token_at = now
            self._token_count += count
            self._metrics.time_to_first_token_seconds.observe(now - choice.request.entered_at)
            return True
        if count == 1:  # nearly every token
            self._followed.append(before)
        else:
            self._token_count += count
            # Tokens that come together share the time since the last ones, so that its mean is that of a token.
            self._metrics.inter_token_latency_seconds.observe((now - before) / count, count)
        return False

    def show(self, now: float) -> None:
        """All of the step's tokens are noted."""
        self._metrics.generation_tokens_total.inc(self._token_count + len(self._followed))
        self._token_count = 0
        for before, count in Counter(self._followed).items():
            self._metrics.inter_token_latency_seconds.observe(now - before, count)
        self._followed.clear()

    def cancelled(self, now: float) -> Cancelled:
        """A sequence is aborted now; to be kept until its blocks are back."""
        return Cancelled(now, self._step_count)

    def steps_since(self, cancelled: Cancelled) -> int:
        """How many have ended."""
        return self._step_count - cancelled.step_count

    def note_abort(self, phase: Phase | IterativePhase, cancelled: Cancelled, now: float) -> None:
        """The blocks of a sequence that was aborted are back."""
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
