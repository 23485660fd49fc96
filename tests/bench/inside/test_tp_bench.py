"""Tests of the rank measurement with a tiny model in one round: one process and ranks compute the same steps."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from trioserve.bench.inside import tp_bench
from trioserve.bench.inside.command import run_inside
from trioserve.bench.inside.step_bench import Case


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    place = Path(__file__).parents[2] / "model" / "tiny_checkpoints.py"
    spec = importlib.util.spec_from_file_location("tiny_checkpoints", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write_checkpoint(tmp_path, "llama")
    return tmp_path


@pytest.mark.slow
def test_steps_are_measured_in_turns_and_lost_ranks_are_named(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tp_bench, "PROMPT_TOKENS", 32)
    monkeypatch.setattr(tp_bench, "CASES", {"decode": [Case(2, 16)], "prompt": [Case(1, 32, count=32)]})

    def no_engine(*_arguments: Any, **_options: Any) -> None:
        raise AssertionError("no engine is needed")

    assert (
        run_inside(
            ["tp", "--model", str(tiny_model), "--losses", "2"], open_engine=no_engine, open_image_engine=no_engine
        )
        == 0
    )
    assert "named" in capsys.readouterr().out
    arguments = ["tp", "--model", str(tiny_model), "--ranks", "2", "3", "--threads", "2", "--rounds", "1"]
    assert run_inside(arguments, open_engine=no_engine, open_image_engine=no_engine) == 0
    header, decode, prompt = capsys.readouterr().out.splitlines()
    assert "2 threads in all" in header
    for line in (decode, prompt):
        for name in ("one process", "2 ranks", "3 ranks"):
            assert name in line
        assert line.count("of one process's speed") == 2
