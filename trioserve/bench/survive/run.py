"""A survival run from start to exit code: equal requests twice, first undisturbed, then while endpoints die.

This command starts all servers as processes. Each client must get equal responses in both runs.
"""

from __future__ import annotations

import datetime
import math
import pathlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import trio

from trioserve.bench.client import Failure, stream_opener
from trioserve.bench.http1 import Http1Client
from trioserve.bench.report import Machine
from trioserve.bench.run import (
    EXIT_INTERRUPTED,
    EXIT_REQUESTS_FAILED,
    EXIT_UNREACHABLE,
    cancel_on_signal,
    common_headers,
)
from trioserve.bench.settings import Target
from trioserve.bench.survive.content import Content, StreamFault, content_of
from trioserve.bench.survive.fleet import SurviveFleet, open_fleet
from trioserve.bench.survive.plan import SurviveRequest, interruptions, requests
from trioserve.bench.survive.processes import NotReady
from trioserve.bench.survive.report import SurviveReport, survive_json, survive_text
from trioserve.bench.survive.settings import SurviveSettings
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.progress import ProgressLine

__all__ = ["main", "survive"]

EXAMPLES_MAX = 10
PROGRESS_SECONDS = 1.0


def main(settings: SurviveSettings) -> int:
    """Run, and print the report.

    Args:
        settings: settings of the run.

    Returns:
        Exit code: 0, 1 if a claim is broken, 2 if a server did not start, 130 if a signal ended the run.
    """
    outcome = trio.run(survive, settings)
    if isinstance(outcome, int):
        return outcome
    print(survive_text(outcome), end="", file=sys.stderr if settings.json_path == "-" else sys.stdout)
    if settings.json_path == "-":
        sys.stdout.write(survive_json(outcome).decode())
    elif settings.json_path is not None:
        pathlib.Path(settings.json_path).write_bytes(survive_json(outcome))
    return 0 if outcome.all_hold else EXIT_REQUESTS_FAILED


async def survive(settings: SurviveSettings) -> SurviveReport | int:
    """Run until the end or until SIGINT or SIGTERM. No process remains in any case.

    Args:
        settings: settings of the run.

    Returns:
        The report, or an exit code if there is none.
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
            except NotReady as error:
                print(f"trioserve bench: {error}", file=sys.stderr)
                return EXIT_UNREACHABLE
            finally:
                nursery.cancel_scope.cancel()
    return EXIT_INTERRUPTED if report is None else report


class _Heard:
    """One response while it arrives.

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
    """All requests once, and their responses."""

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
        shared = iter(asked)

        async def worker(shared: Iterator[SurviveRequest]) -> None:
            for request in shared:  # each worker takes the next one
                await self._ask(request)

        async with trio.open_nursery() as watchers:
            watchers.start_soon(self._show_progress, len(asked))
            async with trio.open_nursery() as nursery:
                for _ in range(self._settings.concurrency):
                    nursery.start_soon(worker, shared)
            watchers.cancel_scope.cancel()
        self.seconds = trio.current_time() - began_at

    async def _ask(self, request: SurviveRequest) -> None:
        target = self._target
        headers = [("host", target.authority), *common_headers(None), ("x-request-id", request.id)]
        client = Http1Client(stream_opener(target, 1), headers)
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
        planning.cancel_scope.cancel()  # the nursery of recoveries still waits for the interruptions that have begun
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
        machine=Machine.here(),
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
        endpoint = await fleet.take_well(interruption)
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
