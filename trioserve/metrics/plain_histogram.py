"""A histogram in plain numbers, for what is counted with every token and every request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily

__all__ = ["PlainHistogram"]


class PlainHistogram:
    """Shown like prometheus_client's, but without its lock: it is counted in one thread.

    buckets: upper bounds, growing. With label_names it is counted by `labels(...)`, which is worth keeping.
    """

    def __init__(
        self,
        name: str,
        meaning: str,
        label_names: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry | None,
    ) -> None:
        self._name = name
        self._meaning = meaning
        self._label_names = tuple(label_names)
        self._children: dict[tuple[str, ...], PlainHistogram] = {}
        self.bounds = tuple(buckets)
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0
        if registry is not None:
            registry.register(self)

    def labels(self, *values: str) -> PlainHistogram:
        """The one of these values, in the order of the names; made when it is first asked for."""
        child = self._children.get(values)
        if child is None:
            assert len(values) == len(self._label_names), (self._name, values)
            child = self._children[values] = PlainHistogram(
                self._name, self._meaning, buckets=self.bounds, registry=None
            )
        return child

    def observe(self, value: float, count: int = 1) -> None:
        """`value` came `count` times."""
        self._counts[bisect_left(self.bounds, value)] += count
        self._sum += value * count

    def counts(self) -> tuple[int, ...]:
        """Of each bucket by itself so far, and of what lies beyond the last bound."""
        return tuple(self._counts)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._meaning, labels=self._label_names)
        for values, child in self._children.items() if self._label_names else [((), self)]:
            names = (*(str(float(bound)) for bound in self.bounds), "+Inf")
            buckets = list(zip(names, accumulate(child._counts), strict=True))
            family.add_metric(values, buckets, child._sum)
        yield family
