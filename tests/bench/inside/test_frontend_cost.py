"""Tests that the measurement of the front end counts the events of its clients. They do not check costs."""

from __future__ import annotations

import argparse
import json

import pytest

from trioserve.bench.inside import frontend_cost


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 3, 2), (2, 1, 2), (2, 1, 1)])
def test_an_event_has_a_cost(shape):
    cost = frontend_cost.event_cost(*shape, tokens=(2, 6), rounds=1)
    assert (cost.connection_count, cost.stream_count, cost.http) == shape
    assert cost.engine_us != 0
    assert cost.response_us != 0


@pytest.mark.slow
def test_every_figure_is_in_the_table_and_in_the_json(capsys, monkeypatch):
    monkeypatch.setattr(frontend_cost, "SHAPES", ((1, 2, 2),))
    monkeypatch.setattr(frontend_cost, "TOKENS", (1, 3))
    monkeypatch.setattr(frontend_cost, "SMALL_REQUESTS", 64)
    monkeypatch.setattr(frontend_cost, "prepare_interpreter", lambda: None)
    assert frontend_cost.run(argparse.Namespace(rounds=1)) == 0
    *table, line = capsys.readouterr().out.splitlines()
    costs = json.loads(line)["costs"]
    assert [cost["what"] for cost in costs] == ["event", "small request", "small request"]
    assert len(table) == len(costs) + 1
