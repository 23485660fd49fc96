"""Export of the front end's counters as metrics, at each scrape. Connections know nothing of metrics."""

from __future__ import annotations

from collections.abc import Callable

from trioserve.http.counters import FrontendCounters
from trioserve.metrics.registry import Metrics

__all__ = ["show_counters"]


def show_counters(metrics: Metrics, read: Callable[[], FrontendCounters]) -> None:
    """Update `metrics` from the counters of a front end at each scrape. Call this once per front end.

    Args:
        metrics: the registry to update.
        read: returns the current counters of the front end.
    """
    shown: dict[tuple[str, str], int] = {}

    def show() -> None:
        counters = read()
        metrics.connections_open.set(counters.connections_open)
        metrics.connections_known_open.set(counters.connections_known_open)
        metrics.connections_max.set(counters.connections_max)
        metrics.clients_slow.set(counters.exchanges_behind)
        metrics.answer_bytes_held.set(counters.answer_bytes_held)
        metrics.request_body_bytes_held.set(counters.request_body_bytes_held)
        # Counters of prometheus_client have no setter. So the increase since the last scrape is added.
        totals = {
            "connections_total": counters.connections_total,
            "accepts_failed_total": counters.accepts_failed_total,
            "clients_left_total": counters.exchanges_left_total,
            "clients_stalled_total": counters.exchanges_stalled_total,
            "request_body_bytes_total": counters.request_body_bytes_total,
        }
        for name, value in totals.items():
            getattr(metrics, name).inc(value - shown.get((name, ""), 0))
            shown[name, ""] = value
        for name in ("connections_refused_total", "streams_refused_total"):
            for reason, value in getattr(counters, name).items():
                getattr(metrics, name).labels(reason).inc(value - shown.get((name, reason), 0))
                shown[name, reason] = value

    metrics.on_scrape(show)
