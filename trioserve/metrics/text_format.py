"""Writes metrics in Prometheus' text format 0.0.4, and joins the pages of several processes.

prometheus_client writes the same text, but formats every name and label again for each page. Some scrapers request a
page twenty times a second, and the thread that serves all requests must write the page. So the text before each value
is cached for the next page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from trioserve.metrics.metric import Metric

__all__ = ["TextFormat", "joined_pages"]


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
