"""Quantiles of what a histogram has counted since somebody looked last, as Prometheus' histogram_quantile has them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from trioserve.metrics.plain_histogram import PlainHistogram

__all__ = ["HistogramWindow"]


class HistogramWindow:
    """From one look to the next. Costs nothing between them."""

    def __init__(self, histogram: PlainHistogram) -> None:
        self._histogram = histogram
        self._seen = histogram.counts()

    def take(self, shares: Sequence[float]) -> list[float | None]:
        """The quantiles of these shares (0.5: the median) since the last look, from the buckets' bounds; None where
        nothing was counted. What lies beyond the last bound counts as that bound."""
        counts = self._histogram.counts()
        new = [count - seen for count, seen in zip(counts, self._seen, strict=True)]
        self._seen = counts
        return [quantile(share, self._histogram.bounds, new) for share in shares]


def quantile(share: float, bounds: Sequence[float], counts: Sequence[int]) -> float | None:
    """counts: of each bucket by itself, and of what lies beyond the last bound. Inside of a bucket values are taken to
    lie evenly."""
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
