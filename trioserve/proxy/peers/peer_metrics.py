"""Metrics of a router that has peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trioserve.metrics.registry import Metrics
    from trioserve.proxy.peers.client_left import ClientLeftNotices
    from trioserve.proxy.peers.peer_watch import PeerWatch
    from trioserve.proxy.peers.retries import PeerStreams

__all__ = ["show_peers"]


def show_peers(metrics: Metrics, watch: PeerWatch, streams: PeerStreams, notices: ClientLeftNotices) -> None:
    """Update the metrics at every scrape. Call this once for each router.

    Args:
        metrics: Metrics of the router.
        watch: State of the other routers.
        streams: Streams that clients asked for again.
        notices: Sender of client-left notices.
    """
    shown: dict[str, int] = {}

    def show() -> None:
        metrics.peers.set(watch.peer_count)
        metrics.peers_well.set(watch.well_count)
        totals = {
            "peers_lost_total": watch.lost_total,
            "streams_found_total": streams.found_total,
            "streams_recomputed_total": streams.recomputed_total,
            "farewells_dropped_total": notices.dropped_total,
        }
        for name, value in totals.items():
            getattr(metrics, name).inc(value - shown.get(name, 0))
            shown[name] = value

    metrics.on_scrape(show)
