"""A histogram in plain numbers, for what is counted with every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily

__all__ = ["PlainHistogram"]


class PlainHistogram:
    """Shown like prometheus_client's, but without labels, and without its lock: it is counted in one thread.

    buckets: upper bounds, growing.
    """

    def __init__(self, name: str, meaning: str, *, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._meaning = meaning
        self.bounds = tuple(buckets)
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        """`value` came `count` times."""
        self._counts[bisect_left(self.bounds, value)] += count
        self._sum += value * count

    def counts(self) -> tuple[int, ...]:
        """Of each bucket by itself so far, and of what lies beyond the last bound."""
        return tuple(self._counts)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        names = (*(str(float(bound)) for bound in self.bounds), "+Inf")
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._meaning, buckets=buckets, sum_value=self._sum)
