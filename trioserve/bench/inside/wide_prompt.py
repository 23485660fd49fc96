"""Measures how prompts affect streams that decode, for several values of wide_prompt_stretch in turns.

When all streams run, the times between their tokens are measured for a while. Then the prompts arrive together, and the
times are measured until each prompt has its first token. Every prompt has other tokens, so that the prefix cache has
none of it.

With --machine, there is no model: the real core plans steps whose times come from a cost model, in virtual time. So the
figures are the same on every machine.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Sequence
from functools import partial
from statistics import median, quantiles
from typing import NamedTuple

import msgspec
import trio

from trioserve.bench.inside.command import print_figures
from trioserve.bench.inside.served_step import OpenEngine
from trioserve.bench.settings import at_least_one
from trioserve.contracts.events import RequestFinished, TokensReady
from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import StepPlan, StepResult
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.engine.engine import Engine
from trioserve.trio_tools.interpreter import freeze_loaded_objects, prepare_interpreter
from trioserve.trio_tools.progress import with_progress

__all__ = ["Load", "WideFigure", "add_arguments", "run", "run_wide_prompt", "simulated"]

STREAMS = 8
PROMPT_TOKENS = 6_000
ROUNDS = 2
ALONE_STEPS = 100
STREAM_PROMPT_TOKENS = 16
KV_CACHE_GIB = 1.0
STRETCHES = (1.5, 3.0, 6.0, 1_000.0)  # The last stretch is so large that only the token budget limits a step.


class Machine(NamedTuple):
    """A cost model of a step. All times are milliseconds.

    Attributes:
        step: time of any step.
        decode: time of each decode.
        floor: fixed time of each prompt in a step.
        token: time of each prompt token.
        attended: time of each token to which a prompt token attends.
        read: time of each token of context that a chunk reads.
    """

    step: float
    decode: float
    floor: float
    token: float
    attended: float = 0.0
    read: float = 0.0

    def seconds(self, plan: StepPlan) -> float:
        """Return the time of a step.

        Args:
            plan: the step.
        """
        ms = self.step
        for chunk in plan.chunks:
            if chunk.count == 1:
                ms += self.decode
            else:
                ms += self.floor + chunk.start * self.read
                ms += chunk.count * (self.token + self.attended * (chunk.start + chunk.count / 2))
        return ms / 1e3


MACHINES = {
    # An 8B model whose decode steps are graphs, while steps with prompt tokens are launched kernel by kernel.
    "gpu": Machine(step=4.5, decode=0.02, floor=2.0, token=0.02),
    # The default model on two cores with AVX2, fitted to 200 steps.
    "cpu": Machine(step=3.0, decode=1.15, floor=1.2, token=0.88, attended=6.9e-4, read=8.2e-3),
}


class WideFigure(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one round. Times without another unit are milliseconds between two tokens of one stream.

    Attributes:
        stretch: the engine's wide_prompt_stretch.
        alone_ms_p50: median without the prompts.
        alone_ms_p99: 99th percentile without the prompts.
        beside_ms_p50: median while the prompts are computed.
        beside_ms_p99: 99th percentile while the prompts are computed.
        prompt_seconds: median time to a prompt's first token.
        step_count: number of steps until all prompts have their first token.
        sample_count: number of times during the prompts.
    """

    stretch: float
    alone_ms_p50: float
    alone_ms_p99: float
    beside_ms_p50: float
    beside_ms_p99: float
    prompt_seconds: float
    step_count: int
    sample_count: int

    @property
    def ratio(self) -> float:
        return self.beside_ms_p99 / self.alone_ms_p50


class Load(NamedTuple):
    """The load of one round: streams that decode, and prompts that arrive together."""

    streams: int
    prompts: int
    prompt_tokens: int


class _Streams:
    """Streams that run until they are cancelled, and the times between their tokens since the last `take`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.times: list[float] = []
        self.running_count = 0
        self.moved = trio.Event()  # The event is set when a stream begins to run or gets a token.

    async def decode(self, prompt: Sequence[int], tokens_max: int) -> None:
        before: float | None = None
        async with self._engine.generate(prompt, _sampling(tokens_max)) as stream:
            async for delta in stream:
                now = trio.current_time()
                if before is None:
                    self.running_count += 1
                else:
                    self.times += [(now - before) / len(delta.token_ids)] * len(delta.token_ids)
                before = now
                self.moved.set()
                self.moved = trio.Event()

    async def wait_for(self, stream_count: int, sample_count: int) -> None:
        while self.running_count < stream_count or len(self.times) < sample_count:
            await self.moved.wait()

    def take(self) -> list[float]:
        taken, self.times = self.times, []
        return taken


def _sampling(tokens_max: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens_max, ignore_eos=True, temperature=0)


def _figure(
    stretch: float, alone: Sequence[float], beside: Sequence[float], prompt_seconds: Sequence[float], step_count: int
) -> WideFigure:
    alone_cuts, beside_cuts = quantiles(alone, n=100), quantiles(beside, n=100)
    return WideFigure(
        stretch=stretch,
        alone_ms_p50=alone_cuts[49] * 1e3,
        alone_ms_p99=alone_cuts[98] * 1e3,
        beside_ms_p50=beside_cuts[49] * 1e3,
        beside_ms_p99=beside_cuts[98] * 1e3,
        prompt_seconds=median(prompt_seconds),
        step_count=step_count,
        sample_count=len(beside),
    )


async def _round(engine: Engine, stretch: float, load: Load, seed: int) -> WideFigure:
    draw = random.Random(seed)
    some_tokens = partial(draw.choices, range(10, min(engine.model.vocab_size, 30_000)))
    tokens_max = engine.model.context_tokens_max - STREAM_PROMPT_TOKENS
    streams = _Streams(engine)
    prompt_seconds: list[float] = []

    async def first_token(prompt: Sequence[int]) -> None:
        began_at = trio.current_time()
        async with engine.generate(prompt, _sampling(1)) as stream:
            async for _delta in stream:
                pass
        prompt_seconds.append(trio.current_time() - began_at)

    async with trio.open_nursery() as nursery:
        for _ in range(load.streams):
            nursery.start_soon(streams.decode, some_tokens(k=STREAM_PROMPT_TOKENS), tokens_max)
        await streams.wait_for(load.streams, 0)
        streams.take()
        await streams.wait_for(load.streams, ALONE_STEPS * load.streams)
        alone = streams.take()
        steps_before = engine.stats().steps_total
        async with trio.open_nursery() as prompts:
            for _ in range(load.prompts):
                prompts.start_soon(first_token, some_tokens(k=load.prompt_tokens))
        beside, step_count = streams.take(), engine.stats().steps_total - steps_before
        nursery.cancel_scope.cancel()
    return _figure(stretch, alone, beside, prompt_seconds, step_count)


async def _measure(
    open_engine: OpenEngine, model: str, load: Load, stretches: Sequence[float], rounds: int, kv_cache_gib: float
) -> list[WideFigure]:
    figures: list[WideFigure] = []
    settings = {"max_num_seqs": load.streams + load.prompts, "kv_cache_memory": kv_cache_gib}
    for number in with_progress(range(rounds), f"measuring {load.streams} streams", unit="rounds"):
        for stretch in stretches:
            async with open_engine(model, **settings, wide_prompt_stretch=stretch) as engine:
                freeze_loaded_objects()
                figures.append(await _round(engine, stretch, load, number))
            _print_row(figures[-1])
    return figures


def simulated(machine: Machine, load: Load, stretch: float, *, step_tokens_max: int = 512) -> WideFigure:
    """Return the figures of the real core with steps that take the time of a cost model.

    Args:
        machine: the cost model.
        load: the streams and prompts.
        stretch: the core's wide_prompt_stretch.
        step_tokens_max: token budget of a step.
    """
    context = STREAM_PROMPT_TOKENS + load.prompt_tokens * load.prompts + 2 * ALONE_STEPS
    core = EngineCore(
        CoreSettings(
            block_count=(load.streams + load.prompts) * (context // 16 + 1),
            context_tokens_max=context,
            max_num_seqs=load.streams + load.prompts,
            step_tokens_max=step_tokens_max,
            wide_prompt_stretch=stretch,
        )
    )
    now, arrivals_total = 0.0, 0
    prompts: set[RequestId] = set()

    def add(prompt_tokens: int, output_tokens_max: int) -> RequestId:
        nonlocal arrivals_total
        arrivals_total += 1
        request_id = RequestId(f"r{arrivals_total}")
        prompt = (arrivals_total, *[0] * (prompt_tokens - 1))
        core.add(
            EngineRequest(
                id=request_id,
                prompt_token_ids=prompt,
                sampling=_sampling(1),
                output_tokens_max=output_tokens_max,
                stop_token_ids=frozenset(),
                seed=0,
            )
        )
        return request_id

    def step() -> tuple[float, int]:
        """Do one step. Return its time, and the number of streams that get a token."""
        nonlocal now
        plan = core.schedule(now)
        assert plan is not None
        seconds = machine.seconds(plan)
        now += seconds
        result = StepResult(tuple(1 if chunk.samples else None for chunk in plan.chunks))
        events = core.update_from_output(plan, result, now)
        prompts.difference_update(event.request_id for event in events if isinstance(event, RequestFinished))
        return seconds, sum(isinstance(event, TokensReady) for event in events)

    for _ in range(load.streams):
        add(STREAM_PROMPT_TOKENS, context - STREAM_PROMPT_TOKENS)
    while step()[1] < load.streams:
        pass
    alone = [step()[0] for _ in range(ALONE_STEPS)]
    began_at, step_count = now, 0
    prompts.update(add(load.prompt_tokens, 1) for _ in range(load.prompts))
    beside: list[float] = []
    prompt_seconds: list[float] = []
    while prompts:
        waiting_count = len(prompts)
        beside += [step()[0]] * load.streams
        step_count += 1
        prompt_seconds += [now - began_at] * (waiting_count - len(prompts))
    return _figure(stretch, alone, beside, prompt_seconds, step_count)


def _print_row(figure: WideFigure) -> None:
    print(
        f"{figure.stretch:>8g}{figure.alone_ms_p50:>11.1f}{figure.alone_ms_p99:>9.1f}{figure.beside_ms_p50:>11.1f}"
        f"{figure.beside_ms_p99:>9.1f}{figure.ratio:>7.2f}{figure.prompt_seconds:>11.2f}{figure.step_count:>7}",
        flush=True,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="model, as for serve")
    parser.add_argument(
        "--machine", choices=MACHINES, help="cost model to use instead of a model; default: measure the model"
    )
    parser.add_argument("--streams", type=at_least_one, default=STREAMS, metavar="N", help="streams that decode")
    parser.add_argument("--prompts", type=at_least_one, default=1, metavar="N", help="prompts that arrive together")
    parser.add_argument(
        "--prompt-tokens", type=at_least_one, default=PROMPT_TOKENS, metavar="N", help="tokens of each prompt"
    )
    parser.add_argument(
        "--stretch", type=float, nargs="+", default=list(STRETCHES), metavar="FACTOR", help="--wide-prompt-stretch"
    )
    parser.add_argument("--rounds", type=at_least_one, default=ROUNDS, metavar="N", help="rounds, in turns")
    parser.add_argument("--kv-cache", type=float, default=KV_CACHE_GIB, metavar="GIB", help="KV cache of the engine")


def run(arguments: argparse.Namespace) -> int:
    prepare_interpreter()
    return run_wide_prompt(
        arguments.open_engine,
        arguments.model,
        load=Load(arguments.streams, arguments.prompts, arguments.prompt_tokens),
        stretches=arguments.stretch,
        machine=arguments.machine,
        rounds=arguments.rounds,
        kv_cache_gib=arguments.kv_cache,
    )


def run_wide_prompt(
    open_engine: OpenEngine,
    model: str = "smollm2",
    *,
    load: Load,
    stretches: Sequence[float] = STRETCHES,
    machine: str | None = None,
    rounds: int = ROUNDS,
    kv_cache_gib: float = KV_CACHE_GIB,
) -> int:
    """Measure, print a table row by row, and then all figures as one line of JSON.

    Args:
        open_engine: trioserve.open_engine.
        model: name of the model.
        load: the streams and prompts.
        stretches: values of wide_prompt_stretch.
        machine: name of a cost model, which is used instead of the model. None: measure the model.
        rounds: number of rounds.
        kv_cache_gib: KV cache of the engine, in GiB.

    Returns:
        Exit code.
    """
    what = f"{load.streams} streams, {load.prompts} prompts of {load.prompt_tokens} tokens"
    print(f"{machine or model}, {what}, load average {os.getloadavg()[0]:.1f}")
    print(
        f"{'stretch':>8}{'alone, p50':>11}{'p99, ms':>9}{'beside':>11}{'p99, ms':>9}{'ratio':>7}{'first, s':>11}"
        f"{'steps':>7}"
    )
    if machine is None:
        figures = trio.run(_measure, open_engine, model, load, stretches, rounds, kv_cache_gib)
    else:
        figures = [simulated(MACHINES[machine], load, stretch) for stretch in stretches]
        for figure in figures:
            _print_row(figure)
    print_figures(figures=figures)
    return 0
