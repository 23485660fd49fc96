"""What once failed, by a bug or by a rule that was wrong, does not fail any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from trioserve.testing.core_runs import run_core_script, run_core_seed
from trioserve.testing.pair_runs import run_pair_script, run_pair_seed
from trioserve.testing.router_runs import run_router_script, run_router_seed
from trioserve.testing.stack_runs import run_stack_script, run_stack_seed

HERE = Path(__file__).resolve().parent
SEED_LINES = [
    line for line in (HERE / "seeds.txt").read_text(encoding="utf-8").splitlines() if not line.startswith("#")
]
HISTORIES = sorted((HERE / "histories").glob("*.txt"))


@pytest.mark.parametrize("line", SEED_LINES)
def test_a_seed_that_once_failed_holds(line):
    mode, step_count, seed, reason = line.split(" ", 3)
    run = {"core": run_core_seed, "stack": run_stack_seed, "router": run_router_seed, "pair": run_pair_seed}[mode]
    assert run(int(seed), int(step_count)).failure is None, reason


@pytest.mark.parametrize("file", HISTORIES, ids=lambda file: file.stem)
def test_a_history_that_once_failed_holds(file):
    script = file.read_text(encoding="utf-8")
    first = next(line for line in script.splitlines() if not line.startswith("#"))
    runs = {
        "world": run_core_script,
        "stage": run_stack_script,
        "router": run_router_script,
        "pair": run_pair_script,
    }
    assert runs[first.split()[0]](script).failure is None
