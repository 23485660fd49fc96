"""Tests the rules and dashboards in examples/observability: metric names exist, and alerts fire only when they should.

The file tests/end_to_end/test_observability.py tests them with a real Prometheus.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from trioserve.metrics.registry import CATALOGUE

EXAMPLE = Path(__file__).parents[1] / "examples" / "observability"
PROMETHEUS = EXAMPLE / "prometheus"
DASHBOARDS = sorted((EXAMPLE / "grafana" / "dashboards").glob("*.json"))
NEEDS_PROMTOOL = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing: apt-get install prometheus"
)
GRID_WIDTH = 24


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def rules(name: str) -> list[dict[str, Any]]:
    return [rule for group in load(PROMETHEUS / "rules" / f"{name}.yml")["groups"] for rule in group["rules"]]


def panels(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["panels"]


def queries(path: Path) -> Iterator[str]:
    for panel in panels(path):
        yield from (target["expr"] for target in panel.get("targets", ()))


# --- rules ---


@NEEDS_PROMTOOL
@pytest.mark.parametrize(
    "words",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "rules/recording.yml", "rules/alerts.yml"),
        ("test", "rules", "tests/recording.yml", "tests/alerts.yml"),
    ],
    ids=" ".join,
)
def test_promtool_accepts_all_files(words):
    ran = subprocess.run(["promtool", *words], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_each_alert_has_a_test_that_it_fires_and_a_test_that_it_stays_silent():
    tested = {test["name"]: test["alert_rule_test"] for test in load(PROMETHEUS / "tests" / "alerts.yml")["tests"]}
    assert list(tested) == [rule["alert"] for rule in rules("alerts")]
    for name, looks in tested.items():
        assert {look["alertname"] for look in looks} == {name}
        assert {bool(look["exp_alerts"]) for look in looks} == {True, False}, name


def test_each_recorded_series_has_a_test():
    text = (PROMETHEUS / "tests" / "recording.yml").read_text(encoding="utf-8")
    expressions = [look["expr"] for test in yaml.safe_load(text)["tests"] for look in test["promql_expr_test"]]
    for rule in rules("recording"):
        assert any(rule["record"] in expression for expression in expressions), rule["record"]


def test_each_alert_has_a_severity_and_an_action():
    for rule in rules("alerts"):
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "action"}, rule["alert"]


# --- names in rules and dashboards ---


def test_every_metric_in_rules_and_dashboards_exists():
    known = {metric.full_name for metric in CATALOGUE}
    known |= {
        f"{metric.full_name}_{part}" for metric in CATALOGUE if metric.buckets for part in ("bucket", "sum", "count")
    }
    known |= {rule["record"] for rule in rules("recording")}
    named = [(path.name, query) for path in DASHBOARDS for query in queries(path)]
    named += [
        (rule.get("alert", rule.get("record")), rule["expr"])
        for name in ("recording", "alerts")
        for rule in rules(name)
    ]
    for where, query in named:
        for name in re.findall(r"[a-z_]+:[a-z_0-9:]+", query):
            assert name in known, f"{where}: there is no {name}"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_variable_of_a_query_is_defined_in_its_dashboard(path):
    variables = [variable["name"] for variable in json.loads(path.read_text())["templating"]["list"]]
    assert variables[0] == "datasource"
    built_in = {"__rate_interval", "__range"}
    used = set(re.findall(r"\$\{?(\w+)", " ".join(queries(path))))
    assert used - built_in <= set(variables)
    assert set(variables[1:]) <= used


# --- dashboards ---


def test_dashboards_have_different_ids():
    identities = [json.loads(path.read_text())["uid"] for path in DASHBOARDS]
    assert sorted(identities) == ["trioserve-pair", "trioserve-router", "trioserve-server"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboard_begins_with_leaked_blocks(path):
    assert panels(path)[0]["type"] == "row"
    assert panels(path)[0]["title"] == "Is anything leaked?"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_has_its_own_position_a_unit_and_a_description(path):
    taken: dict[tuple[int, int], str] = {}
    identities = [panel["id"] for panel in panels(path)]
    assert len(identities) == len(set(identities))
    for panel in panels(path):
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= GRID_WIDTH
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
        if panel["type"] != "row":
            assert panel["description"], panel["title"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["type"] == "state-timeline" or panel["fieldConfig"]["defaults"]["unit"]
            letters = [target["refId"] for target in panel["targets"]]
            assert len(letters) == len(set(letters))


def test_mounted_folders_and_files_exist():
    for service in load(EXAMPLE / "compose.yaml")["services"].values():
        for volume in service["volumes"]:
            here = volume.partition(":")[0]
            assert not here.startswith(".") or (EXAMPLE / here).is_dir(), here
    dashboards = load(EXAMPLE / "grafana" / "provisioning" / "dashboards" / "trioserve.yml")["providers"][0]
    mounts = [volume.split(":")[:2] for volume in load(EXAMPLE / "compose.yaml")["services"]["grafana"]["volumes"]]
    assert ["./grafana/dashboards", dashboards["options"]["path"]] in mounts
    scrape_interval = load(PROMETHEUS / "prometheus.yml")["global"]["scrape_interval"]
    (source,) = load(EXAMPLE / "grafana" / "provisioning" / "datasources" / "prometheus.yml")["datasources"]
    assert source["jsonData"]["timeInterval"] == scrape_interval
