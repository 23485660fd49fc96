"""Collects the catalogue of all metrics from the classes that declare them, creates the metrics as prometheus_client
instruments, and writes the page that scrapers read.

This module determines the names and labels under which metrics are shown. Other packages count the values. If a metric
has the same meaning as a vLLM metric, its name is trioserve's prefix with vLLM's name, and the metric is also shown
with vLLM's prefix. So dashboards and autoscalers for vLLM's V1 engine work without changes. Only the bucket bounds
differ from vLLM's.

The page has Prometheus' text format 0.0.4. prometheus_client writes the same text, but formats every name and label
again for each page. Some scrapers request a page twenty times a second, and the thread that serves all requests must
write the page. So the text before each value is cached for the next page.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from trioserve.metrics.cache_metrics import CacheMetrics
from trioserve.metrics.engine_metrics import EngineMetrics
from trioserve.metrics.image_metrics import AudioMetrics, ImageMetrics
from trioserve.metrics.metric import ENGINE_LABEL, MODEL_LABEL, Metric, Part, PlainHistogram
from trioserve.metrics.router_metrics import RouterMetrics
from trioserve.metrics.server_metrics import ServerMetrics

__all__ = [
    "CATALOGUE",
    "DeclaredMetrics",
    "IMAGE_SERVER_PARTS",
    "Metrics",
    "SERVER_PARTS",
    "TextFormat",
    "joined_pages",
]


class _Shown(NamedTuple):
    """Names and labels with which one metric is shown.

    Attributes:
        family: name of the metric's family in the registry.
        labels: labels that are added to all series of the metric.
        names: for each shown name, the start of its sample names, and the HELP and TYPE lines.
    """

    family: str
    labels: Mapping[str, str]
    names: Sequence[tuple[str, str]]


class TextFormat:
    """Writes pages of some metrics.

    Args:
        registry: registry of the instruments.
        metrics: the metrics, in the order of the page.
        labels: for each metric, the labels that are added to all its series.
    """

    def __init__(
        self, registry: CollectorRegistry, metrics: Sequence[Metric], labels: Sequence[Mapping[str, str]]
    ) -> None:
        self._registry = registry
        self._shown = [
            _Shown(
                _base(metric, metric.name),
                fixed,
                [(_base(metric, name), _head(metric, name)) for name in (metric.full_name, *metric.aliases)],
            )
            for metric, fixed in zip(metrics, labels, strict=True)
        ]
        self._series: dict[tuple[str, tuple[str, ...]], str] = {}  # cached text before each value of the previous page

    def write(self) -> str:
        """Return a page that contains each metric under all its names."""
        return "".join(self._pieces())

    def _pieces(self) -> Iterator[str]:
        families = {family.name: family for family in self._registry.collect()}
        known, self._series = self._series, {}
        for shown in self._shown:
            ends = []
            for sample in families[shown.family].samples:
                if sample.name.endswith("_created"):  # Format 0.0.4 would need a separate family for such samples.
                    continue
                key = (sample.name, tuple(sample.labels.values()))
                series = known.get(key)
                if series is None:
                    series = sample.name.removeprefix(shown.family) + _labels(shown.labels, sample)
                self._series[key] = series
                value = floatToGoString(sample.value)  # type: ignore[no-untyped-call]  # from prometheus_client
                ends.append(f"{series} {value}\n")
            for base, head in shown.names:
                yield head
                for end in ends:
                    yield base
                    yield end


def _base(metric: Metric, name: str) -> str:
    """Return the name of a metric's family. For a counter, prometheus_client removes `_total` from the name of the
    family, but not from the names of samples.
    """
    return name.removesuffix("_total") if metric.kind == "counter" else name


def _head(metric: Metric, name: str) -> str:
    meaning = metric.meaning.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {meaning}\n# TYPE {name} {metric.kind}\n"


def _labels(fixed: Mapping[str, str], sample: Sample) -> str:
    labels = {**fixed, **sample.labels}
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items())) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def joined_pages(pages: Mapping[str, bytes], *, label: str) -> bytes:
    """Join pages in Prometheus' text format 0.0.4.

    Args:
        pages: pages by the value of the added label. A value must not contain a quote, backslash or line break.
        label: name of the added label.

    Returns:
        One page. Families are in the order of their first appearance, and their series in the order of the pages.
    """
    # For each family by name: its HELP and TYPE lines, and its series.
    families: dict[bytes, tuple[list[bytes], list[bytes]]] = {}
    for value, page in pages.items():
        mark = f'{label}="{value}"'.encode()
        is_new, series = False, families.setdefault(b"", ([], []))[1]
        for line in page.splitlines():
            if line.startswith((b"# HELP ", b"# TYPE ")):
                name = line.split(b" ", 3)[2]
                is_new = name not in families if line.startswith(b"# HELP ") else is_new
                head, series = families.setdefault(name, ([], []))
                if is_new:
                    head.append(line)
            elif line:
                series.append(_marked(line, mark))
    lines = [line for head, series in families.values() for line in (*head, *series)]
    return b"".join(line + b"\n" for line in lines)


def _marked(line: bytes, mark: bytes) -> bytes:
    """Add the label to a line with the format `name{labels} value` or `name value`."""
    brace, blank = line.find(b"{"), line.find(b" ")
    if 0 <= brace < blank:
        return b"%b{%b,%b" % (line[:brace], mark, line[brace + 1 :])
    return b"%b{%b}%b" % (line[:blank], mark, line[blank:])


KINDS: dict[type, typing.Literal["gauge", "counter", "histogram"]] = {
    Gauge: "gauge",
    Counter: "counter",
    PlainHistogram: "histogram",
}


class DeclaredMetrics(EngineMetrics, CacheMetrics, ServerMetrics, RouterMetrics, ImageMetrics, AudioMetrics):
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
