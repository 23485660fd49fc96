"""Measures every row of the suite at one or several servers in turn, prints a table, and writes JSON."""

from __future__ import annotations

import os
import pathlib
import random
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import msgspec
import numpy as np
import trio

from trioserve.bench.report import BenchReport, Figures, Machine, measured_at, report_json
from trioserve.bench.run import measure
from trioserve.bench.runner import (
    EXIT_INTERRUPTED,
    EXIT_REQUESTS_FAILED,
    CannotMeasure,
    Measured,
    conclude,
    http1_client,
    print_progress,
    scrape,
)
from trioserve.bench.settings import BenchSettings, SuiteRow, SuiteSettings, Target

__all__ = [
    "Cost",
    "RowResult",
    "SuiteReport",
    "decode_bound",
    "main",
    "markdown",
    "product_rate",
    "read_bandwidth",
    "row_bound",
]


class Cost(msgspec.Struct, frozen=True):
    """The cost of a model's computation.

    Attributes:
        weight_bytes: bytes of weights that a decode step reads.
        token_kv_bytes: bytes of keys and values that a decode step reads for each token of context.
        token_flops: floating-point operations for a token of a prompt.
        attended_token_flops: floating-point operations for each token that it attends to.
    """

    weight_bytes: float
    token_kv_bytes: float
    token_flops: float
    attended_token_flops: float


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """One row at one server.

    Attributes:
        row: name of the row.
        url: the server.
        model: name of the model.
        figure: median over the rounds of output tokens/s, or of requests/s if the row counts requests.
        unit: unit of `figure`.
        ttft_p50_ms: median over the rounds of each round's median TTFT, in milliseconds. The other times are computed
            in the same way.
        itl_p50_ms: median ITL.
        itl_p99_ms: 99th percentile of ITL.
        failed_requests: failed requests of all rounds.
        bound: result of `row_bound`. None: the server does not report its model's cost.
        decode_bound: result of `decode_bound`. None: the row is not mostly decoding, or the server does not report the
            cost.
        rounds: figures of each round.
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
    date: str = msgspec.field(default_factory=measured_at)
    machine: Machine = msgspec.field(default_factory=Machine.here)
    read_bytes_per_second: float
    product_flops_per_second: float | None
    results: list[RowResult]
    notes: list[str]


def main(settings: SuiteSettings) -> int:
    """Measure, print the table, and return the exit code of bench.

    After an interruption, the table of the rows so far is printed.

    Args:
        settings: settings of the suite.
    """
    if settings.seed is None:
        settings = msgspec.structs.replace(settings, seed=secrets.randbelow(2**31))
    bandwidth, products = read_bandwidth(), product_rate()
    urls = (settings.url, *settings.peers)
    costs = {url: trio.run(_cost, url, settings.api_key) for url in urls}
    measured: dict[tuple[str, str], list[BenchReport]] = {}
    turns = [(row, number, url) for row in settings.chosen_rows for number in range(settings.rounds) for url in urls]
    exit_code = 0
    for row, number, url in turns:
        outcome = trio.run(measure, _settings_of(row, number, url, settings))
        exit_code = exit_code or outcome.exit_code
        if isinstance(outcome, CannotMeasure):
            print_progress(f"trioserve bench: row {row.name}: {outcome.message}")
        else:
            measured.setdefault((row.name, url), []).append(outcome.report)
            print_progress(f"row {row.name} at {url} is measured")
        if outcome.exit_code == EXIT_INTERRUPTED:
            exit_code = EXIT_INTERRUPTED
            break
    if exit_code != EXIT_INTERRUPTED:  # The machine is measured a second time, and the better result counts.
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
        read_bytes_per_second=bandwidth,
        product_flops_per_second=products,
        results=results,
        notes=_notes(settings),
    )
    if settings.markdown_path is not None:
        pathlib.Path(settings.markdown_path).write_text(markdown(report), encoding="utf-8")
    return conclude(Measured(report, exit_code), settings.json_path, markdown, report_json)


def _faster(first: float | None, second: float | None) -> float | None:
    return max((rate for rate in (first, second) if rate is not None), default=None)


def decode_bound(row: SuiteRow, cost: Cost, bytes_per_second: float) -> float:
    """Return the output tokens/s that would result if a step took only the time to read its weights, keys and values.

    Args:
        row: the load.
        cost: cost of the model.
        bytes_per_second: memory bandwidth of the machine.
    """
    settings = BenchSettings(**row.load)
    return settings.concurrency / _step_seconds(settings, cost, bytes_per_second)


def row_bound(row: SuiteRow, cost: Cost, bytes_per_second: float, flops_per_second: float) -> float:
    """Return the output tokens/s, or requests/s if the row counts requests, if only computing prompts and reading
    memory took time.

    The prompts of as many requests as run at the same time are computed at the given rate, or as fast as the weights
    can be read. Each further token then takes one step, which takes the time to read its weights, keys and values. A
    shared prefix counts as computed before.

    Args:
        row: the load.
        cost: cost of the model.
        bytes_per_second: memory bandwidth of the machine.
        flops_per_second: speed of matrix products on the machine.
    """
    settings = BenchSettings(**row.load)
    new, seen = settings.prompt_tokens - settings.prefix_tokens, settings.prefix_tokens
    prompt_flops = new * cost.token_flops + new * (seen + (new + 1) / 2) * cost.attended_token_flops
    prompts = max(settings.concurrency * prompt_flops / flops_per_second, cost.weight_bytes / bytes_per_second)
    tokens = _tokens_of_response(settings)
    seconds = prompts + (tokens - 1) * _step_seconds(settings, cost, bytes_per_second)
    return settings.concurrency * (1 if row.counts_requests else tokens) / seconds


def _tokens_of_response(settings: BenchSettings) -> float:
    """Return the mean number of tokens of a response, including responses whose client leaves."""
    return sum(share * tokens for share, tokens in _responses(settings))


def _responses(settings: BenchSettings) -> tuple[tuple[float, int], ...]:
    """Return pairs: a fraction of the responses, and the number of tokens of these responses."""
    left = settings.abort_fraction
    return (1 - left, settings.output_tokens), (left, min(settings.abort_after_tokens, settings.output_tokens))


def _step_seconds(settings: BenchSettings, cost: Cost, bytes_per_second: float) -> float:
    """Return the time to read the weights and the keys and values of the context.

    On average over the steps, half of the response follows the prompt. Longer responses have more steps. A shared
    prefix is read once.
    """
    response_tokens = sum(share * tokens * tokens / 2 for share, tokens in _responses(settings)) / _tokens_of_response(
        settings
    )
    own = settings.prompt_tokens - settings.prefix_tokens + response_tokens
    context = settings.prefix_tokens + settings.concurrency * own
    return (cost.weight_bytes + context * cost.token_kv_bytes) / bytes_per_second


def markdown(report: SuiteReport) -> str:
    """Return a table with one line per row: figures of the first server, of each peer, and the ratio of the two.

    Args:
        report: figures of all servers.
    """
    urls = [report.settings.url, *report.settings.peers]
    found = {(result.row, result.url): result for result in report.results}
    titles = ["row", "load", report.settings.label or urls[0], "of the bound", "of decoding alone"]
    titles += ["TTFT p50", "ITL p50", "ITL p99"]
    for url in urls[1:]:
        titles += [url, "ratio"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for row in report.settings.chosen_rows:
        result = found.get((row.name, urls[0]))
        cells = [row.name, row.meaning]
        if result is None:
            cells += ["-"] * 6
        else:
            cells += [
                f"{result.figure:,.1f} {result.unit}",
                *(
                    "-" if bound is None else f"{result.figure / bound:.0%} of {bound:,.0f}"
                    for bound in (result.bound, result.decode_bound)
                ),
                *(
                    "-" if value is None else f"{value:.1f} ms"
                    for value in (result.ttft_p50_ms, result.itl_p50_ms, result.itl_p99_ms)
                ),
            ]
        for url in urls[1:]:
            peer_result = found.get((row.name, url))
            cells.append("-" if peer_result is None else f"{peer_result.figure:,.1f}")
            cells.append("-" if peer_result is None or result is None else f"{result.figure / peer_result.figure:.2f}x")
        lines.append("| " + " | ".join(cells) + " |")
    products = report.product_flops_per_second
    multiplies = "" if products is None else f", torch multiplies matrices at {products / 1e12:.2f} TFLOP/s"
    lines += [
        "",
        f"{report.machine}, {report.date}; memory is read at "
        f"{report.read_bytes_per_second / 1e9:.1f} GB/s{multiplies}.",
        *report.notes,
    ]
    return "\n".join(lines) + "\n"


def _settings_of(row: SuiteRow, number: int, url: str, settings: SuiteSettings) -> BenchSettings:
    """Return the settings of one measurement.

    Each round has different prompts. Otherwise, a round would find prompts of an earlier round in the prefix cache.
    """
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
    row: SuiteRow, url: str, reports: list[BenchReport], cost: Cost | None, bandwidth: float, products: float | None
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
    """Return the model's cost as the server reports it.

    None: the server does not report the cost, because it is a server of another project.
    """
    target = Target.from_url(url)
    client = http1_client(target, api_key=api_key)
    found = await scrape(client, target, seconds_max=10.0)
    await client.aclose()
    if found is None:
        return None
    names = ("step_weight_bytes", "token_kv_bytes", "token_flops", "attended_token_flops")
    reported = [found.total(f"trioserve:{name}") or 0.0 for name in names]
    return Cost(*reported) if all(reported) else None


def _notes(settings: SuiteSettings) -> list[str]:
    rounds = "" if settings.rounds == 1 else f" Medians of {settings.rounds} rounds, servers in turn."
    share = settings.request_share
    fewer = "" if share == 1.0 else f" With {share:g} of each row's requests, or as many as run at a time."
    return [
        "Greedy, streamed, over HTTP/1.1, the clients on the same cores. The bound: prompts at the rate of torch's "
        "products, and every other step as fast as what it must read can be read; of decoding alone: such steps and "
        f"nothing else.{rounds}{fewer} Seed {settings.seed}."
    ]


# --- Bounds of the machine ---

# rows, depth and columns of two matrix products: one as for the tokens of a prompt, and one of large square matrices
PRODUCT_SHAPES = ((1536, 576, 3072), (2048, 2048, 2048))
PRODUCT_SECONDS = 0.4  # seconds of measurement for each shape and number format
PRODUCT_PROCESS_SECONDS_MAX = 120.0
BYTES_PER_THREAD = 256 * 1024 * 1024  # larger than every cache
READ_ROUNDS = 5


def read_bandwidth() -> float:
    """Measure memory bandwidth. Takes about a second.

    Each thread reduces its own array without the GIL. The reduction costs less than the reading.

    Returns:
        Bytes per second that all cores read together, in the best of a few rounds.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    arrays = [np.ones(BYTES_PER_THREAD // 8, dtype=np.uint64) for _ in range(cores)]
    best_seconds = float("inf")
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(READ_ROUNDS):
            began = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, arrays))
            best_seconds = min(best_seconds, time.perf_counter() - began)
    return cores * BYTES_PER_THREAD / best_seconds


def product_rate() -> float | None:
    """Measure matrix products of torch on all cores, in bfloat16 and float32. Takes some seconds.

    It runs in another process, because torch and its threads must not stay in the process that measures clients.

    Returns:
        Floating-point operations per second of the best shape and number format, or None if torch is not installed.
    """
    try:
        process = subprocess.run(
            [sys.executable, "-m", "trioserve.bench.suite"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PRODUCT_PROCESS_SECONDS_MAX,
            check=True,
        )
        return float(process.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _measured() -> float:
    import torch

    best = 0.0
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            for rows, depth, columns in PRODUCT_SHAPES:
                values = torch.rand(rows, depth, dtype=dtype)
                product = torch.nn.Linear(depth, columns, bias=False, dtype=dtype)
                ends_at = time.perf_counter() + PRODUCT_SECONDS
                while True:
                    began = time.perf_counter()
                    product(values)
                    ended = time.perf_counter()
                    best = max(best, 2.0 * rows * depth * columns / (ended - began))
                    if ended > ends_at:
                        break
    return best


if __name__ == "__main__":
    print(_measured())
