"""The claims of a soak: what the server still holds at the end, its memory, and the latency of clients that stayed."""

from __future__ import annotations

import array
import math
from collections.abc import Sequence

import msgspec

from trioserve.bench.report import Machine, Outcome, Spread, measured_at, percentile, report_json, spread_line
from trioserve.bench.runner import HistogramDifference, Scrape
from trioserve.bench.settings import SoakSettings
from trioserve.bench.soak_plan import LeaveMethod, Moment

__all__ = [
    "NEEDED_SERIES",
    "NOTES",
    "Claim",
    "Ended",
    "Evidence",
    "PhaseFigures",
    "Round",
    "RoundFigures",
    "SoakFigures",
    "SoakReport",
    "is_quiet",
    "missing_series",
    "soak_json",
    "soak_text",
]

MEMORY_CHANGE_MAX = 0.02
MEMORY_SAMPLES_MIN = 10  # minimum number of memory samples in each half of the load
ITL_RATIO_MAX = 1.3
ITL_GAPS_MIN = 1000  # minimum number of gaps of each kind. Ten of 1000 gaps are above the 99th percentile.
STEPS_TO_FREE_MAX = 1
PHASES = ("queued", "prefill", "decode")

MEMORY = "process_resident_memory_bytes"
FREE_SECONDS = "trioserve:cancel_to_free_seconds"
FREE_STEPS = "trioserve:cancel_to_free_steps"
LEFT_BEHIND: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("KV blocks used", "trioserve:kv_blocks", {"state": "used"}),
    ("KV blocks leased to connectors", "trioserve:kv_blocks", {"state": "held"}),
    ("leases of requests", "trioserve:live_requests", {}),
    ("sequences that run", "trioserve:num_requests_running", {}),
    ("sequences that wait", "trioserve:num_requests_waiting", {}),
    ("bytes of bodies", "trioserve:request_body_bytes_held", {}),
)
"""Metrics that must be 0 at the end."""
AS_BEFORE = (("tasks", "trioserve:tasks"), ("connections", "trioserve:connections_open"))
"""Metrics that must be no higher at the end than before the first client: they include the server's own tasks."""

NEEDED_SERIES = (
    *dict.fromkeys(name for _title, name, _labels in LEFT_BEHIND),
    *(name for _title, name in AS_BEFORE),
    f"{FREE_SECONDS}_bucket",
    f"{FREE_STEPS}_bucket",
    "trioserve:aborts_total",
    MEMORY,
)


def missing_series(scrape: Scrape) -> list[str]:
    return [name for name in NEEDED_SERIES if scrape.total(name) is None]


def is_quiet(before: Scrape, now: Scrape) -> bool:
    """Return True if the server has released all resources that the soak used.

    Args:
        before: metrics before the first client.
        now: metrics now.
    """
    return all(claim.holds for claim in _end_claims(before, now))


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one client's request.

    Attributes:
        outcome: how the request ended.
        failure_name: kind of the failure, or None.
        moment: planned moment of leaving. None: the client stays.
        way: planned way of leaving. None: the client stays.
        left: True if the client left as planned. False if its response ended or failed first.
    """

    outcome: Outcome
    failure_name: str | None
    moment: Moment | None
    way: LeaveMethod | None
    left: bool


class Round(msgspec.Struct, frozen=True):
    """Gaps in seconds between the chunks of clients that stayed.

    Attributes:
        soak_gaps: gaps of the slice in which other clients left.
        control_gaps: gaps of the control slice after it.
    """

    soak_gaps: array.array[float]
    control_gaps: array.array[float]


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All observations of a soak.

    Attributes:
        before: metrics of the idle server before the first client.
        warm: metrics after the warm-up.
        end: metrics of the idle server at the end. If it did not become idle in time, the last metrics.
        quiet_seconds: seconds between the last client and `end`.
        memory: pairs of time in seconds and resident bytes.
        rounds: gaps of each round.
        ended: ends of all requests outside of the control.
        control_failed_requests: failed requests of the control.
        unanswered_half_closes: connections that the server did not close after a half-close.
        duration_seconds: duration of the load.
    """

    before: Scrape
    warm: Scrape
    end: Scrape
    quiet_seconds: float
    memory: Sequence[tuple[float, float]]
    rounds: Sequence[Round]
    ended: Sequence[Ended]
    control_failed_requests: int
    unanswered_half_closes: int
    duration_seconds: float


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One claim and its verdict.

    Attributes:
        name: what is claimed.
        holds: True or False. None: there were too few samples to judge.
        allowed: the allowed value, as a short text.
        found: the found value, as a short text.
    """

    name: str
    holds: bool | None
    allowed: str
    found: str


class PhaseFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Times from an abort to free blocks, for requests of one phase. None: there was no abort.

    Milliseconds are interpolated within the server's buckets. Steps are exact.

    Attributes:
        phase: phase of the request at its abort: queued, prefill or decode.
        aborts: number of aborts.
        median_ms: median in milliseconds.
        p99_ms: 99th percentile in milliseconds.
        median_steps: median in steps.
        p99_steps: 99th percentile in steps.
        max_steps: maximum in steps.
    """

    phase: str
    aborts: int
    median_ms: float | None
    p99_ms: float | None
    median_steps: float | None
    p99_steps: float | None
    max_steps: float | None

    @classmethod
    def between(cls, before: Scrape, after: Scrape, phase: str) -> PhaseFigures:
        seconds, steps = (
            HistogramDifference.between(before.buckets(name, phase=phase), after.buckets(name, phase=phase))
            for name in (FREE_SECONDS, FREE_STEPS)
        )
        return cls(
            phase=phase,
            aborts=seconds.count,
            median_ms=_milliseconds(seconds.quantile(0.5)),
            p99_ms=_milliseconds(seconds.quantile(0.99)),
            median_steps=steps.bound(0.5),
            p99_steps=steps.bound(0.99),
            max_steps=steps.bound(1.0),
        )


class RoundFigures(msgspec.Struct, frozen=True, kw_only=True):
    soak_p99_ms: float | None
    control_p99_ms: float | None


class SoakFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures and claims of a soak.

    `left_by_moment` and `left_by_way` count the clients that left as planned. `finished_early_requests` counts the
    clients whose response was complete before they left. Memory is resident memory, as the mean of each half of the
    load after the warm-up.
    """

    duration_seconds: float
    quiet_seconds: float
    requests: int
    completed_requests: int
    left_requests: int
    finished_early_requests: int
    failed_requests: int
    control_failed_requests: int
    errors: dict[str, int]
    left_by_moment: dict[str, int]
    left_by_way: dict[str, int]
    aborts: int
    cancel_to_free: list[PhaseFigures]
    memory_first_half_mib: float | None
    memory_last_half_mib: float | None
    memory_ratio: float | None
    itl_ms: Spread | None
    control_itl_ms: Spread | None
    itl_p99_ratio: float | None
    rounds: list[RoundFigures]
    claims: list[Claim]

    @property
    def all_hold(self) -> bool:
        """True if no claim is broken. Claims that could not be judged are not broken."""
        return all(claim.holds is not False for claim in self.claims)

    @classmethod
    def from_evidence(cls, evidence: Evidence) -> SoakFigures:
        ended = evidence.ended
        left = [one for one in ended if one.left]
        errors: dict[str, int] = {}
        for one in ended:
            if one.failure_name is not None:
                errors[one.failure_name] = errors.get(one.failure_name, 0) + 1
        if evidence.unanswered_half_closes:
            errors["half-close unanswered"] = evidence.unanswered_half_closes
        phases = [PhaseFigures.between(evidence.warm, evidence.end, phase) for phase in PHASES]
        first, last = _halves(evidence.memory)
        memory_ratio = _mean(last) / _mean(first) if first and last else None
        soak_gaps, control_gaps = array.array("d"), array.array("d")
        for one_round in evidence.rounds:
            soak_gaps.extend(one_round.soak_gaps)
            control_gaps.extend(one_round.control_gaps)
        itl, control_itl = Spread.from_seconds(soak_gaps), Spread.from_seconds(control_gaps)
        itl_ratio = itl.p99 / control_itl.p99 if itl and control_itl and control_itl.p99 > 0 else None
        failed = sum(one.outcome is Outcome.FAILED for one in ended)
        claims = [
            _failure_claim(failed + evidence.control_failed_requests + evidence.unanswered_half_closes),
            *_end_claims(evidence.before, evidence.end),
            _memory_claim(memory_ratio, min(len(first), len(last))),
            _latency_claim(itl_ratio, min(len(soak_gaps), len(control_gaps))),
            _steps_claim(phases),
        ]
        return cls(
            duration_seconds=evidence.duration_seconds,
            quiet_seconds=evidence.quiet_seconds,
            requests=len(ended),
            completed_requests=sum(one.outcome is Outcome.COMPLETED and one.moment is None for one in ended),
            left_requests=len(left),
            finished_early_requests=sum(one.outcome is Outcome.COMPLETED and one.moment is not None for one in ended),
            failed_requests=failed,
            control_failed_requests=evidence.control_failed_requests,
            errors=errors,
            left_by_moment={moment.value: sum(one.moment is moment for one in left) for moment in Moment},
            left_by_way={way.value: sum(one.way is way for one in left) for way in LeaveMethod},
            aborts=sum(phase.aborts for phase in phases),
            cancel_to_free=phases,
            memory_first_half_mib=_mean(first) / 2**20 if first else None,
            memory_last_half_mib=_mean(last) / 2**20 if last else None,
            memory_ratio=memory_ratio,
            itl_ms=itl,
            control_itl_ms=control_itl,
            itl_p99_ratio=itl_ratio,
            rounds=[
                RoundFigures(soak_p99_ms=_p99_ms(one.soak_gaps), control_p99_ms=_p99_ms(one.control_gaps))
                for one in evidence.rounds
            ],
            claims=claims,
        )


def _failure_claim(failed: int) -> Claim:
    return Claim(name="failed requests", holds=failed == 0, allowed="0", found=str(failed))


def _end_claims(before: Scrape, end: Scrape) -> list[Claim]:
    claims = []
    for title, name, labels in LEFT_BEHIND:
        value = end.total(name, **labels)
        found = "-" if value is None else f"{value:g}"
        claims.append(Claim(name=f"{title}, at the end", holds=value == 0, allowed="0", found=found))
    for title, name in AS_BEFORE:
        at_first, value = before.total(name) or 0.0, end.total(name)
        claims.append(
            Claim(
                name=f"{title} more than before, at the end",
                holds=value is not None and value <= at_first,
                allowed="0",
                found="-" if value is None else f"{value - at_first:g}",
            )
        )
    return claims


def _memory_claim(ratio: float | None, samples_min: int) -> Claim:
    holds = None
    if ratio is not None and samples_min >= MEMORY_SAMPLES_MIN:
        holds = abs(ratio - 1.0) <= MEMORY_CHANGE_MAX
    return Claim(
        name="resident memory, last half to first",
        holds=holds,
        allowed=f"{1 - MEMORY_CHANGE_MAX:g} to {1 + MEMORY_CHANGE_MAX:g}",
        found="-" if ratio is None else f"{ratio:.4f}",
    )


def _latency_claim(ratio: float | None, gaps_min: int) -> Claim:
    holds = None
    if ratio is not None and gaps_min >= ITL_GAPS_MIN:
        holds = ratio <= ITL_RATIO_MAX
    return Claim(
        name="p99 ITL of survivors, to the control's",
        holds=holds,
        allowed=f"up to {ITL_RATIO_MAX:g}",
        found="-" if ratio is None else f"{ratio:.3f}",
    )


def _steps_claim(phases: Sequence[PhaseFigures]) -> Claim:
    worst = max((phase.max_steps for phase in phases if phase.max_steps is not None), default=None)
    return Claim(
        name="steps until an aborted request's blocks are free",
        holds=None if worst is None else worst <= STEPS_TO_FREE_MAX,
        allowed=f"up to {STEPS_TO_FREE_MAX}",
        found="-" if worst is None else ("more" if math.isinf(worst) else f"{worst:g}"),
    )


def _halves(memory: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return the samples of the first and of the last half of the time."""
    if not memory:
        return [], []
    middle = (memory[0][0] + memory[-1][0]) / 2
    return [value for at, value in memory if at < middle], [value for at, value in memory if at >= middle]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _p99_ms(gaps_seconds: Sequence[float]) -> float | None:
    return 1e3 * percentile(sorted(gaps_seconds), 99) if gaps_seconds else None


NOTES = (
    "Cancel-to-free is the server's own count, from the moment it noticed; times are interpolated within its buckets.",
    "In the control, clients that would leave request only the tokens that they would have received, and stay. Clients "
    "that would leave in the queue or before their body is complete send nothing. ITL is of clients that stay in both, "
    "of whole responses, without the beginning of each slice.",
    "Memory is judged after the warm-up: pages of a KV cache are resident only once they were written, and on a CPU "
    "torch keeps the kernels it has made for each number of tokens in a step.",
)


class SoakReport(msgspec.Struct, frozen=True, kw_only=True):
    """One soak, with all that is needed to read and repeat it."""

    settings: SoakSettings
    model: str
    date: str = msgspec.field(default_factory=measured_at)
    machine: Machine = msgspec.field(default_factory=Machine.here)
    figures: SoakFigures
    notes: tuple[str, ...] = NOTES


def soak_json(report: SoakReport) -> bytes:
    return report_json(report, before={"label": report.settings.label})


def soak_text(report: SoakReport) -> str:
    """Return the report as text: first the claims, then the figures behind them."""
    settings, figures = report.settings, report.figures
    title = f"{settings.label}: " if settings.label else ""
    lines = [
        f"{title}soak of {report.model} at {settings.url}, completions over HTTP/1.1 and HTTP/2",
        f"{settings.requests} requests, {settings.concurrency} at a time, {settings.abort_fraction:.0%} leave, "
        f"prompts up to {settings.prompt_tokens} tokens, a few up to {settings.long_prompt_tokens}, "
        f"responses up to {settings.output_tokens}, seed {settings.seed}",
        f"{report.machine}, {report.date}",
        "",
        f"{'':<12}{'claim':<52}{'found':>10}{'allowed':>16}",
        *(_claim_line(claim) for claim in figures.claims),
        "",
        f"{'duration':<22}{figures.duration_seconds:>12.1f} s, at rest {figures.quiet_seconds:.1f} s later",
        f"{'requests':<22}{figures.requests:>12}: {figures.completed_requests} stayed, {figures.left_requests} left, "
        f"{figures.finished_early_requests} were answered before they left, {figures.failed_requests} failed "
        f"(in the control {figures.control_failed_requests})",
        *_count_lines("left", figures.left_by_moment),
        *_count_lines("left by", figures.left_by_way),
        *_count_lines("failed", figures.errors),
        _memory_line(figures),
        "",
        f"{'cancel to free':<22}"
        + "".join(f"{name:>12}" for name in ("p50 ms", "p99 ms", "p50", "p99", "most", "aborts")),
        *(_phase_line(phase) for phase in figures.cancel_to_free),
        f"{'':<46}{'in steps':>12}",
        "",
        f"{'ITL, ms':<22}" + "".join(f"{name:>12}" for name in ("mean", "p50", "p90", "p99", "max", "samples")),
        spread_line("survivors", figures.itl_ms),
        spread_line("control", figures.control_itl_ms),
        f"{'p99, round by round':<22}" + _rounds(figures),
        "",
        *report.notes,
    ]
    return "\n".join(lines) + "\n"


def _claim_line(claim: Claim) -> str:
    verdict = {True: "holds", False: "BROKEN", None: "not judged"}[claim.holds]
    return f"{verdict:<12}{claim.name:<52}{claim.found:>10}{claim.allowed:>16}"


def _count_lines(name: str, counts: dict[str, int]) -> list[str]:
    return [f"{name:<22}{count:>12} {what}" for what, count in counts.items()]


def _memory_line(figures: SoakFigures) -> str:
    first, last = figures.memory_first_half_mib, figures.memory_last_half_mib
    if first is None or last is None:
        return f"{'resident memory':<22}{'-':>12}"
    return f"{'resident memory':<22}{first:>12.1f} MiB in the first half, {last:.1f} MiB in the last"


def _phase_line(phase: PhaseFigures) -> str:
    def shown(value: float | None, digits: int) -> str:
        return f"{'-':>12}" if value is None else f"{value:>12.{digits}f}"

    times = shown(phase.median_ms, 3) + shown(phase.p99_ms, 3)
    steps = shown(phase.median_steps, 0) + shown(phase.p99_steps, 0) + shown(phase.max_steps, 0)
    return f"  {phase.phase:<20}{times}{steps}{phase.aborts:>12}"


def _rounds(figures: SoakFigures) -> str:
    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.0f}"

    return "  ".join(f"{shown(one.soak_p99_ms)}/{shown(one.control_p99_ms)}" for one in figures.rounds)
