"""Tests that several routers with many endpoints are measured. They do not check CPU times."""

from __future__ import annotations

import argparse
import json
from random import Random

import msgspec
import pytest

from trioserve.bench.inside import router_scale
from trioserve.bench.inside.router_scale import CallTimes, ScaleCase, TimedCore, measured, scale_cases
from trioserve.cli import main
from trioserve.contracts.endpoint import EndpointId, RoutedRequest
from trioserve.router.policies import POLICIES
from trioserve.router.settings import RouterSettings
from trioserve.router.ticket import Ticket
from trioserve.simulation.router.routers_books import RoutersWorld

pytestmark = pytest.mark.slow

NOW = 100.0


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Leave the interpreter unchanged, since it also runs other tests."""
    monkeypatch.setattr(router_scale, "prepare_interpreter", lambda: None)
    monkeypatch.setattr(router_scale, "REQUESTS_MAX", 200)


def test_bench_router_with_routers_measures_every_case(capsys):
    assert main(["bench", "router", "--routers", "2", "--endpoints", "3", "--loads", "0.5", "2"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    cases = json.loads(last)["cases"]
    names = list(dict.fromkeys(case["what"] for case in cases))
    assert names[:2] == ["1 x 3", "2 x 3"]
    assert len(names) == len(set(names)) == 7
    assert [(case["what"], case["load"]) for case in cases] == [(name, load) for name in names for load in (0.5, 2.0)]
    assert len(lines) == 2 + len(cases)
    for case, line in zip(cases, lines[2:], strict=True):
        assert line.startswith(f"{case['what']} ")
        assert case["row"]["requests"] > 50
        assert case["choice_us"] > 0
        assert case["report_us"] > 0
        assert case["core_share"] > 0
        assert case["row"]["wait_p99"] >= case["row"]["wait_p50"] >= 0


def test_router_cases_grow_to_the_requested_size_and_differ_in_one_property():
    names = [case.what for case in scale_cases(16, 1000, policy="round_robin")]
    assert names[:5] == ["1 x 1,000", "4 x 1,000", "16 x 1,000", "16 x 10", "16 x 100"]
    cases = {case.what: case for case in scale_cases(16, 100, policy="round_robin", seed=7)}
    plain = msgspec.structs.asdict(cases["16 x 100"].world)
    assert (plain["policy"], plain["seed"], plain["shares"], plain["reports"]) == ("round_robin", 7, True, "pushed")
    differences = {
        name: {key for key, value in msgspec.structs.asdict(case.world).items() if value != plain[key]}
        for name, case in cases.items()
    }
    assert differences["16 x 100, loads asked for"] == {"reports"}
    assert differences["16 x 100, no peers"] == {"shares"}
    assert differences["16 x 100, a limit of 20"] == {"leases_max"}
    assert [name for name, case in cases.items() if case.busy_weight != 1] == [
        "16 x 100, one router has 3 times the clients"
    ]


def test_single_router_has_no_cases_with_peers():
    assert not any(case.world.shares for case in scale_cases(1, 20, policy="least_loaded"))


def test_refusals_of_a_full_queue_are_counted():
    world = RoutersWorld(endpoints=2, seats=2, leases_max=2, queue_requests_max=3)
    figures = measured(ScaleCase(what="small", world=world), 3.0, seed=1)
    assert figures.row.refused > 0
    assert 0 < figures.refused_share < 1
    assert figures.row.requests + figures.row.refused == sum(
        1 for _ in router_scale.drawn_traffic(Random(1), world, ScaleCase(what="", world=world).traffic(3.0))
    )


def test_busy_endpoints_push_more_reports_than_routers_would_ask_for():
    world = RoutersWorld(endpoints=2, seats=16, leases_max=64)
    counts = {
        reports: measured(
            ScaleCase(what="", world=msgspec.structs.replace(world, reports=reports)), 0.9, seed=1
        ).reports_per_second
        for reports in ("asked", "pushed")
    }
    assert counts["asked"] == pytest.approx(2 / world.report_seconds, rel=0.1)
    assert counts["asked"] < counts["pushed"] <= 2 * 10 * 1.05


def test_router_cost_does_not_include_the_time_of_callbacks(monkeypatch):
    clock = 0

    def perf_counter_ns() -> int:
        nonlocal clock
        clock += 1  # Each read of the clock adds 1, so a call takes 1 plus the time that the test adds.
        return clock

    def changed(ticket: Ticket) -> None:
        nonlocal clock
        clock += 1_000_000

    monkeypatch.setattr("trioserve.bench.inside.router_scale.perf_counter_ns", perf_counter_ns)
    times = CallTimes()
    core = TimedCore(
        RouterSettings(leases_max=1, slow_start_seconds=0),
        POLICIES["least_loaded"],
        times=times,
        on_change=changed,
        rng=Random(0),
    )
    core.add_endpoint(EndpointId("e"), ["m"], NOW)
    core.note_health(EndpointId("e"), True, NOW)
    first, second = (core.enter(RoutedRequest(model="m"), NOW) for _ in range(2))
    core.leave(first, NOW)
    assert second.endpoint == "e"
    assert clock > 1_000_000
    assert len(times.choices) == 1
    assert max((*times.choices, *times.others)) < 10


def test_calls_outside_of_the_measured_time_are_not_counted():
    times = CallTimes()
    times.begins_at, times.ends_at = NOW, NOW + 1
    core = TimedCore(
        RouterSettings(), POLICIES["least_loaded"], times=times, on_change=lambda ticket: None, rng=Random(0)
    )
    for now in (NOW - 1, NOW, NOW + 1):
        core.next_tick(now)
    assert len(times.others) == 1


@pytest.mark.parametrize("words", [("--routers", "0"), ("--endpoints", "0"), ("--loads", "0"), ("--policy", "session")])
def test_settings_that_cannot_be_measured_are_refused(words, capsys):
    parser = argparse.ArgumentParser()
    router_scale.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(words)
    assert words[0] in capsys.readouterr().err
