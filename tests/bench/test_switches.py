"""Tests of the measurement of models on demand: its report, and one run with real processes."""

from __future__ import annotations

import json

import pytest

from trioserve.bench.server_settings import SwitchSettings
from trioserve.bench.switches import SwitchFigures, SwitchReport, main, switch_text


def test_report_names_lost_requests_and_memory():
    report = SwitchReport(
        settings=SwitchSettings(),
        server=SwitchFigures(
            switch_seconds=[2.0, 4.0], loaded_seconds=[0.1, 0.3], answered=5, left=4, lost={"status 503": 1}
        ),
        peer=SwitchFigures(switch_seconds=[6.0], loaded_seconds=[0.4], answered=9),
        storm_switches=7,
        memory_before_bytes=80 * 2**20,
        memory_after_bytes=81 * 2**20,
        processes_after=0,
    )
    text = switch_text(report)
    assert "| its model has to be loaded | 3.000 | 2.000 | 4.000 |" in text
    assert "| its model is loaded (peer) | 0.400 | 0.400 | 0.400 |" in text
    assert "Storm: 5 answered, 4 clients left, lost: 1 status 503, 7 loads." in text
    assert "Storm at the peer: 9 answered, 0 clients left, lost: none." in text
    assert "80 MiB before the first load, 81 MiB after all unloads; 0 processes of models left." in text


@pytest.mark.slow
def test_measurement_loses_no_request_and_leaves_no_process(tmp_path):
    settings = SwitchSettings(rounds=1, clients=8, output_tokens=2, json_path=str(tmp_path / "report.json"))
    assert main(settings) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    figures = report["server"]
    assert (figures["answered"] + figures["left"], figures["lost"], report["processes_after"]) == (8, {}, 0)
    assert min(figures["switch_seconds"]) > max(figures["loaded_seconds"])
