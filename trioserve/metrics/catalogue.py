"""The catalogue of all metrics. It collects the metrics from the classes that declare them.

If a metric has the same meaning as a vLLM metric, its name is trioserve's prefix with vLLM's name, and the metric is
also shown with vLLM's prefix. So dashboards and autoscalers for vLLM's V1 engine work without changes. Only the bucket
bounds differ from vLLM's.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator

import msgspec
from prometheus_client import Counter, Gauge

from trioserve.metrics.cache_metrics import CacheMetrics
from trioserve.metrics.engine_metrics import EngineMetrics
from trioserve.metrics.image_metrics import ImageMetrics
from trioserve.metrics.metric import Metric
from trioserve.metrics.plain_histogram import PlainHistogram
from trioserve.metrics.router_metrics import RouterMetrics
from trioserve.metrics.server_metrics import ServerMetrics

__all__ = ["CATALOGUE", "DeclaredMetrics"]

KINDS: dict[type, typing.Literal["gauge", "counter", "histogram"]] = {
    Gauge: "gauge",
    Counter: "counter",
    PlainHistogram: "histogram",
}


class DeclaredMetrics(EngineMetrics, CacheMetrics, ServerMetrics, RouterMetrics, ImageMetrics):
    """All metrics as typed attributes."""


def _declared() -> Iterator[Metric]:
    for kind in DeclaredMetrics.__bases__:
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            yield msgspec.structs.replace(hint.__metadata__[0], name=name, kind=KINDS[hint.__origin__])


CATALOGUE = tuple(_declared())
