"""Tests that the pages of several processes are joined to one page that a scraper can read."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from trioserve.metrics.registry import Metrics, joined_pages

ONE = b'# HELP a What a is.\n# TYPE a counter\na_total 1.0\n# HELP b B.\n# TYPE b gauge\nb{x="y z"} 2.0\n'
TWO = b'# HELP b B.\n# TYPE b gauge\nb{x="{"} 3.0\n# HELP c C.\n# TYPE c gauge\nc 4.0\n'


def test_each_family_appears_once_and_each_series_has_its_process():
    assert joined_pages({"1": ONE, "2": TWO}, label="process").decode().splitlines() == [
        "# HELP a What a is.",
        "# TYPE a counter",
        'a_total{process="1"} 1.0',
        "# HELP b B.",
        "# TYPE b gauge",
        'b{process="1",x="y z"} 2.0',
        'b{process="2",x="{"} 3.0',
        "# HELP c C.",
        "# TYPE c gauge",
        'c{process="2"} 4.0',
    ]


def test_prometheus_parser_reads_joined_pages_of_a_router():
    pages = {str(number): Metrics(None, parts=("frontend", "router")).expose() for number in (1, 2)}
    families = list(text_string_to_metric_families(joined_pages(pages, label="process").decode()))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert {sample.labels["process"] for sample in family.samples} <= {"1", "2"}
    one = list(text_string_to_metric_families(pages["1"].decode()))
    assert [family.name for family in one] == [family.name for family in families]
