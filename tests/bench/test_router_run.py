"""Tests small measurements of a router with real processes: the table and the JSON have every figure."""

from __future__ import annotations

import json
import sys

import pytest

from trioserve.bench.router.run import main
from trioserve.bench.server_settings import RouterBenchSettings
from trioserve.contracts.errors import StartupError

SMALL = {
    "requests": 20,
    "concurrency": 4,
    "rounds": 1,
    "output_tokens": 5,
    "endpoints": 2,
    "slots_max": 2,
    "service_seconds": 0.05,
    "burst_seconds": 0.3,
    "bursts": 1,
    "watched": 3,
    "watch_seconds": 0.2,
}


@pytest.mark.slow
def test_small_router_measurement_has_every_figure(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert main(RouterBenchSettings(**SMALL, json_path=str(path), label="small")) == 0
    report = json.loads(path.read_text())
    for each in report["latency"]:
        assert each["through_ms"]["count"] == each["direct_ms"]["count"] == 20
        assert len(each["turns_added_ms"]) == 1
    assert report["throughput"]["requests"] == 20
    assert report["events"]["events"] == 4 * 5
    middle, best = report["figures"]["requests/s through, 4 at a time"]
    assert middle == best > 0
    assert all(each >= 0 for each in report["figures"]["router CPU us per request"])
    if sys.platform.startswith("linux"):
        one, two = report["processes"]
        assert (one["processes"], two["processes"]) == (1, 2)
        assert one["streams"] == two["streams"] == 8 * 4
        assert report["figures"]["events/s by the clock, 2 processes"][0] > 0
    assert [(each["how"], each["endpoints"]) for each in report["watch"]] == [
        ("requested four times a second", 3),
        ("sent once a second", 3),
        ("sent ten times a second", 3),
    ]
    assert all(each["seconds"] >= 0.2 for each in report["watch"])
    held_back, passed_on = report["bursts"]
    assert (held_back["holds_back"], passed_on["holds_back"]) == (True, False)
    for burst in report["bursts"]:
        assert len(burst["endpoints"]) == 2
        served = sum(tenant["served"] for tenant in burst["tenants"])
        assert served == sum(endpoint["served"] for endpoint in burst["endpoints"]) > 0
    assert max(endpoint["depth_max"] for endpoint in held_back["endpoints"]) <= 4
    table = capsys.readouterr().out
    assert table.startswith("small: route with no flags")
    for words in (
        "added p50",
        "requests/s through, 4 at a time",
        "router CPU us per event",
        "3, sent once a second",
        "of its fair share",
    ):
        assert words in table


@pytest.mark.slow
def test_only_chosen_rows_are_measured_and_flags_reach_the_router(capsys):
    assert main(RouterBenchSettings(**SMALL, rows=("throughput",), server_flags=("--policy", "round_robin"))) == 0
    table = capsys.readouterr().out
    assert "route with --policy round_robin" in table
    assert "added p50" not in table
    assert "tenant" not in table


@pytest.mark.slow
def test_router_that_does_not_start_is_reported_with_its_last_log_line(capsys):
    assert main(RouterBenchSettings(**SMALL, server_flags=("--policy", "nothing"))) == 2
    assert 'last line of its log: trioserve: there is no policy "nothing"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "expect"),
    [
        ({"rows": ("latency", "speed")}, "--rows has 'speed'"),
        ({"concurrency": 513}, "--concurrency is 513"),
        ({"burst_load": 0.0}, "burst_load is 0.0"),
        ({"slots_max": 0}, "slots_max is 0"),
    ],
)
def test_router_settings_out_of_range_are_refused_in_one_sentence(wrong, expect):
    with pytest.raises(StartupError, match=expect):
        RouterBenchSettings(**wrong)
