"""Runs one measurement: finds the server and its model, sends the load, and measures the responses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TextIO

import trio

from trioserve.bench.client import Client, Failure, Http2Client, OpenStream, stream_opener
from trioserve.bench.load import Load, PlannedRequest, PromptMode, Tally
from trioserve.bench.report import (
    BenchReport,
    Figures,
    Measurement,
    bench_json,
    bench_text,
    figures_notes,
    progress_line,
)
from trioserve.bench.runner import (
    EXIT_INTERRUPTED,
    EXIT_REQUESTS_FAILED,
    CannotMeasure,
    Measured,
    ask,
    cancel_on_signal,
    common_headers,
    conclude,
    find_model,
    http1_client,
    perform,
    perform_all,
    unreachable,
)
from trioserve.bench.settings import BenchSettings
from trioserve.trio_tools.progress import LOG_SECONDS, ProgressLine

__all__ = ["main", "measure"]

PROGRESS_PERIOD_SECONDS = 0.25


def main(settings: BenchSettings) -> int:
    """Measure, print the report, and return the exit code.

    Args:
        settings: settings of the measurement.

    Returns:
        0, 1 if a request failed, 2 if the server cannot be reached, 130 after an interruption. After an interruption,
        the report of the requests so far is printed.
    """
    return conclude(trio.run(measure, settings), settings.json_path, bench_text, bench_json)


async def measure(
    settings: BenchSettings, *, open_stream: OpenStream | None = None, progress: TextIO | None = None
) -> Measured[BenchReport] | CannotMeasure:
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
    target = settings.target
    if settings.http == 1:
        return http1_client(target, api_key=settings.api_key, open_stream=open_stream)
    return Http2Client(
        nursery,
        open_stream,
        common_headers(settings.api_key),
        scheme=target.scheme,
        authority=target.authority,
        connections=settings.connections,
    )


class _Run:
    """The tasks of one measurement, and their results so far."""

    def __init__(self, settings: BenchSettings, client: Client, progress: TextIO) -> None:
        self.scope = trio.CancelScope()
        self._settings = settings
        self._client = client
        self._progress = progress
        self._model = ""
        self._prompt_mode: PromptMode = "text"
        self._measurements: list[Measurement] = []
        self._warmups: list[Measurement] = []
        self._tally = Tally()
        self._notes: list[str] = []
        self._duration_seconds = 0.0

    async def outcome(self) -> Measured[BenchReport] | CannotMeasure:
        with self.scope:
            model = await find_model(self._client, self._settings, http=self._settings.http)
            if isinstance(model, CannotMeasure):
                return model
            self._model = model
            refusal = await self._find_prompt_mode()
            if refusal is not None:
                return refusal
            load = Load(self._settings, model=model, prompt_mode=self._prompt_mode)
            await self._closed_loop(load.warmups(), self._warmups)
            self._tally.output_tokens = 0
            await self._measure(load)
        if not self._measurements:
            return CannotMeasure("interrupted before the first request", EXIT_INTERRUPTED)
        return self._result()

    # --- Before the first request ---

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
            load = Load(settings, model=self._model, prompt_mode=mode)
            response = await ask(
                self._client,
                settings.target,
                self._path,
                seconds_max=settings.timeout_seconds,
                method="POST",
                body=load.probe_body(),
            )
            if isinstance(response, Failure):
                return unreachable(settings, response, http=settings.http)
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

    # --- Load ---

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
        async def perform_one(planned: PlannedRequest) -> None:
            await self._perform(planned, trio.current_time(), measurements)

        await perform_all(requests, perform_one, in_flight=self._settings.concurrency)

    async def _open_loop(self, requests: Iterator[PlannedRequest], began_at: float) -> None:
        async with trio.open_nursery() as nursery:
            for planned in requests:
                arrives_at = began_at + (planned.arrival_seconds or 0.0)
                await trio.sleep_until(arrives_at)
                # The measured time of a request starts at its planned arrival. Otherwise, a late client would make the
                # server look fast.
                nursery.start_soon(self._perform, planned, arrives_at, self._measurements)

    async def _perform(self, planned: PlannedRequest, started_at: float, measurements: list[Measurement]) -> None:
        await perform(
            self._client,
            self._settings.target.path_prefix + self._path,
            planned,
            started_at=started_at,
            seconds_max=self._settings.timeout_seconds,
            tally=self._tally,
            measurements=measurements,
        )

    # --- Output ---

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

    def _result(self) -> Measured[BenchReport]:
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
        report = BenchReport(
            settings=self._settings, model=self._model, prompt_mode=self._prompt_mode, figures=figures, notes=notes
        )
        return Measured(report, exit_code)
