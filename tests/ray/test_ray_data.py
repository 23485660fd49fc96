"""Tests the example with Ray Data in the way in which a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import SECONDS_MAX, ray_environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_data.py"


@pytest.mark.slow
def test_example_prints_rows_in_order_and_leaves_no_process():
    pytest.importorskip("pyarrow", reason="needs ray[data]: make ray-tests")
    with ray_environment() as environment:
        ran = subprocess.run(
            [sys.executable, EXAMPLE],
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
            env=environment,
        )
        assert ran.returncode == 0, ran.stderr
        asked = [line.split(".")[0] for line in ran.stdout.splitlines() if line.startswith("Name a river")]
        assert asked == [f"Name a river in {place}" for place in ("Kenya", "Peru", "Norway", "Japan")]
