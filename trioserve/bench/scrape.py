"""Reads the metrics of a server (Prometheus' text format 0.0.4), and computes differences between two reads."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import msgspec

__all__ = ["HistogramDifference", "Scrape"]

_SERIES = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Scrape:
    """The metrics of one read. Lines that are not metrics are ignored.

    Args:
        text: the text of /metrics.
    """

    def __init__(self, text: str) -> None:
        self._series: dict[str, list[tuple[dict[str, str], float]]] = {}
        for line in text.splitlines():
            found = None if line.startswith("#") else _SERIES.match(line)
            if found is None:
                continue
            try:
                value = float(found[3])
            except ValueError:
                continue
            self._series.setdefault(found[1], []).append((dict(_LABEL.findall(found[2] or "")), value))

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of the series with a name and with at least some labels. None: there is no such series.

        Args:
            name: name of the metric.
            **labels: labels that a series must have.
        """
        values = [value for _labels, value in self._matching(name, labels)]
        return sum(values) if values else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the sums of the series with a name, by the value of one label. Sums that are 0 are left out.

        Args:
            name: name of the metric.
            label: name of the label.
        """
        found: dict[str, float] = {}
        for labels, value in self._matching(name, {}):
            if value:
                key = labels.get(label, "")
                found[key] = found.get(key, 0.0) + value
        return found

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return the cumulative counts of a histogram by upper bound, in ascending order. Counts of several series are
        added.

        Args:
            name: name of the histogram.
            **labels: labels that a series must have.
        """
        counts: dict[float, float] = {}
        for found, value in self._matching(f"{name}_bucket", labels):
            bound = float(found.get("le", "nan"))
            counts[bound] = counts.get(bound, 0.0) + value
        return dict(sorted(counts.items()))

    def _matching(self, name: str, labels: dict[str, str]) -> Iterator[tuple[dict[str, str], float]]:
        for found, value in self._series.get(name, ()):
            if labels.items() <= found.items():
                yield found, value


class HistogramDifference(msgspec.Struct, frozen=True):
    """The counts of a histogram between two reads.

    Attributes:
        bounds: upper bounds of the buckets in ascending order. The last one is infinite.
        counts: count of each bucket.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]

    @classmethod
    def between(cls, before: dict[float, float], after: dict[float, float]) -> HistogramDifference:
        """Return the difference of two results of Scrape.buckets.

        Args:
            before: the earlier result.
            after: the later result.
        """
        cumulated = [count - before.get(bound, 0.0) for bound, count in after.items()]
        counts = [now - below for now, below in zip(cumulated, [0.0, *cumulated], strict=False)]
        return cls(tuple(after), tuple(counts))

    @property
    def count(self) -> int:
        return round(sum(self.counts))

    def quantile(self, share: float) -> float | None:
        """Return a quantile, interpolated linearly within its bucket. The first bucket begins at 0.

        Args:
            share: 0 to 1.

        Returns:
            None if nothing was counted. The last finite bound if the quantile is above it.
        """
        found = self._bucket(share)
        if found is None:
            return None
        index, rest = found
        low = self.bounds[index - 1] if index else 0.0
        high = self.bounds[index]
        return low if math.isinf(high) else low + (high - low) * rest

    def bound(self, share: float) -> float | None:
        """Return the upper bound of a quantile's bucket. It is exact if each bucket has one whole number.

        Args:
            share: 0 to 1.
        """
        found = self._bucket(share)
        return None if found is None else self.bounds[found[0]]

    def _bucket(self, share: float) -> tuple[int, float] | None:
        """Return the index of the quantile's bucket, and the share of the bucket below the quantile."""
        wanted = share * sum(self.counts)
        below = 0.0
        for index, count in enumerate(self.counts):
            if count > 0 and below + count >= wanted:
                return index, (wanted - below) / count
            below += count
        return None
