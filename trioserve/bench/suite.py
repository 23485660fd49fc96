"""Every row of the suite against one server, and against others in turn; a table for people, JSON for programs."""

from __future__ import annotations

import datetime
import pathlib
import random
import secrets
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec
import trio

from trioserve.bench.client import Failure, stream_opener
from trioserve.bench.http1 import Http1Client
from trioserve.bench.machine_speed import product_rate, read_bandwidth
from trioserve.bench.report import BenchReport, Figures, Machine
from trioserve.bench.run import (
    EXIT_INTERRUPTED,
    EXIT_REQUESTS_FAILED,
    CannotMeasure,
    PlainResponse,
    common_headers,
    measure,
)
from trioserve.bench.scrape import Scrape
from trioserve.bench.settings import BenchSettings, Target
from trioserve.bench.suite_settings import Row, SuiteSettings

__all__ = ["Cost", "RowResult", "SuiteReport", "decode_bound", "main", "markdown", "report_json", "row_bound"]


class Cost(msgspec.Struct, frozen=True):
    """What a model takes. Bytes that a decode step has to read: all weights once, and the keys and values of every
    token of context. Floating-point operations of a prompt's token, and of each token that it sees."""

    weight_bytes: float
    token_kv_bytes: float
    token_flops: float
    attended_token_flops: float


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """One row at one server. figure: output tokens/s, or requests/s where the row counts those; the median of rounds.

    bound, decode_bound: see row_bound and decode_bound, in the same unit; None where they say nothing or the server
    does not tell what its model takes. Times are medians of the rounds' percentiles, in milliseconds.
    """

    row: str
    url: str
    model: str
    figure: float
    unit: str
    ttft_p50_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    failed_requests: int
    bound: float | None
    decode_bound: float | None
    rounds: list[Figures]


class SuiteReport(msgspec.Struct, frozen=True, kw_only=True):
    settings: SuiteSettings
    date: str
    machine: Machine
    read_bytes_per_second: float
    product_flops_per_second: float | None
    results: list[RowResult]
    notes: list[str]


def main(settings: SuiteSettings) -> int:
    """Measure, print, and return the exit code as bench does. What was measured before an interruption is printed."""
    if settings.seed is None:
        settings = msgspec.structs.replace(settings, seed=secrets.randbelow(2**31))
    bandwidth, products = read_bandwidth(), product_rate()
    urls = (settings.url, *settings.peers)
    costs = {url: trio.run(_cost, url, settings.api_key) for url in urls}
    measured: dict[tuple[str, str], list[BenchReport]] = {}
    exit_code = 0
    turns = [(row, number, url) for row in settings.chosen_rows for number in range(settings.rounds) for url in urls]
    for row, number, url in turns:
        outcome = trio.run(measure, _settings_of(row, number, url, settings))
        exit_code = exit_code or outcome.exit_code
        if isinstance(outcome, CannotMeasure):
            print(f"trioserve bench: row {row.name}: {outcome.message}", file=sys.stderr)
        else:
            measured.setdefault((row.name, url), []).append(outcome.report)
            print(f"row {row.name} at {url} is measured", file=sys.stderr, flush=True)
        if outcome.exit_code == EXIT_INTERRUPTED:
            exit_code = EXIT_INTERRUPTED
            break
    if exit_code != EXIT_INTERRUPTED:  # every bound is of the quieter moment
        bandwidth, products = max(bandwidth, read_bandwidth()), _faster(products, product_rate())
    results = [
        _result(row, url, measured[row.name, url], costs[url], bandwidth, products)
        for row in settings.chosen_rows
        for url in urls
        if (row.name, url) in measured
    ]
    if not results:
        return exit_code or EXIT_REQUESTS_FAILED
    report = SuiteReport(
        settings=settings,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=Machine.here(),
        read_bytes_per_second=bandwidth,
        product_flops_per_second=products,
        results=results,
        notes=_notes(settings),
    )
    table = markdown(report)
    print(table, end="", file=sys.stderr if settings.json_path == "-" else sys.stdout)
    if settings.markdown_path is not None:
        pathlib.Path(settings.markdown_path).write_text(table, encoding="utf-8")
    if settings.json_path == "-":
        sys.stdout.write(report_json(report).decode())
    elif settings.json_path is not None:
        pathlib.Path(settings.json_path).write_bytes(report_json(report))
    return exit_code


def _faster(first: float | None, second: float | None) -> float | None:
    return max((rate for rate in (first, second) if rate is not None), default=None)


def decode_bound(row: Row, cost: Cost, bytes_per_second: float) -> float:
    """Output tokens/s if every step took as long as reading what it has to, and nothing else took time."""
    settings = BenchSettings(**row.load)
    return settings.concurrency / _step_seconds(settings, cost, bytes_per_second)


def row_bound(row: Row, cost: Cost, bytes_per_second: float, flops_per_second: float) -> float:
    """Output tokens/s, or requests/s where the row counts those, if nothing took time but this: the prompts of as many
    requests as run at a time, computed at this rate or as fast as the weights can be read, and then a step for each
    token behind the first ones, which takes as long as reading what it has to. A prefix that all share is computed
    before."""
    settings = BenchSettings(**row.load)
    new, seen = settings.prompt_tokens - settings.prefix_tokens, settings.prefix_tokens
    prompt_flops = new * cost.token_flops + new * (seen + (new + 1) / 2) * cost.attended_token_flops
    prompts = max(settings.concurrency * prompt_flops / flops_per_second, cost.weight_bytes / bytes_per_second)
    tokens = _tokens_of_response(settings)
    seconds = prompts + (tokens - 1) * _step_seconds(settings, cost, bytes_per_second)
    return settings.concurrency * (1 if row.counts_requests else tokens) / seconds


def _tokens_of_response(settings: BenchSettings) -> float:
    """On average, with those that are not read to their end."""
    return sum(share * tokens for share, tokens in _responses(settings))


def _responses(settings: BenchSettings) -> tuple[tuple[float, int], ...]:
    """Which share of the responses has how many tokens."""
    left = settings.abort_fraction
    return (1 - left, settings.output_tokens), (left, min(settings.abort_after_tokens, settings.output_tokens))


def _step_seconds(settings: BenchSettings, cost: Cost, bytes_per_second: float) -> float:
    """Reading the weights and the keys and values of the context: behind the prompt half of the response, on average
    over the steps, of which a longer answer has more; what all share is there once."""
    answered = sum(share * tokens * tokens / 2 for share, tokens in _responses(settings)) / _tokens_of_response(
        settings
    )
    own = settings.prompt_tokens - settings.prefix_tokens + answered
    context = settings.prefix_tokens + settings.concurrency * own
    return (cost.weight_bytes + context * cost.token_kv_bytes) / bytes_per_second


def markdown(report: SuiteReport) -> str:
    """One line a row; the first server's figures, each peer's, and how many times the peer's the first one's is."""
    urls = [report.settings.url, *report.settings.peers]
    found = {(result.row, result.url): result for result in report.results}
    titles = ["row", "load", report.settings.label or urls[0], "of the bound", "of decoding alone"]
    titles += ["TTFT p50", "ITL p50", "ITL p99"]
    for url in urls[1:]:
        titles += [url, "ratio"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for row in report.settings.chosen_rows:
        mine = found.get((row.name, urls[0]))
        cells = [row.name, row.meaning]
        if mine is None:
            cells += ["-"] * 6
        else:
            cells += [
                f"{mine.figure:,.1f} {mine.unit}",
                *(
                    "-" if bound is None else f"{mine.figure / bound:.0%} of {bound:,.0f}"
                    for bound in (mine.bound, mine.decode_bound)
                ),
                *(
                    "-" if value is None else f"{value:.1f} ms"
                    for value in (mine.ttft_p50_ms, mine.itl_p50_ms, mine.itl_p99_ms)
                ),
            ]
        for url in urls[1:]:
            theirs = found.get((row.name, url))
            cells.append("-" if theirs is None else f"{theirs.figure:,.1f}")
            cells.append("-" if theirs is None or mine is None else f"{mine.figure / theirs.figure:.2f}x")
        lines.append("| " + " | ".join(cells) + " |")
    machine, products = report.machine, report.product_flops_per_second
    multiplies = "" if products is None else f", torch multiplies matrices at {products / 1e12:.2f} TFLOP/s"
    lines += [
        "",
        f"{machine.cpu}, {machine.cores} cores, Python {machine.python}, {report.date}; memory is read at "
        f"{report.read_bytes_per_second / 1e9:.1f} GB/s{multiplies}.",
        *report.notes,
    ]
    return "\n".join(lines) + "\n"


def report_json(report: SuiteReport) -> bytes:
    """Indented JSON, without the API key."""
    content = msgspec.to_builtins(report)
    del content["settings"]["api_key"]
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def _settings_of(row: Row, number: int, url: str, settings: SuiteSettings) -> BenchSettings:
    """number: of the round. Each has prompts of its own, or it would find those of another in the prefix cache."""
    load: dict[str, Any] = {
        **row.load,
        "vocab_size": settings.vocab_size,
        "seed": random.Random(f"{settings.seed}/{row.name}/{number}").getrandbits(31),
        "timeout_seconds": settings.timeout_seconds,
        "api_key": settings.api_key,
        "allow_remote": settings.allow_remote,
    }
    return BenchSettings(url=url, **load)


def _result(
    row: Row, url: str, reports: list[BenchReport], cost: Cost | None, bandwidth: float, products: float | None
) -> RowResult:
    rounds = [report.figures for report in reports]

    def middle(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return median(known) if known else None

    figure = middle(
        [one.completed_requests_per_second if row.counts_requests else one.output_tokens_per_second for one in rounds]
    )
    return RowResult(
        row=row.name,
        url=url,
        model=reports[-1].model,
        figure=figure or 0.0,
        unit="requests/s" if row.counts_requests else "tokens/s",
        ttft_p50_ms=middle([None if one.ttft_ms is None else one.ttft_ms.p50 for one in rounds]),
        itl_p50_ms=middle([None if one.itl_ms is None else one.itl_ms.p50 for one in rounds]),
        itl_p99_ms=middle([None if one.itl_ms is None else one.itl_ms.p99 for one in rounds]),
        failed_requests=sum(one.failed_requests for one in rounds),
        bound=row_bound(row, cost, bandwidth, products) if cost is not None and products is not None else None,
        decode_bound=decode_bound(row, cost, bandwidth) if cost is not None and row.is_decode else None,
        rounds=rounds,
    )


async def _cost(url: str, api_key: str | None) -> Cost | None:
    """What the server says of itself; None if it says nothing, as others than trioserve do."""
    target = Target.from_url(url)
    client = Http1Client(stream_opener(target, 1), [("host", target.authority), *common_headers(api_key)])
    response = PlainResponse()
    failure: Failure | None = None
    with trio.move_on_after(10.0):
        failure = await client.request("GET", target.path_prefix + "/metrics", b"", response)
    await client.aclose()
    if failure is not None or response.status != 200:
        return None
    scrape = Scrape(response.text())
    names = ("step_weight_bytes", "token_kv_bytes", "token_flops", "attended_token_flops")
    told = [scrape.total(f"trioserve:{name}") or 0.0 for name in names]
    return Cost(*told) if all(told) else None


def _notes(settings: SuiteSettings) -> list[str]:
    rounds = "" if settings.rounds == 1 else f" Medians of {settings.rounds} rounds, servers in turn."
    share = settings.request_share
    fewer = "" if share == 1.0 else f" With {share:g} of each row's requests, or as many as run at a time."
    return [
        "Greedy, streamed, over HTTP/1.1, the clients on the same cores. The bound: prompts at the rate of torch's "
        "products, and every other step as fast as what it must read can be read; of decoding alone: such steps and "
        f"nothing else.{rounds}{fewer} Seed {settings.seed}."
    ]
