"""Measures an image engine while clients leave, and with clients that come at different times, compared with diffusers.

    python -m trioserve bench inside images --model build/digits

First, clients leave over HTTP in each phase of their request, alone and while all other slots denoise. Then the same
images are made in three ways, in turns. Each image must be equal in all bytes, independent of the other images in its
batch. The pipeline's images must be equal except for rounding. Otherwise the measurement fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from statistics import median

import msgspec
import trio

from trioserve.admission.image_decoder import ImageDecoder
from trioserve.api.images.image_routes import ImageApp
from trioserve.bench.inside.images.asked import ImageRequester
from trioserve.bench.inside.images.leaving import (
    LeavingFigure,
    PipelineFigure,
    measure_answered,
    measure_leaving,
    measure_pipeline,
)
from trioserve.bench.inside.images.speed import SpeedRound, measure_speed
from trioserve.bench.inside.images.watch import ImageWatch
from trioserve.contracts.events import IterativePhase
from trioserve.contracts.images import ImageLimits
from trioserve.engine.images.image_engine import ImageEngine
from trioserve.http.server import FrontendServer
from trioserve.testing.flag_types import at_least_one
from trioserve.trio_tools.interpreter import freeze_loaded_objects, prepare_interpreter

__all__ = ["add_arguments", "run"]

OpenImageEngine = Callable[..., AbstractAsyncContextManager[ImageEngine]]
"""Type of trioserve.open_image_engine, which this package must not import."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="build/digits", metavar="DIR", help="folder that diffusers' save_pretrained wrote"
    )
    parser.add_argument("--steps", type=at_least_one, default=32, metavar="N", help="denoising steps of an image")
    parser.add_argument(
        "--guidance",
        type=float,
        default=2.0,
        metavar="X",
        help="guidance scale; above 1, each image has two rows in a step",
    )
    parser.add_argument(
        "--batch", type=at_least_one, default=16, metavar="N", help="slots, and images at the same time"
    )
    parser.add_argument("--rounds", type=at_least_one, default=5, metavar="N", help="rounds of each way, in turns")
    parser.add_argument(
        "--leavers", type=at_least_one, default=20, metavar="N", help="leaving clients in each phase, one by one"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print tables row by row, and then all figures as one line of JSON. Return the exit code.

    Args:
        arguments: the parsed command line. `open_image_engine` is trioserve.open_image_engine.
    """
    prepare_interpreter()
    trio.run(_measure, arguments)
    return 0


async def _measure(arguments: argparse.Namespace) -> None:
    # imported here, since it loads torch and diffusers
    from trioserve.bench.inside.images.pipeline import PlainPipeline

    watch, batch = ImageWatch(), arguments.batch
    leaving: list[LeavingFigure] = []
    rounds: list[SpeedRound] = []
    with watch.watched():
        async with arguments.open_image_engine(arguments.model, max_num_seqs=batch) as engine:
            pipeline = PlainPipeline(Path(arguments.model))  # after the engine, whose errors are better
            asked = ImageRequester(engine, steps=arguments.steps, guidance=arguments.guidance)
            await measure_speed(asked, watch, pipeline, batch)  # warm-up
            freeze_loaded_objects()
            print(
                f"{arguments.model}, {arguments.steps} steps, guidance {arguments.guidance:g}, load average "
                f"{os.getloadavg()[0]:.1f}; from closing the connection until the slot is free"
            )
            print(f"{'phase':<10}{'others':>7}{'median, ms':>12}{'most, ms':>10}{'steps, most':>13}{'a step, ms':>12}")
            async with _serving(engine) as port:
                for phase, others in _cases(batch):
                    figure = await measure_leaving(asked, watch, port, phase, others, arguments.leavers)
                    leaving.append(figure)
                    _print_leaving(figure)
                for others in (0, batch - 1):
                    leaving.append(await measure_answered(asked, watch, port, others, arguments.leavers))
                    _print_leaving(leaving[-1])
            plain = await measure_pipeline(asked, pipeline, max(1, arguments.leavers // 4))
            print(f"{'pipeline':<10}{0:>7}{plain.median_ms:>12.1f}{plain.most_ms:>10.1f}{plain.steps:>13}")
            print(f"images per second, {batch} at a time")
            print(f"{'together':>10}{'mixed':>10}{'pipeline':>10}{'mixed to together':>20}", flush=True)
            for _ in range(arguments.rounds):
                rounds.append(await measure_speed(asked, watch, pipeline, batch))
                print(_shown(rounds[-1:]), flush=True)
    print(f"{_shown(rounds)}  medians")
    _print_json(leaving, plain, rounds)


def _cases(batch: int) -> list[tuple[IterativePhase, int]]:
    slotted = (IterativePhase.ENCODE, IterativePhase.DENOISE, IterativePhase.DECODE)
    return [(IterativePhase.QUEUED, batch), *((phase, others) for phase in slotted for others in (0, batch - 1))]


@asynccontextmanager
async def _serving(engine: ImageEngine) -> AsyncIterator[int]:
    decoder = ImageDecoder(ImageLimits(pixels_max=engine.limits.pixels_max), engine.metrics)
    server = FrontendServer(ImageApp(engine, decoder))
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    with closing(decoder):
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, listeners)
            yield listeners[0].socket.getsockname()[1]
            nursery.cancel_scope.cancel()


def _print_leaving(figure: LeavingFigure) -> None:
    print(
        f"{figure.phase:<10}{figure.others:>7}{figure.median_ms:>12.2f}{figure.most_ms:>10.2f}{figure.steps:>13}"
        f"{figure.step_ms:>12.2f}",
        flush=True,
    )


def _shown(rounds: list[SpeedRound]) -> str:
    """Return medians of the rounds, also of the ratio of each round."""
    speeds = [median(getattr(one, name) for one in rounds) for name in ("together", "mixed", "pipeline")]
    ratio = median(one.mixed / one.together for one in rounds)
    return "".join(f"{speed:>10.2f}" for speed in speeds) + f"{ratio:>20.3f}"


def _print_json(leaving: list[LeavingFigure], plain: PipelineFigure, rounds: list[SpeedRound]) -> None:
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    figures = {"machine": machine, "leaving": leaving, "pipeline": plain, "rounds": rounds}
    print(json.dumps(msgspec.to_builtins(figures)))
