"""Quantiles of the values that a histogram counted since the last call.

The quantiles are computed as Prometheus' histogram_quantile does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from trioserve.metrics.plain_histogram import PlainHistogram

__all__ = ["HistogramWindow"]


class HistogramWindow:
    """The values that a histogram counted between two calls of `take`. Counting itself gets no slower.

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
    while not counts[index]:  # share is 0
        index += 1
    if index == len(bounds):
        return bounds[-1]
    low = bounds[index - 1] if index else 0.0
    return low + (bounds[index] - low) * (wanted - (totals[index] - counts[index])) / counts[index]
