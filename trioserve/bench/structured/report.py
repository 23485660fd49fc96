"""The result of a measurement of structured output, as text and as JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

import msgspec

from trioserve.bench.structured.judge import Verdict
from trioserve.bench.structured.plan import ROWS, Row
from trioserve.bench.structured.settings import StructuredBenchSettings

__all__ = ["JudgedSchema", "MeasuredRow", "RoundFigures", "StructuredReport", "report_json", "report_text"]

SHOWN_MAX = 40  # maximum number of failures in the text


class RoundFigures(msgspec.Struct, frozen=True):
    """One row of one round. Counters of the server are None if it does not report them."""

    seconds: float
    tokens: int
    forced_tokens: float | None = None
    mask_rows: float | None = None
    mask_seconds: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class MeasuredRow(msgspec.Struct):
    name: str
    streams: int
    rounds: list[RoundFigures]


class JudgedSchema(msgspec.Struct, frozen=True):
    name: str
    group: str
    verdict: Verdict
    reason: str
    seconds: float
    tokens: int


class StructuredReport(msgspec.Struct):
    """The result. Either its rows or its schemas are empty."""

    settings: StructuredBenchSettings
    model: str
    rows: list[MeasuredRow] = []
    schemas: list[JudgedSchema] = []
    failures: list[str] = []


def report_json(report: StructuredReport) -> bytes:
    settings = msgspec.structs.replace(report.settings, api_key=None)
    return (
        msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(report, settings=settings)), indent=2) + b"\n"
    )


def report_text(report: StructuredReport) -> str:
    lines = [f"structured output of {report.model} at {report.settings.url}"]
    if report.settings.label:
        lines.append(report.settings.label)
    lines.append("")
    lines += _row_lines(report.rows) if report.rows else _schema_lines(report.schemas)
    lines += [f"failed: {failure}" for failure in report.failures[:SHOWN_MAX]]
    return "\n".join(lines) + "\n"


def _row_lines(rows: Sequence[MeasuredRow]) -> list[str]:
    lines = [
        f"{'row':<15}{'streams':>8}{'tokens/s':>10}{'ms/token':>10}{'of free':>9}{'forced':>8}{'mask':>9}{'masks':>11}",
        f"{'':<15}{'':>8}{'':>10}{'a stream':>10}{'text':>9}{'':>8}{'us/row':>9}{'share':>11}",
    ]
    by_name = {row.name: row for row in rows}
    for planned in ROWS:
        if planned.name in by_name:
            lines.append(_row_line(planned, by_name[planned.name], by_name.get(planned.free)))
    lines += ["", "Medians of rounds; `of free text` is the median of each round's own. A mask's share is of one core."]
    return lines


def _row_line(planned: Row, row: MeasuredRow, free: MeasuredRow | None) -> str:
    speed = statistics.median(one.tokens_per_second for one in row.rounds)
    ratio = "" if free is None else f"{ratio_of(row, free):.3f}"
    forced = mask = share = ""
    tokens = sum(one.tokens for one in row.rounds)
    if all(one.forced_tokens is not None for one in row.rounds):
        forced = f"{sum(one.forced_tokens or 0 for one in row.rounds) / max(tokens, 1):.0%}"
    mask_rows = sum(one.mask_rows or 0 for one in row.rounds)
    if mask_rows:
        mask_seconds = sum(one.mask_seconds or 0 for one in row.rounds)
        mask = f"{mask_seconds / mask_rows * 1e6:.0f}"
        share = f"{mask_seconds / sum(one.seconds for one in row.rounds):.1%}"
    milliseconds = row.streams / speed * 1e3
    return f"{row.name:<15}{row.streams:>8}{speed:>10.1f}{milliseconds:>10.2f}{ratio:>9}{forced:>8}{mask:>9}{share:>11}"


def ratio_of(row: MeasuredRow, free: MeasuredRow) -> float:
    """Return the median over the rounds of the ratio of two speeds. A slow moment of the machine affects both.

    Args:
        row: the row.
        free: the row with which it is compared.
    """
    pairs = zip(row.rounds, free.rounds, strict=False)
    return statistics.median(one.tokens_per_second / other.tokens_per_second for one, other in pairs)


def _schema_lines(schemas: Sequence[JudgedSchema]) -> list[str]:
    groups = dict.fromkeys(one.group for one in schemas)
    width = max(8, *(len(group) for group in groups)) + 2
    lines = [f"{'group':<{width}}{'schemas':>9}" + "".join(f"{verdict.name.lower():>10}" for verdict in Verdict)]
    for group in (*groups, *(("all",) if len(groups) > 1 else ())):
        counts = Counter(one.verdict for one in schemas if group in (one.group, "all"))
        lines.append(f"{group:<{width}}{counts.total():>9}" + "".join(f"{counts[verdict]:>10}" for verdict in Verdict))
    slowest = max(schemas, key=lambda one: one.seconds)
    lines += ["", f"slowest: {slowest.name}, {slowest.seconds:.2f} s for {slowest.tokens} tokens"]
    shown = [one for one in schemas if one.verdict not in (Verdict.VALID, Verdict.CUT)]
    lines += [f"{one.verdict.value}: {one.name}: {one.reason}" for one in shown[:SHOWN_MAX]]
    if len(shown) > SHOWN_MAX:
        lines.append(f"... and {len(shown) - SHOWN_MAX} more")
    return lines
