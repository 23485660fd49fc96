"""Runs one measurement: finds the server and its model, sends the load, and measures the responses."""

from __future__ import annotations

import pathlib
import signal
import sys
from collections.abc import Iterator
from typing import TextIO

import msgspec
import trio

from trioserve.bench.client import (
    Client,
    Failure,
    FailureKind,
    OpenStream,
    stream_opener,
)
from trioserve.bench.http1 import Http1Client
from trioserve.bench.http2 import Http2Client
from trioserve.bench.load import Load, PlannedRequest, PromptMode, ResponseReader, Tally, excerpt
from trioserve.bench.report import (
    BenchReport,
    Figures,
    Measurement,
    figures_notes,
    progress_line,
    report_json,
    report_text,
)
from trioserve.bench.settings import BenchSettings
from trioserve.contracts.endpoint import NOT_A_PAGE_HEADER
from trioserve.trio_tools.progress import LOG_SECONDS, ProgressLine

__all__ = [
    "EXIT_INTERRUPTED",
    "EXIT_REQUESTS_FAILED",
    "EXIT_UNREACHABLE",
    "CannotMeasure",
    "Measured",
    "PlainResponse",
    "cancel_on_signal",
    "common_headers",
    "main",
    "measure",
]

EXIT_REQUESTS_FAILED = 1
EXIT_UNREACHABLE = 2
EXIT_INTERRUPTED = 130  # exit code that shells show for SIGINT

PLAIN_RESPONSE_BYTES_MAX = 1 << 24
PROGRESS_PERIOD_SECONDS = 0.25


def main(settings: BenchSettings) -> int:
    """Measure, print the report, and return the exit code.

    Args:
        settings: settings of the measurement.

    Returns:
        0, 1 if a request failed, 2 if the server cannot be reached, 130 after an interruption. After an interruption,
        the report of the requests so far is printed.
    """
    outcome = trio.run(measure, settings)
    if isinstance(outcome, CannotMeasure):
        print(f"trioserve bench: {outcome.message}", file=sys.stderr)
        return outcome.exit_code
    # The JSON report has standard output for itself if it was requested there.
    print(report_text(outcome.report), end="", file=sys.stderr if settings.json_path == "-" else sys.stdout)
    if settings.json_path == "-":
        sys.stdout.write(report_json(outcome.report).decode())
    elif settings.json_path is not None:
        pathlib.Path(settings.json_path).write_bytes(report_json(outcome.report))
    return outcome.exit_code


class CannotMeasure(msgspec.Struct, frozen=True):
    """There is no report. The message is one sentence for the user."""

    message: str
    exit_code: int


class Measured(msgspec.Struct, frozen=True):
    report: BenchReport
    exit_code: int


async def measure(
    settings: BenchSettings, *, open_stream: OpenStream | None = None, progress: TextIO | None = None
) -> Measured | CannotMeasure:
    """Run one measurement. Must run in the main thread, since it handles SIGINT and SIGTERM.

    A signal ends the measurement early, with a report of the requests so far.

    Args:
        settings: settings of the measurement.
        open_stream: opens a connection to the server. Default: as the settings say.
        progress: where the progress line is written. Default: standard error.
    """
    async with trio.open_nursery() as nursery:
        client = _new_client(nursery, settings, open_stream or stream_opener(settings.target, settings.http))
        run = _Run(settings, client, progress or sys.stderr)
        await nursery.start(cancel_on_signal, run.scope)
        outcome = await run.outcome()
        await client.aclose()
        nursery.cancel_scope.cancel()
    return outcome


def _new_client(nursery: trio.Nursery, settings: BenchSettings, open_stream: OpenStream) -> Client:
    headers = common_headers(settings.api_key)
    target = settings.target
    if settings.http == 1:
        return Http1Client(open_stream, [("host", target.authority), *headers])
    return Http2Client(
        nursery,
        open_stream,
        headers,
        scheme=target.scheme,
        authority=target.authority,
        connections=settings.connections,
    )


def common_headers(api_key: str | None) -> list[tuple[str, str]]:
    """Return the headers of every request, for both HTTP versions.

    Args:
        api_key: sent as a bearer token. None: no key.
    """
    headers = [("user-agent", "trioserve-bench"), ("content-type", "application/json"), (NOT_A_PAGE_HEADER, "bench")]
    if api_key is not None:
        headers.append(("authorization", f"Bearer {api_key}"))
    return headers


async def cancel_on_signal(scope: trio.CancelScope, task_status: trio.TaskStatus[None]) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            scope.cancel()
            return  # A second signal ends the program in the usual way.


class _Run:
    """The tasks of one measurement, and their results so far."""

    def __init__(self, settings: BenchSettings, client: Client, progress: TextIO) -> None:
        self.scope = trio.CancelScope()
        self._settings = settings
        self._client = client
        self._progress = progress
        self._model: str | None = None
        self._prompt_mode: PromptMode = "text"
        self._measurements: list[Measurement] = []
        self._warmups: list[Measurement] = []
        self._tally = Tally()
        self._notes: list[str] = []
        self._duration_seconds = 0.0

    async def outcome(self) -> Measured | CannotMeasure:
        with self.scope:
            refusal = await self._find_model() or await self._find_prompt_mode()
            if refusal is not None:
                return refusal
            load = Load(self._settings, model=self._model or "", prompt_mode=self._prompt_mode)
            await self._closed_loop(load.warmups(), self._warmups)
            self._tally.output_tokens = 0
            await self._measure(load)
        if not self._measurements:
            return CannotMeasure("interrupted before the first request", EXIT_INTERRUPTED)
        return self._result()

    # --- before the first request ---

    async def _find_model(self) -> CannotMeasure | None:
        settings = self._settings
        response = PlainResponse()
        failure = await self._ask("GET", "/v1/models", b"", response)
        if failure is not None:
            return self._unreachable(failure)
        self._model = settings.model or response.first_model()
        if self._model is None:
            return CannotMeasure(
                f"{settings.url} names no model (GET /v1/models: status {response.status}, {response.excerpt()}): "
                "give --model, and --api-key if the server wants one",
                EXIT_REQUESTS_FAILED,
            )
        return None

    async def _find_prompt_mode(self) -> CannotMeasure | None:
        """Send a small request in each mode that the settings allow, exact lengths first.

        Keep the first mode that works.
        """
        settings = self._settings
        modes: list[PromptMode] = ["text"]
        if settings.endpoint == "completions" and settings.prompt_mode != "text":
            modes = ["ids"] if settings.prompt_mode == "ids" else ["ids", "text"]
        refusals: list[str] = []
        for mode in modes:
            response = PlainResponse()
            load = Load(settings, model=self._model or "", prompt_mode=mode)
            failure = await self._ask("POST", self._path, load.probe_body(), response)
            if failure is not None:
                return self._unreachable(failure)
            if response.status == 200:
                self._prompt_mode = mode
                if refusals:
                    self._notes.append(f"Prompts are words: the server does not accept token ids ({refusals[0]}).")
                return None
            refusals.append(f"status {response.status}, {response.excerpt()}")
        return CannotMeasure(
            f"{settings.url} refuses a small request to {self._path} for {self._model}: {refusals[-1]}",
            EXIT_REQUESTS_FAILED,
        )

    async def _ask(self, method: str, path: str, body: bytes, response: PlainResponse) -> Failure | None:
        with trio.move_on_after(self._settings.timeout_seconds):
            return await self._client.request(method, self._settings.target.path_prefix + path, body, response)
        return Failure(
            FailureKind.TIMEOUT, f"no response to {method} {path} within {self._settings.timeout_seconds:g} s"
        )

    def _unreachable(self, failure: Failure) -> CannotMeasure:
        http = "HTTP/2" if self._settings.http == 2 else "HTTP/1.1"
        return CannotMeasure(
            f"cannot reach {self._settings.url} over {http}: {failure.message}; is the server up, and is --http right?",
            EXIT_UNREACHABLE,
        )

    # --- the load ---

    @property
    def _path(self) -> str:
        return "/v1/chat/completions" if self._settings.endpoint == "chat" else "/v1/completions"

    async def _measure(self, load: Load) -> None:
        began_at = trio.current_time()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._show_progress, began_at)
                if self._settings.rate_per_second is None:
                    await self._closed_loop(load.requests(), self._measurements)
                else:
                    await self._open_loop(load.requests(), began_at)
                nursery.cancel_scope.cancel()
        finally:
            self._duration_seconds = trio.current_time() - began_at

    async def _closed_loop(self, requests: Iterator[PlannedRequest], measurements: list[Measurement]) -> None:
        async def worker() -> None:
            for planned in requests:  # The iterator is shared, so each worker takes the next request.
                await self._perform(planned, trio.current_time(), measurements)

        async with trio.open_nursery() as nursery:
            for _ in range(self._settings.concurrency):
                nursery.start_soon(worker)

    async def _open_loop(self, requests: Iterator[PlannedRequest], began_at: float) -> None:
        async with trio.open_nursery() as nursery:
            for planned in requests:
                arrives_at = began_at + (planned.arrival_seconds or 0.0)
                await trio.sleep_until(arrives_at)
                # The time of a request starts at its planned arrival. Otherwise a client that is late would make the
                # server look fast.
                nursery.start_soon(self._perform, planned, arrives_at, self._measurements)

    async def _perform(self, planned: PlannedRequest, started_at: float, measurements: list[Measurement]) -> None:
        timeout_seconds = self._settings.timeout_seconds
        reader = ResponseReader(planned, started_at=started_at, tally=self._tally)
        failure: Failure | None = None
        is_over = False
        try:
            with trio.move_on_at(started_at + timeout_seconds) as scope:
                path = self._settings.target.path_prefix + self._path
                failure = await self._client.request("POST", path, planned.body, reader)
            if scope.cancelled_caught:
                failure = Failure(FailureKind.TIMEOUT, f"no whole response within {timeout_seconds:g} s")
            is_over = True
        finally:
            # Also after an interruption, since the server has produced the tokens that came until then.
            measurements.append(reader.measurement(failure, is_over=is_over))

    # --- output ---

    async def _show_progress(self, began_at: float) -> None:
        with ProgressLine(self._progress, clock=trio.current_time) as line:
            while True:
                await trio.sleep(PROGRESS_PERIOD_SECONDS if line.is_terminal else LOG_SECONDS)
                line.show(
                    progress_line(
                        done_count=len(self._measurements),
                        request_count=self._settings.requests,
                        output_tokens=self._tally.output_tokens,
                        elapsed_seconds=trio.current_time() - began_at,
                    )
                )

    def _result(self) -> Measured:
        figures = Figures.from_measurements(self._measurements, duration_seconds=self._duration_seconds)
        failed_warmups = [one.failure for one in self._warmups if one.failure is not None]
        notes = [*self._notes, *figures_notes(figures, self._measurements, self._settings, self._prompt_mode)]
        if failed_warmups:
            notes.append(f"{len(failed_warmups)} warm-up requests failed, the first with: {failed_warmups[0].message}.")
        if isinstance(self._client, Http2Client) and self._client.stream_wait_count:
            notes.append(
                f"{self._client.stream_wait_count} requests waited for a free HTTP/2 stream, which is in their times: "
                "raise --connections."
            )
        exit_code = 0
        if self.scope.cancelled_caught:
            exit_code = EXIT_INTERRUPTED
        elif figures.failed_requests or failed_warmups:
            exit_code = EXIT_REQUESTS_FAILED
        report = BenchReport.now(
            self._settings, model=self._model or "", prompt_mode=self._prompt_mode, figures=figures, notes=notes
        )
        return Measured(report, exit_code)


class PlainResponse:
    """Listener of a response that is not a stream. It keeps the status and the body."""

    def __init__(self) -> None:
        self.status = 0
        self._body = bytearray()

    def head(self, status: int) -> None:
        self.status = status

    def body(self, data: bytes, now_seconds: float) -> bool:
        self._body += data
        return len(self._body) <= PLAIN_RESPONSE_BYTES_MAX

    def first_model(self) -> str | None:
        """Return the id of the first model if the body is a list of models, otherwise None."""
        try:
            models = msgspec.json.decode(bytes(self._body), type=_ModelList).data if self.status == 200 else []
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return models[0].id if models else None

    def text(self) -> str:
        return self._body.decode("utf-8", "replace")

    def excerpt(self) -> str:
        return excerpt(bytes(self._body))


class _ModelCard(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]
