"""Runs one measurement of structured output: rows in turn, or a set of schemas one by one."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO

import msgspec
import trio

from trioserve.bench.client import Failure, OpenStream, stream_opener
from trioserve.bench.http1 import Http1Client
from trioserve.bench.load import EventParser, EventTooLong, excerpt
from trioserve.bench.run import (
    EXIT_INTERRUPTED,
    EXIT_REQUESTS_FAILED,
    EXIT_UNREACHABLE,
    CannotMeasure,
    PlainResponse,
    cancel_on_signal,
    common_headers,
)
from trioserve.bench.scrape import Scrape
from trioserve.bench.structured.judge import Judge, Verdict
from trioserve.bench.structured.plan import PATH, ROWS, Row, row_body, schema_body
from trioserve.bench.structured.report import (
    JudgedSchema,
    MeasuredRow,
    RoundFigures,
    StructuredReport,
    report_json,
    report_text,
)
from trioserve.bench.structured.schema_set import NamedSchema, read_schemas
from trioserve.bench.structured.settings import StructuredBenchSettings
from trioserve.trio_tools.progress import ProgressBar

__all__ = ["main", "measure_structured"]

COUNTED = {
    "forced_tokens": "trioserve:forced_tokens_total",
    "mask_rows": "trioserve:mask_rows_total",
    "mask_seconds": "trioserve:mask_seconds_total",
}
REFUSAL_BYTES_MAX = 4096


def main(settings: StructuredBenchSettings) -> int:
    """Measure, print the report, and return the exit code.

    Args:
        settings: settings of the measurement.

    Returns:
        0, 1 if a request failed or a response is not valid, 2 if the server cannot be reached, 130 after an
        interruption. After an interruption, the report so far is printed.
    """
    outcome = trio.run(measure_structured, settings)
    if isinstance(outcome, CannotMeasure):
        print(f"trioserve bench: {outcome.message}", file=sys.stderr)
        return outcome.exit_code
    report, exit_code = outcome
    print(report_text(report), end="", file=sys.stderr if settings.json_path == "-" else sys.stdout)
    if settings.json_path == "-":
        sys.stdout.write(report_json(report).decode())
    elif settings.json_path is not None:
        pathlib.Path(settings.json_path).write_bytes(report_json(report))
    return exit_code


async def measure_structured(
    settings: StructuredBenchSettings, *, open_stream: OpenStream | None = None, progress: TextIO | None = None
) -> tuple[StructuredReport, int] | CannotMeasure:
    """Run one measurement. Must run in the main thread, since it handles SIGINT and SIGTERM, which end it early.

    Args:
        settings: settings of the measurement.
        open_stream: opens a connection to the server. Default: as the settings say.
        progress: where the progress is written. Default: standard error.

    Returns:
        The report and the exit code, or the reason why there is no report.

    Raises:
        StartupError: the schemas cannot be read.
    """
    schemas = [] if settings.schemas is None else read_schemas(pathlib.Path(settings.schemas))
    headers = [("host", settings.target.authority), *common_headers(settings.api_key)]
    client = Http1Client(open_stream or stream_opener(settings.target, 1), headers)
    run = _Run(settings, client, progress or sys.stderr)
    async with trio.open_nursery() as nursery:
        await nursery.start(cancel_on_signal, run.scope)
        outcome = await run.outcome(schemas)
        await client.aclose()
        nursery.cancel_scope.cancel()
    return outcome


class _Run:
    def __init__(self, settings: StructuredBenchSettings, client: Http1Client, progress: TextIO) -> None:
        self.scope = trio.CancelScope()
        self._settings = settings
        self._client = client
        self._progress = progress
        self._model = ""
        self._measured: dict[str, MeasuredRow] = {}
        self._judged: list[JudgedSchema] = []
        self._failures: list[str] = []

    async def outcome(self, schemas: list[NamedSchema]) -> tuple[StructuredReport, int] | CannotMeasure:
        judge = Judge() if schemas else None
        with self.scope:
            refusal = await self._find_model()
            if refusal is not None:
                return refusal
            if judge is not None:
                await self._judge_all(schemas, judge)
            else:
                await self._measure_rows()
        rows = [row for row in self._measured.values() if row.rounds]
        if not rows and not self._judged:
            return CannotMeasure("interrupted before anything was measured", EXIT_INTERRUPTED)
        self._judged.sort(key=lambda one: (one.group, one.name))
        report = StructuredReport(self._settings, self._model, rows, self._judged, self._failures)
        if self.scope.cancelled_caught:
            return report, EXIT_INTERRUPTED
        is_bad = any(one.verdict in (Verdict.INVALID, Verdict.FAILED) for one in self._judged)
        return report, EXIT_REQUESTS_FAILED if is_bad or self._failures else 0

    async def _find_model(self) -> CannotMeasure | None:
        response = PlainResponse()
        failure = await self._ask("/v1/models", response)
        if failure is not None:
            return CannotMeasure(f"cannot reach {self._settings.url}: {failure.message}", EXIT_UNREACHABLE)
        model = self._settings.model or response.first_model()
        if model is None:
            return CannotMeasure(f"{self._settings.url} names no model: give --model", EXIT_REQUESTS_FAILED)
        self._model = model
        return None

    async def _ask(self, path: str, response: PlainResponse) -> Failure | None:
        return await self._client.request("GET", self._settings.target.path_prefix + path, b"", response)

    # --- rows in turn ---

    async def _measure_rows(self) -> None:
        settings = self._settings
        for row in ROWS:
            streams = 1 if row.is_alone else settings.concurrency
            self._measured[row.name] = MeasuredRow(row.name, streams, [])
            await self._round(row, streams)  # compiles grammars and fills caches
        for number in range(settings.rounds):
            first = number % len(ROWS)
            for row in (*ROWS[first:], *ROWS[:first]):
                measured = self._measured[row.name]
                figures = await self._round(row, measured.streams)
                if figures is not None:
                    measured.rounds.append(figures)
            print(f"round {number + 1} of {settings.rounds}", file=self._progress, flush=True)

    async def _round(self, row: Row, streams: int) -> RoundFigures | None:
        """Measure a row once. Return None if a request failed, since the speed would mean nothing."""
        settings = self._settings
        count = max(1, settings.requests // settings.concurrency) if row.is_alone else settings.requests
        numbers: Iterator[int] = iter(range(count))
        tokens: list[int] = []

        async def worker() -> None:
            for number in numbers:
                response = await self._generate(row_body(settings, self._model, row, number))
                if response.failure is not None:
                    self._failures.append(f"{row.name}: {response.failure}")
                tokens.append(response.token_count)

        before = await self._counted()
        failed_count = len(self._failures)
        began_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(streams):
                nursery.start_soon(worker)
        seconds = trio.current_time() - began_at
        after = await self._counted()
        if len(self._failures) > failed_count:
            return None
        counted = {name: after[name] - before[name] for name in COUNTED if name in before and name in after}
        return RoundFigures(seconds, sum(tokens), **counted)

    async def _counted(self) -> dict[str, float]:
        response = PlainResponse()
        if await self._ask("/metrics", response) is not None or response.status != 200:
            return {}
        scrape = Scrape(response.text())
        found = {name: scrape.total(series) for name, series in COUNTED.items()}
        return {name: value for name, value in found.items() if value is not None}

    # --- a set of schemas ---

    async def _judge_all(self, schemas: list[NamedSchema], judge: Judge) -> None:
        remaining = iter(enumerate(schemas))

        async def worker() -> None:
            for number, named in remaining:
                began_at = trio.current_time()
                response = await self._generate(schema_body(self._settings, self._model, named, number))
                seconds = trio.current_time() - began_at
                verdict, reason = self._verdict(judge, named, response)
                self._judged.append(
                    JudgedSchema(named.name, named.group, verdict, reason, seconds, response.token_count)
                )
                bar.show_share(len(self._judged), len(schemas))

        with ProgressBar("judging", self._progress, unit="schemas", clock=trio.current_time) as bar:
            async with trio.open_nursery() as nursery:
                for _ in range(self._settings.concurrency):
                    nursery.start_soon(worker)

    def _verdict(self, judge: Judge, named: NamedSchema, response: _Written) -> tuple[Verdict, str]:
        if response.status == 400:
            return Verdict.REFUSED, response.failure or ""
        if response.failure is not None:
            return Verdict.FAILED, response.failure
        return judge.judge(named.schema, response.text, is_cut=response.finish_reason == "length")

    async def _generate(self, body: bytes) -> _Written:
        written = _Written()
        with trio.move_on_after(self._settings.timeout_seconds) as scope:
            failure = await self._client.request("POST", self._settings.target.path_prefix + PATH, body, written)
            written.end(None if failure is None else failure.message)
        if scope.cancelled_caught:
            written.end(f"no whole response within {self._settings.timeout_seconds:g} s")
        return written


class _Written:
    """Listener of one streamed response.

    Attributes:
        status: HTTP status.
        token_count: tokens of the response.
        finish_reason: why the response ended.
        failure: why there is no whole response. None: there is one.
    """

    def __init__(self) -> None:
        self.status = 0
        self.token_count = 0
        self.finish_reason: str | None = None
        self.failure: str | None = None
        self._parts: list[str] = []
        self._parser = EventParser()
        self._refusal = b""

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def head(self, status: int) -> None:
        self.status = status

    def body(self, data: bytes, now_seconds: float) -> bool:
        if self.status != 200:
            self._refusal += data[: REFUSAL_BYTES_MAX - len(self._refusal)]
            return True
        try:
            for event in self._parser.feed(data):
                if event != b"[DONE]":
                    self._note_chunk(msgspec.json.decode(event))
        except (msgspec.MsgspecError, UnicodeDecodeError, EventTooLong) as error:
            self.failure = f"a chunk of the stream cannot be read: {error}"
        return self.failure is None

    def _note_chunk(self, chunk: dict[str, Any]) -> None:
        if chunk.get("error") is not None:
            self.failure = f"error in the stream: {excerpt(json.dumps(chunk['error']).encode())}"
        if chunk.get("usage"):
            self.token_count = chunk["usage"]["completion_tokens"]
        for choice in chunk.get("choices", ()):
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self._parts.append(choice.get("delta", {}).get("content") or "")

    def end(self, failure: str | None) -> None:
        """Note the end of the response.

        Args:
            failure: why the transport failed, or None.
        """
        if self.failure is None:
            self.failure = failure
        if self.failure is None and self.status != 200:
            self.failure = f"status {self.status}: {excerpt(self._refusal)}"
        if self.failure is None and self.finish_reason not in ("stop", "length"):
            self.failure = f"the response ended with finish_reason {self.finish_reason}"
