"""The benchmark of the core runs, and its figures belong to what they say. How large they are is not a test."""

from __future__ import annotations

import argparse
import json

import pytest

from trioserve.testing.core_cost import add_arguments, main


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_every_combination_is_measured_and_compared_with_the_shortest_queue(capsys):
    assert main(parsed("--running", "1", "3", "--queued", "2", "9", "--rounds", "1")) == 0
    *table, line = capsys.readouterr().out.splitlines()
    costs = json.loads(line)["costs"]
    assert len(table) == len(costs) + 1
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
def test_what_cannot_be_measured_is_refused(words, capsys):
    with pytest.raises(SystemExit):
        parsed(*words)
    assert words[0] in capsys.readouterr().err
