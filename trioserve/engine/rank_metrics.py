"""Metrics of the time that steps take in each rank, read at every scrape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from trioserve.metrics.registry import Metrics

__all__ = ["RankSeconds", "RankTotals", "show_ranks"]


class RankSeconds(NamedTuple):
    """Times of one rank so far.

    Attributes:
        steps: seconds of all steps.
        together: the part of these seconds that all ranks spent together.
    """

    steps: float = 0.0
    together: float = 0.0


class RankTotals(Protocol):
    @property
    def rank_seconds(self) -> Sequence[tuple[float, float]]:
        """One `RankSeconds` per rank."""
        ...


def show_ranks(metrics: Metrics, totals: RankTotals) -> Callable[[], None]:
    """Update the rank metrics at every scrape.

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
