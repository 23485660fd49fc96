"""The figures of a measurement with their units, and their output as text and JSON."""

from __future__ import annotations

import array
import datetime
import enum
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from trioserve.bench.client import Failure
from trioserve.bench.settings import BenchSettings

__all__ = [
    "BenchReport",
    "Figures",
    "Machine",
    "Measurement",
    "Outcome",
    "Spread",
    "bench_json",
    "bench_text",
    "figures_notes",
    "measured_at",
    "percentile",
    "progress_line",
    "report_json",
    "spread_line",
]


class Outcome(enum.Enum):
    COMPLETED = "completed"
    ABORTED = "aborted"  # The client disconnected as planned.
    FAILED = "failed"
    INTERRUPTED = "interrupted"  # The measurement ended while the request ran.


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """The measured times and tokens of one request. A time is in seconds, or None if its event did not happen.

    Attributes:
        outcome: how the request ended.
        failure: reason why the request failed. None: it did not fail.
        ttft_seconds: time to the first chunk with tokens. It begins at the start of the request, and in an open loop at
            the planned arrival.
        gaps_seconds: times between successive chunks with tokens.
        e2e_seconds: time from the start to the last byte.
        prompt_tokens: tokens of the prompt.
        output_tokens: tokens of the response. They are from the server's usage if `counted_by_usage` is True, otherwise
            from the chunks.
        cached_prompt_tokens: prompt tokens from the prefix cache. None: the server did not report them.
        counted_by_usage: True if the server sent usage.
    """

    outcome: Outcome
    failure: Failure | None = None
    ttft_seconds: float | None = None
    gaps_seconds: array.array[float] = msgspec.field(default_factory=lambda: array.array("d"))
    e2e_seconds: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_prompt_tokens: int | None = None
    counted_by_usage: bool = False


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one quantity over all of its samples. The name of the field with this object has the unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def from_seconds(cls, samples_seconds: Sequence[float]) -> Spread | None:
        """Return statistics in milliseconds, or None if there are no samples."""
        if not samples_seconds:
            return None
        ordered = sorted(samples_seconds)
        return cls(
            count=len(ordered),
            mean=1e3 * sum(ordered) / len(ordered),
            p50=1e3 * percentile(ordered, 50),
            p90=1e3 * percentile(ordered, 90),
            p99=1e3 * percentile(ordered, 99),
            max=1e3 * ordered[-1],
        )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated linearly between two samples.

    Args:
        ordered: at least one sample, in ascending order.
        percent: 0 to 100.
    """
    position = (len(ordered) - 1) * percent / 100.0
    lower = int(position)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (ordered[upper] - ordered[lower]) * (position - lower)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of all requests. Failed requests count only as errors.

    Tokens per second are over the whole duration, with ramp-up and the last responses. ITL is the gap between two
    chunks. TPOT of a completed request is (last chunk - first chunk) / (tokens - 1), which does not depend on how a
    server divides tokens into chunks. TTFT and ITL include aborted requests.
    """

    duration_seconds: float
    completed_requests: int
    aborted_requests: int
    failed_requests: int
    interrupted_requests: int
    completed_requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    output_tokens: int
    prompt_tokens: int
    cached_prompt_tokens: int | None
    token_chunks: int
    requests_counted_by_usage: int
    requests_counted_by_chunks: int
    ttft_ms: Spread | None
    itl_ms: Spread | None
    tpot_ms: Spread | None
    e2e_ms: Spread | None
    errors: dict[str, int]
    error_examples: dict[str, str]

    @classmethod
    def from_measurements(cls, measurements: Sequence[Measurement], *, duration_seconds: float) -> Figures:
        outcomes = Counter(measurement.outcome for measurement in measurements)
        counted = [one for one in measurements if one.outcome is not Outcome.FAILED]
        completed = [one for one in counted if one.outcome is Outcome.COMPLETED]
        errors: Counter[str] = Counter()
        examples: dict[str, str] = {}
        for one in measurements:
            if one.failure is not None:
                errors[one.failure.name] += 1
                examples.setdefault(one.failure.name, one.failure.message)
        gaps = array.array("d")
        for one in counted:
            gaps.extend(one.gaps_seconds)
        output_tokens = sum(one.output_tokens for one in counted)
        prompt_tokens = sum(one.prompt_tokens for one in counted)
        cached = [one.cached_prompt_tokens for one in counted if one.cached_prompt_tokens is not None]
        by_usage = sum(one.counted_by_usage for one in counted)
        seconds = max(duration_seconds, 1e-9)  # If the duration is 0, no request was measured.
        ttfts = [one.ttft_seconds for one in counted if one.ttft_seconds is not None]
        return cls(
            duration_seconds=duration_seconds,
            completed_requests=outcomes[Outcome.COMPLETED],
            aborted_requests=outcomes[Outcome.ABORTED],
            failed_requests=outcomes[Outcome.FAILED],
            interrupted_requests=outcomes[Outcome.INTERRUPTED],
            completed_requests_per_second=len(completed) / seconds,
            output_tokens_per_second=output_tokens / seconds,
            total_tokens_per_second=(prompt_tokens + output_tokens) / seconds,
            output_tokens=output_tokens,
            prompt_tokens=prompt_tokens,
            cached_prompt_tokens=sum(cached) if cached else None,
            token_chunks=len(ttfts) + len(gaps),
            requests_counted_by_usage=by_usage,
            requests_counted_by_chunks=len(counted) - by_usage,
            ttft_ms=Spread.from_seconds(ttfts),
            itl_ms=Spread.from_seconds(gaps),
            tpot_ms=Spread.from_seconds(
                [
                    sum(one.gaps_seconds) / (one.output_tokens - 1)
                    for one in completed
                    if one.gaps_seconds and one.output_tokens > 1
                ]
            ),
            e2e_ms=Spread.from_seconds([one.e2e_seconds for one in completed if one.e2e_seconds is not None]),
            errors=dict(errors),
            error_examples=examples,
        )


def figures_notes(
    figures: Figures, measurements: Sequence[Measurement], settings: BenchSettings, prompt_mode: str
) -> list[str]:
    """Return sentences about the figures: how tokens were counted, and where the load differed from the settings.

    Args:
        measurements: the measured requests.
        settings: settings of the measurement.
        prompt_mode: "ids" or "text".
    """
    notes = [
        f"Output tokens are from the server's usage for {figures.requests_counted_by_usage} requests, from chunks for "
        f"{figures.requests_counted_by_chunks} (one a chunk, or as many as it lists ids).",
        "ITL is the gap between two chunks that carry tokens, however many each carries; TPOT does not depend on that.",
    ]
    completed = [one for one in measurements if one.outcome is Outcome.COMPLETED]
    odd_count = sum(one.output_tokens != settings.output_tokens for one in completed)
    if odd_count:
        notes.append(
            f"{odd_count} of {len(completed)} completed responses do not have the {settings.output_tokens} tokens they "
            "were asked for."
        )
    if prompt_mode == "text" and figures.requests_counted_by_chunks:
        notes.append("Prompt tokens of requests without usage are counted as words.")
    return notes


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that sent the load. If the server's address is loopback, it is also the server's machine."""

    cpu: str
    cores: int
    python: str
    platform: str

    @classmethod
    def here(cls) -> Machine:
        """Return the description of this machine. Its cores are those that this process may use."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(cpu=_cpu_name(), cores=cores, python=platform.python_version(), platform=platform.platform())

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} cores, Python {self.python}"


def measured_at() -> str:
    """Return the time of the end of a measurement, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # Only Linux has this file.
    return platform.processor() or platform.machine() or "unknown"


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement, with all that is needed to read and repeat it.

    Attributes:
        settings: settings of the measurement.
        model: name of the model.
        prompt_mode: "ids" or "text".
        date: end of the measurement, ISO 8601.
        machine: machine that sent the load.
        figures: the figures.
        notes: sentences about the figures.
    """

    settings: BenchSettings
    model: str
    prompt_mode: str
    date: str = msgspec.field(default_factory=measured_at)
    machine: Machine = msgspec.field(default_factory=Machine.here)
    figures: Figures
    notes: list[str]


def report_json(report: msgspec.Struct, *, before: Mapping[str, Any] = {}, after: Mapping[str, Any] = {}) -> bytes:
    """Return a report as indented JSON, without the API key. The name of every figure contains its unit.

    Args:
        report: the report of any measurement. It has settings.
        before: entries before the fields of the report.
        after: entries after the fields of the report.
    """
    content: dict[str, Any] = {**before, **msgspec.to_builtins(report)}
    content["settings"].pop("api_key", None)
    return msgspec.json.format(msgspec.json.encode({**content, **after}), indent=2) + b"\n"


def bench_json(report: BenchReport) -> bytes:
    return report_json(report, before={"label": report.settings.label})


def bench_text(report: BenchReport) -> str:
    """Return the report as a table."""
    settings, figures = report.settings, report.figures
    title = f"{settings.label}: " if settings.label else ""
    http = "HTTP/2" if settings.http == 2 else "HTTP/1.1"
    cached = "" if figures.cached_prompt_tokens is None else f" ({figures.cached_prompt_tokens} from the prefix cache)"
    lines = [
        f"{title}{report.model} at {settings.url}, {settings.endpoint} over {http}",
        _load_line(report),
        f"{report.machine}, {report.date}",
        "",
        f"{'duration':<22}{figures.duration_seconds:>12.2f} s",
        f"{'output':<22}{figures.output_tokens_per_second:>12.1f} tokens/s   {figures.output_tokens} tokens",
        f"{'prompt and output':<22}{figures.total_tokens_per_second:>12.1f} tokens/s   "
        f"{figures.prompt_tokens} prompt tokens{cached}",
        f"{'completed':<22}{figures.completed_requests_per_second:>12.2f} requests/s",
        f"{'requests':<22}{figures.completed_requests:>12} completed, {figures.aborted_requests} aborted, "
        f"{figures.failed_requests} failed, {figures.interrupted_requests} interrupted",
        "",
        f"{'ms':<22}" + "".join(f"{name:>12}" for name in ("mean", "p50", "p90", "p99", "max", "samples")),
        spread_line("first token (TTFT)", figures.ttft_ms),
        spread_line("between chunks (ITL)", figures.itl_ms),
        spread_line("per token (TPOT)", figures.tpot_ms),
        spread_line("end to end (E2E)", figures.e2e_ms),
    ]
    if figures.errors:
        lines += ["", "errors"]
        lines += [f"  {count} x {name}: {figures.error_examples[name]}" for name, count in figures.errors.items()]
    if report.notes:
        lines += ["", *report.notes]
    return "\n".join(lines) + "\n"


def _load_line(report: BenchReport) -> str:
    settings = report.settings
    rate = settings.rate_per_second
    pace = f"{settings.concurrency} at a time" if rate is None else f"{rate:g} requests/s at random"
    prefix = f" ({settings.prefix_tokens} shared)" if settings.prefix_tokens else ""
    unit = "tokens" if report.prompt_mode == "ids" else "words"
    return (
        f"{settings.requests} requests, {pace}, prompts of {settings.prompt_tokens} {unit}{prefix}, "
        f"answers of {settings.output_tokens} tokens, temperature {settings.temperature:g}, seed {settings.seed}"
    )


def spread_line(name: str, spread: Spread | None) -> str:
    if spread is None:
        return f"{name:<22}" + f"{'-':>12}" * 5 + f"{0:>12}"
    figures = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
    return f"{name:<22}" + "".join(f"{figure:>12.2f}" for figure in figures) + f"{spread.count:>12}"


def progress_line(*, done_count: int, request_count: int, output_tokens: int, elapsed_seconds: float) -> str:
    """Return the line that is shown during a measurement.

    Args:
        done_count: requests that have ended.
        request_count: all requests.
        output_tokens: tokens that have arrived in chunks.
        elapsed_seconds: seconds since the start.
    """
    rate = output_tokens / elapsed_seconds if elapsed_seconds > 0 else 0.0
    return f"{done_count}/{request_count} requests, {rate:.1f} tokens/s, {elapsed_seconds:.0f} s"
