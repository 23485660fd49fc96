"""Whether requests are traced, as flags and the standard's variables say, and the end of that: with a deadline."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from trioserve.contracts.errors import StartupError
from trioserve.contracts.tracing import NO_TRACER, Tracer
from trioserve.trio_tools.daemon_thread import call_abandonable

if TYPE_CHECKING:
    from trioserve.config import ServerConfig
    from trioserve.metrics.registry import Metrics
    from trioserve.tracing.otel import SpanCounts

__all__ = ["Tracing", "open_tracing"]

logger = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
CLOSE_SECONDS_MAX = 5.0  # for the last spans; a collector that hangs must not keep the process


class Tracing:
    """Off: its tracer begins no trace."""

    tracer: Tracer = NO_TRACER

    def show(self, metrics: Metrics) -> None:
        """Have the spans counted there, where there are any."""


class _Exported(Tracing):
    def __init__(self, tracer: Tracer, counts: Callable[[], SpanCounts]) -> None:
        self.tracer = tracer
        self._counts = counts

    def show(self, metrics: Metrics) -> None:
        shown = {"exported": 0, "failed": 0, "dropped": 0}

        def show() -> None:
            for outcome, count in self._counts()._asdict().items():
                metrics.trace_spans_total.labels(outcome).inc(count - shown[outcome])
                shown[outcome] = count

        metrics.on_scrape(show)


@asynccontextmanager
async def open_tracing(config: ServerConfig, environment: Mapping[str, str] = os.environ) -> AsyncIterator[Tracing]:
    """Inside, spans of requests go to the collector. Leaving sends the last ones, if it takes them in time; being
    cancelled leaves them. Raises StartupError where --otlp-endpoint is set and cannot be followed."""
    if not _is_on(config, environment):
        yield Tracing()
        return
    try:
        from trioserve.tracing.otel import OtelTracing
    except ImportError as error:
        if config.otlp_endpoint is not None:
            raise StartupError(
                f"--otlp-endpoint is set, and {error.name} is not installed: pip install 'trioserve[otel]'"
            ) from None
        logger.warning("requests are not traced: %s is not installed (pip install 'trioserve[otel]')", error.name)
        yield Tracing()
        return
    otel = OtelTracing(endpoint=config.otlp_endpoint, sample=config.trace_sample)
    try:
        yield _Exported(otel.tracer, otel.counts)
    finally:
        with trio.move_on_after(CLOSE_SECONDS_MAX) as patience:
            await call_abandonable(otel.close, thread_name="trace-export-end")
        if patience.cancelled_caught:
            logger.warning("the last spans were not sent: the collector took none for %g s", CLOSE_SECONDS_MAX)


def _is_on(config: ServerConfig, environment: Mapping[str, str]) -> bool:
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if config.otlp_endpoint is not None:
        return True
    return environment.get("OTEL_TRACES_EXPORTER") != "none" and any(map(environment.get, ENDPOINT_VARIABLES))
