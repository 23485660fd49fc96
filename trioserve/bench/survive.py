"""Runs a survival run: the same requests twice, first undisturbed, then while endpoints die.

This command starts all servers as processes. Each client must get equal responses in both runs.
"""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import trio

from trioserve.bench.client import Failure
from trioserve.bench.report import Machine, report_json
from trioserve.bench.runner import (
    EXIT_INTERRUPTED,
    EXIT_REQUESTS_FAILED,
    CannotMeasure,
    Measured,
    cancel_on_signal,
    conclude,
    http1_client,
    perform_all,
)
from trioserve.bench.server_settings import SurviveSettings
from trioserve.bench.settings import Target
from trioserve.bench.survive_fleet import SurviveFleet, open_fleet
from trioserve.bench.survive_plan import Content, StreamFault, SurviveRequest, content_of, interruptions, requests
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.progress import ProgressLine

__all__ = ["SurviveReport", "main", "survive", "survive_json", "survive_text"]

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
        longest_pause_request: the request of the stream with the longest pause.
        undisturbed_pause_seconds: longest pause of a stream in the run without interruptions.
        pauses_seconds: quantiles of the longest pause of each stream.
    """

    settings: SurviveSettings
    date: str
    machine: Machine = msgspec.field(default_factory=Machine.here)
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
    return report_json(report, after={"all_hold": report.all_hold})


def survive_text(report: SurviveReport) -> str:
    settings = report.settings
    title = f"{settings.label}: " if settings.label else ""
    pauses = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in report.pauses_seconds.items())
    lines = [
        f"{title}{settings.requests} streams of {settings.model} over {settings.endpoints} endpoints "
        f"({' '.join(settings.server_flags)}), {settings.concurrency} at a time, seed {settings.seed}",
        f"{report.machine}, {report.date}",
        "",
        _claim("requests lost before their first token", report.lost_before_first_token),
        _claim("streams lost after their first token", report.failed - report.lost_before_first_token),
        _claim(f"streams that differ, of {report.compared}", report.differing),
        _claim("blocks, leases and requests that are left", len(report.left_behind)),
        _claim("failed requests of the undisturbed run", report.undisturbed_failed),
        _claim("interruptions that failed", len(report.troubles)),
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


EXAMPLES_MAX = 10
PROGRESS_SECONDS = 1.0


def main(settings: SurviveSettings) -> int:
    """Run, and print the report.

    Args:
        settings: settings of the run.

    Returns:
        Exit code: 0, 1 if a claim is broken, 2 if a server did not start, 130 if a signal ended the run.
    """
    return conclude(trio.run(survive, settings), settings.json_path, survive_text, survive_json)


async def survive(settings: SurviveSettings) -> Measured[SurviveReport] | CannotMeasure:
    """Run until the end or until SIGINT or SIGTERM. No process remains in any case.

    Args:
        settings: settings of the run.

    Returns:
        The report and the exit code, or the reason why there is no report.
    """
    report: SurviveReport | None = None
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()
        await nursery.start(cancel_on_signal, scope)
        with scope:
            try:
                with errors_unwrapped():
                    async with open_fleet(settings) as fleet:
                        report = await _compared(settings, fleet)
            except CannotMeasure as error:
                return error
            finally:
                nursery.cancel_scope.cancel()
    if report is None:
        return CannotMeasure("interrupted before the end of both runs: nothing to compare", EXIT_INTERRUPTED)
    return Measured(report, 0 if report.all_hold else EXIT_REQUESTS_FAILED)


class _Heard:
    """One response that is being received.

    Attributes:
        pause_seconds: longest time between two received pieces with events.
    """

    def __init__(self) -> None:
        self.status = 0
        self.pause_seconds = 0.0
        self._last_at: float | None = None
        self._body = bytearray()

    @property
    def has_begun(self) -> bool:
        """True if an event of the response has arrived."""
        return self.status == 200 and self._last_at is not None

    def head(self, status: int) -> None:
        self.status = status

    def body(self, data: bytes, now_seconds: float) -> bool:
        self._body += data
        if b"data:" in data:
            if self._last_at is not None:
                self.pause_seconds = max(self.pause_seconds, now_seconds - self._last_at)
            self._last_at = now_seconds
        return True

    def content(self) -> Content:
        """Parse the whole response.

        Raises:
            StreamFault: it is not a complete response.
        """
        if self.status != 200:
            raise StreamFault(f"status {self.status}: {bytes(self._body[:300])!r}")
        return content_of(bytes(self._body))


class _Pass:
    """One run of all requests, with their responses."""

    def __init__(self, settings: SurviveSettings, port: int, name: str) -> None:
        self.contents: dict[int, Content] = {}
        self.failures: dict[int, str] = {}
        self.pauses: dict[int, float] = {}
        self.lost_unbegun = 0
        self.seconds = 0.0
        self._settings = settings
        self._target = Target.from_url(f"http://127.0.0.1:{port}")
        self._name = name

    async def run(self, asked: Sequence[SurviveRequest]) -> None:
        began_at = trio.current_time()
        async with trio.open_nursery() as watchers:
            watchers.start_soon(self._show_progress, len(asked))
            await perform_all(asked, self._ask, in_flight=self._settings.concurrency)
            watchers.cancel_scope.cancel()
        self.seconds = trio.current_time() - began_at

    async def _ask(self, request: SurviveRequest) -> None:
        client = http1_client(self._target, ("x-request-id", request.id))
        heard = _Heard()
        failure: Failure | None = None
        try:
            with trio.move_on_after(self._settings.timeout_seconds) as patience:
                failure = await client.request("POST", request.path, request.body, heard)
        finally:
            await client.aclose()
        try:
            if patience.cancelled_caught:
                raise StreamFault(f"no whole response within {self._settings.timeout_seconds:g} s")
            if failure is not None:
                raise StreamFault(failure.message)
            self.contents[request.index] = heard.content()
        except StreamFault as fault:
            self.failures[request.index] = str(fault)
            self.lost_unbegun += not heard.has_begun
        self.pauses[request.index] = heard.pause_seconds

    async def _show_progress(self, count: int) -> None:
        with ProgressLine(clock=trio.current_time) as line:
            while True:
                await trio.sleep(PROGRESS_SECONDS)
                done = len(self.contents) + len(self.failures)
                line.show(f"{self._name}: {done}/{count} requests, {len(self.failures)} failed")


async def _compared(settings: SurviveSettings, fleet: SurviveFleet) -> SurviveReport:
    asked = requests(settings)
    undisturbed = _Pass(settings, fleet.router.port, "undisturbed")
    await undisturbed.run(asked)
    disturbed = _Pass(settings, fleet.router.port, "disturbed")
    async with trio.open_nursery() as recoveries, trio.open_nursery() as planning:
        planning.start_soon(_interrupt, settings, fleet, recoveries)
        await disturbed.run(asked)
        # No new interruption begins. Another nursery still waits for the interruptions that have begun.
        planning.cancel_scope.cancel()
    left = await fleet.left_behind()
    scrape = await fleet.scrape_router()
    differing: dict[int, list[str]] = {}
    for index, content in disturbed.contents.items():
        expected = undisturbed.contents.get(index)
        if expected is not None and (
            found := content.differences(expected, logprob_tolerance=settings.logprob_tolerance)
        ):
            differing[index] = found
    kinds = {request.index: request.kinds for request in asked}
    longest = max(disturbed.pauses, key=lambda index: disturbed.pauses[index])
    return SurviveReport(
        settings=settings,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        kinds=dict(Counter(kind for request in asked for kind in request.kinds).most_common()),
        undisturbed_seconds=undisturbed.seconds,
        disturbed_seconds=disturbed.seconds,
        undisturbed_failures=_examples(undisturbed.failures, kinds, lambda text: text),
        undisturbed_failed=len(undisturbed.failures),
        failed=len(disturbed.failures),
        lost_before_first_token=disturbed.lost_unbegun,
        failures=_examples(disturbed.failures, kinds, lambda text: text),
        differing=len(differing),
        differences=_examples(differing, kinds, "; ".join),
        compared=sum(index in undisturbed.contents for index in disturbed.contents),
        left_behind=left,
        troubles=fleet.troubles,
        interruptions={kind.value: count for kind, count in fleet.happened.items()},
        continued=scrape.by_label("trioserve_router:streams_continued_total", "reason"),
        not_continued={
            **scrape.by_label("trioserve_router:stream_continuations_refused_total", "reason"),
            **scrape.by_label("trioserve_router:streams_not_resumable_total", "reason"),
        },
        retries=round(scrape.total("trioserve_router:retries_total") or 0),
        told_streams=sum(content.continued > 0 for content in disturbed.contents.values()),
        longest_pause_seconds=disturbed.pauses[longest],
        longest_pause_request=f"{asked[longest].id} ({', '.join(kinds[longest])})",
        undisturbed_pause_seconds=max(undisturbed.pauses.values()),
        pauses_seconds=_quantiles(list(disturbed.pauses.values())),
    )


async def _interrupt(settings: SurviveSettings, fleet: SurviveFleet, recoveries: trio.Nursery) -> None:
    for interruption in interruptions(settings):
        await trio.sleep(interruption.after_seconds)
        endpoint = await fleet.claim_endpoint(interruption)
        recoveries.start_soon(fleet.interrupt, endpoint, interruption)


def _examples(found: Mapping[int, Any], kinds: dict[int, tuple[str, ...]], shown: Callable[..., str]) -> list[str]:
    """Return the first failures or differences, with the kinds of their requests."""
    return [f"{index} ({', '.join(kinds[index])}): {shown(found[index])}" for index in sorted(found)[:EXAMPLES_MAX]]


def _quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        f"p{round(100 * share)}": ordered[min(len(ordered) - 1, math.floor(share * len(ordered)))]
        for share in (0.5, 0.9, 0.99)
    }
