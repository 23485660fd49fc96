"""Measures how long the compute threads are idle between two forward passes, with and without overlapping steps.

Two engines in one process, which differ only in overlap_steps, decode the same streams in turns, round by round. Tasks
read them and ignore the text. The output has the time from the end of one native step to the beginning of the next one,
for steps that decode all streams. It also has tokens per second, since a shorter gap alone is no gain.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import msgspec
import trio

from trioserve.bench.inside.command import print_figures
from trioserve.bench.inside.served_step import OpenEngine
from trioserve.bench.settings import at_least_one
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.engine import Engine
from trioserve.trio_tools.interpreter import freeze_loaded_objects, prepare_interpreter
from trioserve.trio_tools.progress import with_progress

__all__ = ["GapFigure", "Passes", "add_arguments", "native_passes", "run", "run_step_gap"]

STREAM_COUNTS = (1, 16, 64)
PROMPT = "Once upon a time there was a step"
TOKENS = 48
ROUNDS = 5
# An engine takes half a minute to allocate a larger cache, which would disturb the measurement of the other engine.
KV_CACHE_GIB = 0.25


class GapFigure(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one engine with a number of streams: medians, and one 90th percentile.

    Attributes:
        overlap_steps: True if steps overlap.
        stream_count: number of streams.
        gap_us: microseconds between two forward passes.
        gap_us_p90: 90th percentile of the microseconds between two forward passes.
        forward_ms: milliseconds of a forward pass.
        speed: tokens per second, from the beginning of one forward pass to that of the next.
        sample_count: number of gaps.
    """

    overlap_steps: bool
    stream_count: int
    gap_us: float
    gap_us_p90: float
    forward_ms: float
    speed: float
    sample_count: int


class Passes:
    """Records the beginning and the end of forward passes.

    Args:
        owner: class whose method computes them.
        name: name of the method.
        rows_of: function from the method's arguments to the number of computed tokens.
    """

    def __init__(self, owner: type, name: str, rows_of: Callable[..., int]) -> None:
        self._owner, self._name, self._rows_of = owner, name, rows_of
        self._passes: list[tuple[int, float, float]] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record every pass inside of the context, in the thread that computes it."""
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
        """Return the recorded passes, and forget them.

        Args:
            row_count: number of computed tokens.

        Returns:
            For each two successive passes with that many tokens: seconds of the first one, and seconds from its end to
                the second one.
        """
        passes, self._passes = self._passes, []
        return [
            (ended_at - began_at, next_began_at - ended_at)
            for (rows, began_at, ended_at), (next_rows, next_began_at, _) in pairwise(passes)
            if rows == next_rows == row_count
        ]


def native_passes() -> Passes:
    """Return a recorder for the forward passes of the native kernels."""
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
                        if number > 0:  # The first round fills the prefix cache.
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
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="model, as for serve")
    parser.add_argument(
        "--streams", type=at_least_one, nargs="+", default=list(STREAM_COUNTS), metavar="N", help="concurrent streams"
    )
    parser.add_argument(
        "--rounds", type=at_least_one, default=ROUNDS, metavar="N", help="rounds of each engine, in turns"
    )
    parser.add_argument("--tokens", type=at_least_one, default=TOKENS, metavar="N", help="tokens of each response")


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
    """Measure, print a table row by row, and then all figures as one line of JSON.

    Args:
        open_engine: trioserve.open_engine.
        model: name of the model.
        passes: recorder of forward passes. None: those of the native kernels.
        stream_counts: numbers of streams.
        rounds: number of rounds.
        tokens: tokens of each response.

    Returns:
        Exit code.
    """
    print(f"{model}, load average {os.getloadavg()[0]:.1f}; microseconds between two forward passes")
    print(f"{'streams':>8}{'overlap':>9}{'median':>9}{'90th pct':>10}{'forward, ms':>13}{'tokens/s':>11}{'steps':>8}")
    figures = trio.run(_measure, open_engine, model, passes or native_passes(), stream_counts, rounds, tokens)
    print_figures(figures=figures)
    return 0
