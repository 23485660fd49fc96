"""Tests for leaks with a short soak run of the real server and the real model. Speed is not tested."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

SOAK_SECONDS_MAX = 300  # The test usually takes about 20 s.

JUDGED = {
    "failed requests",
    "KV blocks used, at the end",
    "KV blocks leased to connectors, at the end",
    "leases of requests, at the end",
    "sequences that run, at the end",
    "sequences that wait, at the end",
    "bytes of bodies, at the end",
    "tasks more than before, at the end",
    "connections more than before, at the end",
    "steps until an aborted request's blocks are free",
}


@pytest.mark.slow
def test_clients_that_leave_at_any_moment_leak_nothing(server, tmp_path: Path):
    path = tmp_path / "soak.json"
    command = (
        f"{sys.executable} -m trioserve bench soak --url {server.url} --json {path} --requests 120 --warmup 20 "
        "--concurrency 20 --output-tokens 12 --long-prompt-tokens 700"
    )
    result = subprocess.run(
        shlex.split(command),
        capture_output=True,
        text=True,
        timeout=SOAK_SECONDS_MAX,
        check=False,
    )
    assert path.exists(), result.stderr
    figures = json.loads(path.read_bytes())["figures"]
    holds = {claim["name"] for claim in figures["claims"] if claim["holds"]}
    assert holds >= JUDGED, result.stdout
    assert figures["left_requests"] > 30
    assert figures["completed_requests"] > 30
    assert all(count > 0 for count in figures["left_by_moment"].values()), result.stdout
    assert sum(phase["aborts"] for phase in figures["cancel_to_free"]) > 10, result.stdout
    assert server.metric('trioserve:kv_blocks{state="used"}') == 0
    assert server.metric("trioserve:live_requests") == 0
