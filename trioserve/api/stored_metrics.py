"""Metrics of work that outlives its request, read at every scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trioserve.api.responses.background import BackgroundResponses
    from trioserve.api.responses.kept_responses import KeptMemory
    from trioserve.api.streams.detached_streams import DetachedStreams, RouterStreams
    from trioserve.metrics.registry import Metrics
    from trioserve.store.store import Store

__all__ = ["show_stored"]


def show_stored(
    metrics: Metrics,
    store: Store | None,
    background: BackgroundResponses,
    kept: KeptMemory,
    detached: DetachedStreams,
    router_streams: RouterStreams,
) -> None:
    """Register the metrics. Call once for each app.

    Args:
        metrics: metrics of the server.
        store: store of the server. None: no store.
        background: background responses.
        kept: responses that connections keep in memory.
        detached: streams that continue without their clients.
        router_streams: streams that continue without their routers.
    """
    shown = dict.fromkeys(
        (
            "store_evicted_total",
            "store_refused_total",
            "store_write_failures_total",
            "router_streams_taken_over_total",
            "router_streams_expired_total",
        ),
        0,
    )

    def count(totals: dict[str, int]) -> None:
        for name, value in totals.items():
            getattr(metrics, name).inc(value - shown[name])
            shown[name] = value

    def show() -> None:
        metrics.router_streams.set(router_streams.detached_count)
        metrics.router_stream_bytes_held.set(router_streams.kept_bytes)
        count(
            {
                "router_streams_taken_over_total": router_streams.taken_over_total,
                "router_streams_expired_total": router_streams.expired_total,
            }
        )
        metrics.background_responses.set(background.live_count)
        metrics.connection_bytes_held.set(kept.byte_count)
        metrics.detached_streams.set(detached.detached_count)
        metrics.detached_bytes_held.set(detached.kept_bytes)
        if store is None:
            return
        usage = store.usage()
        metrics.store_bytes_used.set(usage.bytes)
        metrics.store_objects.set(usage.objects)
        metrics.store_unwritten_bytes.set(usage.unwritten_bytes)
        count(
            {
                "store_evicted_total": usage.evicted_count,
                "store_refused_total": usage.refused_count,
                "store_write_failures_total": usage.failure_count,
            }
        )

    metrics.on_scrape(show)
