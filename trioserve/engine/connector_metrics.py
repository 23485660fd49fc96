"""How a connector's counts become metrics: at every scrape, by their names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from trioserve.metrics.registry import Metrics

__all__ = ["show_connector"]

logger = logging.getLogger(__name__)

PREFIX = "kv_transfer_"


def show_connector(metrics: Metrics, counts: Callable[[], Mapping[str, float]]) -> Callable[[], None]:
    """Have every exposition show what `counts` says at that moment: totals, with or without "_total" behind their name,
    and levels where the catalogue has a gauge. A name that the catalogue does not have is left out, and said once; so
    is what it raises. Returns what ends it."""
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
        """The others' metrics are not to be lost for it."""
        nonlocal is_broken
        if not is_broken:
            logger.exception("the connector cannot say what it has counted")
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
            logger.info("the connector counts what is no metric count=%s", given)

    return metrics.on_scrape(show)
