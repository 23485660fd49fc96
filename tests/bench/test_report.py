"""Tests that measurements become figures with units, a table and JSON."""

from __future__ import annotations

import array
import json
import random
import statistics

import pytest

from trioserve.bench.client import Failure, FailureKind
from trioserve.bench.report import (
    BenchReport,
    Figures,
    Measurement,
    Outcome,
    Spread,
    bench_json,
    bench_text,
    figures_notes,
    percentile,
    progress_line,
)


def completed(ttft=0.5, gaps=(0.1, 0.3), tokens=3, **more):
    gaps = array.array("d", gaps)
    return Measurement(
        outcome=Outcome.COMPLETED,
        ttft_seconds=ttft,
        gaps_seconds=gaps,
        e2e_seconds=ttft + sum(gaps),
        prompt_tokens=10,
        output_tokens=tokens,
        **{"counted_by_usage": True, **more},
    )


def failed(kind, code, message="it broke"):
    return Measurement(outcome=Outcome.FAILED, failure=Failure(kind, message, code))


def test_percentiles_agree_with_the_standard_library():
    ordered = sorted(random.Random(3).expovariate(1) for _ in range(501))
    cuts = statistics.quantiles(ordered, n=100, method="inclusive")
    for percent in (1, 50, 90, 99):
        assert percentile(ordered, percent) == pytest.approx(cuts[percent - 1])


@pytest.mark.parametrize(
    "ordered, percent, value",
    [([7.0], 50, 7.0), ([7.0], 99, 7.0), ([1.0, 2.0], 50, 1.5), ([1.0, 2.0, 4.0], 100, 4.0), ([1.0, 2.0], 0, 1.0)],
)
def test_percentiles_of_few_samples_have_their_defined_values(ordered, percent, value):
    assert percentile(ordered, percent) == value


def test_spread_is_in_milliseconds_for_any_order_of_samples():
    spread = Spread.from_seconds([0.003, 0.001, 0.002])
    assert spread is not None
    assert (spread.count, spread.mean, spread.p50, spread.max) == (3, pytest.approx(2.0), 2.0, 3.0)
    assert Spread.from_seconds([]) is None


def test_rates_are_relative_to_the_whole_duration():
    figures = Figures.from_measurements([completed(), completed(tokens=5)], duration_seconds=4.0)
    assert figures.completed_requests_per_second == 0.5
    assert figures.output_tokens_per_second == 2.0
    assert figures.total_tokens_per_second == 7.0
    assert figures.token_chunks == 6


def test_tpot_does_not_depend_on_the_size_of_chunks():
    one_by_one = Figures.from_measurements([completed(gaps=[0.1] * 4, tokens=5)], duration_seconds=1)
    merged = Figures.from_measurements([completed(gaps=[0.2] * 2, tokens=5)], duration_seconds=1)
    assert one_by_one.tpot_ms is not None
    assert merged.tpot_ms is not None
    assert one_by_one.tpot_ms.mean == pytest.approx(merged.tpot_ms.mean) == pytest.approx(100.0)


def test_failures_are_counted_by_name_and_excluded_from_the_figures():
    figures = Figures.from_measurements(
        [
            completed(),
            failed(FailureKind.STATUS, "503", "first words"),
            failed(FailureKind.STATUS, "503", "other words"),
            failed(FailureKind.DISCONNECT, ""),
        ],
        duration_seconds=1.0,
    )
    assert figures.errors == {"status 503": 2, "disconnect": 1}
    assert figures.error_examples == {"status 503": "first words", "disconnect": "it broke"}
    assert (figures.completed_requests, figures.failed_requests, figures.output_tokens) == (1, 3, 3)
    assert (figures.requests_counted_by_usage, figures.requests_counted_by_chunks) == (1, 0)


def test_aborted_and_interrupted_requests_count_with_their_tokens():
    left = Measurement(outcome=Outcome.ABORTED, ttft_seconds=1.0, gaps_seconds=array.array("d", [0.5]), output_tokens=2)
    cut = Measurement(outcome=Outcome.INTERRUPTED, ttft_seconds=2.0, output_tokens=1)
    figures = Figures.from_measurements([left, cut], duration_seconds=1.0)
    assert (figures.aborted_requests, figures.interrupted_requests, figures.failed_requests) == (1, 1, 0)
    assert (figures.output_tokens, figures.requests_counted_by_chunks) == (3, 2)
    assert figures.ttft_ms is not None
    assert figures.itl_ms is not None
    assert (figures.ttft_ms.count, figures.itl_ms.count) == (2, 1)
    assert figures.e2e_ms is None
    assert figures.tpot_ms is None


def test_figures_without_measurements_are_zero_and_have_no_spread():
    figures = Figures.from_measurements([], duration_seconds=0.0)
    assert figures.output_tokens_per_second == 0.0
    assert figures.ttft_ms is None


def test_notes_say_how_tokens_were_counted_and_which_lengths_differ(bench_settings):
    measurements = [completed(), completed(tokens=2, counted_by_usage=False)]
    figures = Figures.from_measurements(measurements, duration_seconds=1.0)
    notes = " ".join(figures_notes(figures, measurements, bench_settings(output_tokens=3), "text"))
    assert "usage for 1 requests, from chunks for 1" in notes
    assert "1 of 2 completed responses do not have the 3 tokens" in notes
    assert "counted as words" in notes


def report(bench_settings, measurements, **changes):
    settings = bench_settings(api_key="secret", **changes)
    figures = Figures.from_measurements(measurements, duration_seconds=2.0)
    return BenchReport(settings=settings, model="m", prompt_mode="ids", figures=figures, notes=["A note."])


def test_report_table_has_every_figure_in_its_column(bench_settings):
    shown = bench_text(
        report(bench_settings, [completed(), failed(FailureKind.STATUS, "429", "slow down")], label="night run")
    )
    lines = shown.splitlines()
    assert lines[0] == "night run: m at http://127.0.0.1:8000, completions over HTTP/1.1"
    assert lines[1].startswith("4 requests, 2 at a time, prompts of 6 tokens, answers of 3 tokens")
    assert "output                         1.5 tokens/s   3 tokens" in lines
    assert "requests                         1 completed, 0 aborted, 1 failed, 0 interrupted" in lines
    header = next(line for line in lines if line.startswith("ms "))
    between = next(line for line in lines if line.startswith("between chunks"))
    assert header.split() == ["ms", "mean", "p50", "p90", "p99", "max", "samples"]
    assert between.split()[-6:] == ["200.00", "200.00", "280.00", "298.00", "300.00", "2"]
    assert len(header) == len(between)
    assert "  1 x status 429: slow down" in lines
    assert lines[-1] == "A note."


def test_report_table_without_responses_has_dashes(bench_settings):
    shown = bench_text(report(bench_settings, [failed(FailureKind.TIMEOUT, "")], rate_per_second=3.0, http=2))
    assert "over HTTP/2" in shown
    assert "3 requests/s at random" in shown
    line = next(line for line in shown.splitlines() if line.startswith("first token"))
    assert line.split()[-6:] == ["-", "-", "-", "-", "-", "0"]


def test_report_json_has_settings_machine_date_and_figures_but_not_the_api_key(bench_settings):
    shown = bench_json(report(bench_settings, [completed()], label="l"))
    content = json.loads(shown)
    assert b"secret" not in shown
    assert b"api_key" not in shown
    assert content["label"] == "l"
    assert content["settings"]["prompt_tokens"] == 6
    assert set(content["machine"]) == {"cpu", "cores", "python", "platform"}
    assert content["machine"]["cores"] >= 1
    assert content["date"].endswith("+00:00")
    assert content["figures"]["ttft_ms"]["p50"] == 500.0
    assert content["figures"]["errors"] == {}


def test_progress_line_has_requests_rate_and_time():
    line = progress_line(done_count=3, request_count=9, output_tokens=50, elapsed_seconds=2.0)
    assert line == "3/9 requests, 25.0 tokens/s, 2 s"
    assert "0.0 tokens/s" in progress_line(done_count=0, request_count=9, output_tokens=0, elapsed_seconds=0.0)
