"""Tests the simulation of an image engine: its scripts, and seeds that pass and reach every phase."""

from __future__ import annotations

from collections import Counter

import pytest

from trioserve.contracts.errors import InvalidRequest
from trioserve.simulation.images.plan import Client, Fail, ImagesPlan, ImagesStage
from trioserve.simulation.runs import case_of, runs_of, script_of
from trioserve.simulation.stack.pause_plan import Order, Pause, Resume, Sleep, Wake

EVERYTHING = ImagesPlan(
    ImagesStage(
        schedule_seed=3, slots=2, kept=1, work=4, waiting_max=5, step_seconds=(0.01, 0.02), opening_seconds=0.1
    ),
    (
        Client(number=0, id="a", pictures=2, steps=4, size=2, guided=True, partials=3, pause=0.05),
        Client(number=1, id="b", at=0.02, steps=2, priority=-1, leaves_after=1),
        Client(number=2, id="b", at=0.02, patience=0.03, timeout=0.2, queue_timeout=0.1),
        Fail(at=0.03, id="a"),
        Pause(at=0.04, mode="wait", patience=0.01),
        Resume(at=0.05),
        Order(at=0.06, ids=("b", "nobody")),
        Sleep(at=0.07, level=2),
        Wake(at=0.08),
        Order(at=0.3, drains=True),
        Order(at=0.4, ends_all=True),
    ),
)
MOMENTS = [
    *(f"aborts: {outcome}" for outcome in ("aborted", "already_finished", "unknown")),
    *(f"clients: {what}" for what in ("left early", "client timeout", "read to the end", "got the engine's fault")),
    *(f"clients: refused: {what}" for what in ("draining", "full", "reopening")),
    *(f"ends: {reason}" for reason in ("abort", "deadline", "error", "stop")),
    *(f"pauses: {mode}" for mode in ("abort", "keep", "wait")),
    *(f"steps to {phase}" for phase in ("encode", "denoise", "decode")),
    "engines broken",
    "faults",
    "partial images",
    "preempted",
    "resumes",
    "sleeps: level 2",
    "steps abandoned",
    "wakes: done",
]
# A small number of seeds may not contain these cases.
SELDOM = ("clients: got the engine's fault", "engines broken", "wakes: done")


def test_parsing_a_script_of_image_requests_restores_the_case():
    assert case_of(script_of(EVERYTHING), ImagesPlan) == EVERYTHING


@pytest.mark.parametrize("script", ["", 'client number=0 id="a"', "images schedule_seed=1\nimages schedule_seed=1"])
def test_script_without_stage_first_is_refused(script):
    with pytest.raises(InvalidRequest, match="begins with 'images"):
        case_of(script, ImagesPlan)


@pytest.mark.parametrize("missing", range(len(EVERYTHING.parts) + 1))
def test_image_plan_still_runs_without_some_of_its_parts(missing):
    parts = EVERYTHING.parts[:missing] + EVERYTHING.parts[missing + 1 :]
    for kept in (parts, parts[::-1]):
        assert runs_of("images").run_script(script_of(ImagesPlan(EVERYTHING.stage, kept))).failure is None


def test_seed_gives_the_same_trace_again():
    traces: list[list[str]] = [[], []]
    for trace in traces:
        assert runs_of("images").run_seed(5, 12, trace=trace.append).failure is None
    assert traces[0] == traces[1]
    assert len(traces[0]) > 20


@pytest.mark.parametrize("seed_count", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_image_seeds_pass_and_reach_every_phase(seed_count):
    totals: Counter[str] = Counter()
    for seed in range(seed_count):
        verdict = runs_of("images").run_seed(seed, 12)
        assert verdict.failure is None, (seed, verdict.failure)
        totals.update(verdict.counts)
    assert [moment for moment in MOMENTS if not totals[moment] and (seed_count > 100 or moment not in SELDOM)] == []
