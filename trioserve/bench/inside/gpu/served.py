"""Measures a server on a GPU as its clients see it: start, load, clients that leave, and the end."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import trio

from trioserve.bench.inside.gpu.machine import Part
from trioserve.bench.run import measure
from trioserve.bench.runner import CannotMeasure, Measured, Scrape, ServerProcess, http1_client, scrape
from trioserve.bench.settings import BenchSettings, Target

__all__ = ["measure_server"]

READY_SECONDS_MAX = 90.0
SCRAPE_SECONDS_MAX = 5.0
LOADS = (1, 64, 256)
PROMPT_TOKENS, OUTPUT_TOKENS, LONG_PROMPT_TOKENS = 128, 128, 1_024
COUNTERS = ("trioserve:cancel_to_free_seconds", "trioserve:cancel_to_free_steps", "trioserve:step_seconds")


def measure_server(part: Part, shape: str, log_directory: Path | None) -> None:
    """Write a checkpoint with random weights, serve it with the defaults of the device, and load it.

    Args:
        part: where the figures go.
        shape: name in SHAPES.
        log_directory: folder for the server's log. None: no log is kept.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / shape
        began = time.monotonic()
        command = [sys.executable, "-m", "trioserve", "random-checkpoint", shape, str(model)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        part.put(f"random checkpoint of {shape}", seconds=time.monotonic() - began)
        words = ["serve", "--model", str(model), "--device", part.device]
        if not part.is_gpu:
            words += ["--kv-cache-memory", "0.1", "--max-model-len", "4096"]
        server = ServerProcess("served", words, log_directory=log_directory)
        with server:
            try:
                ready_at = trio.run(server.wait_until_ready, READY_SECONDS_MAX)
            except CannotMeasure as error:
                part.wrong_count += 1
                part.put("served", verdict="WRONG", error=error.message)
                return
            part.put(f"{shape}, served", ready_s=ready_at - began)
            loads = LOADS if part.is_gpu else LOADS[:1]
            for concurrency in loads:
                if part.has_time():
                    _load(part, f"{shape}, {concurrency} at a time", server.url, concurrency, PROMPT_TOKENS, 0.0)
            if part.has_time():
                _load(part, f"{shape}, half of the clients leave", server.url, 64, LONG_PROMPT_TOKENS, 0.5)
            _put_counters(part, trio.run(_scraped, server.url))
            stopping_at = time.monotonic()
        part.put(f"{shape}, ended after SIGTERM", seconds=time.monotonic() - stopping_at)


def _load(part: Part, what: str, url: str, concurrency: int, prompt_tokens: int, abort_fraction: float) -> None:
    requests, output_tokens = (max(4, 2 * concurrency), OUTPUT_TOKENS) if part.is_gpu else (4, 64)
    settings = BenchSettings(
        url=url,
        concurrency=concurrency,
        requests=requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        abort_fraction=abort_fraction,
        vocab_size=300,
        seed=0,
    )
    outcome = trio.run(measure, settings)
    if not isinstance(outcome, Measured):
        part.wrong_count += 1
        part.put(what, verdict="WRONG", error=outcome.message)
        return
    figures = outcome.report.figures
    part.wrong_count += figures.failed_requests
    part.put(
        what,
        completed=figures.completed_requests,
        aborted=figures.aborted_requests,
        failed=figures.failed_requests,
        tokens_per_s=figures.output_tokens_per_second,
        **{
            f"{name}_{share}_ms": getattr(spread, share)
            for name, spread in (("first_token", figures.ttft_ms), ("gap", figures.itl_ms))
            if spread is not None
            for share in ("p50", "p99")
        },
    )


async def _scraped(url: str) -> Scrape | None:
    target = Target.from_url(url)
    return await scrape(http1_client(target), target, seconds_max=SCRAPE_SECONDS_MAX)


def _put_counters(part: Part, metrics: Scrape | None) -> None:
    if metrics is None:
        part.put("metrics", error="the server did not return its metrics")
        return
    for name in COUNTERS:
        total, count = metrics.total(f"{name}_sum"), metrics.total(f"{name}_count")
        if total is not None and count:
            part.put(name, mean=total / count, count=int(count))
