"""What a server says of itself at /metrics (Prometheus' text format 0.0.4), and what was counted between two looks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import msgspec

__all__ = ["HistogramDifference", "Scrape"]

_SERIES = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Scrape:
    """One exposition. A line that is none is passed over: what is missing shows when it is asked for."""

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
        """The sum of the series with this name and at least these labels, None if there is none."""
        values = [value for _labels, value in self._matching(name, labels)]
        return sum(values) if values else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The series with this name by the value of one label, without those that are 0."""
        found: dict[str, float] = {}
        for labels, value in self._matching(name, {}):
            if value:
                key = labels.get(label, "")
                found[key] = found.get(key, 0.0) + value
        return found

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """A histogram's cumulated counts by upper bound, growing; of several series, their sums."""
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
    """What a histogram counted between two scrapes. bounds: growing, the last infinite; counts: one for each bucket."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]

    @classmethod
    def between(cls, before: dict[float, float], after: dict[float, float]) -> HistogramDifference:
        """Of two results of Scrape.buckets."""
        cumulated = [count - before.get(bound, 0.0) for bound, count in after.items()]
        counts = [now - below for now, below in zip(cumulated, [0.0, *cumulated], strict=False)]
        return cls(tuple(after), tuple(counts))

    @property
    def count(self) -> int:
        return round(sum(self.counts))

    def quantile(self, share: float) -> float | None:
        """Interpolated linearly within its bucket, the first of which begins at 0; None when nothing was counted, and
        the last finite bound when it lies beyond."""
        found = self._bucket(share)
        if found is None:
            return None
        index, rest = found
        low = self.bounds[index - 1] if index else 0.0
        high = self.bounds[index]
        return low if math.isinf(high) else low + (high - low) * rest

    def bound(self, share: float) -> float | None:
        """The upper bound of the bucket in which this share lies: exact where every bucket holds one whole number."""
        found = self._bucket(share)
        return None if found is None else self.bounds[found[0]]

    def _bucket(self, share: float) -> tuple[int, float] | None:
        """The index of the bucket that holds this share of all counts, and how much of the bucket lies below it."""
        wanted = share * sum(self.counts)
        below = 0.0
        for index, count in enumerate(self.counts):
            if count > 0 and below + count >= wanted:
                return index, (wanted - below) / count
            below += count
        return None
