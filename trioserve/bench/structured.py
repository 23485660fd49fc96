"""Measures structured output: rows of requests in turn, or a set of schemas one by one."""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, TextIO

import msgspec
import trio

from trioserve.bench.client import Http1Client, OpenStream
from trioserve.bench.load import EventParser, EventTooLong, excerpt
from trioserve.bench.report import report_json
from trioserve.bench.runner import (
    EXIT_INTERRUPTED,
    EXIT_REQUESTS_FAILED,
    CannotMeasure,
    Measured,
    cancel_on_signal,
    conclude,
    find_model,
    http1_client,
    perform_all,
    scrape,
)
from trioserve.bench.schema_set import Judge, NamedSchema, Verdict, read_schemas
from trioserve.bench.settings import StructuredBenchSettings
from trioserve.trio_tools.progress import ProgressBar

__all__ = [
    "ROWS",
    "JudgedSchema",
    "MeasuredRow",
    "RoundFigures",
    "Row",
    "StructuredReport",
    "main",
    "measure_structured",
    "row_body",
    "schema_body",
]

PATH = "/v1/chat/completions"

# With this schema, nearly no token is forced, and the list never ends early. So every token needs a mask.
OPEN = {"type": "array", "items": {"type": "string", "minLength": 24}, "minItems": 1000}
# With this schema, about half of the tokens are forced, such as names of properties and punctuation.
HALF = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "product_name": {"type": "string", "minLength": 8, "maxLength": 24},
            "price_in_cents": {"type": "integer", "minimum": 1000, "maximum": 9999},
            "is_available": {"type": "boolean"},
            "comment": {"type": "string", "minLength": 16, "maxLength": 32},
        },
        "required": ["product_name", "price_in_cents", "is_available", "comment"],
        "additionalProperties": False,
    },
}


class Row(msgspec.Struct, frozen=True):
    """One kind of request.

    Attributes:
        name: name of the row.
        meaning: description.
        schema: JSON schema of the response. None: free text.
        is_alone: True: one request at a time, whatever the concurrency is.
        free: name of the row with which it is compared. "": none.
    """

    name: str
    meaning: str
    schema: Any = None
    is_alone: bool = False
    free: str = ""


ROWS = (
    Row("free", "free text"),
    Row("schema", "a list of texts without forced tokens", OPEN, free="free"),
    Row("forced", "a list of objects, about half forced", HALF, free="free"),
    Row("free, alone", "free text, one at a time", is_alone=True),
    Row("schema, alone", "nothing forced, one at a time", OPEN, is_alone=True, free="free, alone"),
    Row("forced, alone", "about half forced, one at a time", HALF, is_alone=True, free="free, alone"),
)


def row_body(settings: StructuredBenchSettings, model: str, row: Row, number: int) -> bytes:
    """Return the body of a request. All rows have the same prompts.

    Args:
        settings: settings of the measurement.
        model: name of the model.
        number: number of the request within its row and round.
    """
    body = _body(settings, model, f"List number {number}: things that are sold on a market, in JSON.", row.schema)
    return msgspec.json.encode({**body, "ignore_eos": True, "seed": settings.seed + number})


def schema_body(settings: StructuredBenchSettings, model: str, named: NamedSchema, number: int) -> bytes:
    prompt = f"Write one example in JSON: {named.title}"
    return msgspec.json.encode({**_body(settings, model, prompt, named.schema), "seed": settings.seed + number})


def _body(settings: StructuredBenchSettings, model: str, prompt: str, schema: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": settings.output_tokens,
        "temperature": settings.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if schema is not None:
        # The schema is inserted as JSON text. Only Python's own json module keeps all numbers of a schema exact.
        raw = msgspec.Raw(json.dumps(schema).encode())
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "response", "schema": raw}}
    return body


SHOWN_MAX = 40  # maximum number of failures that the text report shows


class RoundFigures(msgspec.Struct, frozen=True):
    """Figures of one row in one round. A counter is None if the server does not report it."""

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


def structured_json(report: StructuredReport) -> bytes:
    return report_json(report, after={"settings": msgspec.structs.replace(report.settings, api_key=None)})


def structured_text(report: StructuredReport) -> str:
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
    """Return the median over the rounds of the ratio of two speeds. Other work on the machine affects both speeds.

    Args:
        row: figures of one schema set, in rounds.
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
    return conclude(trio.run(measure_structured, settings), settings.json_path, structured_text, structured_json)


async def measure_structured(
    settings: StructuredBenchSettings, *, open_stream: OpenStream | None = None, progress: TextIO | None = None
) -> Measured[StructuredReport] | CannotMeasure:
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
    client = http1_client(settings.target, api_key=settings.api_key, open_stream=open_stream)
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

    async def outcome(self, schemas: list[NamedSchema]) -> Measured[StructuredReport] | CannotMeasure:
        judge = Judge() if schemas else None
        with self.scope:
            model = await find_model(self._client, self._settings)
            if isinstance(model, CannotMeasure):
                return model
            self._model = model
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
            return Measured(report, EXIT_INTERRUPTED)
        is_bad = any(one.verdict in (Verdict.INVALID, Verdict.FAILED) for one in self._judged)
        return Measured(report, EXIT_REQUESTS_FAILED if is_bad or self._failures else 0)

    # --- Measurement of rows in turn ---

    async def _measure_rows(self) -> None:
        settings = self._settings
        for row in ROWS:
            streams = 1 if row.is_alone else settings.concurrency
            self._measured[row.name] = MeasuredRow(row.name, streams, [])
            await self._round(row, streams)  # This uncounted round compiles grammars and fills caches.
        for number in range(settings.rounds):
            first = number % len(ROWS)
            for row in (*ROWS[first:], *ROWS[:first]):
                measured = self._measured[row.name]
                figures = await self._round(row, measured.streams)
                if figures is not None:
                    measured.rounds.append(figures)
            print(f"round {number + 1} of {settings.rounds}", file=self._progress, flush=True)

    async def _round(self, row: Row, streams: int) -> RoundFigures | None:
        """Measure a row once. Return None if a request failed, since the speed would then have no meaning."""
        settings = self._settings
        count = max(1, settings.requests // settings.concurrency) if row.is_alone else settings.requests
        tokens: list[int] = []

        async def generate(number: int) -> None:
            response = await self._generate(row_body(settings, self._model, row, number))
            if response.failure is not None:
                self._failures.append(f"{row.name}: {response.failure}")
            tokens.append(response.token_count)

        before = await self._counted()
        failed_count = len(self._failures)
        began_at = trio.current_time()
        await perform_all(range(count), generate, in_flight=streams)
        seconds = trio.current_time() - began_at
        after = await self._counted()
        if len(self._failures) > failed_count:
            return None
        counted = {name: after[name] - before[name] for name in COUNTED if name in before and name in after}
        return RoundFigures(seconds, sum(tokens), **counted)

    async def _counted(self) -> dict[str, float]:
        settings = self._settings
        metrics = await scrape(self._client, settings.target, seconds_max=settings.timeout_seconds)
        found = {} if metrics is None else {name: metrics.total(series) for name, series in COUNTED.items()}
        return {name: value for name, value in found.items() if value is not None}

    # --- Measurement of a set of schemas ---

    async def _judge_all(self, schemas: list[NamedSchema], judge: Judge) -> None:
        async def judge_one(numbered: tuple[int, NamedSchema]) -> None:
            number, named = numbered
            began_at = trio.current_time()
            response = await self._generate(schema_body(self._settings, self._model, named, number))
            seconds = trio.current_time() - began_at
            verdict, reason = self._verdict(judge, named, response)
            self._judged.append(JudgedSchema(named.name, named.group, verdict, reason, seconds, response.token_count))
            bar.show_share(len(self._judged), len(schemas))

        with ProgressBar("judging", self._progress, unit="schemas", clock=trio.current_time) as bar:
            await perform_all(enumerate(schemas), judge_one, in_flight=self._settings.concurrency)

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
