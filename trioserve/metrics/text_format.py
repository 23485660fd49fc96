"""Prometheus' text format 0.0.4 of a catalogue's metrics.

prometheus_client writes the same, but makes every name and every label anew for each page. Some scrapers ask twenty
times a second, in the thread that serves everybody: so what stands before a value is kept from page to page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from trioserve.metrics.catalogue import Metric

__all__ = ["TextFormat"]


class _Shown(NamedTuple):
    """family: its name in the registry. names: with what each sample's name begins, and the lines above."""

    family: str
    labels: Mapping[str, str]
    names: Sequence[tuple[str, str]]


class TextFormat:
    """labels: of each metric, in the order of `metrics`, on all of its series besides their own."""

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
        self._series: dict[tuple[str, tuple[str, ...]], str] = {}  # of the last page, what stands before a value

    def write(self) -> str:
        """A page: each metric under all of its names, one after the other."""
        return "".join(self._pieces())

    def _pieces(self) -> Iterator[str]:
        families = {family.name: family for family in self._registry.collect()}
        known, self._series = self._series, {}
        for shown in self._shown:
            ends = []
            for sample in families[shown.family].samples:
                if sample.name.endswith("_created"):  # the format has no place for them but as families of their own
                    continue
                key = (sample.name, tuple(sample.labels.values()))
                series = known.get(key)
                if series is None:
                    series = sample.name.removeprefix(shown.family) + _labels(shown.labels, sample)
                self._series[key] = series
                value = floatToGoString(sample.value)  # type: ignore[no-untyped-call]  # a library's
                ends.append(f"{series} {value}\n")
            for base, head in shown.names:
                yield head
                for end in ends:
                    yield base
                    yield end


def _base(metric: Metric, name: str) -> str:
    """prometheus_client names a counter's family without `_total`, and its sample with it."""
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
