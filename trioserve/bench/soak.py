"""Runs one soak: reads the server's metrics, sends the load while clients leave, and reads the metrics again."""

from __future__ import annotations

import array
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

import trio

from trioserve.bench.client import Failure, FailureKind, Listener, OpenStream, stream_opener
from trioserve.bench.load import ResponseReader, Tally
from trioserve.bench.report import Outcome
from trioserve.bench.runner import (
    EXIT_INTERRUPTED,
    EXIT_REQUESTS_FAILED,
    EXIT_UNREACHABLE,
    CannotMeasure,
    Measured,
    Scrape,
    cancel_on_signal,
    conclude,
    find_model,
    perform_all,
    scrape,
)
from trioserve.bench.settings import SoakSettings
from trioserve.bench.soak_plan import LeaveMethod, Moment, Slice, SoakClients, SoakPlan, SoakRequest
from trioserve.bench.soak_verdict import (
    MEMORY,
    Ended,
    Evidence,
    Round,
    SoakFigures,
    SoakReport,
    is_quiet,
    missing_series,
    soak_json,
    soak_text,
)
from trioserve.trio_tools.progress import ProgressLine

__all__ = ["main", "soak"]

PATH = "/v1/completions"
SCRAPE_PERIOD_SECONDS = 2.0
LOG_SECONDS = 30.0  # seconds between two progress lines without a terminal. A soak may take hours.
QUIET_SECONDS_MAX = 30.0  # A server that is not idle after this time will never become idle.
QUIET_PERIOD_SECONDS = 0.2
FIRST_TOKEN_SECONDS = 0.5  # assumed time to the first token, until the warm-up has measured it
# The first clients of a slice do not count, since clients of the previous slice still run. Their number is this
# multiple of the concurrency.
SETTLING_ROUNDS = 2


class SliceBook:
    """Records the responses of one slice.

    Args:
        piece: the slice.

    Attributes:
        began_at: time at which its first client started, or None.
        started_count: number of clients that have started.
    """

    def __init__(self, piece: Slice) -> None:
        self.piece = piece
        self.began_at: float | None = None
        self.started_count = 0
        self._responses: list[tuple[int, float, array.array[float]]] = []

    def start(self, now_seconds: float) -> int:
        """Note that a client starts, and return its number within the slice.

        Args:
            now_seconds: the time.
        """
        if self.began_at is None:
            self.began_at = now_seconds
        self.started_count += 1
        return self.started_count - 1

    def note_response(self, number: int, now_seconds: float, gaps_seconds: array.array[float]) -> None:
        """Note the whole response of a client that stayed.

        Args:
            number: number of the client within the slice.
            now_seconds: the time.
            gaps_seconds: gaps between its chunks.
        """
        self._responses.append((number, now_seconds, gaps_seconds))

    def settled_gaps(self, first_number: int, ended_at: float) -> array.array[float]:
        """Return the gaps of responses that lie completely within the counted part of the slice.

        Args:
            first_number: number of the first client that counts.
            ended_at: time by which a response must be complete.
        """
        gaps = array.array("d")
        for number, responded_at, gaps_seconds in self._responses:
            if number >= first_number and responded_at <= ended_at:
                gaps.extend(gaps_seconds)
        return gaps


def rounds_from(books: Sequence[SliceBook], *, settled_number: int, all_sent_at: float) -> list[Round]:
    """Return the gaps of each round.

    Args:
        books: records of the slices with leaving clients and of the control, in turn.
        settled_number: number of the first client in each slice that counts. By then, the clients of the slice before
            have ended.
        all_sent_at: time at which the last client started.
    """
    ends = [*(book.began_at or all_sent_at for book in books[1:]), all_sent_at]
    gaps = [book.settled_gaps(settled_number, ended_at) for book, ended_at in zip(books, ends, strict=True)]
    return [Round(soak_gaps, control_gaps) for soak_gaps, control_gaps in zip(gaps[::2], gaps[1::2], strict=True)]


def main(settings: SoakSettings) -> int:
    """Run a soak, print the report, and return the exit code.

    Args:
        settings: settings of the soak.

    Returns:
        0 if all claims hold, 1 if a claim is broken, 2 if the server cannot be reached or is not a trioserve, 130 after
        an interruption. After an interruption, the verdict so far is printed.
    """
    return conclude(trio.run(soak, settings), settings.json_path, soak_text, soak_json)


async def soak(
    settings: SoakSettings,
    *,
    opener: Callable[[int], OpenStream] | None = None,
    progress: TextIO | None = None,
) -> Measured[SoakReport] | CannotMeasure:
    """Run one soak. Must run in the main thread, since it handles SIGINT and SIGTERM.

    On a signal, all clients leave, and the verdict is about the load until then.

    Args:
        settings: settings of the soak.
        opener: returns, for an HTTP version, a function that opens a connection. Default: as the settings say.
        progress: where the progress line is written. Default: standard error.
    """
    async with trio.open_nursery() as nursery:
        clients = SoakClients(nursery, settings, opener or (lambda http: stream_opener(settings.target, http)))
        run = _Soak(settings, clients, progress or sys.stderr)
        await nursery.start(cancel_on_signal, run.scope)
        outcome = await run.outcome()
        await clients.close_all_but_observer()
        await clients.observer.aclose()
        nursery.cancel_scope.cancel()
    return outcome


class _Soak:
    """The tasks of one soak, and their observations so far."""

    def __init__(self, settings: SoakSettings, clients: SoakClients, progress: TextIO) -> None:
        self.scope = trio.CancelScope()
        self._settings = settings
        self._clients = clients
        self._progress = progress
        self._tally = Tally()
        self._typical_seconds = FIRST_TOKEN_SECONDS
        self._first_token_seconds: list[float] = []
        self._memory: list[tuple[float, float]] = []
        self._ended: list[Ended] = []
        self._control_failed_count = 0
        self._model = ""
        self._before: Scrape | None = None
        self._warm: Scrape | None = None
        self._half_closes_before = 0
        self._books: list[SliceBook] = []
        self._all_sent_at: float | None = None
        self._duration_seconds = 0.0

    async def outcome(self) -> Measured[SoakReport] | CannotMeasure:
        with self.scope:
            refusal = await self._begin()
            if refusal is not None:
                return refusal
            await self._measure()
        if self._warm is None:
            return CannotMeasure("interrupted before the end of the warm-up: nothing to judge", EXIT_INTERRUPTED)
        return await self._judged()

    async def _begin(self) -> CannotMeasure | None:
        """Read the metrics of the idle server, then warm it up."""
        settings = self._settings
        model = await find_model(self._clients.observer, settings)
        if isinstance(model, CannotMeasure):
            return model
        self._model = model
        before = await self._scrape()
        refusal = self._unfit(before)
        if refusal is not None:
            return refusal
        self._before = before
        plan = SoakPlan(settings, model=model)
        await self._send([SliceBook(plan.warmup())], plan, settings.warmup_requests, "requests of the warm-up")
        if self._first_token_seconds:
            self._typical_seconds = statistics.median(self._first_token_seconds)
        self._ended.clear()
        self._memory.clear()
        self._half_closes_before = self._clients.unanswered_half_closes
        self._warm = await self._scrape()
        return None if self._warm is not None else self._no_metrics()

    async def _measure(self) -> None:
        plan = SoakPlan(self._settings, model=self._model)
        self._books = [SliceBook(piece) for piece in plan.slices()]
        began_at = trio.current_time()
        try:
            await self._send(self._books, plan, self._settings.requests, "requests")
        finally:
            self._duration_seconds = trio.current_time() - began_at

    async def _judged(self) -> Measured[SoakReport] | CannotMeasure:
        """Wait until the server is idle, and make the report.

        This function also makes the report after an interruption, when all clients have disconnected.
        """
        assert self._before is not None
        assert self._warm is not None
        settings = self._settings
        await self._clients.close_all_but_observer()
        quiet_began_at = trio.current_time()
        end = await self._scrape_at_rest(self._before)
        if end is None:
            return self._no_metrics()
        figures = SoakFigures.from_evidence(
            Evidence(
                before=self._before,
                warm=self._warm,
                end=end,
                quiet_seconds=trio.current_time() - quiet_began_at,
                memory=self._memory,
                rounds=rounds_from(
                    self._books,
                    settled_number=SETTLING_ROUNDS * settings.concurrency,
                    all_sent_at=quiet_began_at if self._all_sent_at is None else self._all_sent_at,
                ),
                ended=self._ended,
                control_failed_requests=self._control_failed_count,
                unanswered_half_closes=self._clients.unanswered_half_closes - self._half_closes_before,
                duration_seconds=self._duration_seconds,
            )
        )
        exit_code = 0 if figures.all_hold else EXIT_REQUESTS_FAILED
        report = SoakReport(settings=settings, model=self._model, figures=figures)
        return Measured(report, EXIT_INTERRUPTED if self.scope.cancelled_caught else exit_code)

    def _no_metrics(self) -> CannotMeasure:
        return CannotMeasure(f"{self._settings.url} no longer answers GET /metrics", EXIT_UNREACHABLE)

    # --- State of the server ---

    async def _scrape(self) -> Scrape | None:
        settings = self._settings
        return await scrape(self._clients.observer, settings.target, seconds_max=settings.timeout_seconds)

    def _unfit(self, before: Scrape | None) -> CannotMeasure | None:
        url = self._settings.url
        missing = missing_series(before or Scrape(""))
        if before is None or missing:
            named = f"without {missing[0]}" if before is not None else "without a response"
            return CannotMeasure(
                f"bench soak reads metrics of trioserve, and GET /metrics of {url} is {named}: use bench load for "
                "other servers",
                EXIT_UNREACHABLE,
            )
        if not is_quiet(before, before):
            return CannotMeasure(f"{url} has other requests: a soak needs an idle server", EXIT_REQUESTS_FAILED)
        return None

    async def _scrape_at_rest(self, before: Scrape) -> Scrape | None:
        """Return the metrics of the idle server, or the last metrics if the server does not become idle in time."""
        found: Scrape | None = None
        with trio.move_on_after(QUIET_SECONDS_MAX):
            while True:
                found = await self._scrape() or found
                if found is not None and is_quiet(before, found):
                    break
                await trio.sleep(QUIET_PERIOD_SECONDS)
        return found

    async def _watch(self, request_count: int, unit: str) -> None:
        """Record the server's memory, and show the progress."""
        began_at = trio.current_time()
        with ProgressLine(self._progress, log_seconds=LOG_SECONDS, clock=trio.current_time) as line:
            while True:
                await trio.sleep(SCRAPE_PERIOD_SECONDS)
                found = await self._scrape()
                memory = None if found is None else found.total(MEMORY)
                if memory is not None:
                    self._memory.append((trio.current_time(), memory))
                elapsed_seconds = trio.current_time() - began_at
                resident = "memory unknown" if memory is None else f"{memory / 2**20:.0f} MiB resident"
                left_count = sum(one.left for one in self._ended)
                line.show(
                    f"{len(self._ended)}/{request_count} {unit}, {left_count} left, {resident}, {elapsed_seconds:.0f} s"
                )

    # --- Load ---

    async def _send(self, books: list[SliceBook], plan: SoakPlan, request_count: int, unit: str) -> None:
        """Run all clients of some slices, and return when they have ended.

        Args:
            books: records of the slices.
            plan: the plan of the soak.
            request_count: number of requests, for the progress line.
            unit: name of the requests, for the progress line.
        """
        requests = ((book, request) for book in books for request in plan.requests(book.piece))

        def remaining() -> Iterator[tuple[SliceBook, SoakRequest]]:
            yield from requests
            # The time is that of the first worker that finds no further request.
            self._all_sent_at = trio.current_time()

        async def perform_one(part: tuple[SliceBook, SoakRequest]) -> None:
            book, request = part
            await self._perform(request, book, book.start(trio.current_time()))

        self._all_sent_at = None
        async with trio.open_nursery() as watchers:
            watchers.start_soon(self._watch, request_count, unit)
            await perform_all(remaining(), perform_one, in_flight=self._settings.concurrency)
            watchers.cancel_scope.cancel()

    async def _perform(self, request: SoakRequest, book: SliceBook, number: int) -> None:
        planned, leave = request.planned, request.leave
        delay_seconds = request.delay * self._typical_seconds
        if planned is None:
            await trio.sleep(delay_seconds)
            return
        started_at = trio.current_time()
        reader = ResponseReader(planned, started_at=started_at, tally=self._tally)
        leaving = trio.CancelScope()
        listener: Listener = reader
        if leave is not None and leave.moment is Moment.HEAD:
            listener = _LeavesAfterHead(reader, leaving, delay_seconds)
        elif leave is not None and leave.moment is not Moment.TOKENS:
            leaving.deadline = started_at + delay_seconds
        hang_up_count = self._clients.hang_up_count
        failure: Failure | None = None
        with trio.move_on_at(started_at + self._settings.timeout_seconds) as patience, leaving:
            failure = await self._clients.client_for(request).request(
                "POST",
                self._settings.target.path_prefix + PATH,
                planned.body,
                listener,
                withheld_bytes=request.withheld_bytes,
            )
        if patience.cancelled_caught:
            failure = Failure(FailureKind.TIMEOUT, f"no whole response within {self._settings.timeout_seconds:g} s")
        measurement = reader.measurement(failure, is_over=not leaving.cancelled_caught)
        left = leaving.cancelled_caught or measurement.outcome is Outcome.ABORTED
        if leave is not None and leave.way is LeaveMethod.HANG_UP:
            if left:
                self._clients.hang_up()
            elif failure is not None and self._clients.hang_up_count > hang_up_count:
                left = True  # Another client closed the shared connection, which ended this request too.
        outcome = Outcome.ABORTED if left else measurement.outcome

        if request.is_survivor and outcome is Outcome.COMPLETED:
            book.note_response(number, trio.current_time(), measurement.gaps_seconds)
        if book.piece.is_warmup and measurement.ttft_seconds is not None:
            self._first_token_seconds.append(measurement.ttft_seconds)
        if book.piece.is_control:
            self._control_failed_count += outcome is Outcome.FAILED
        else:
            self._ended.append(
                Ended(
                    outcome=outcome,
                    failure_name=measurement.failure.name if measurement.failure and not left else None,
                    moment=None if leave is None else leave.moment,
                    way=None if leave is None else leave.way,
                    left=left,
                )
            )


class _LeavesAfterHead:
    """Listener of a client that leaves some time after the head of the response."""

    def __init__(self, reader: ResponseReader, leaving: trio.CancelScope, delay_seconds: float) -> None:
        self._reader = reader
        self._leaving = leaving
        self._delay_seconds = delay_seconds

    def head(self, status: int) -> None:
        self._reader.head(status)
        if status == 200:  # The client reads an error response to its end.
            self._leaving.deadline = trio.current_time() + self._delay_seconds

    def body(self, data: bytes, now_seconds: float) -> bool:
        return self._reader.body(data, now_seconds)
