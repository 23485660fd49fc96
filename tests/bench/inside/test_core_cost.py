"""Tests that the measurement of the core runs and names its figures correctly.

They do not check the size of the figures.
"""

from __future__ import annotations

import argparse
import json
from types import ModuleType

import pytest

from trioserve.bench.inside import core_cost, delivery_cost


@pytest.fixture(autouse=True)
def unprepared(monkeypatch):
    """Leave the interpreter unchanged, since it also runs other tests."""
    for module in (core_cost, delivery_cost):
        monkeypatch.setattr(module, "prepare_interpreter", lambda: None)


def parsed(module: ModuleType, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.slow
def test_delivery_benchmark_reports_a_cost_for_each_part(capsys, monkeypatch):
    monkeypatch.setattr(delivery_cost, "SHAPES", ((0, 2), (5, 3)))
    assert delivery_cost.run(parsed(delivery_cost, "--rounds", "1")) == 0
    delivery = json.loads(capsys.readouterr().out.splitlines()[-1])
    steps = [(step["readers"], step["running_count"], step["queued_count"]) for step in delivery["steps"]]
    assert steps == [("plain", 2, 0), ("plain", 3, 5), ("chat", 2, 0), ("chat", 3, 5)]
    for step in delivery["steps"]:
        assert min(step[part] for part in ("schedule_us", "update_us", "deliver_us", "readers_us")) > 0
        assert step["step_count"] == 8
    assert [hand_off["sample_count"] for hand_off in delivery["hand_offs"]] == [100, 100]
    for hand_off in delivery["hand_offs"]:
        assert 0 < hand_off["median_us"] <= hand_off["p99_us"]


@pytest.mark.slow
def test_every_queue_length_is_compared_with_the_shortest_queue(capsys):
    assert core_cost.run(parsed(core_cost, "--running", "1", "3", "--queued", "2", "9", "--rounds", "1")) == 0
    *table, line = capsys.readouterr().out.splitlines()
    costs = json.loads(line)["costs"]
    assert len([row for row in table if row.startswith(("step", "abort"))]) == len(costs)
    queue = [cost for cost in costs if cost["held_count"] is None]
    places = {(cost["what"], cost["running_count"], cost["queued_count"]) for cost in queue}
    kinds = {"step", "abort head", "abort middle", "abort tail", "abort running"}
    assert places == {(kind, running, queued) for kind in kinds for running in (1, 3) for queued in (2, 9)}
    assert [cost["held_count"] for cost in costs if cost["held_count"] is not None] == [1, 10, 100, 1000]
    for cost in costs:
        assert cost["ratio"] > 0
        assert cost["median_us"] > 0
        if cost["queued_count"] == 2 and cost["held_count"] in (None, 1):
            assert cost["ratio"] == 1.0


@pytest.mark.parametrize("words", [("--rounds", "0"), ("--running", "0"), ("--queued", "-1"), ("--rounds", "x")])
def test_settings_that_cannot_be_measured_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        parsed(core_cost, *words)
    assert words[0] in capsys.readouterr().err
