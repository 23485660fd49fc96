"""What the steps of a model in several processes took each of them, as metrics: read at every scrape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from trioserve.metrics.registry import Metrics

__all__ = ["RankSeconds", "RankTotals", "show_ranks"]


class RankSeconds(NamedTuple):
    """Of one rank: what its steps took so far, and how much of that the ranks did together."""

    steps: float = 0.0
    together: float = 0.0


class RankTotals(Protocol):
    @property
    def rank_seconds(self) -> Sequence[tuple[float, float]]:
        """Of each rank, as RankSeconds."""
        ...


def show_ranks(metrics: Metrics, totals: RankTotals) -> Callable[[], None]:
    """Returns what ends it."""
    seen: dict[int, RankSeconds] = {}

    def show() -> None:
        for rank, seconds in enumerate(totals.rank_seconds):
            found, before = RankSeconds(*seconds), seen.get(rank, RankSeconds())
            metrics.rank_step_seconds_total.labels(str(rank)).inc(found.steps - before.steps)
            metrics.rank_together_seconds_total.labels(str(rank)).inc(found.together - before.together)
            seen[rank] = found

    return metrics.on_scrape(show)
