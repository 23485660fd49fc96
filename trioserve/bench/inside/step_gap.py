"""How long the compute threads have nothing to do between two forward passes, with overlapping steps and without.

Two engines in one process, equal but for overlap_steps, decode the same streams in turns, round for round, read by
tasks that do nothing with them. Shown is the time from the end of one native step to the beginning of the next, of the
steps that decode for every stream; and tokens a second, since a shorter gap alone helps nobody.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import msgspec
import trio

from trioserve.bench.inside.served_step import OpenEngine
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.engine import Engine
from trioserve.testing.flag_types import at_least_one
from trioserve.trio_tools.interpreter import freeze_loaded_objects, prepare_interpreter
from trioserve.trio_tools.progress import with_progress

__all__ = ["GapFigure", "Passes", "add_arguments", "native_passes", "run", "run_step_gap"]

STREAM_COUNTS = (1, 16, 64)
PROMPT = "Once upon a time there was a step"
TOKENS = 48
ROUNDS = 5
KV_CACHE_GIB = 0.25  # more would be claimed by the one engine, for half a minute, while the other one is measured


class GapFigure(msgspec.Struct, frozen=True, kw_only=True):
    """Of one way to plan steps, with so many streams. forward_ms: of a forward pass; speed: tokens a second, counted
    from the beginning of one forward pass to that of the next. Medians, but for the 90th percentile."""

    overlap_steps: bool
    stream_count: int
    gap_us: float
    gap_us_p90: float
    forward_ms: float
    speed: float
    sample_count: int


class Passes:
    """When forward passes begin and end. What computes them is the method `name` of `owner`; rows_of: of its arguments,
    how many tokens it computes."""

    def __init__(self, owner: type, name: str, rows_of: Callable[..., int]) -> None:
        self._owner, self._name, self._rows_of = owner, name, rows_of
        self._passes: list[tuple[int, float, float]] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Every one is noted, in the thread that computes it."""
        compute = getattr(self._owner, self._name)

        def noted(owner: object, *arguments: Any) -> object:
            began_at = perf_counter()
            result = compute(owner, *arguments)
            self._passes.append((self._rows_of(*arguments), began_at, perf_counter()))
            return result

        setattr(self._owner, self._name, noted)
        try:
            yield
        finally:
            setattr(self._owner, self._name, compute)

    def take(self, row_count: int) -> list[tuple[float, float]]:
        """Seconds of a forward pass, and from its end to the next one, for each two in a row that compute so many
        tokens; and forget them all."""
        passes, self._passes = self._passes, []
        return [
            (ended_at - began_at, next_began_at - ended_at)
            for (rows, began_at, ended_at), (next_rows, next_began_at, _) in pairwise(passes)
            if rows == next_rows == row_count
        ]


def native_passes() -> Passes:
    """Those of the native kernels."""
    from trioserve_kernels.native import Engine as NativeEngine

    return Passes(NativeEngine, "step", lambda _model, step: step.row_count)


async def _read(engine: Engine, stream_count: int, tokens: int) -> None:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)

    async def read() -> None:
        async with engine.generate(PROMPT, sampling) as stream:
            async for _delta in stream:
                pass

    async with trio.open_nursery() as nursery:
        for _ in range(stream_count):
            nursery.start_soon(read)


async def _measure(
    open_engine: OpenEngine, model: str, passes: Passes, stream_counts: Sequence[int], rounds: int, tokens: int
) -> list[GapFigure]:
    figures: list[GapFigure] = []
    fits_all = {"max_num_seqs": max(stream_counts), "kv_cache_memory": KV_CACHE_GIB}
    with passes.watched():
        async with (
            open_engine(model, **fits_all, overlap_steps=False) as plain,
            open_engine(model, **fits_all, overlap_steps=True) as overlapping,
        ):
            freeze_loaded_objects()
            for stream_count in stream_counts:
                taken: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
                for number in with_progress(range(rounds + 1), f"measuring {stream_count} streams", unit="rounds"):
                    for overlap_steps, engine in ((False, plain), (True, overlapping)):
                        await _read(engine, stream_count, tokens)
                        times = passes.take(stream_count)
                        if number > 0:  # the first one fills the prefix cache
                            taken[overlap_steps] += times
                for overlap_steps, times in taken.items():
                    figures.append(_figure(overlap_steps, stream_count, times))
                    _print_row(figures[-1])
    return figures


def _figure(overlap_steps: bool, stream_count: int, times: list[tuple[float, float]]) -> GapFigure:
    gaps = [gap for _forward, gap in times]
    return GapFigure(
        overlap_steps=overlap_steps,
        stream_count=stream_count,
        gap_us=median(gaps) * 1e6,
        gap_us_p90=quantiles(gaps, n=10)[-1] * 1e6,
        forward_ms=median(forward for forward, _gap in times) * 1e3,
        speed=stream_count / median(forward + gap for forward, gap in times),
        sample_count=len(times),
    )


def _print_row(figure: GapFigure) -> None:
    print(
        f"{figure.stream_count:>8}{'with' if figure.overlap_steps else 'without':>9}{figure.gap_us:>9.0f}"
        f"{figure.gap_us_p90:>10.0f}{figure.forward_ms:>13.2f}{figure.speed:>11.1f}{figure.sample_count:>8}",
        flush=True,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="as serve takes it")
    parser.add_argument(
        "--streams", type=at_least_one, nargs="+", default=list(STREAM_COUNTS), metavar="N", help="at a time"
    )
    parser.add_argument("--rounds", type=at_least_one, default=ROUNDS, metavar="N", help="of each, in turns")
    parser.add_argument("--tokens", type=at_least_one, default=TOKENS, metavar="N", help="of each response")


def run(arguments: argparse.Namespace) -> int:
    prepare_interpreter()
    return run_step_gap(
        arguments.open_engine,
        arguments.model,
        stream_counts=arguments.streams,
        rounds=arguments.rounds,
        tokens=arguments.tokens,
    )


def run_step_gap(
    open_engine: OpenEngine,
    model: str = "smollm2",
    *,
    passes: Passes | None = None,
    stream_counts: Sequence[int] = STREAM_COUNTS,
    rounds: int = ROUNDS,
    tokens: int = TOKENS,
) -> int:
    """Measure, print a table as it grows, and then everything as one line of JSON. passes: None takes those of the
    native kernels. open_engine: trioserve.open_engine, which a room does not know."""
    print(f"{model}, load average {os.getloadavg()[0]:.1f}; microseconds between two forward passes")
    print(f"{'streams':>8}{'overlap':>9}{'median':>9}{'90th pct':>10}{'forward, ms':>13}{'tokens/s':>11}{'steps':>8}")
    figures = trio.run(_measure, open_engine, model, passes or native_passes(), stream_counts, rounds, tokens)
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    print(json.dumps({"machine": machine, "figures": msgspec.to_builtins(figures)}))
    return 0
