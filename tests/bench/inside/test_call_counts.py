"""Tests that the call counts have every flow, and are equal in every run."""

from __future__ import annotations

import argparse
import json

import pytest

from trioserve.bench.inside import call_counts


@pytest.mark.parametrize("flow", call_counts.FLOWS)
def test_flow_has_equal_call_counts_in_every_run(flow):
    first = call_counts.counted(flow)
    assert first.flow == flow
    assert first.calls >= first.functions / call_counts.COUNTED_EVENTS
    assert call_counts.counted(flow) == first


CEILINGS = {
    "prompt in": (240, 227, 75),
    "token out": (75, 82, 35),
    "disconnect": (36, 33, 16),
    "relayed event": (22, 17, 12),
}
"""Most calls, functions and files of each flow. Lower them when a flow gets shorter."""


@pytest.mark.parametrize("flow", call_counts.FLOWS)
def test_number_of_calls_in_a_flow_is_limited(flow):
    counts = call_counts.counted(flow)
    calls, functions, files = CEILINGS[flow]
    assert counts.calls <= calls
    assert counts.functions <= functions
    assert counts.files <= files


def test_flow_of_a_prompt_passes_through_the_expected_packages():
    counts = call_counts.counted("prompt in")
    assert counts.packages >= 5, "from http to core"
    assert counts.files > counts.packages


@pytest.mark.slow
def test_every_flow_is_in_the_table_and_in_the_json(capsys):
    assert call_counts.run(argparse.Namespace(functions=True)) == 0
    *table, line = capsys.readouterr().out.splitlines()
    assert [flow["flow"] for flow in json.loads(line)["flows"]] == list(call_counts.FLOWS)
    assert all(any(row.startswith(flow) for row in table) for flow in call_counts.FLOWS)
