"""Tests that seeds and histories pass that once failed because of a bug or a wrong rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from trioserve.simulation.runs import runs_of

HERE = Path(__file__).resolve().parent
SEED_LINES = [
    line for line in (HERE / "seeds.txt").read_text(encoding="utf-8").splitlines() if not line.startswith("#")
]
HISTORIES = sorted((HERE / "histories").glob("*.txt"))


@pytest.mark.parametrize("line", SEED_LINES)
def test_seed_that_failed_once_passes(line):
    mode, step_count, seed, reason = line.split(" ", 3)
    assert runs_of(mode).run_seed(int(seed), int(step_count)).failure is None, reason


@pytest.mark.parametrize("file", HISTORIES, ids=lambda file: file.stem)
def test_history_that_failed_once_passes(file):
    script = file.read_text(encoding="utf-8")
    first = next(line for line in script.splitlines() if not line.startswith("#"))
    word = first.split()[0]
    mode = {"world": "core", "stage": "stack"}.get(word, word)
    assert runs_of(mode).run_script(script).failure is None
