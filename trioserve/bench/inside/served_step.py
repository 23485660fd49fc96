"""Measures how much a step of the engine slows down while many streams are sent over HTTP.

One engine in one process runs the same batch in turns: read by tasks that ignore it, and by clients in another process
over one HTTP/2 connection. The output has the time of the forward pass alone, as its thread sees it, and of a whole
step, from its beginning to the next one. The clients also need a core, so their CPU time is printed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from statistics import median

import trio

from trioserve.api.routes import App
from trioserve.bench.settings import at_least_one
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import IsAbandoned, StepPlan, StepResult, never_abandoned
from trioserve.engine.engine import Engine
from trioserve.http.limits import FrontendLimits
from trioserve.http.server import FrontendServer
from trioserve.model.runner import ModelRunner
from trioserve.trio_tools.interpreter import freeze_loaded_objects, prepare_interpreter
from trioserve.trio_tools.progress import with_progress

__all__ = ["OpenEngine", "add_arguments", "run", "run_served_step"]

OpenEngine = Callable[..., AbstractAsyncContextManager[Engine]]
"""Type of trioserve.open_engine, which this package must not import."""

STREAMS = 64

PROMPT = "Once upon a time there was a step"
TOKENS = 32
ROUNDS = 5


class _Times:
    """Times of steps with a full batch: of the forward pass, and from its begin to the begin of the next one."""

    def __init__(self) -> None:
        self.forward: list[float] = []
        self.whole: list[float] = []
        self._began_at: float | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure every step of every runner inside of the context, in the thread that computes it."""
        execute = ModelRunner.execute

        def timed(
            runner: ModelRunner, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned
        ) -> StepResult | None:
            began_at = time.perf_counter()
            result = execute(runner, plan, is_abandoned)
            is_full = len(plan.chunks) == plan.token_count == STREAMS
            if is_full:
                self.forward.append(time.perf_counter() - began_at)
                if self._began_at is not None:
                    self.whole.append(began_at - self._began_at)
            self._began_at = began_at if is_full else None
            return result

        ModelRunner.execute = timed  # type: ignore[assignment]
        try:
            yield
        finally:
            ModelRunner.execute = execute  # type: ignore[method-assign]

    def take(self) -> tuple[float, float]:
        taken = median(self.forward), median(self.whole)
        self.forward.clear()
        self.whole.clear()
        return taken


async def _read_in_process(engine: Engine) -> None:
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0)

    async def read() -> None:
        async with engine.generate(PROMPT, sampling) as stream:
            async for _delta in stream:
                pass

    async with trio.open_nursery() as nursery:
        for _ in range(STREAMS):
            nursery.start_soon(read)


@asynccontextmanager
async def _serving(engine: Engine) -> AsyncIterator[int]:
    server = FrontendServer(App(engine), limits=FrontendLimits(streams_max=max(100, STREAMS)))
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, listeners)
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def _read_over_http(port: int) -> float:
    """Return the CPU seconds of the clients."""
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
    load = {"port": port, "connections": 1, "streams": STREAMS, "http": 2, "body": json.dumps(body), "repeats": 1}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    await trio.run_process(
        [sys.executable, "-m", "trioserve.bench.inside.frontend_load"],
        stdin=json.dumps(load).encode(),
        capture_stdout=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


async def _measure(open_engine: OpenEngine, rounds: int) -> None:
    times = _Times()
    with times.watching():
        async with (
            open_engine(max_num_seqs=STREAMS, enable_prefix_caching=False) as engine,
            _serving(engine) as port,
        ):
            freeze_loaded_objects()
            await _read_in_process(engine)  # warm-up
            times.take()
            quiet, served, client_seconds = [], [], []
            for _ in with_progress(range(rounds), "measuring", unit="rounds"):
                await _read_in_process(engine)
                quiet.append(times.take())
                client_seconds.append(await _read_over_http(port))
                served.append(times.take())
    for index, what in enumerate(("forward pass", "whole step")):
        without, over_http = (median(round_[index] for round_ in taken) * 1e3 for taken in (quiet, served))
        ratios = sorted(after[index] / before[index] for before, after in zip(quiet, served, strict=True))
        print(
            f"{what:<14}{without:>8.2f} ms, over HTTP {over_http:>8.2f} ms, ratio of the rounds "
            f"{median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )
    print(f"clients: {median(client_seconds) / TOKENS * 1e3:.2f} ms of CPU time per step, with their start")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="model, as for serve")
    parser.add_argument("--rounds", type=at_least_one, default=ROUNDS, metavar="N", help="rounds of each, in turns")


def run(arguments: argparse.Namespace) -> int:
    prepare_interpreter()
    return run_served_step(arguments.open_engine, model=arguments.model, rounds=arguments.rounds)


def run_served_step(open_engine: OpenEngine, *, model: str = "smollm2", rounds: int = ROUNDS) -> int:
    """Measure with one thread per core, and with one thread less, which leaves one core for the event loop.

    Args:
        open_engine: trioserve.open_engine.
        model: name of the model.
        rounds: number of rounds.
    """
    cores = os.cpu_count() or 1
    for threads in dict.fromkeys((cores, max(1, cores - 1))):
        print(f"{STREAMS} streams, {threads} threads, load average {os.getloadavg()[0]:.1f}", flush=True)
        trio.run(_measure, functools.partial(open_engine, model, threads=threads), rounds)
    return 0
