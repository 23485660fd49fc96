"""Tests of the metrics page that a scraper reads, and of the agreement between the catalogue and the class Metrics."""

from __future__ import annotations

import re

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from trioserve.metrics.metric import PlainHistogram
from trioserve.metrics.registry import CATALOGUE, IMAGE_SERVER_PARTS, Metrics


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.expose().decode())
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[name, tuple(sorted({"model_name": "tiny", "engine": "0", **labels}.items()))]


def test_metric_names_are_unique_and_match_the_kind_of_metric() -> None:
    names = [metric.name for metric in CATALOGUE]
    assert len(names) == len(set(names))
    for metric in CATALOGUE:
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not {metric.full_name} & set(metric.aliases), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name


def test_a_counter_is_shown_under_its_own_name_and_its_vllm_name() -> None:
    metrics = Metrics("tiny")
    metrics.prompt_tokens_total.inc(7)
    assert value(metrics, "trioserve:prompt_tokens_total") == 7
    assert value(metrics, "vllm:prompt_tokens_total") == 7


def test_a_histogram_is_shown_under_its_own_name_and_its_vllm_name() -> None:
    metrics = Metrics("tiny")
    metrics.time_to_first_token_seconds.observe(0.004)
    for prefix in ("trioserve:", "vllm:"):
        name = prefix + "time_to_first_token_seconds"
        assert value(metrics, name + "_count") == 1
        assert value(metrics, name + "_sum") == pytest.approx(0.004)
        assert value(metrics, name + "_bucket", le="0.002") == 0
        assert value(metrics, name + "_bucket", le="0.005") == 1
        assert value(metrics, name + "_bucket", le="+Inf") == 1


@pytest.mark.parametrize(
    ("other", "count"), [("vllm:iteration_tokens_total", 2), ("vllm:time_per_output_token_seconds", 1)]
)
def test_a_histogram_is_shown_under_all_its_aliases(other: str, count: int) -> None:
    metrics = Metrics("tiny")
    metrics.step_tokens.observe(100, 2)
    metrics.inter_token_latency_seconds.observe(0.02)
    assert value(metrics, other + "_count") == count
    assert f"# TYPE {other} histogram" in metrics.expose().decode()


def test_http_metrics_that_vllm_also_has_get_only_the_labels_of_vllm() -> None:
    metrics = Metrics("tiny")
    metrics.http_requests_by_handler_total.labels("/v1/models", "GET", "2xx").inc()
    metrics.http_request_duration_seconds.labels("/v1/models", "GET").observe(0.2)
    shown = samples(metrics)
    labels = (("handler", "/v1/models"), ("method", "GET"))
    assert shown["http_requests_total", (*labels, ("status", "2xx"))] == 1
    assert shown["http_request_duration_seconds_count", labels] == 1
    bounds = {
        dict(labels)["le"]: number
        for (name, labels), number in shown.items()
        if name == "http_request_duration_seconds_bucket"
    }
    assert bounds == {"0.1": 0, "0.5": 1, "1.0": 1, "5.0": 1, "30.0": 1, "+Inf": 1}


def test_only_engine_metrics_have_the_engine_label() -> None:
    for name, labels in samples(Metrics("tiny")):
        is_of_an_engine = name.startswith(("trioserve:num_requests", "vllm:"))
        assert not is_of_an_engine or dict(labels)["engine"] == "0", name
    router = Metrics(None, parts=("frontend", "router"))
    assert all("engine" not in dict(labels) for _name, labels in samples(router))


def test_a_plain_histogram_is_shown_in_the_format_of_prometheus_client() -> None:
    bounds = (0.001, 0.01, 1, 20)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    plain = PlainHistogram("seconds", "Of a thing.", buckets=bounds, registry=ours)
    histogram = Histogram("seconds", "Of a thing.", buckets=bounds, registry=theirs)
    for value, count in ((0.0, 1), (0.001, 2), (0.0011, 3), (1.0, 1), (19.0, 1), (20.5, 4)):
        plain.observe(value, count)
        for _ in range(count):
            histogram.observe(value)
    shown, expected = (
        [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
        for registry in (ours, theirs)
    )
    assert shown == expected


def test_a_plain_histogram_with_labels_is_shown_in_the_format_of_prometheus_client() -> None:
    bounds = (0.1, 1)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    plain = PlainHistogram("seconds", "Of a thing.", ("a", "b"), buckets=bounds, registry=ours)
    histogram = Histogram("seconds", "Of a thing.", ("a", "b"), buckets=bounds, registry=theirs)
    for one in (plain, histogram):
        one.labels("x", "y").observe(0.5)
        one.labels("x", "z").observe(5)
        one.labels("x", "y").observe(0.05)
    shown, expected = (
        [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
        for registry in (ours, theirs)
    )
    assert shown == expected


def test_metrics_without_a_counterpart_in_vllm_have_no_alias() -> None:
    text = Metrics("tiny").expose().decode()
    assert "trioserve:aborts_total" in text
    assert "vllm:aborts_total" not in text


def test_gauges_are_computed_when_the_page_is_scraped() -> None:
    metrics = Metrics("tiny")
    running = 0

    def snapshot() -> None:
        metrics.num_requests_running.set(running)

    metrics.on_scrape(snapshot)
    running = 3
    assert value(metrics, "vllm:num_requests_running") == 3
    running = 1
    assert value(metrics, "trioserve:num_requests_running") == 1


def test_page_equals_the_text_that_prometheus_client_writes() -> None:
    """The texts are equal except for prefixes, aliases and the labels of model and engine."""
    metrics = Metrics(None, parts=("frontend", "router"))
    names = {metric.full_name: metric.name for metric in CATALOGUE if metric.part in ("frontend", "router")}
    for awkward in ('a "b"\\c\nd', "", "é{}=,"):
        metrics.http_requests_total.labels(awkward, "200").inc(1e17)
        metrics.endpoint_leases.labels(awkward).set(float("inf"))
        metrics.http_request_duration_seconds.labels("/v1/models", awkward).observe(0.25)
    for _ in range(2):  # The second page uses the cached text of the first page.
        metrics.queue_wait_seconds.observe(1 / 3)
        metrics.rejections_total.labels("queue_full").inc()
        shown = metrics.expose(part="frontend").decode() + metrics.expose(part="router").decode()
        expected = generate_latest(metrics.registry).decode().splitlines()
        ours = []
        for line in shown.splitlines():
            start, name, rest = re.fullmatch(
                r"(# \w+ )?([\w:]+?)((?:_bucket|_sum|_count)?(?:\{.*|[ ].*))", line
            ).groups()
            if name in names:
                ours.append((start or "") + names[name] + rest)
        assert sorted(ours) == sorted(line for line in expected if "_created" not in line)


def test_page_does_not_show_a_removed_series_from_its_cache() -> None:
    metrics = Metrics(None, parts=("router",))
    for number in range(20):
        metrics.endpoint_leases.clear()
        metrics.endpoint_leases.labels(f"pod-{number}").set(number)
        shown = samples(metrics)
        found = {
            dict(labels)["endpoint"]: value for (name, labels), value in shown.items() if "endpoint_leases" in name
        }
        assert found == {f"pod-{number}": number}


def test_known_label_values_are_shown_before_their_first_event() -> None:
    metrics = Metrics("tiny")
    assert value(metrics, "trioserve:aborts_total", phase="prefill") == 0
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 0
    assert value(metrics, "trioserve:kv_blocks", state="cached") == 0


def test_every_metric_family_has_help_and_type_exactly_once() -> None:
    text = Metrics("tiny", parts=IMAGE_SERVER_PARTS).expose().decode()
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    types = [name for name in types if not name.startswith("process_")]
    assert len(types) == len(set(types)) == len(CATALOGUE) + sum(len(metric.aliases) for metric in CATALOGUE)
    assert "_created" not in text


def test_quotes_in_a_model_name_are_escaped() -> None:
    metrics = Metrics('a "b"\\c')
    labels = next(iter(samples(metrics)))[1]
    assert dict(labels)["model_name"] == 'a "b"\\c'


def test_two_engines_in_one_process_have_separate_counts() -> None:
    first, second = Metrics("tiny"), Metrics("tiny")
    first.generation_tokens_total.inc(5)
    assert value(second, "trioserve:generation_tokens_total") == 0


def test_cancel_to_free_buckets_cover_0_1_ms_to_10_s() -> None:
    metrics = Metrics("tiny")
    metrics.cancel_to_free_seconds.labels("decode").observe(0.00005)
    assert value(metrics, "trioserve:cancel_to_free_seconds_bucket", phase="decode", le="0.0001") == 1
    metrics.cancel_to_free_seconds.labels("decode").observe(9.9)
    assert value(metrics, "trioserve:cancel_to_free_seconds_bucket", phase="decode", le="10.0") == 2


def test_process_metrics_have_the_usual_names() -> None:
    shown = samples(Metrics("tiny"))
    assert shown["process_resident_memory_bytes", ()] > 2**20
    assert [name for name, _labels in shown].count("process_resident_memory_bytes") == 1


def test_buckets_of_cancel_to_free_steps_separate_zero_one_and_more_steps() -> None:
    metrics = Metrics("tiny")
    for steps in (0, 0, 1, 2):
        metrics.cancel_to_free_steps.labels("decode").observe(steps)
    counts = [
        value(metrics, "trioserve:cancel_to_free_steps_bucket", phase="decode", le=bound)
        for bound in ("0.0", "1.0", "2.0")
    ]
    assert counts == [2, 3, 4]
