"""Metrics from a connector's counts: read at every scrape, and matched by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from trioserve.metrics.registry import Metrics

__all__ = ["show_connector"]

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
