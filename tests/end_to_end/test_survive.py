"""Tests a short survival run: real servers with the real model are killed, and streams must not change."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

RUN_SECONDS_MAX = 400  # The test usually takes about 40 s. Half of this time starts servers.


@pytest.mark.slow
# The timeout of the benchmark must be shorter, so that the benchmark can stop its servers.
@pytest.mark.timeout(RUN_SECONDS_MAX + 30)
def test_streams_are_complete_and_unchanged_while_endpoints_are_killed(tmp_path: Path):
    path = tmp_path / "survive.json"
    # With this seed, the first three kills happen early, and not all at the same time.
    command = (
        f"{sys.executable} -m trioserve bench survive --json {path} --logs {tmp_path} --requests 200 --concurrency 6 "
        "--seed 1635 --output-tokens 32 --period 4 --flags='--batch-invariant --kv-cache-memory 0.2 --threads 1'"
    )
    result = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=RUN_SECONDS_MAX, check=False)
    assert path.exists(), result.stderr
    report = json.loads(path.read_bytes())
    assert result.returncode == 0, result.stdout
    assert report["all_hold"], result.stdout
    assert report["compared"] == 200
    assert sum(report["interruptions"].values()) >= 2, result.stdout
    assert sum(report["continued"].values()) + report["retries"] > 0, "nobody noticed anything"
