"""Metrics of token times, in addition to the metrics of `StepTimings`.

Most tokens of a step follow a token of the same earlier step. So equal time differences are observed once per step,
with a count.
"""

from __future__ import annotations

from collections import Counter

from trioserve.engine.lifecycle.step_timings import StepTimings
from trioserve.engine.open_request import Choice
from trioserve.metrics.registry import Metrics

__all__ = ["TokenTimings"]


class TokenTimings(StepTimings):
    """Counts tokens and the times between them. All times are seconds of Trio's clock.

    Args:
        metrics: receives the observations.
    """

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics)
        self._token_count = 0  # of the step that is being delivered, without the tokens in _followed
        self._followed: list[float] = []  # one entry per single token of the step: the time of the token before it

    def note_tokens(self, choice: Choice, count: int, now: float) -> bool:
        """Count the tokens that a step produced for a choice.

        Args:
            choice: the choice that gets the tokens.
            count: number of tokens, may be 0.
            now: time of delivery.

        Returns:
            True if these are the first tokens of the choice.
        """
        if count == 0:
            return False
        before, choice.last_token_at = choice.last_token_at, now
        if choice.first_token_at is None:
            choice.first_token_at = now
            self._token_count += count
            self._metrics.time_to_first_token_seconds.observe(now - choice.request.entered_at)
            return True
        if count == 1:  # the usual case
            self._followed.append(before)
        else:
            self._token_count += count
            # Tokens that arrive together share the time since the previous token equally, so the mean per token stays
            # right.
            self._metrics.inter_token_latency_seconds.observe((now - before) / count, count)
        return False

    def show(self, now: float) -> None:
        """Publish the counts after all tokens of a step are noted.

        Args:
            now: time of delivery.
        """
        self._metrics.generation_tokens_total.inc(self._token_count + len(self._followed))
        self._token_count = 0
        for before, count in Counter(self._followed).items():
            self._metrics.inter_token_latency_seconds.observe(now - before, count)
        self._followed.clear()
