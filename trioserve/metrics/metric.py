"""Declaration of a metric, and a histogram in plain Python numbers that is fast enough for every token and request.

A declaration has the question that the metric answers, its unit, meaning, labels and aliases, and the buckets of
histograms.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily

__all__ = ["HistogramWindow", "Label", "Metric", "Part", "PlainHistogram", "Question"]

PREFIX = "trioserve:"
ALIAS_PREFIX = "vllm:"
ROUTER_PREFIX = "trioserve_router:"
ROUTER_ALIAS_PREFIX = "vllm_router:"
Part = Literal["engine", "frontend", "router", "images"]
MODEL_LABEL = "model_name"
"""Label of every series that has a prefix. The label is added when a page is written, so the instruments do not have
it.
"""
ENGINE_LABEL = "engine"
"""Label of every series of an engine, added in the same way. Its value is the engine's number in the process, which is
always 0. Dashboards use this label.
"""


class Label(msgspec.Struct, frozen=True):
    """A label of a metric.

    Attributes:
        name: name of the label.
        values: all values of the label. Each value is shown with a count of zero before its first event. Empty if the
            values depend on the configuration.
    """

    name: str
    values: tuple[str, ...] = ()


class Question(enum.Enum):
    """A question that a metric helps to answer. The documentation groups the metrics by question."""

    LOAD = "How busy is the server?"
    LATENCY = "How fast are responses?"
    STAGES = "Where does the time go?"
    WAITING = "Which requests wait, and for what?"
    SIZES = "How large are requests and responses?"
    ENDS = "How do requests end?"
    CANCELLATION = "Does cancellation work?"
    LEAKS = "Is anything leaked?"
    HANGS = "Does the engine hang or fail?"
    REFUSED = "What is refused?"
    CLIENTS = "Do clients leave or read slowly?"
    CACHE = "Is there room for KV, and does the prefix cache help?"
    SHORTCUTS = "Do speculative decoding and grammars help?"
    ADAPTERS = "Which adapters are used?"
    IMAGES = "What do input images cost?"
    AUDIO = "What do recordings cost?"
    IMAGE_GENERATION = "How does image generation progress?"
    TRANSFERS = "Do KV transfers between engines work?"
    HOST = "Does offloading KV to host memory and files work?"
    SURVIVAL = "Do streams survive server failures?"
    ENDPOINTS = "Are the endpoints healthy?"
    PEERS = "Do routers see each other?"
    STORED = "What is kept after its request?"
    HARDWARE = "Which hardware limit applies?"
    TELEMETRY = "Do logs and traces arrive?"


class Metric(msgspec.Struct, frozen=True):
    """One metric family.

    The field of a class of metrics gives the name and the kind: `step_seconds: Annotated[PlainHistogram, Metric(...)]`.

    Attributes:
        question: question that the metric helps to answer.
        unit: unit of the metric's values.
        meaning: description in the docs and on the page.
        labels: the metric's own labels, in addition to `model_name` and `engine`.
        buckets: upper bounds of a histogram's buckets, increasing, in `unit`. Empty for other kinds.
        vllm: True if the metric is also shown under vLLM's prefix.
        others: further full names under which the metric is shown.
        shown_as: full name that replaces trioserve's name, for tools that expect the name of another program. Such a
            metric has only its own labels.
        part: part of the program that counts the metric.
        name: name without prefix. The unit comes last, and a counter ends in `_total`.
        kind: type of the metric.
    """

    question: Question
    unit: str
    meaning: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    vllm: bool = False
    others: tuple[str, ...] = ()
    shown_as: str | None = None
    part: Part = "engine"
    name: str = ""
    kind: Literal["gauge", "counter", "histogram"] = "gauge"

    @property
    def full_name(self) -> str:
        return self.shown_as or (ROUTER_PREFIX if self.part == "router" else PREFIX) + self.name

    @property
    def aliases(self) -> tuple[str, ...]:
        """Further full names under which the metric is shown."""
        prefix = ROUTER_ALIAS_PREFIX if self.part == "router" else ALIAS_PREFIX
        return (*((prefix + self.name,) if self.vllm else ()), *self.others)


# These buckets range from a token of a small model on a GPU (a millisecond) to a long prompt on a CPU (minutes).
TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10)
WAIT_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
REQUEST_SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
# An abort between steps frees its blocks within microseconds. An abort during a step takes until the end of the step.
# The buckets are fine for both cases.
FREE_SECONDS_AT_ONCE = (0.00001, 0.00002, 0.00003, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005)
FREE_SECONDS_IN_A_STEP = (0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
FREE_SECONDS = (*FREE_SECONDS_AT_ONCE, *FREE_SECONDS_IN_A_STEP, 0.75, 1, 2, 5, 10)
FREE_STEPS = (0, 1, 2, 5)
TOKEN_COUNTS = tuple(digit * 10**zeros for zeros in range(6) for digit in (1, 2, 5))
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICE_COUNTS = (1, 2, 5, 10, 20, 50, 100)
# There are few buckets, because each route and method has its own series. HTTP_SECONDS_FINE is used without labels, so
# it has many buckets.
HTTP_SECONDS = (0.1, 0.5, 1, 5, 30)
HTTP_SECONDS_FINE = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 30, 60, 120, 300)


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
