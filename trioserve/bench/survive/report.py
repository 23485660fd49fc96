"""The report of a survival run, as text and as JSON."""

from __future__ import annotations

import msgspec

from trioserve.bench.report import Machine
from trioserve.bench.survive.settings import SurviveSettings

__all__ = ["SurviveReport", "survive_json", "survive_text"]

NOTES = (
    "The comparison includes text, reasoning, tool calls with their ids, log probabilities, ends and usage, and counts "
    "repetitions. It leaves out the creation time, cached tokens, comments and ids of events.",
    "A pause is the time between two received pieces with events. The wait for the first event is no pause.",
)


class SurviveReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a survival run.

    Attributes:
        kinds: number of requests of each kind.
        undisturbed_failed: failed requests of the run without interruptions.
        undisturbed_failures: examples of those failures.
        failed: failed requests of the run with interruptions.
        lost_before_first_token: failed requests that got no token.
        failures: examples of failures.
        compared: streams that are complete in both runs.
        differing: streams whose content differs between the runs.
        differences: examples of differences.
        left_behind: counts in endpoints and router that are not 0 after the run, by name.
        troubles: interruptions that did not work as planned.
        interruptions: number of interruptions of each kind.
        continued: resumed streams that the router counted, by reason.
        not_continued: streams that the router could not resume, by reason.
        retries: retries before the first token.
        told_streams: streams in which a comment reported a resumption.
        longest_pause_seconds: longest pause of a stream in the run with interruptions.
        longest_pause_request: the request of that stream.
        undisturbed_pause_seconds: longest pause in the other run.
        pauses_seconds: quantiles of the longest pause of each stream.
    """

    settings: SurviveSettings
    date: str
    machine: Machine
    kinds: dict[str, int]
    undisturbed_seconds: float
    disturbed_seconds: float
    undisturbed_failed: int
    undisturbed_failures: list[str]
    failed: int
    lost_before_first_token: int
    failures: list[str]
    compared: int
    differing: int
    differences: list[str]
    left_behind: dict[str, float]
    troubles: list[str]
    interruptions: dict[str, int]
    continued: dict[str, float]
    not_continued: dict[str, float]
    retries: int
    told_streams: int
    longest_pause_seconds: float
    longest_pause_request: str
    undisturbed_pause_seconds: float
    pauses_seconds: dict[str, float]

    @property
    def all_hold(self) -> bool:
        return not (self.failed or self.differing or self.left_behind or self.troubles or self.undisturbed_failed)


def survive_json(report: SurviveReport) -> bytes:
    return (
        msgspec.json.format(msgspec.json.encode({**msgspec.to_builtins(report), "all_hold": report.all_hold})) + b"\n"
    )


def survive_text(report: SurviveReport) -> str:
    settings = report.settings
    title = f"{settings.label}: " if settings.label else ""
    pauses = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in report.pauses_seconds.items())
    lines = [
        f"{title}{settings.requests} streams of {settings.model} over {settings.endpoints} endpoints "
        f"({' '.join(settings.server_flags)}), {settings.concurrency} at a time, seed {settings.seed}",
        f"{report.machine.cpu}, {report.machine.cores} cores, Python {report.machine.python}, {report.date}",
        "",
        _claim("requests lost before their first token", report.lost_before_first_token),
        _claim("streams lost after their first token", report.failed - report.lost_before_first_token),
        _claim(f"streams that differ, of {report.compared}", report.differing),
        _claim("blocks, leases and requests left behind", len(report.left_behind)),
        _claim("failed requests of the undisturbed run", report.undisturbed_failed),
        _claim("interruptions that went wrong", len(report.troubles)),
        "",
        f"{'interruptions':<22}{sum(report.interruptions.values()):>12}: "
        + ", ".join(f"{count} {kind}" for kind, count in report.interruptions.items()),
        f"{'continued':<22}{sum(report.continued.values()):>12.0f}: {_counted(report.continued)}",
        f"{'not continued':<22}{sum(report.not_continued.values()):>12.0f}: {_counted(report.not_continued)}",
        f"{'retried':<22}{report.retries:>12} before the first token",
        f"{'longest pause':<22}{report.longest_pause_seconds:>12.2f} s, of {report.longest_pause_request}",
        f"{'':<22}{report.undisturbed_pause_seconds:>12.2f} s undisturbed",
        f"{'longest of a stream':<22}  {pauses}",
        f"{'duration':<22}{report.disturbed_seconds:>12.1f} s, {report.undisturbed_seconds:.1f} s undisturbed",
        f"{'asked for':<22}  " + ", ".join(f"{count} {kind}" for kind, count in report.kinds.items()),
        *_listed("failed", report.failures),
        *_listed("differs", report.differences),
        *_listed("left behind", [f"{name} {value:g}" for name, value in report.left_behind.items()]),
        *_listed("failed undisturbed", report.undisturbed_failures),
        *_listed("went wrong", report.troubles),
        "",
        *NOTES,
    ]
    return "\n".join(lines) + "\n"


def _claim(name: str, count: int) -> str:
    return f"{'BROKEN' if count else 'holds':<12}{name:<52}{count:>10}"


def _counted(counts: dict[str, float]) -> str:
    return ", ".join(f"{count:.0f} {name}" for name, count in counts.items()) or "none"


def _listed(name: str, lines: list[str]) -> list[str]:
    return [f"{name:<22}  {line}" for line in lines]
