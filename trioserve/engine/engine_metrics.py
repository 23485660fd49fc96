"""Metrics of an engine: request sizes and times, token times, connector counts, and rank times.

Sizes are counted for every started sequence, so that their sums equal the token counters. Times are counted only for
sequences that finished, because the time of an aborted sequence depends on its client. The metrics of connectors and
ranks are read at every scrape.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.step import StepPlan
from trioserve.engine.lifecycle.core_delivery import StepTimings
from trioserve.engine.open_request import Choice, OpenRequest
from trioserve.metrics.registry import Metrics

__all__ = ["WHOLE", "RequestMetrics", "TokenTimings", "show_connector", "RankSeconds", "RankTotals", "show_ranks"]


WHOLE = (FinishReason.STOP, FinishReason.LENGTH)  # Finish reasons of a complete response.


class RequestMetrics:
    """Observes the sizes and times of sequences. All times are seconds of Trio's clock.

    Args:
        metrics: receives the observations.
        prompt_saved: returns two token counts of a sequence's prompt: tokens found in the prefix cache, and tokens
            whose KV was loaded from another engine or storage.
    """

    def __init__(self, metrics: Metrics, prompt_saved: Callable[[RequestId], tuple[int, int]]) -> None:
        self._metrics = metrics
        self._prompt_saved = prompt_saved
        self._ended = {reason: metrics.request_success_total.labels(reason.value) for reason in FinishReason}
        by_source = metrics.prompt_tokens_by_source_total
        self._computed = by_source.labels("local_compute")
        self._found = by_source.labels("local_cache_hit")
        self._loaded = by_source.labels("external_kv_transfer")

    def note_run(self, choice: Choice, now: float) -> None:
        found, loaded = self._prompt_saved(choice.sequence_id)
        count = choice.request.prompt_token_count_of(choice)
        choice.prompt_saved_count = found + loaded
        self._metrics.request_queue_time_seconds.observe(now - choice.request.entered_at)
        self._metrics.prompt_tokens_total.inc(count)
        self._metrics.prompt_tokens_cached_total.inc(found + loaded)
        self._computed.inc(count - found - loaded)
        self._found.inc(found)
        self._loaded.inc(loaded)

    def note_end(self, choice: Choice, reason: FinishReason, now: float) -> None:
        self._ended[reason].inc()
        request, metrics = choice.request, self._metrics
        if reason in WHOLE:
            metrics.e2e_request_latency_seconds.observe(now - request.entered_at)
            self._note_times(choice, now)
        if choice.running_at is not None:
            prompt_count = request.prompt_token_count_of(choice)
            metrics.request_prompt_tokens.observe(prompt_count)
            metrics.request_prefill_kv_computed_tokens.observe(prompt_count - choice.prompt_saved_count)
            if request.generates:
                metrics.request_generation_tokens.observe(choice.sampled_count)

    def note_all_ended(self, request: OpenRequest) -> None:
        metrics, sampling = self._metrics, request.sampling
        if not request.generates or not request.has_run:
            return
        metrics.request_max_num_generation_tokens.observe(max(choice.sampled_count for choice in request.choices))
        metrics.request_params_n.observe(sampling.n)
        if sampling.max_tokens is not None:
            metrics.request_params_max_tokens.observe(sampling.max_tokens)

    def _note_times(self, choice: Choice, now: float) -> None:
        metrics, began_at, first_at = self._metrics, choice.running_at, choice.first_token_at
        if began_at is None:
            return
        last_at = now if first_at is None else choice.last_token_at
        metrics.request_inference_time_seconds.observe(last_at - began_at)
        metrics.request_prefill_time_seconds.observe((last_at if first_at is None else first_at) - began_at)
        if first_at is None:  # A pooled sequence has no first token.
            return
        metrics.request_decode_time_seconds.observe(last_at - first_at)
        if choice.sampled_count > 1:
            metrics.request_time_per_output_token_seconds.observe((last_at - first_at) / (choice.sampled_count - 1))


class TokenTimings(StepTimings[StepPlan]):
    """Counts tokens, and measures the times between tokens. All times are seconds of Trio's clock.

    Args:
        metrics: receives the observations.
    """

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics)
        self._token_count = 0  # Tokens of the step that is being delivered, without the tokens in `_followed`.
        # For each choice that got a single token in this step: the time of its previous token.
        self._followed: list[float] = []

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
        if count == 1:  # This is the usual case.
            self._followed.append(before)
        else:
            self._token_count += count
            # Divide the time equally among tokens that arrive together, so that the mean stays right.
            self._metrics.inter_token_latency_seconds.observe((now - before) / count, count)
        return False

    def note_step(self, plan: StepPlan, step_seconds: float, now: float) -> None:
        self._metrics.step_seconds.observe(step_seconds)
        self._metrics.step_tokens.observe(plan.token_count)
        self._metrics.generation_tokens_total.inc(self._token_count + len(self._followed))
        self._token_count = 0
        for before, count in Counter(self._followed).items():
            self._metrics.inter_token_latency_seconds.observe(now - before, count)
        self._followed.clear()


logger = logging.getLogger(__name__)

PREFIX = "kv_transfer_"


def show_connector(metrics: Metrics, counts: Callable[[], Mapping[str, float]]) -> Callable[[], None]:
    """Copy the connector's counts into metrics at every scrape.

    A count that the metrics catalogue does not know is skipped and logged once. An error of `counts` is logged once,
    too.

    Args:
        metrics: registry to update.
        counts: returns the current values. The name of a total may lack the suffix "_total". Other names are gauges.

    Returns:
        A function that stops the updates.
    """
    shown: dict[str, float] = {}
    unknown: set[str] = set()
    is_broken = False

    def show() -> None:
        try:
            counted = counts()
        except Exception:
            note_broken()
            return
        for given, value in counted.items():
            try:
                take(given, float(value))
            except Exception:
                note_broken()

    def note_broken() -> None:
        """Log the first error. The scrape continues, so that the other metrics are still shown."""
        nonlocal is_broken
        if not is_broken:
            logger.exception("the connector's counts cannot be read")
        is_broken = True

    def take(given: str, value: float) -> None:
        name = PREFIX + given
        if metrics.has(name + "_total"):
            name += "_total"
        if name.endswith("_total") and metrics.has(name):
            getattr(metrics, name).inc(max(0.0, value - shown.get(name, 0.0)))
            shown[name] = value
        elif metrics.has(name):
            getattr(metrics, name).set(value)
        elif given not in unknown:
            unknown.add(given)
            logger.info("the connector has a count that is not a metric count=%s", given)

    return metrics.on_scrape(show)


class RankSeconds(NamedTuple):
    """Times that one rank has used so far.

    Attributes:
        steps: seconds of all steps together.
        together: seconds within these steps that all ranks spent on collective operations.
    """

    steps: float = 0.0
    together: float = 0.0


class RankTotals(Protocol):
    @property
    def rank_seconds(self) -> Sequence[tuple[float, float]]:
        """The times of each rank, as one `RankSeconds` per rank."""
        ...


def show_ranks(metrics: Metrics, totals: RankTotals) -> Callable[[], None]:
    """Copy the times of the ranks into metrics at every scrape.

    Args:
        metrics: registry to update.
        totals: source of the times.

    Returns:
        A function that stops the updates.
    """
    seen: dict[int, RankSeconds] = {}

    def show() -> None:
        for rank, seconds in enumerate(totals.rank_seconds):
            found, before = RankSeconds(*seconds), seen.get(rank, RankSeconds())
            metrics.rank_step_seconds_total.labels(str(rank)).inc(found.steps - before.steps)
            metrics.rank_together_seconds_total.labels(str(rank)).inc(found.together - before.together)
            seen[rank] = found

    return metrics.on_scrape(show)
