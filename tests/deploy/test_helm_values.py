"""Tests of the chart's values: a misspelt or wrong value is refused by name, and each value has a meaning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from trioserve.config import Config
from trioserve.model.settings import MAX_NUM_SEQS_CPU
from trioserve.options.engine import RANKS_MAX
from trioserve.options.option import options_of
from trioserve.router.policies import POLICIES

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "trioserve"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
OF_HELM = {"global"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("router.replica=3", "'/router': additional properties 'replica' not allowed"),
        ("routers.replicas=3", "additional properties 'routers' not allowed"),
        ("engine.autoscaling.min=3", "'/engine/autoscaling': additional properties 'min' not allowed"),
        ("router.replicas=0", "'/router/replicas': minimum: got 0, want 1"),
        ("router.replicas=two", "'/router/replicas': got string, want integer"),
        ("engine.autoscaling.kind=vpa", "'/engine/autoscaling/kind': value must be one of 'none', 'hpa', 'keda'"),
        ("drainSeconds=-1", "'/drainSeconds': minimum: got -1, want 0"),
        ("networkPolicy.enabled=yes", "'/networkPolicy/enabled': got string, want boolean"),
        ("router.service.port=80000", "'/router/service/port': maximum: got 80,000, want 65,535"),
        ("engine.extraArgs={max-num-seqs}", "'/engine/extraArgs/0': 'max-num-seqs' does not match pattern"),
        ("engine.model=", "'/engine/model': minLength: got 0, want 1"),
        ("engine.resources.requests.cpu=null", "'/engine/resources/requests': missing property 'cpu'"),
        ("engine.cache.sizeLimit=20gigs", "'/engine/cache/sizeLimit': '20gigs' does not match pattern"),
        ("engine.extraArgs={--port=9000}", "engine.extraArgs: --port is set by the chart"),
        ("router.extraArgs={--api-key=x}", "router.extraArgs: --api-key belongs in a Secret"),
        ("engine.extraArgs={--nnodes=2}", "engine.extraArgs: --nnodes is set by the chart"),
        ("engine.extraArgs={--ranks-key=x}", "engine.extraArgs: --ranks-key belongs in a Secret"),
        ("engine.nodes=0", "'/engine/nodes': minimum: got 0, want 1"),
        (
            "engine.nodes=2",
            "engine.tensorParallelSize is 1, but engine.nodes is 2: give each node the same number of ranks",
        ),
        ("engine.nodes=2,engine.tensorParallelSize=3", "such as 2 in all"),
        (
            "engine.nodes=2,engine.tensorParallelSize=2,engine.pipelineParallelSize=3",
            "engine.pipelineParallelSize is 3, but engine.nodes is 2: give each node the same number of stages",
        ),
        (
            "engine.nodes=2,engine.tensorParallelSize=4",
            'engine.nodes is 2: name a Secret with "ranks-key" in engine.ranksKeySecret',
        ),
        (
            "engine.tensorParallelSize=4,engine.resources.limits.nvidia\\.com/gpu=2",
            "engine.resources.limits: nvidia.com/gpu is 2, but a pod has 4 ranks, and each needs one",
        ),
        (
            "engine.nodes=2,engine.tensorParallelSize=2,engine.ranksKeySecret=ranks,engine.cache.claim.create=true,"
            "engine.cache.claim.accessModes={ReadWriteOnce}",
            "engine.cache.claim.accessModes: the pods of an engine on 2 nodes need ReadWriteMany",
        ),
        (
            "router.autoscaling.enabled=true,router.autoscaling.minReplicas=9",
            "router.autoscaling: minReplicas is 9, which is more than maxReplicas (6)",
        ),
        (
            "engine.cache.existingClaim=mine,engine.cache.claim.create=true",
            "engine.cache: give existingClaim or claim.create, not both",
        ),
    ],
)
def test_chart_error_names_the_wrong_value(helm, value, message):
    ran = helm("template", "trioserve", CHART, "--set", value)
    assert ran.returncode != 0
    assert message in ran.stderr


def names(values: dict[str, Any], schema: dict[str, Any], place: str = "") -> Iterator[tuple[str, set[str], set[str]]]:
    """For each map of the schema, yield its path, the names in the values, and the names in the schema."""
    yield place, set(values), set(schema["properties"]) - OF_HELM
    for name, value in values.items():
        known = schema["properties"][name]
        if isinstance(value, dict) and "properties" in known:
            yield from names(value, known, f"{place}/{name}")


def test_schema_and_values_have_the_same_names():
    places = list(names(yaml.safe_load((CHART / "values.yaml").read_text()), SCHEMA))
    assert len(places) > 10
    for place, there, known in places:
        assert there == known, place


def test_no_map_of_the_schema_accepts_unknown_names():
    def maps(schema: Any) -> Iterator[dict[str, Any]]:
        for child in schema.values() if isinstance(schema, dict) else ():
            yield from maps(child)
        if isinstance(schema, dict) and "properties" in schema and schema.get("type") == "object":
            yield schema

    assert all(schema["additionalProperties"] is False for schema in maps(SCHEMA))


def test_flags_reserved_by_the_chart_exist():
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    kept = {name for words in re.findall(r'splitList " " "([a-z -]+)"', helpers) for name in words.split()}
    assert "drain-timeout" in kept
    assert {name.replace("-", "_") for name in kept} <= options_of(Config).keys()


def test_default_values_of_the_chart_are_those_of_the_program():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["drainSeconds"] == Config().drain_timeout
    assert values["engine"]["model"] == Config().model
    assert values["engine"]["tensorParallelSize"] == Config().tensor_parallel_size
    assert values["engine"]["pipelineParallelSize"] == Config().pipeline_parallel_size
    assert values["engine"]["nodes"] == Config().nnodes
    assert SCHEMA["definitions"]["ranks"]["maximum"] == RANKS_MAX
    assert values["router"]["policy"] == Config().policy
    assert values["router"]["policy"] in POLICIES
    assert values["engine"]["autoscaling"]["requestsPerEngine"] <= MAX_NUM_SEQS_CPU


@pytest.mark.slow
def test_chart_accepts_the_values_in_the_documents(helm, tmp_path):
    page = (CHART.parents[2] / "docs" / "guides" / "kubernetes.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        (tmp_path / "values.yaml").write_text(block)
        ran = helm("template", "llm", CHART, "--values", tmp_path / "values.yaml")
        assert ran.returncode == 0, ran.stderr
    named = re.findall(r"--set (\S+)", page)
    assert len(named) == 2
    ran = helm("template", "llm", CHART, *(word for pair in named for word in ("--set", pair)))
    assert ran.returncode == 0, ran.stderr
