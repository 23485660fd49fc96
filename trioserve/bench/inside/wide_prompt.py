"""Measures how a prompt that takes many steps affects streams, with its chunks chosen by time or only by tokens, in
turns.

Two engines in one process, which differ only in wide_prompt_stretch, decode the same streams. When all streams run, the
times between their tokens are measured for a while. Then the long prompt arrives, and they are measured until its first
token. Every prompt has other tokens, so that the prefix cache has none of it.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Sequence
from functools import partial
from statistics import quantiles

import msgspec
import trio

from trioserve.bench.inside.command import print_figures
from trioserve.bench.inside.served_step import OpenEngine
from trioserve.bench.settings import at_least_one
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.engine import Engine
from trioserve.trio_tools.interpreter import freeze_loaded_objects, prepare_interpreter
from trioserve.trio_tools.progress import with_progress

__all__ = ["WideFigure", "add_arguments", "run", "run_wide_prompt"]

STREAMS = 64
PROMPT_TOKENS = 7_000
ROUNDS = 2
ALONE_STEPS = 100
STREAM_PROMPT_TOKENS = 16
KV_CACHE_GIB = 1.0
BY_TIME = 1.5
BY_TOKENS = 1_000.0  # This stretch is so large that time never limits a chunk.


class WideFigure(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one round. Times are milliseconds between two tokens of one stream.

    Attributes:
        stretch: the engine's wide_prompt_stretch.
        alone_ms_p50: median without the long prompt.
        alone_ms_p99: 99th percentile without the long prompt.
        beside_ms_p50: median while the long prompt is computed.
        beside_ms_p99: 99th percentile while the long prompt is computed.
        prompt_seconds: time to the long prompt's first token.
        sample_count: number of times during the long prompt.
    """

    stretch: float
    alone_ms_p50: float
    alone_ms_p99: float
    beside_ms_p50: float
    beside_ms_p99: float
    prompt_seconds: float
    sample_count: int

    @property
    def ratio(self) -> float:
        return self.beside_ms_p99 / self.alone_ms_p99


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


async def _round(engine: Engine, stretch: float, stream_count: int, prompt_tokens: int, seed: int) -> WideFigure:
    draw = random.Random(seed)
    some_tokens = partial(draw.choices, range(10, min(engine.model.vocab_size, 30_000)))
    tokens_max = engine.model.context_tokens_max - STREAM_PROMPT_TOKENS
    streams = _Streams(engine)
    async with trio.open_nursery() as nursery:
        for _ in range(stream_count):
            nursery.start_soon(streams.decode, some_tokens(k=STREAM_PROMPT_TOKENS), tokens_max)
        await streams.wait_for(stream_count, 0)
        streams.take()
        await streams.wait_for(stream_count, ALONE_STEPS * stream_count)
        alone = streams.take()
        began_at = trio.current_time()
        async with engine.generate(some_tokens(k=prompt_tokens), _sampling(1)) as stream:
            async for _delta in stream:
                pass
        seconds, beside = trio.current_time() - began_at, streams.take()
        nursery.cancel_scope.cancel()
    alone_cuts, beside_cuts = quantiles(alone, n=100), quantiles(beside, n=100)
    return WideFigure(
        stretch=stretch,
        alone_ms_p50=alone_cuts[49] * 1e3,
        alone_ms_p99=alone_cuts[98] * 1e3,
        beside_ms_p50=beside_cuts[49] * 1e3,
        beside_ms_p99=beside_cuts[98] * 1e3,
        prompt_seconds=seconds,
        sample_count=len(beside),
    )


async def _measure(
    open_engine: OpenEngine, model: str, stream_count: int, prompt_tokens: int, rounds: int, kv_cache_gib: float
) -> list[WideFigure]:
    figures: list[WideFigure] = []
    settings = {"max_num_seqs": stream_count + 1, "kv_cache_memory": kv_cache_gib}
    async with (
        open_engine(model, **settings, wide_prompt_stretch=BY_TIME) as by_time,
        open_engine(model, **settings, wide_prompt_stretch=BY_TOKENS) as by_tokens,
    ):
        freeze_loaded_objects()
        for number in with_progress(range(rounds), f"measuring {stream_count} streams", unit="rounds"):
            for stretch, engine in ((BY_TIME, by_time), (BY_TOKENS, by_tokens)):
                figures.append(await _round(engine, stretch, stream_count, prompt_tokens, number))
                _print_row(figures[-1])
    return figures


def _print_row(figure: WideFigure) -> None:
    print(
        f"{'time' if figure.stretch == BY_TIME else 'tokens':>8}{figure.alone_ms_p50:>11.1f}{figure.alone_ms_p99:>9.1f}"
        f"{figure.beside_ms_p50:>11.1f}{figure.beside_ms_p99:>9.1f}{figure.ratio:>7.2f}{figure.prompt_seconds:>11.1f}",
        flush=True,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="model, as for serve")
    parser.add_argument("--streams", type=at_least_one, default=STREAMS, metavar="N", help="streams that decode")
    parser.add_argument(
        "--prompt-tokens", type=at_least_one, default=PROMPT_TOKENS, metavar="N", help="tokens of the prompt"
    )
    parser.add_argument(
        "--rounds", type=at_least_one, default=ROUNDS, metavar="N", help="rounds of each engine, in turns"
    )
    parser.add_argument("--kv-cache", type=float, default=KV_CACHE_GIB, metavar="GIB", help="KV cache of each engine")


def run(arguments: argparse.Namespace) -> int:
    prepare_interpreter()
    return run_wide_prompt(
        arguments.open_engine,
        arguments.model,
        stream_count=arguments.streams,
        prompt_tokens=arguments.prompt_tokens,
        rounds=arguments.rounds,
        kv_cache_gib=arguments.kv_cache,
    )


def run_wide_prompt(
    open_engine: OpenEngine,
    model: str = "smollm2",
    *,
    stream_count: int = STREAMS,
    prompt_tokens: int = PROMPT_TOKENS,
    rounds: int = ROUNDS,
    kv_cache_gib: float = KV_CACHE_GIB,
) -> int:
    """Measure, print a table row by row, and then all figures as one line of JSON.

    Args:
        open_engine: trioserve.open_engine.
        model: name of the model.
        stream_count: streams that decode.
        prompt_tokens: tokens of the long prompt.
        rounds: number of rounds.
        kv_cache_gib: KV cache of each engine, in GiB.

    Returns:
        Exit code.
    """
    print(f"{model}, {stream_count} streams, a prompt of {prompt_tokens} tokens, load average {os.getloadavg()[0]:.1f}")
    print(f"{'chunks':>8}{'alone, p50':>11}{'p99, ms':>9}{'beside':>11}{'p99, ms':>9}{'ratio':>7}{'prompt, s':>11}")
    figures = trio.run(_measure, open_engine, model, stream_count, prompt_tokens, rounds, kv_cache_gib)
    print_figures(figures=figures)
    return 0
