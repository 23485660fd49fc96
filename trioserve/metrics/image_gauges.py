"""Copies the counters of an image engine into metrics at every scrape, so that the core does not depend on metrics."""

from __future__ import annotations

from trioserve.contracts.iterative import IterativeStats
from trioserve.metrics.registry import Metrics

__all__ = ["ImageGauges"]


class ImageGauges:
    """The metrics of an image engine.

    Args:
        metrics: the metrics to update.
        stats: the engine's first snapshot. Counts before this snapshot are not shown.
    """

    def __init__(self, metrics: Metrics, stats: IterativeStats) -> None:
        self._metrics = metrics
        self._seen = stats

    def show(self, stats: IterativeStats) -> None:
        metrics, seen = self._metrics, self._seen
        self._seen = stats
        metrics.latent_slots.labels("free").set(stats.slots_total - stats.slots_used)
        metrics.latent_slots.labels("used").set(stats.slots_used)
        metrics.latent_slots.labels("kept_free").set(stats.kept_total - stats.kept_used)
        metrics.latent_slots.labels("kept_used").set(stats.kept_used)
        metrics.denoising_steps_total.inc(stats.denoised_total - seen.denoised_total)
        metrics.num_preemptions_total.inc(stats.preemptions_total - seen.preemptions_total)
