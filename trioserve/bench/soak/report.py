"""The verdict of a soak, as text and as JSON."""

from __future__ import annotations

import datetime
from typing import Any

import msgspec

from trioserve.bench.report import Machine, spread_line
from trioserve.bench.soak.settings import SoakSettings
from trioserve.bench.soak.verdict import Claim, PhaseFigures, SoakFigures

__all__ = ["NOTES", "SoakReport", "soak_json", "soak_text"]

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
    date: str
    machine: Machine
    figures: SoakFigures
    notes: tuple[str, ...] = NOTES

    @classmethod
    def now(cls, settings: SoakSettings, *, model: str, figures: SoakFigures) -> SoakReport:
        return cls(
            settings=settings,
            model=model,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            machine=Machine.here(),
            figures=figures,
        )


def soak_json(report: SoakReport) -> bytes:
    """Return the report as indented JSON, without the API key. The name of every figure contains its unit.

    Args:
        report: the report.
    """
    settings: dict[str, Any] = msgspec.structs.asdict(report.settings)
    del settings["api_key"]
    content = {"label": report.settings.label, **msgspec.structs.asdict(report), "settings": settings}
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def soak_text(report: SoakReport) -> str:
    """Return the report as text: first the claims, then the figures behind them.

    Args:
        report: the report.
    """
    settings, figures = report.settings, report.figures
    title = f"{settings.label}: " if settings.label else ""
    lines = [
        f"{title}soak of {report.model} at {settings.url}, completions over HTTP/1.1 and HTTP/2",
        f"{settings.requests} requests, {settings.concurrency} at a time, {settings.abort_fraction:.0%} leave, "
        f"prompts up to {settings.prompt_tokens} tokens, a few up to {settings.long_prompt_tokens}, "
        f"answers up to {settings.output_tokens}, seed {settings.seed}",
        f"{report.machine.cpu}, {report.machine.cores} cores, Python {report.machine.python}, {report.date}",
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
