"""What a step of the engine loses to the event loop while many streams go out over HTTP.

    python -m trioserve.testing.served_step [--model smollm2] [--dtype float32] [--streams 64] [--threads N]

One engine, one process, and the same batch in turns: read by tasks that do nothing with it, and by clients in another
process over one HTTP/2 connection. Shown is the time of the forward pass alone, as its thread sees it, and of a whole
step, from its plan to the next one. The clients need a core, too: their CPU time is told beside it.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median

import trio

from trioserve import SamplingParams, open_engine
from trioserve.contracts.step import IsAbandoned, StepPlan, StepResult, never_abandoned
from trioserve.frontend.limits import FrontendLimits
from trioserve.frontend.routes import App
from trioserve.frontend.server import FrontendServer
from trioserve.model.runner import ModelRunner
from trioserve.runtime.engine import Engine
from trioserve.runtime.interpreter import keep_what_is_loaded, prepare_interpreter

__all__ = ["main"]

PROMPT = "Once upon a time there was a step"
TOKENS = 32
ROUNDS = 5


class _Times:
    """Of the steps that compute a full batch."""

    def __init__(self) -> None:
        self.batch = 0
        self.forward: list[float] = []
        self.whole: list[float] = []
        self._began_at = 0.0

    def watch(self) -> None:
        """From now on every step of every runner is timed, in the thread that computes it."""
        execute = ModelRunner.execute

        def timed(
            runner: ModelRunner, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned
        ) -> StepResult | None:
            began_at = time.perf_counter()
            result = execute(runner, plan, is_abandoned)
            is_full = len(plan.chunks) == plan.token_count == self.batch
            if is_full:
                self.forward.append(time.perf_counter() - began_at)
                if self._began_at:
                    self.whole.append(began_at - self._began_at)
            self._began_at = began_at if is_full else 0.0
            return result

        ModelRunner.execute = timed  # type: ignore[assignment]

    def take(self) -> tuple[float, float]:
        taken = median(self.forward), median(self.whole)
        self.forward.clear()
        self.whole.clear()
        return taken


async def _read_in_process(engine: Engine, streams: int) -> None:
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0)

    async def read() -> None:
        async with engine.generate(PROMPT, sampling) as stream:
            async for _delta in stream:
                pass

    async with trio.open_nursery() as nursery:
        for _ in range(streams):
            nursery.start_soon(read)


@asynccontextmanager
async def _serving(engine: Engine, streams: int) -> AsyncIterator[int]:
    server = FrontendServer(App(engine), limits=FrontendLimits(streams_max=max(100, streams)))
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, listeners)
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def _read_over_http(port: int, streams: int) -> float:
    """CPU seconds of the clients."""
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
    load = {"port": port, "connections": 1, "streams": streams, "http": 2, "body": json.dumps(body), "repeats": 1}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    await trio.run_process(
        [sys.executable, "-m", "trioserve.testing.frontend_load"],
        stdin=json.dumps(load).encode(),
        capture_stdout=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


async def _measure(model: str, dtype: str, streams: int, threads: int | None, rounds: int) -> None:
    times = _Times()
    times.watch()
    times.batch = streams
    async with (
        open_engine(model, dtype=dtype, threads=threads, max_num_seqs=streams, enable_prefix_caching=False) as engine,
        _serving(engine, streams) as port,
    ):
        keep_what_is_loaded()
        await _read_in_process(engine, streams)  # warms up
        times.take()
        quiet, served, client_seconds = [], [], []
        for _ in range(rounds):
            await _read_in_process(engine, streams)
            quiet.append(times.take())
            client_seconds.append(await _read_over_http(port, streams))
            served.append(times.take())
    for index, what in enumerate(("forward pass", "whole step")):
        without, over_http = (median(round_[index] for round_ in taken) * 1e3 for taken in (quiet, served))
        ratios = sorted(after[index] / before[index] for before, after in zip(quiet, served, strict=True))
        print(
            f"{what:<14}{without:>8.2f} ms, over HTTP {over_http:>8.2f} ms, ratio of the rounds "
            f"{median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )
    print(f"the clients: {median(client_seconds) / TOKENS * 1e3:.2f} ms of CPU time a step, their start included")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--threads", type=int, default=None, help="of a forward pass; default: one per core")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    prepare_interpreter()
    trio.run(_measure, arguments.model, arguments.dtype, arguments.streams, arguments.threads, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
