"""A histogram in plain Python numbers, fast enough to count every token and request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily

__all__ = ["PlainHistogram"]


class PlainHistogram:
    """A histogram with the output format of prometheus_client, but without its lock. Only one thread may count values.

    Args:
        name: name of the metric.
        meaning: description of the metric.
        label_names: names of the histogram's labels. If there are labels, call `labels(...)` once and count in the
            histogram that it returns.
        buckets: increasing upper bounds.
        registry: registry to register with. If None, the histogram is not registered.
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
        """Return the histogram of these label values, and create it at the first call.

        Args:
            *values: label values, in the order of the label names.
        """
        child = self._children.get(values)
        if child is None:
            assert len(values) == len(self._label_names), (self._name, values)
            child = self._children[values] = PlainHistogram(
                self._name, self._meaning, buckets=self.bounds, registry=None
            )
        return child

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value.

        Args:
            value: the value.
            count: how often the value occurred.
        """
        self._counts[bisect_left(self.bounds, value)] += count
        self._sum += value * count

    def counts(self) -> tuple[int, ...]:
        """Return the count of each single bucket, not cumulative. The last number counts the values above the last
        bound.
        """
        return tuple(self._counts)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._meaning, labels=self._label_names)
        for values, child in self._children.items() if self._label_names else [((), self)]:
            names = (*(str(float(bound)) for bound in self.bounds), "+Inf")
            buckets = list(zip(names, accumulate(child._counts), strict=True))
            family.add_metric(values, buckets, child._sum)
        yield family
