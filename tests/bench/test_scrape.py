"""Tests of the parser of Prometheus' text format, and of differences of histograms."""

from __future__ import annotations

import math

import pytest

from trioserve.bench.runner import HistogramDifference, Scrape

TEXT = """\
# HELP kv_blocks KV blocks by state.
# TYPE kv_blocks gauge
kv_blocks{model_name="a \\"b\\", {c}",state="used"} 3.0
kv_blocks{model_name="a \\"b\\", {c}",state="free"} 4.0
plain 1.5e+06

not a series at all
strange{x="y"} many
seconds_bucket{le="0.1",phase="queued"} 1.0
seconds_bucket{le="+Inf",phase="queued"} 2.0
seconds_bucket{le="0.1",phase="decode"} 10.0
seconds_bucket{le="+Inf",phase="decode"} 20.0
"""


def difference(after: dict[float, float], before: dict[float, float] | None = None) -> HistogramDifference:
    return HistogramDifference.between(before or {}, after)


def test_scraped_value_is_found_by_name_and_labels():
    scrape = Scrape(TEXT)
    assert scrape.total("kv_blocks", state="used") == 3
    assert scrape.total("kv_blocks") == 7
    assert scrape.total("plain") == 1_500_000


def test_missing_series_and_bad_numbers_are_none():
    scrape = Scrape(TEXT)
    assert scrape.total("kv_blocks", state="held") is None
    assert scrape.total("strange") is None
    assert Scrape("").total("plain") is None


def test_buckets_of_several_series_are_added():
    scrape = Scrape(TEXT)
    assert scrape.buckets("seconds", phase="queued") == {0.1: 1, math.inf: 2}
    assert scrape.buckets("seconds") == {0.1: 11, math.inf: 22}
    assert scrape.buckets("other") == {}


def test_histogram_difference_counts_only_events_between_two_scrapes():
    counted = difference({1.0: 5, 2.0: 9, math.inf: 10}, {1.0: 5, 2.0: 6, math.inf: 7})
    assert counted.counts == (0, 3, 0)
    assert counted.count == 3
    assert counted.bound(0.5) == 2.0


@pytest.mark.parametrize(("share", "value"), [(0.25, 0.5), (0.5, 1.0), (0.75, 2.0), (1.0, 3.0)])
def test_quantile_is_interpolated_within_its_bucket(share, value):
    assert difference({1.0: 10, 3.0: 20, math.inf: 20}).quantile(share) == pytest.approx(value)


def test_quantile_above_the_last_finite_bound_is_that_bound():
    counted = difference({1.0: 1, 10.0: 1, math.inf: 100})
    assert counted.quantile(0.99) == 10.0
    assert counted.bound(0.99) == math.inf


def test_empty_histogram_difference_has_no_quantile():
    counted = difference({1.0: 4, math.inf: 4}, {1.0: 4, math.inf: 4})
    assert counted.quantile(0.5) is None
    assert counted.bound(0.5) is None
    assert difference({}).quantile(0.5) is None
