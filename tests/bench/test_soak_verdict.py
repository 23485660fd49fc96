"""Tests that each claim holds for a clean soak, and is broken only by its own observation."""

from __future__ import annotations

import array
import json

import msgspec
import pytest

from trioserve.bench.report import Outcome
from trioserve.bench.runner import Scrape
from trioserve.bench.settings import SoakSettings
from trioserve.bench.soak_plan import LeaveMethod, Moment
from trioserve.bench.soak_verdict import (
    Ended,
    Evidence,
    Round,
    SoakFigures,
    SoakReport,
    missing_series,
    soak_json,
    soak_text,
)

CALM = {
    'trioserve:kv_blocks{state="free"}': 100,
    'trioserve:kv_blocks{state="cached"}': 5,
    'trioserve:kv_blocks{state="used"}': 0,
    'trioserve:kv_blocks{state="held"}': 0,
    "trioserve:live_requests": 0,
    "trioserve:num_requests_running": 0,
    "trioserve:num_requests_waiting": 0,
    "trioserve:request_body_bytes_held": 0,
    "trioserve:tasks": 12,
    "trioserve:connections_open": 1,
    "trioserve:aborts_total": 0,
    "process_resident_memory_bytes": 2**30,
}
STEPS_BUCKET = 'trioserve:cancel_to_free_steps_bucket{{phase="decode",le="{}"}}'
SECONDS_BUCKET = 'trioserve:cancel_to_free_seconds_bucket{{phase="decode",le="{}"}}'


def scrape(
    changes: dict[str, float] | None = None, *, at_once: int = 0, one_step: int = 0, two_steps: int = 0
) -> Scrape:
    total = at_once + one_step + two_steps
    steps = {"0.0": at_once, "1.0": at_once + one_step, "2.0": total, "+Inf": total}
    seconds = {"0.001": at_once, "0.1": total, "+Inf": total}
    series = {
        **CALM,
        **{STEPS_BUCKET.format(bound): count for bound, count in steps.items()},
        **{SECONDS_BUCKET.format(bound): count for bound, count in seconds.items()},
        **(changes or {}),
    }
    return Scrape("".join(f"{name} {value}\n" for name, value in series.items()))


def ended(outcome=Outcome.COMPLETED, *, moment=None, way=None, left=False, failure=None) -> Ended:
    return Ended(outcome=outcome, failure_name=failure, moment=moment, way=way, left=left)


def gaps(seconds: float) -> array.array:
    return array.array("d", [seconds] * 600)


def evidence(**changes) -> Evidence:
    clean = {
        "before": scrape(),
        "warm": scrape(at_once=3, one_step=4),
        "end": scrape(at_once=4, one_step=14),
        "quiet_seconds": 0.2,
        "memory": [(float(second), 1e9) for second in range(40)],
        "rounds": [Round(gaps(0.05), gaps(0.05))] * 2,
        "ended": [ended()] * 3
        + [ended(Outcome.ABORTED, moment=Moment.WAIT, way=LeaveMethod.RESET, left=True)] * 2
        + [ended(moment=Moment.HEAD, way=LeaveMethod.CLOSE)],
        "control_failed_requests": 0,
        "unanswered_half_closes": 0,
        "duration_seconds": 40.0,
    }
    return Evidence(**{**clean, **changes})


def verdicts(figures: SoakFigures) -> dict[str, bool | None]:
    return {claim.name: claim.holds for claim in figures.claims}


def test_every_claim_holds_for_a_clean_soak():
    figures = SoakFigures.from_evidence(evidence())
    assert set(verdicts(figures).values()) == {True}
    assert figures.all_hold
    assert (figures.requests, figures.completed_requests, figures.left_requests) == (6, 3, 2)
    assert figures.finished_early_requests == 1
    assert figures.left_by_moment[Moment.WAIT.value] == figures.left_by_way[LeaveMethod.RESET.value] == 2


@pytest.mark.parametrize(
    ("claim", "changes"),
    [
        ("failed requests", {"ended": [ended(Outcome.FAILED, failure="status 500")]}),
        ("failed requests", {"control_failed_requests": 1}),
        ("failed requests", {"unanswered_half_closes": 1}),
        ("KV blocks used, at the end", {"end": scrape({'trioserve:kv_blocks{state="used"}': 1}, one_step=14)}),
        (
            "KV blocks leased to connectors, at the end",
            {"end": scrape({'trioserve:kv_blocks{state="held"}': 1}, one_step=14)},
        ),
        ("leases of requests, at the end", {"end": scrape({"trioserve:live_requests": 1}, one_step=14)}),
        ("sequences that run, at the end", {"end": scrape({"trioserve:num_requests_running": 1}, one_step=14)}),
        ("sequences that wait, at the end", {"end": scrape({"trioserve:num_requests_waiting": 1}, one_step=14)}),
        ("bytes of bodies, at the end", {"end": scrape({"trioserve:request_body_bytes_held": 1}, one_step=14)}),
        ("tasks more than before, at the end", {"end": scrape({"trioserve:tasks": 13}, one_step=14)}),
        ("connections more than before, at the end", {"end": scrape({"trioserve:connections_open": 2}, one_step=14)}),
        (
            "resident memory, last half to first",
            {"memory": [(float(second), 1e9 if second < 20 else 1.021e9) for second in range(40)]},
        ),
        (
            "resident memory, last half to first",
            {"memory": [(float(second), 1e9 if second < 20 else 0.979e9) for second in range(40)]},
        ),
        ("p99 ITL of survivors, to the control's", {"rounds": [Round(gaps(0.0651), gaps(0.05))] * 2}),
        (
            "steps until an aborted request's blocks are free",
            {"end": scrape(at_once=4, one_step=13, two_steps=1)},
        ),
    ],
)
def test_each_claim_of_a_soak_fails_only_for_its_own_observation(claim, changes):
    figures = SoakFigures.from_evidence(evidence(**changes))
    assert [name for name, holds in verdicts(figures).items() if holds is not True] == [claim]
    assert verdicts(figures)[claim] is False
    assert not figures.all_hold


@pytest.mark.parametrize(
    ("claim", "changes"),
    [
        ("resident memory, last half to first", {"memory": [(float(second), 1e9 + second) for second in range(19)]}),
        ("resident memory, last half to first", {"memory": []}),
        ("p99 ITL of survivors, to the control's", {"rounds": [Round(gaps(0.5), gaps(0.05))]}),
        ("p99 ITL of survivors, to the control's", {"rounds": []}),
        ("steps until an aborted request's blocks are free", {"end": scrape(at_once=3, one_step=4)}),
    ],
)
def test_claim_with_too_few_samples_is_not_judged(claim, changes):
    figures = SoakFigures.from_evidence(evidence(**changes))
    assert verdicts(figures)[claim] is None
    assert figures.all_hold


def test_metrics_that_are_missing_at_the_end_break_their_claims():
    figures = SoakFigures.from_evidence(evidence(end=Scrape("")))
    broken = [name for name, holds in verdicts(figures).items() if holds is False]
    assert len(broken) == 8  # Every claim about the final state fails.


def test_cancel_to_free_claim_counts_only_aborts_after_the_warmup():
    figures = SoakFigures.from_evidence(evidence())
    decode = next(phase for phase in figures.cancel_to_free if phase.phase == "decode")
    assert decode.aborts == 11  # One abort frees its blocks at once, and ten aborts free them after one step.
    assert (decode.median_steps, decode.p99_steps, decode.max_steps) == (1, 1, 1)
    assert decode.median_ms == pytest.approx(1 + 99 * 4.5 / 10)
    assert figures.aborts == 11
    queued = figures.cancel_to_free[0]
    assert (queued.aborts, queued.median_ms, queued.median_steps) == (0, None, None)


def test_every_needed_series_is_reported_as_missing():
    assert missing_series(scrape()) == []
    without = Scrape("".join(f"{name} 0\n" for name in CALM if "tasks" not in name))
    assert missing_series(without)[0] == "trioserve:tasks"
    assert "trioserve:cancel_to_free_steps_bucket" in missing_series(without)


def report(**changes) -> SoakReport:
    figures = SoakFigures.from_evidence(evidence(**changes))
    return SoakReport(settings=SoakSettings(api_key="secret", label="night"), model="m", figures=figures)


def test_soak_table_has_every_claim_and_its_verdict():
    shown = soak_text(report(control_failed_requests=1, memory=[]))
    lines = shown.splitlines()
    assert lines[0].startswith("night: soak of m at http://127.0.0.1:8000")
    assert any(line.startswith("BROKEN      failed requests") for line in lines)
    assert any(line.startswith("not judged  resident memory") for line in lines)
    assert any(line.startswith("holds       KV blocks used") for line in lines)
    decode = next(line for line in lines if line.startswith("  decode"))
    assert decode.split() == ["decode", "45.550", "98.911", "1", "1", "1", "11"]
    assert next(line for line in lines if line.startswith("survivors")).split()[-1] == "1200"
    assert "50/50  50/50" in shown


def test_soak_json_has_claims_and_figures_but_not_the_api_key():
    shown = soak_json(report())
    content = json.loads(shown)
    assert b"secret" not in shown
    assert b"api_key" not in shown
    assert {claim["holds"] for claim in content["figures"]["claims"]} == {True}
    assert content["figures"]["memory_ratio"] == 1.0
    assert content["figures"]["itl_p99_ratio"] == 1.0
    assert content["settings"]["requests"] == 10_000
    assert content["label"] == "night"
    assert msgspec.json.decode(shown) == content
