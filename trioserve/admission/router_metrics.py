"""Copies the router's counts into metrics at every scrape, so that the router core does not depend on metrics.

Routers import this module, and neither torch nor numpy.
"""

from __future__ import annotations

from trioserve.admission.dispatch import Dispatch
from trioserve.metrics.registry import CATALOGUE, Metrics

__all__ = ["show_router"]

ENDPOINT_METRICS = tuple(
    metric.name for metric in CATALOGUE if any(label.name == "endpoint" for label in metric.labels)
)


def show_router(metrics: Metrics, dispatch: Dispatch) -> None:
    """Update the metrics from the router at every scrape. Call this function once for each router.

    Args:
        metrics: Metrics to update.
        dispatch: The router.
    """
    dispatch.on_wait_over = metrics.queue_wait_seconds.observe
    dispatch.on_paired = metrics.pair_handover_seconds.observe
    seen = dispatch.stats()
    reports_seen = dict(dispatch.load_reports_total)

    def show() -> None:
        nonlocal seen
        stats = dispatch.stats()
        metrics.queued_requests.set(stats.waiting)
        metrics.admissions_total.inc(stats.admissions_total - seen.admissions_total)
        metrics.retries_total.inc(stats.retries_total - seen.retries_total)
        metrics.stream_continuations_total.inc(stats.continuations_total - seen.continuations_total)
        metrics.continuing_requests.set(stats.continuing)
        metrics.stream_moves_total.inc(stats.moves_total - seen.moves_total)
        metrics.moving_requests.set(stats.moving)
        for reason, total in stats.continuations_refused_total.items():
            more = total - seen.continuations_refused_total.get(reason, 0)
            metrics.stream_continuations_refused_total.labels(reason).inc(more)
        for reason, total in stats.rejections_total.items():
            metrics.rejections_total.labels(reason).inc(total - seen.rejections_total.get(reason, 0))
        for how, total in dispatch.load_reports_total.items():
            metrics.endpoint_load_reports_total.labels(how).inc(total - reports_seen[how])
            reports_seen[how] = total
        for outcome, total in stats.pairs_total.items():
            metrics.pairs_total.labels(outcome.value).inc(total - seen.pairs_total[outcome])
        seen = stats
        for name in ENDPOINT_METRICS:
            # Remove the series of removed endpoints, because a fleet may add and remove any number of endpoints.
            getattr(metrics, name).clear()
        for state in dispatch.endpoints:
            metrics.endpoint_leases.labels(state.id).set(state.leases)
            metrics.endpoint_in_flight.labels(state.id).set(state.in_flight)
            metrics.endpoint_healthy.labels(state.id).set(state.accepts_requests)
            resident = dispatch.policy.resident_count(state.id)
            if resident is not None:
                metrics.endpoint_resident_blocks.labels(state.id).set(resident)
            metrics.endpoint_ejections_total.labels(state.id).inc(state.ejections_total)
            for reason, total in state.failures_total.items():
                metrics.endpoint_failures_total.labels(state.id, reason).inc(total)
            metrics.endpoint_hangs_total.labels(state.id).inc(state.hangs_total)

    metrics.on_scrape(show)
