"""Measures the cost of the live page: the same load with and without a reader of the page's events."""

from __future__ import annotations

import statistics

import msgspec
import trio

from trioserve.bench.client import Failure, OpenStream, stream_opener
from trioserve.bench.report import Figures, Machine, measured_at, report_json
from trioserve.bench.run import measure
from trioserve.bench.runner import EXIT_REQUESTS_FAILED, CannotMeasure, Measured, conclude, http1_client, print_progress
from trioserve.bench.settings import BenchSettings, PageBenchSettings

__all__ = ["PageReport", "main", "measure_page", "page_text"]

EVENTS_PATH = "/ui/events"


class PageRound(msgspec.Struct, frozen=True, kw_only=True):
    """The two measurements of one round.

    Attributes:
        without: figures without a reader of the page.
        beside: figures with a reader of the page.
        events: events that the reader received.
        event_bytes: bytes that the reader received.
    """

    without: Figures
    beside: Figures
    events: int
    event_bytes: int

    @property
    def ratio(self) -> float:
        return self.beside.output_tokens_per_second / self.without.output_tokens_per_second


class PageReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a measurement of the live page.

    Attributes:
        settings: settings of the measurement.
        date: end of the measurement, ISO 8601.
        machine: machine that sent the load.
        rounds: the rounds.
        ratio: median over the rounds of output tokens/s with the page to output tokens/s without it.
        spread: the lowest and the highest ratio of a round.
    """

    settings: PageBenchSettings
    date: str = msgspec.field(default_factory=measured_at)
    machine: Machine = msgspec.field(default_factory=Machine.here)
    rounds: list[PageRound]
    ratio: float
    spread: tuple[float, float]


class _Reader:
    """Counts the events and bytes of the page."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.events = 0
        self.bytes = 0
        self.has_ended = False  # True if the stream of events ended before the load was complete

    def head(self, status: int) -> None:
        self.status = status

    def body(self, data: bytes, now_seconds: float) -> bool:
        self.events += data.count(b"event: ")
        self.bytes += len(data)
        return True


def main(settings: PageBenchSettings) -> int:
    """Measure, print the report, and return the exit code of bench.

    Args:
        settings: settings of the measurement.
    """
    return conclude(trio.run(measure_page, settings), settings.json_path, page_text, page_json)


async def measure_page(
    settings: PageBenchSettings, *, open_stream: OpenStream | None = None
) -> Measured[PageReport] | CannotMeasure:
    """Measure the load with and without the page, round by round.

    Every second round begins with the page, so that slow changes of the machine affect both. Prompts differ between the
    measurements, but not their number and lengths.

    Args:
        settings: settings of the measurement.
        open_stream: opens a connection to the server. Default: as the settings say.

    Returns:
        The report, or the reason why there is no report.
    """
    opener = open_stream or stream_opener(settings.target, 1)
    rounds = []
    for number in range(settings.rounds):
        found: dict[bool, Figures] = {}
        reader = _Reader()
        for is_open in (False, True) if number % 2 == 0 else (True, False):
            # The two measurements need different prompts. Otherwise, the second one would find the prompts of the first
            # one in the prefix cache.
            seed = settings.seed + 2 * number + is_open
            measured = await _measure_one(settings, seed, opener, reader if is_open else None)
            if isinstance(measured, CannotMeasure):
                return measured
            found[is_open] = measured
        if reader.status != 200 or not reader.events or reader.has_ended:
            ended = " and ended" if reader.has_ended else ""
            return CannotMeasure(
                f"{settings.url}{EVENTS_PATH} gave status {reader.status} and {reader.events} events{ended}: "
                "check that the server shows the page, and that --api-key is its key",
                EXIT_REQUESTS_FAILED,
            )
        rounds.append(
            PageRound(without=found[False], beside=found[True], events=reader.events, event_bytes=reader.bytes)
        )
        print_progress(f"round {number + 1} of {settings.rounds}: ratio {rounds[-1].ratio:.4f}")
    ratios = [one.ratio for one in rounds]
    report = PageReport(
        settings=settings, rounds=rounds, ratio=statistics.median(ratios), spread=(min(ratios), max(ratios))
    )
    return Measured(report, 0)


async def _measure_one(
    settings: PageBenchSettings, seed: int, open_stream: OpenStream, reader: _Reader | None
) -> Figures | CannotMeasure:
    load = BenchSettings(
        url=settings.url,
        model=settings.model,
        concurrency=settings.concurrency,
        requests=settings.requests,
        prompt_tokens=settings.prompt_tokens,
        output_tokens=settings.output_tokens,
        seed=seed,
        timeout_seconds=settings.timeout_seconds,
        api_key=settings.api_key,
        allow_remote=settings.allow_remote,
    )
    async with trio.open_nursery() as nursery:
        if reader is not None:
            nursery.start_soon(_read, settings, open_stream, reader)
        outcome = await measure(load, open_stream=open_stream)
        nursery.cancel_scope.cancel()
    if isinstance(outcome, CannotMeasure):
        return outcome
    figures = outcome.report.figures
    if outcome.exit_code or figures.failed_requests or not figures.output_tokens_per_second:
        what = "it was interrupted" if figures.interrupted_requests else f"{figures.failed_requests} requests failed"
        return CannotMeasure(f"{what}, so nothing can be compared", outcome.exit_code or EXIT_REQUESTS_FAILED)
    return figures


async def _read(settings: PageBenchSettings, open_stream: OpenStream, reader: _Reader) -> None:
    client = http1_client(settings.target, api_key=settings.api_key, open_stream=open_stream)
    path = settings.target.path_prefix + EVENTS_PATH
    failure = await client.request("GET", path, b"", reader)
    reader.has_ended = True
    if isinstance(failure, Failure):
        print_progress(f"the page's events ended: {failure.message}")


def page_json(report: PageReport) -> bytes:
    return report_json(report, after={"settings": msgspec.structs.replace(report.settings, api_key=None)})


def page_text(report: PageReport) -> str:
    """Return a table with one line per round, and the ratio.

    Args:
        report: figures of all rounds.
    """
    lines = [f"live page at {report.settings.url}{' ' + report.settings.label if report.settings.label else ''}", ""]
    lines += ["| round | without, tokens/s | with, tokens/s | ratio | events | KB |", "|---|---|---|---|---|---|"]
    for number, one in enumerate(report.rounds, start=1):
        lines.append(
            f"| {number} | {one.without.output_tokens_per_second:,.1f} | {one.beside.output_tokens_per_second:,.1f} | "
            f"{one.ratio:.4f} | {one.events} | {one.event_bytes / 1000:,.0f} |"
        )
    low, high = report.spread
    lines += ["", f"ratio {report.ratio:.4f} (median; {low:.4f} to {high:.4f})", ""]
    return "\n".join(lines)
