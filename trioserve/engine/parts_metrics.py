"""Metrics of the parts of an engine, read at every scrape: the counts of a connector, and the times of each rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from trioserve.metrics.registry import Metrics

__all__ = ["show_connector", "RankSeconds", "RankTotals", "show_ranks"]


logger = logging.getLogger(__name__)

PREFIX = "kv_transfer_"


def show_connector(metrics: Metrics, counts: Callable[[], Mapping[str, float]]) -> Callable[[], None]:
    """Update the connector's metrics at every scrape.

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
        """Log the first error. The scrape continues, so that no other metric is lost."""
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
