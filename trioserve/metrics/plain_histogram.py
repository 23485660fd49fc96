"""A histogram in plain Python numbers, fast enough to count every token and request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily

__all__ = ["HistogramWindow", "PlainHistogram"]


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
        """Return the number of values in each bucket. Counts are not cumulative. The last number counts the values
        above the last bound.
        """
        return tuple(self._counts)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._meaning, labels=self._label_names)
        for values, child in self._children.items() if self._label_names else [((), self)]:
            names = (*(str(float(bound)) for bound in self.bounds), "+Inf")
            buckets = list(zip(names, accumulate(child._counts), strict=True))
            family.add_metric(values, buckets, child._sum)
        yield family


class HistogramWindow:
    """The values that a histogram counted between two calls of `take`. The window does not slow down `observe`.

    Args:
        histogram: the histogram to read.
    """

    def __init__(self, histogram: PlainHistogram) -> None:
        self._histogram = histogram
        self._seen = histogram.counts()

    def take(self, shares: Sequence[float]) -> list[float | None]:
        """Return quantiles of the values since the last call.

        Args:
            shares: the quantiles as fractions, for example 0.5 for the median.

        Returns:
            A quantile for each share, interpolated within the buckets, or None if no value was counted. A value above
            the last bound counts as equal to that bound.
        """
        counts = self._histogram.counts()
        new = [count - seen for count, seen in zip(counts, self._seen, strict=True)]
        self._seen = counts
        return [quantile(share, self._histogram.bounds, new) for share in shares]


def quantile(share: float, bounds: Sequence[float], counts: Sequence[int]) -> float | None:
    """Return one quantile, assuming that values are evenly distributed within a bucket.

    Args:
        share: the quantile as a fraction, 0 to 1.
        bounds: increasing upper bounds of the buckets.
        counts: count of each single bucket, then the count of values above the last bound.

    Returns:
        The value, or None if all counts are 0.
    """
    totals = list(accumulate(counts))
    if not totals[-1]:
        return None
    wanted = share * totals[-1]
    index = bisect_left(totals, wanted)
    while not counts[index]:  # If the share is 0, skip the empty buckets at the beginning.
        index += 1
    if index == len(bounds):
        return bounds[-1]
    low = bounds[index - 1] if index else 0.0
    return low + (bounds[index] - low) * (wanted - (totals[index] - counts[index])) / counts[index]
