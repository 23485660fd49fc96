"""Tests of the bursts: plans from a seed, fair shares, waits and refusals."""

from __future__ import annotations

import pytest

from trioserve.bench.router.fake_endpoint import DepthFigures
from trioserve.bench.router.report import burst_figures, burst_plan, fair_shares
from trioserve.bench.router.socket_load import Asked
from trioserve.bench.server_settings import RouterBenchSettings


@pytest.mark.parametrize(
    ("demands", "capacity", "expect"),
    [
        ([10, 10], 10, [5, 5]),
        ([2, 100], 10, [2, 8]),
        ([100, 2], 10, [8, 2]),
        ([1, 4, 100], 12, [1, 4, 7]),
        ([3, 3], 10, [3, 3]),
        ([0, 5], 0, [0, 0]),
    ],
)
def test_fair_share_is_the_demand_or_an_equal_share_of_the_remaining_capacity(demands, capacity, expect):
    assert fair_shares(demands, capacity) == expect


def settings(**changes: object) -> RouterBenchSettings:
    return RouterBenchSettings(**{"burst_seconds": 5.0, "bursts": 2, **changes})


@pytest.mark.slow
def test_burst_plan_alternates_between_twice_the_capacity_and_a_rest():
    chosen = settings(burst_seconds=20.0)
    plan = burst_plan(chosen)
    for begin in (0.0, 40.0):
        burst = [each for each in plan if begin <= each.at_seconds < begin + 20.0]
        assert len(burst) / 20.0 == pytest.approx(2 * chosen.capacity_per_second, rel=0.05)
        rest = [each for each in plan if begin + 20.0 <= each.at_seconds < begin + 40.0]
        assert {each.key for each in rest} == {0}
        assert len(rest) / 20.0 == pytest.approx(0.25 * chosen.capacity_per_second, rel=0.1)


def test_burst_plan_depends_only_on_the_seed():
    moments = [[each.at_seconds for each in burst_plan(settings(seed=seed))] for seed in (1, 1, 2)]
    assert moments[0] == moments[1] != moments[2]


def test_figures_have_waits_refusals_and_shares_of_each_tenant():
    asked = [
        *[Asked(0, "", 0.3)] * 3,
        Asked(0, "429 queue_full", 0.001),
        *[Asked(1, "", 1.2)] * 9,
        *[Asked(1, "429 queue_wait_over", 2.0)] * 11,
    ]
    depths = [DepthFigures(depth_max=3, depth_mean=1.0, served=6), DepthFigures(depth_max=4, depth_mean=2.0, served=6)]
    figures = burst_figures(settings(), asked, depths, holds_back=True)
    steady, bursting = figures.tenants
    assert (steady.asked, steady.served, steady.refused) == (4, 3, {"429 queue_full": 1})
    assert steady.wait_ms.p50 == pytest.approx(100.0)
    assert steady.of_fair_share == pytest.approx(3 / 4)
    assert (bursting.asked, bursting.served, bursting.refused) == (20, 9, {"429 queue_wait_over": 11})
    assert bursting.wait_ms.max == pytest.approx(1000.0)
    assert bursting.of_fair_share == pytest.approx(9 / 8)
    assert (figures.depth_max, figures.depth_mean) == (4, 1.5)


def test_tenant_without_responses_has_no_wait():
    figures = burst_figures(settings(), [Asked(1, "503 no_endpoint", 0.1)], [], holds_back=False)
    steady, bursting = figures.tenants
    assert (steady.wait_ms, steady.of_fair_share) == (None, 1.0)
    assert (bursting.wait_ms, bursting.refused) == (None, {"503 no_endpoint": 1})
    assert "--endpoint-max-requests" in figures.flags
