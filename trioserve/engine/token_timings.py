"""When tokens came, as metrics, beside what StepTimings counts.

What a step's tokens have in common is counted once a step: most of them follow one that came at the same time.
"""

from __future__ import annotations

from collections import Counter

from trioserve.engine.open_request import Choice
from trioserve.engine.shell.step_timings import StepTimings
from trioserve.metrics.registry import Metrics

__all__ = ["TokenTimings"]


class TokenTimings(StepTimings):
    """All times are seconds of Trio's clock."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics)
        self._token_count = 0  # of the step that is being delivered, without those in _followed
        self._followed: list[float] = []  # of each of its tokens that came alone, when the one before it had come

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
