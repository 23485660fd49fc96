"""Collects the catalogue of all metrics from the classes that declare them, creates the metrics as prometheus_client
instruments, and writes the page that scrapers read.

This module determines the names and labels under which metrics are shown. Other packages count the values. If a metric
has the same meaning as a vLLM metric, its name is trioserve's prefix with vLLM's name, and the metric is also shown
with vLLM's prefix. So dashboards and autoscalers for vLLM's V1 engine work without changes. Only the bucket bounds
differ from vLLM's.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Collection, Iterator

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.exposition import generate_latest

from trioserve.metrics.cache_metrics import CacheMetrics
from trioserve.metrics.engine_metrics import EngineMetrics
from trioserve.metrics.image_metrics import ImageMetrics
from trioserve.metrics.metric import ENGINE_LABEL, MODEL_LABEL, Metric, Part
from trioserve.metrics.plain_histogram import PlainHistogram
from trioserve.metrics.router_metrics import RouterMetrics
from trioserve.metrics.server_metrics import ServerMetrics
from trioserve.metrics.text_format import TextFormat

__all__ = ["CATALOGUE", "DeclaredMetrics", "IMAGE_SERVER_PARTS", "Metrics", "SERVER_PARTS"]

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


SERVER_PARTS: tuple[Part, ...] = ("engine", "frontend", "router")
IMAGE_SERVER_PARTS: tuple[Part, ...] = (*SERVER_PARTS, "images")
ENGINE_PARTS: tuple[Part, ...] = ("engine", "images")


class Metrics(DeclaredMetrics):
    """The metrics of a server or router. Each metric of the catalogue is an attribute:
    `metrics.step_seconds.observe(0.012)`.

    If a metric has labels, select their values first: `metrics.aborts_total.labels("decode").inc()`. A process can have
    several Metrics, each with its own registry. Any thread may use counters and gauges, but only one thread may use a
    histogram.

    Args:
        model_name: value of the label `model_name`, or None if there is not exactly one model.
        parts: parts of the program whose metrics exist. Metrics of other parts have no attribute. A server for image
            generation uses IMAGE_SERVER_PARTS.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, model_name: str | None, *, parts: Collection[Part] = SERVER_PARTS) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._metrics = tuple(metric for metric in CATALOGUE if metric.part in parts)
        self._names = frozenset(metric.name for metric in self._metrics)
        self._callbacks: list[Callable[[], None]] = []
        self._pages: dict[Part | None, TextFormat] = {}
        self._process = ProcessCollector(registry=None)
        for metric in self._metrics:
            setattr(self, metric.name, _instrument(metric, self.registry))

    def has(self, name: str) -> bool:
        """Return whether a metric exists.

        Args:
            name: name without prefix.
        """
        return name in self._names

    def on_scrape(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Register a callback that sets gauges from a snapshot before every page.

        Args:
            callback: called before every page. It must not wait.

        Returns:
            A function that ends the registration. It calls the callback one last time.
        """
        self._callbacks.append(callback)

        def end() -> None:
            callback()
            self._callbacks.remove(callback)

        return end

    def refresh(self) -> None:
        """Run all callbacks, as before every page."""
        for callback in self._callbacks:
            callback()

    def total(self, name: str) -> float:
        """Return the value of a counter or gauge, summed over its labels.

        Args:
            name: name without prefix.

        Returns:
            The current value of a counter, or the value that a gauge had at the last page or refresh. 0 if the metric
            does not exist.
        """
        if name not in self._names:
            return 0.0
        family = next(iter(getattr(self, name).collect()))
        return float(sum(sample.value for sample in family.samples if not sample.name.endswith("_created")))

    def expose(self, *, part: Part | None = None) -> bytes:
        """Write a page in Prometheus' text format 0.0.4. Send the page with the content type `content_type`.

        Each family is shown under our prefix and then under its aliases. Every series has the label model_name, and
        series of an engine also have the label engine. On Linux, the usual process metrics follow
        (`process_resident_memory_bytes`, ...).

        Args:
            part: if not None, write only the metrics of this part, without the process metrics, so that the result can
                be appended to another page. If None, write all metrics.
        """
        self.refresh()
        text = self._pages.get(part)
        if text is None:
            metrics = [metric for metric in self._metrics if part in (None, metric.part)]
            text = self._pages[part] = TextFormat(self.registry, metrics, [self._labels(metric) for metric in metrics])
        return text.write().encode() + (generate_latest(self._process) if part is None else b"")

    def _labels(self, metric: Metric) -> dict[str, str]:
        """Return the labels that all series of a metric have. They are added when a page is written, so that the
        instruments need not have them.
        """
        if metric.shown_as is not None:
            return {}
        model = {} if self._model_name is None else {MODEL_LABEL: self._model_name}
        return model | ({ENGINE_LABEL: "0"} if metric.part in ENGINE_PARTS else {})


def _instrument(metric: Metric, registry: CollectorRegistry) -> Gauge | Counter | PlainHistogram:
    label_names = [label.name for label in metric.labels]
    instrument: Gauge | Counter | PlainHistogram
    if metric.kind == "gauge":
        instrument = Gauge(metric.name, metric.meaning, label_names, registry=registry)
    elif metric.kind == "counter":
        instrument = Counter(metric.name, metric.meaning, label_names, registry=registry)
    else:
        instrument = PlainHistogram(metric.name, metric.meaning, label_names, buckets=metric.buckets, registry=registry)
    if len(metric.labels) == 1:
        for value in metric.labels[0].values:
            instrument.labels(value)
    return instrument
