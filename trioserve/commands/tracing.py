"""Turns tracing on or off, by flags and by OpenTelemetry's environment variables. Sends the last spans at the end."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from trioserve.contracts.errors import StartupError
from trioserve.contracts.extras import install_command
from trioserve.contracts.tracing import NO_TRACER, Tracer
from trioserve.trio_tools.worker_thread import call_abandonable

if TYPE_CHECKING:
    from trioserve.metrics.registry import Metrics
    from trioserve.options.server import ServerOptions
    from trioserve.tracing.otel import SpanCounts

__all__ = ["Tracing", "open_tracing"]

logger = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
# Time limit for sending the last spans. A collector that hangs must not block the end of the process.
CLOSE_SECONDS_MAX = 5.0


class Tracing:
    """Tracing that is switched off. Its tracer records nothing."""

    tracer: Tracer = NO_TRACER

    def show(self, metrics: Metrics) -> None:
        """Update the span metrics at each scrape. Does nothing if tracing is off.

        Args:
            metrics: registry that exposes the metrics.
        """


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
async def open_tracing(config: ServerOptions, environment: Mapping[str, str] = os.environ) -> AsyncIterator[Tracing]:
    """Send spans of requests to the collector inside of the scope, if tracing is on.

    The exit of the scope waits up to CLOSE_SECONDS_MAX until the last spans are sent. A cancelled scope drops them.

    Args:
        config: options of the server.
        environment: environment variables.

    Raises:
        StartupError: --otlp-endpoint is set, but OpenTelemetry is not installed.
    """
    if not _is_on(config, environment):
        yield Tracing()
        return
    try:
        from trioserve.tracing.otel import OtelTracing
    except ImportError as error:
        if config.otlp_endpoint is not None:
            raise StartupError(
                f"--otlp-endpoint is set, and {error.name} is not installed: {install_command('otel')}"
            ) from None
        logger.warning("requests are not traced: %s is not installed (%s)", error.name, install_command("otel"))
        yield Tracing()
        return
    otel = OtelTracing(endpoint=config.otlp_endpoint, sample=config.trace_sample)
    try:
        yield _Exported(otel.tracer, otel.counts)
    finally:
        with trio.move_on_after(CLOSE_SECONDS_MAX) as closing:
            await call_abandonable(otel.close, thread_name="trace-export-end")
        if closing.cancelled_caught:
            logger.warning("the last spans were not sent: the collector did not accept them in %g s", CLOSE_SECONDS_MAX)


def _is_on(config: ServerOptions, environment: Mapping[str, str]) -> bool:
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if config.otlp_endpoint is not None:
        return True
    return environment.get("OTEL_TRACES_EXPORTER") != "none" and any(map(environment.get, ENDPOINT_VARIABLES))
