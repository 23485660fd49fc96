"""Measures whole steps in milliseconds, as in a server: with one process, and with a model in several ranks.

    python -m trioserve bench inside tp [--model smollm2] [--ranks 2] [--threads 2] [--rounds 15] [--steps decode]

All variants have the same total number of threads, and compute in turns, round by round, so that other work on the
machine affects all of them. The single process computes in a thread beside the event loop. Ranks are separate processes
that get their plans from this one. The measured time is from the submission of a plan until its result arrives. The
output has the least and the median of the rounds, the median of the single process relative to that of the ranks (above
1: ranks are faster), and the share of the ranks' steps that they spent in sums and gatherings, including waits for each
other.

With --losses N, groups lose a rank to SIGKILL N times, by turns during a prefill and while idle. The output has the
time from the signal until the waiting task has the error with the rank's name, and until all processes have ended.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from trioserve.bench.inside.step_bench import CASES, FILLED_AT_ONCE, step_plan
from trioserve.contracts.errors import RankLost
from trioserve.contracts.step import StepPlan, StepResult, never_abandoned
from trioserve.engine.lifecycle.engine_loop import ThreadedExecutor
from trioserve.model.device import default_thread_count
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.default_model import resolve_model
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings
from trioserve.ranks.group import RankGroup, open_ranks
from trioserve.ranks.host import free_port, host_ranks
from trioserve.ranks.messages import RankSetup
from trioserve.trio_tools.worker_thread import WorkerThread

__all__ = ["add_arguments", "run"]

RunStep = Callable[[StepPlan], Coroutine[Any, Any, StepResult | None]]
KV_BYTES = 2**29
STEPS_OF_ROUND = 4
PROMPT_TOKENS = 512  # number of tokens in the prefill during which a rank is killed
STEPS = ("decode", "sampled", "prompt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="model, as for serve")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], metavar="N", help="numbers of ranks")
    parser.add_argument(
        "--threads",
        type=int,
        default=None,
        metavar="N",
        help="threads of all ranks together; None: as many as serve uses",
    )
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="rounds of each step, in turns")
    parser.add_argument("--losses", type=int, default=0, metavar="N", help="ranks to kill, instead of measuring steps")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=["decode", "prompt"], help="which steps to time")


def run(arguments: argparse.Namespace) -> int:
    trio.run(_measure_losses if arguments.losses else _measure, arguments)
    return 0


async def _measure(arguments: argparse.Namespace) -> None:
    path, threads = resolve_model(arguments.model), arguments.threads or default_thread_count()
    cases = [case for step in arguments.steps for case in CASES[step]]
    async with AsyncExitStack() as scopes:
        one = await scopes.enter_async_context(_one_process(path, threads))
        groups: dict[str, RankGroup] = {}
        for count in arguments.ranks:
            groups[f"{count} ranks"] = await scopes.enter_async_context(_in_ranks(path, count, threads))
        vocab_size, block_size = open_checkpoint(path).config.vocab_size, ModelSettings().block_size
        runs: dict[str, RunStep] = {"one process": one}
        for name, group in groups.items():
            runs[name] = _of_group(group)
        print(
            f"{arguments.model}, {threads} threads in all, load average {os.getloadavg()[0]:.1f}; milliseconds, least "
            "/ median of the rounds"
        )
        for case in cases:
            for run_step in runs.values():
                for first in range(0, case.batch, FILLED_AT_ONCE):
                    sequences = range(first, min(first + FILLED_AT_ONCE, case.batch))
                    await run_step(step_plan(case, sequences, 0, block_size, vocab_size))
            plan = step_plan(case, range(case.batch), case.context - case.count, block_size, vocab_size)
            times: dict[str, list[float]] = {name: [] for name in runs}
            together: dict[str, list[float]] = {name: [] for name in groups}
            for _ in range(arguments.rounds if case.count == 1 else max(3, arguments.rounds // 3)):
                for name, run_step in runs.items():
                    await run_step(plan)  # This step replaces data of the other variants in the CPU's caches.
                    for _ in range(STEPS_OF_ROUND if case.count == 1 else 1):
                        begun_at = time.perf_counter()
                        await run_step(plan)
                        times[name].append(time.perf_counter() - begun_at)
                        if name in groups:
                            together[name] += [some / all for all, some in groups[name].step_seconds.values()]
            print(f"{case}: {_shown(times, together)}", flush=True)


async def _measure_losses(arguments: argparse.Namespace) -> None:
    path, threads = resolve_model(arguments.model), arguments.threads or default_thread_count()
    vocab_size, block_size = open_checkpoint(path).config.vocab_size, ModelSettings().block_size
    (case,) = (case for case in CASES["prompt"] if case.context == PROMPT_TOKENS)
    for count in arguments.ranks:
        named: list[float] = []
        gone: list[float] = []
        for index in range(arguments.losses):
            async with _in_ranks(path, count, threads) as group:
                rank = index % count
                waits = group.guard
                if index % 2:
                    plan = step_plan(case, range(1), 0, block_size, vocab_size)
                    step = group.run_step(plan, never_abandoned)

                    async def waits(group: RankGroup = group, step: Coroutine[Any, Any, object] = step) -> None:
                        await step
                        await group.guard()  # The step of a small model can end before the signal arrives.

                    await trio.lowlevel.checkpoint()
                killed_at = time.perf_counter()
                os.kill(group.pids[rank], signal.SIGKILL)
                error = await _error_of(waits)
                named.append(time.perf_counter() - killed_at)
                assert f"rank {rank} " in error, f"rank {rank} was killed, but the error is: {error}"
            gone.append(time.perf_counter() - killed_at)
        shown = ", ".join(
            f"{what} {1e3 * statistics.median(seconds):.1f} / {1e3 * max(seconds):.1f}"
            for what, seconds in (("named", named), ("all gone", gone))
        )
        print(f"{count} ranks, {arguments.losses} losses; milliseconds, median / most: {shown}", flush=True)


async def _error_of(waits: Callable[[], Coroutine[Any, Any, object]]) -> str:
    try:
        await waits()
    except RankLost as error:
        return str(error)
    return "nothing"


def _shown(times: dict[str, list[float]], together: dict[str, list[float]]) -> str:
    base = statistics.median(times["one process"])
    parts = []
    for name, seconds in times.items():
        median = statistics.median(seconds)
        part = f"{name} {1e3 * min(seconds):.2f} / {1e3 * median:.2f}"
        if name in together:
            part += f" ({base / median:.2f} of one process's speed, {statistics.median(together[name]):.0%} together)"
        parts.append(part)
    return ", ".join(parts)


@asynccontextmanager
async def _one_process(path: Path, threads: int) -> AsyncIterator[RunStep]:
    settings = ModelSettings(device="cpu", threads=threads, kv_cache_bytes=KV_BYTES)
    async with WorkerThread("compute") as compute:
        runner = await compute.run(ModelRunner.load, open_checkpoint(path), settings)
        try:
            await compute.run(runner.allocate_kv, runner.block_count)
            steps = ThreadedExecutor(runner, compute, takes_cpu=runner.takes_every_cpu)
            yield lambda plan: steps.run_step(plan, never_abandoned)
        finally:
            await compute.run(runner.close)


@asynccontextmanager
async def _in_ranks(path: Path, count: int, threads: int) -> AsyncIterator[RankGroup]:
    settings = ModelSettings(
        device="cpu", threads=max(1, threads // count), kv_cache_bytes=KV_BYTES // count, ranks_here=count
    )
    meeting_port = free_port()
    setups = [
        RankSetup(
            rank=rank,
            size=count,
            path=str(path),
            settings=settings,
            context_tokens=None,
            uses_further_layers=False,
            expert_parallel=False,
            meeting_port=meeting_port,
        )
        for rank in range(count)
    ]
    with host_ranks(count, elsewhere={}, shows_kv=False) as ranks:
        async with open_ranks(setups, ranks.make_links, find_missing=ranks.find_missing) as group:
            await group.load()
            yield group


def _of_group(group: RankGroup) -> RunStep:
    return lambda plan: group.run_step(plan, never_abandoned)
