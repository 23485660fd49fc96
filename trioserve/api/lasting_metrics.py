"""What outlives its request, as metrics: looked up at every scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trioserve.api.responses.background import BackgroundResponses
    from trioserve.api.streams.detached_streams import DetachedStreams
    from trioserve.metrics.registry import Metrics
    from trioserve.store.store import Store

__all__ = ["show_lasting"]


def show_lasting(
    metrics: Metrics, store: Store | None, background: BackgroundResponses, detached: DetachedStreams
) -> None:
    """Once for each app."""
    shown = {"store_evicted_total": 0, "store_refused_total": 0}

    def show() -> None:
        metrics.background_responses.set(background.live_count)
        metrics.detached_streams.set(detached.detached_count)
        metrics.detached_bytes_held.set(detached.kept_bytes)
        if store is None:
            return
        usage = store.usage()
        metrics.store_bytes_used.set(usage.bytes)
        metrics.store_objects.set(usage.objects)
        totals = {"store_evicted_total": usage.evicted_count, "store_refused_total": usage.refused_count}
        for name, value in totals.items():
            getattr(metrics, name).inc(value - shown[name])
            shown[name] = value

    metrics.on_scrape(show)
