"""Tests reading the load of other servers from their Prometheus pages."""

from __future__ import annotations

import pytest

from trioserve.contracts.endpoint import EndpointLoad
from trioserve.proxy.endpoint_watch import load_from_metrics

PAGE = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0 1700000000000
vllm:num_requests_waiting{engine="0",model_name="m"} 1e1
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
"""


def test_series_with_the_same_metric_name_are_added_up():
    assert load_from_metrics(PAGE.encode()) == EndpointLoad(running=5, waiting=10, kv_usage=0.25)


def test_metrics_page_may_end_without_a_line_end():
    page = b"llamacpp:requests_processing 1\nllamacpp:requests_deferred 2"
    assert load_from_metrics(page) == EndpointLoad(running=1, waiting=2)


@pytest.mark.parametrize("value", ["+", "-", ".", "e", "1e999", "NaN", "+Inf", "-1", "1.2.3", "0x10", ""])
def test_metrics_page_with_an_invalid_number_gives_no_load(value):
    page = f"vllm:num_requests_running {value}\nvllm:num_requests_waiting 2\n"
    assert load_from_metrics(page.encode()) is None
