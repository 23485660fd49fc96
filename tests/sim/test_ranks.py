"""Tests the simulation of an engine with ranks: its scripts, and seeds that pass and reach every phase of a rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from trioserve.cli import main
from trioserve.contracts.errors import InvalidRequest
from trioserve.simulation.ranks.plan import (
    Abort,
    Client,
    Harm,
    Load,
    RanksPlan,
    RanksStage,
    Swap,
    Unload,
)
from trioserve.simulation.runs import case_of, runs_of, script_of

SEED_COUNT, CLIENT_COUNT = 150, 6
KINDS = ("break", "end", "garble", "hang", "kill", "stop", "stray")
PHASES = ("adapter", "answered", "claim", "look", "masks", "met", "step", "while loading", "write")
MOMENTS = [
    "harm: slow",
    *(f"clients: {what}" for what in ("left early", "client timeout", "read to the end", "got the engine's fault")),
    *(f"clients: refused: {what}" for what in ("no such adapter", "reopening")),
    *(f"ends: {reason}" for reason in ("abort", "deadline", "length", "stop")),
    "engines that did not restart",
    "engines reopened",
    "engines that never opened",
    "left while it ran",
    "loads: no_memory",
    "loads: ready",
    "steps planned ahead",
    *(f"swaps: {outcome}" for outcome in ("abort", "keep", "left", "lost", "recompute", "refused", "reopening")),
    "unloads",
]
PLAN = RanksPlan(
    RanksStage(schedule_seed=3, rank_count=3, far_count=1, mask_seconds=0.01, notice_seconds=0.01, overlaps=True),
    (
        Client(number=0, at=0.0, prompt=(1, 2), output=4, repetition_penalty=1.2, logprobs=2, min_tokens=1, stops=(7,)),
        Client(number=1, at=0.0, prompt=(1, 2), output=12, form=("left", "right"), adapter="a", patience=0.3),
        Abort(number=1, at=0.1),
        Load(name="a", at=0.0),
        Unload(name="a", at=0.2),
        Swap(number=1, at=0.05, in_flight="recompute"),
        Swap(number=2, at=0.05, refused_by=(1,), patience=0.1),
        Harm(kind="kill", rank=2, moment="met", count=2, after=0.003),
    ),
)


@pytest.mark.slow
def test_seeds_of_ranks_pass_and_reach_every_phase() -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEED_COUNT):
        verdict = runs_of("ranks").run_seed(seed, CLIENT_COUNT)
        assert verdict.failure is None, f"seed {seed}: {verdict.failure}"
        counts.update(verdict.counts)
    assert [moment for moment in MOMENTS if not counts[moment]] == []
    harms = [what.removeprefix("harm: ").partition(", ") for what in counts if what.startswith("harm: ")]
    assert {kind for kind, _, _ in harms} == {*KINDS, "refuse", "slow"}
    assert {phase for _, _, phase in harms if phase} == {*PHASES}


def test_parsing_a_script_of_ranks_restores_the_case() -> None:
    assert case_of(script_of(PLAN), RanksPlan) == PLAN
    assert runs_of("ranks").run_script(script_of(PLAN)).failure is None


def test_script_without_stage_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="begins with 'ranks"):
        case_of("abort number=1 at=0.1\n", RanksPlan)


def test_dead_rank_is_named_in_the_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "plan.txt"
    script.write_text(script_of(PLAN), encoding="utf-8")
    assert main(["simulate", "--replay", str(script)]) == 0
    shown = capsys.readouterr().out
    assert "opening 0 failed: rank 2 (on 10.0.0.2) has closed its connection" in shown
    assert shown.endswith("every contract held\n")
