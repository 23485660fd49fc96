"""Measures how an image engine handles clients that disconnect, and compares its speed with a diffusers pipeline.

    python -m trioserve bench inside images --model build/digits

First, HTTP clients disconnect in each phase of their request, once on an idle engine and once while all other slots
denoise. Then the same images are generated in turn by simultaneous requests, by requests that begin one after another,
and by the pipeline. For each seed, both kinds of requests must give the same bytes, whatever else is in the batch. The
pipeline must give the same image except for rounding. Otherwise the measurement fails.

`ImageWatch` identifies requests by their seed, since a client over HTTP does not choose the engine's ids.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import msgspec
import trio

from trioserve.admission.admission_scope import AdmissionScope
from trioserve.admission.dispatch import Dispatch
from trioserve.admission.file_decoders import ImageDecoder
from trioserve.api.images.image_routes import ImageApp
from trioserve.bench.inside.command import print_figures
from trioserve.bench.settings import at_least_one
from trioserve.contracts.events import IterativePhase
from trioserve.contracts.image_generation import ImageParams, IterativePlan, IterativeResult, RGBImage
from trioserve.contracts.media import ImageLimits
from trioserve.contracts.step import IsAbandoned
from trioserve.engine.image_engine import ImageEngine
from trioserve.engine.lifecycle.engine_loop import ThreadedExecutor
from trioserve.engine.lifecycle.request_admission import RequestAdmission
from trioserve.engine.open_image import OpenImage
from trioserve.http.server import FrontendServer
from trioserve.trio_tools.interpreter import freeze_loaded_objects, prepare_interpreter
from trioserve.trio_tools.tcp_stream import connect_tcp
from trioserve.trio_tools.worker_thread import call_abandonable

__all__ = [
    "ForwardPass",
    "ImageRequester",
    "ImageWatch",
    "LeavingFigure",
    "PipelineFigure",
    "PlainPipeline",
    "SpeedRound",
    "add_arguments",
    "measure_answered",
    "measure_leaving",
    "measure_pipeline",
    "measure_speed",
    "run",
]


CLASSES_MAX = 10
# Allowed difference of a color value of 255. A batch adds numbers in another order, so rounding may differ.
LEVELS_APART_MAX = 2


class ImageRequester:
    """Requests and results, by seed. The seed also chooses the prompt.

    Args:
        engine: the engine under test.
        steps: default number of denoising steps.
        guidance: guidance scale.
    """

    def __init__(self, engine: ImageEngine, *, steps: int, guidance: float) -> None:
        self._engine = engine
        self.steps, self.guidance = steps, guidance
        self.steps_max = engine.limits.steps_max
        self._made: dict[int, RGBImage] = {}

    def prompt(self, seed: int) -> str:
        classes = self._engine.model.classes
        return f"image {seed}" if classes is None else classes[seed % min(CLASSES_MAX, len(classes))]

    def prompts(self, count: int) -> list[str]:
        return [self.prompt(seed) for seed in range(count)]

    def body(self, seed: int) -> dict[str, Any]:
        """Return the JSON body of a request over HTTP.

        Args:
            seed: seed of the image.
        """
        return {
            "prompt": self.prompt(seed),
            "seed": seed,
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance,
        }

    async def draw(
        self, seed: int, *, steps: int | None = None, on_step: Callable[[int], None] = lambda steps_done: None
    ) -> None:
        """Generate one image.

        Args:
            seed: seed of the image.
            steps: number of denoising steps. None: the default number, whose result must be the same each time.
            on_step: called with the number of steps done.
        """
        params = ImageParams(seed=seed, steps=steps or self.steps, guidance=self.guidance)
        image: RGBImage | None = None
        async with self._engine.generate_image(self.prompt(seed), params) as stream:
            async for delta in stream:
                on_step(delta.steps_done)
                image = delta.image
        assert image is not None, f"there is no image with seed {seed}"
        if steps is None:
            self.note(seed, image)

    def note(self, seed: int, image: RGBImage) -> None:
        """Record an image, and assert that the engine made no other image with that seed.

        Args:
            seed: seed of the image.
        """
        assert self._made.setdefault(seed, image) == image, f"seed {seed} gave two different images"

    def compare(self, seeds: Sequence[int], pictures: Sequence[RGBImage]) -> None:
        """Assert that the pipeline made the same images, except for rounding.

        Args:
            seeds: seeds of the images.
            pictures: images of the pipeline.
        """
        for seed, image in zip(seeds, pictures, strict=True):
            made = self._made[seed]
            assert (made.width, made.height) == (image.width, image.height)
            apart = max(abs(one - other) for one, other in zip(made.rgb, image.rgb, strict=True))
            assert apart <= LEVELS_APART_MAX, f"seed {seed}: the pipeline's image differs by {apart} levels"


class PlainPipeline:
    """A diffusers pipeline. It computes in the thread that calls it.

    Args:
        directory: folder of the saved model.

    Attributes:
        on_step: called before each denoising step, in that thread.
    """

    def __init__(self, directory: Path) -> None:
        from diffusers import DiffusionPipeline

        self._pipeline = DiffusionPipeline.from_pretrained(directory)
        self._pipeline.set_progress_bar_config(disable=True)
        self.on_step: Callable[[], None] = lambda: None
        denoiser = getattr(self._pipeline, "unet", None) or self._pipeline.transformer
        denoiser.register_forward_pre_hook(lambda *_: self.on_step())

    def draw(self, prompts: Sequence[str], seeds: Sequence[int], step_count: int, guidance: float) -> list[RGBImage]:
        """Return one batch of images in the model's default size.

        Args:
            prompts: prompt of each image.
            seeds: seed of each image.
            step_count: number of denoising steps.
            guidance: guidance scale.
        """
        import torch

        pipeline = self._pipeline
        asked = {"prompt": list(prompts)}
        if hasattr(pipeline, "get_label_ids"):
            asked = {"class_labels": pipeline.get_label_ids(list(prompts))}
        images = pipeline(
            **asked,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            num_inference_steps=step_count,
            guidance_scale=guidance,
        ).images
        return [RGBImage(image.width, image.height, image.convert("RGB").tobytes()) for image in images]


class ForwardPass(msgspec.Struct):
    """One forward pass. Times are seconds of perf_counter, and include the transfer to the compute thread and back."""

    phase: IterativePhase
    seeds: tuple[int, ...]
    began_at: float
    ended_at: float = inf


class ImageWatch:
    """Watches all image engines of this process. It must be used in Trio's thread.

    Attributes:
        passes: the forward passes, oldest first.
        released_at: time at which a request released everything, by seed.
    """

    def __init__(self) -> None:
        self.passes: list[ForwardPass] = []
        self.released_at: dict[int, float] = {}
        self._awaited: list[tuple[Callable[[], bool], trio.Event]] = []
        self._seeds: dict[AdmissionScope, int] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch all engines of this process inside of the context."""
        run_step, begin, leave = ThreadedExecutor.run_step, RequestAdmission.begin, Dispatch.leave

        def noted_step(
            steps: ThreadedExecutor[Any, Any], plan: IterativePlan, is_abandoned: IsAbandoned
        ) -> Coroutine[Any, Any, IterativeResult | None]:
            seeds = tuple(work.request.seed for work in plan.works)
            self.passes.append(ForwardPass(plan.phase, seeds, perf_counter()))
            return self._until_done(self.passes[-1], run_step(steps, plan, is_abandoned))

        def noted_begin(admissions: RequestAdmission, request: OpenImage) -> AdmissionScope:
            admission = begin(admissions, request)
            self._seeds[admission] = request.seeds[0]
            self._look()
            return admission

        def noted_leave(dispatch: Dispatch, admission: AdmissionScope) -> None:
            leave(dispatch, admission)
            seed = self._seeds.pop(admission, None)
            if seed is not None:  # The request had not released everything before.
                self.released_at[seed] = perf_counter()
                self._look()

        ThreadedExecutor.run_step = noted_step  # type: ignore[method-assign, assignment]
        RequestAdmission.begin = noted_begin  # type: ignore[method-assign, assignment]
        Dispatch.leave = noted_leave  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            ThreadedExecutor.run_step = run_step  # type: ignore[method-assign]
            RequestAdmission.begin, Dispatch.leave = begin, leave  # type: ignore[method-assign]

    def forget(self) -> None:
        """Forget all passes and releases."""
        self.passes.clear()
        self.released_at.clear()

    async def wait_for_queue(self, seed: int) -> None:
        await self._wait(lambda: seed in self._seeds.values())

    async def wait_for_release(self, seed: int) -> float:
        await self._wait(lambda: seed in self.released_at)
        return self.released_at[seed]

    async def wait_for_pass(self, seed: int, phase: IterativePhase, count: int = 1) -> None:
        """Wait until a number of passes of a phase with a request have begun.

        Args:
            seed: seed of the request.
            count: number of passes.
        """
        await self._wait(lambda: sum(seed in one.seeds for one in self.passes if one.phase is phase) >= count)

    def denoising_between(self, begin: float, end: float) -> int:
        """Return the number of denoising steps that ended between two times.

        Args:
            begin: first time.
            end: last time.
        """
        return sum(one.phase is IterativePhase.DENOISE and begin < one.ended_at < end for one in self.passes)

    def denoising_seconds(self) -> float:
        """Return the median duration of a finished denoising step, or 0 if there is none."""
        steps = [one.ended_at - one.began_at for one in self.passes if one.phase is IterativePhase.DENOISE]
        return median([seconds for seconds in steps if seconds < inf] or [0.0])

    def denoised_a_second(self, count: int) -> float:
        """Return denoising steps of all requests per second, between the first and the last pass with `count` requests.

        Args:
            count: number of requests of a full pass.
        """
        full = [one for one in self.passes if one.phase is IterativePhase.DENOISE and len(one.seeds) == count]
        assert full, f"no pass had all {count} requests"
        within = [one for one in self.passes if full[0].began_at <= one.began_at and one.ended_at <= full[-1].ended_at]
        denoised = sum(len(one.seeds) for one in within if one.phase is IterativePhase.DENOISE)
        return denoised / (full[-1].ended_at - full[0].began_at)

    async def _until_done(
        self, noted: ForwardPass, step: Coroutine[Any, Any, IterativeResult | None]
    ) -> IterativeResult | None:
        self._look()
        result = await step
        noted.ended_at = perf_counter()
        return result

    async def _wait(self, is_so: Callable[[], bool]) -> None:
        if not is_so():
            event = trio.Event()
            self._awaited.append((is_so, event))
            await event.wait()

    def _look(self) -> None:
        for entry in [entry for entry in self._awaited if entry[0]()]:
            self._awaited.remove(entry)
            entry[1].set()


FIRST_OTHER_SEED = 1_000_000  # Leaving clients have lower seeds.


class LeavingFigure(msgspec.Struct, frozen=True, kw_only=True):
    """Clients that left in one phase.

    Attributes:
        phase: phase of their requests.
        others: other requests that ran.
        median_ms: median time from closing the connection until the slot or the queue place was free.
        most_ms: maximum of that time.
        steps: maximum number of denoising steps that ended during that time.
        step_ms: median duration of a denoising step.
        count: number of clients.
    """

    phase: str
    others: int
    median_ms: float
    most_ms: float
    steps: int
    step_ms: float
    count: int


class PipelineFigure(msgspec.Struct, frozen=True, kw_only=True):
    """Callers of the pipeline that were cancelled halfway.

    Attributes:
        median_ms: median time that the pipeline continued.
        most_ms: maximum of that time.
        steps: maximum number of steps that still began.
        count: number of callers.
    """

    median_ms: float
    most_ms: float
    steps: int
    count: int


async def measure_leaving(
    asked: ImageRequester, watch: ImageWatch, port: int, phase: IterativePhase, others: int, count: int
) -> LeavingFigure:
    """Measure clients that leave in one phase.

    Args:
        asked: requests and results.
        watch: watches the engine.
        port: port of the server.
        phase: phase in which the clients leave.
        others: other requests that run. For QUEUED, it must be the number of slots.
        count: number of clients.
    """
    seconds: list[float] = []
    steps: list[int] = []
    watch.forget()
    async with _others(asked, watch, others):
        for seed in range(count):
            async with await _ask_over_http(asked, port, seed):
                if phase is IterativePhase.QUEUED:
                    await watch.wait_for_queue(seed)
                else:
                    halfway = asked.steps // 2 if phase is IterativePhase.DENOISE else 0
                    await watch.wait_for_pass(seed, phase, halfway + 1)
                closed_at = perf_counter()
            released_at = await watch.wait_for_release(seed)
            seconds.append(released_at - closed_at)
            steps.append(watch.denoising_between(closed_at, released_at))
    return LeavingFigure(
        phase=phase.value,
        others=others,
        median_ms=1e3 * median(seconds),
        most_ms=1e3 * max(seconds),
        steps=max(steps),
        step_ms=1e3 * watch.denoising_seconds(),
        count=count,
    )


async def measure_answered(
    asked: ImageRequester, watch: ImageWatch, port: int, others: int, count: int
) -> LeavingFigure:
    """Measure clients that stay: the time from the first byte of the response until the slot is free.

    It is negative if the slot was free before. Then a client that leaves during its response has no slot.

    Args:
        asked: requests and results.
        watch: watches the engine.
        port: port of the server.
        others: other requests that run.
        count: number of clients.
    """
    seconds: list[float] = []
    watch.forget()
    async with _others(asked, watch, others):
        for seed in range(count):
            async with await _ask_over_http(asked, port, seed) as stream:
                assert (await stream.receive_some()).startswith(b"HTTP/1.1 200 "), "the request was refused"
                answered_at = perf_counter()
            seconds.append(await watch.wait_for_release(seed) - answered_at)
    return LeavingFigure(
        phase="send",
        others=others,
        median_ms=1e3 * median(seconds),
        most_ms=1e3 * max(seconds),
        steps=0,
        step_ms=1e3 * watch.denoising_seconds(),
        count=count,
    )


async def measure_pipeline(asked: ImageRequester, pipeline: PlainPipeline, count: int) -> PipelineFigure:
    """Measure the pipeline in a thread, as in a server. Its caller is cancelled halfway, without notice to the thread.

    Args:
        asked: requests and results.
        count: number of callers.
    """
    left = [await _leave_pipeline(asked, pipeline, seed) for seed in range(count)]
    seconds = [continued for continued, _ in left]
    return PipelineFigure(
        median_ms=1e3 * median(seconds),
        most_ms=1e3 * max(seconds),
        steps=max(begun for _, begun in left),
        count=count,
    )


async def _leave_pipeline(asked: ImageRequester, pipeline: PlainPipeline, seed: int) -> tuple[float, int]:
    """Return the seconds and the number of begun steps of the pipeline after its caller was cancelled."""
    begun = 0
    ended_at = 0.0
    halfway, ended = trio.Event(), trio.Event()

    def on_step() -> None:
        nonlocal begun
        begun += 1
        if begun == asked.steps // 2 + 1:
            token.run_sync_soon(halfway.set)

    def draw() -> None:
        nonlocal ended_at
        pipeline.draw([asked.prompt(seed)], [seed], asked.steps, asked.guidance)
        ended_at = perf_counter()
        # The caller has abandoned this thread, so the thread reports its end with an event.
        token.run_sync_soon(ended.set)

    token = trio.lowlevel.current_trio_token()
    pipeline.on_step = on_step
    async with trio.open_nursery() as caller:
        caller.start_soon(partial(call_abandonable, draw, thread_name="pipeline"))
        await halfway.wait()
        left_at, begun_until_then = perf_counter(), begun
        caller.cancel_scope.cancel()
    await ended.wait()
    pipeline.on_step = lambda: None
    return ended_at - left_at, begun - begun_until_then


@asynccontextmanager
async def _others(asked: ImageRequester, watch: ImageWatch, count: int) -> AsyncIterator[None]:
    """Keep a number of other requests running during the context, each with the maximum number of steps."""

    async def draw(seed: int) -> None:
        while True:
            await asked.draw(seed, steps=asked.steps_max)

    async with trio.open_nursery() as nursery:
        for seed in range(FIRST_OTHER_SEED, FIRST_OTHER_SEED + count):
            nursery.start_soon(draw, seed)
            await watch.wait_for_pass(seed, IterativePhase.DENOISE, 1)
        yield
        nursery.cancel_scope.cancel()


async def _ask_over_http(asked: ImageRequester, port: int, seed: int) -> trio.SocketStream:
    body = json.dumps(asked.body(seed)).encode()
    stream = await connect_tcp("127.0.0.1", port)
    head = f"POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    await stream.send_all(head.encode() + body)
    return stream


IMAGES_EACH = 2  # With only one image per request, no forward pass would contain all of the mixed requests.


class SpeedRound(msgspec.Struct, frozen=True, kw_only=True):
    """Images per second in one round, measured in three ways.

    Attributes:
        together: all requests begin together.
        mixed: requests begin one after another, so a step computes different denoising steps of several requests.
        pipeline: diffusers' pipeline without the engine.
    """

    together: float
    mixed: float
    pipeline: float


async def measure_speed(asked: ImageRequester, watch: ImageWatch, pipeline: PlainPipeline, batch: int) -> SpeedRound:
    """Measure the three ways of SpeedRound one after another, with the same images.

    Args:
        asked: requests and results.
        watch: watches the engine.
        pipeline: diffusers' pipeline.
        batch: number of clients.
    """
    watch.forget()
    began_at = perf_counter()
    await _draw_all(asked, batch, steps_apart=0)
    together = IMAGES_EACH * batch / (perf_counter() - began_at)

    watch.forget()
    await _draw_all(asked, batch, steps_apart=max(1, asked.steps // batch))
    mixed = watch.denoised_a_second(batch) / asked.steps

    seeds = range(batch)
    began_at = perf_counter()
    # The pipeline runs in a thread that ends with the call. If its OpenMP threads stayed, the engine's speed would
    # halve.
    pictures = await call_abandonable(
        pipeline.draw, asked.prompts(batch), seeds, asked.steps, asked.guidance, thread_name="pipeline"
    )
    plain = batch / (perf_counter() - began_at)
    asked.compare(seeds, pictures)
    return SpeedRound(together=together, mixed=mixed, pipeline=plain)


async def _draw_all(asked: ImageRequester, batch: int, *, steps_apart: int) -> None:
    """Run all clients. Each begins when the one before has done a number of steps."""
    begins = [trio.Event() for _ in range(batch + 1)]
    begins[0].set()

    async def read(index: int) -> None:
        def on_step(steps_done: int) -> None:
            if steps_done >= steps_apart:
                begins[index + 1].set()

        if steps_apart == 0:
            begins[index + 1].set()
        await begins[index].wait()
        for number in range(IMAGES_EACH):
            await asked.draw(index + batch * number, on_step=on_step)

    async with trio.open_nursery() as nursery:
        for index in range(batch):
            nursery.start_soon(read, index)


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
    watch, batch = ImageWatch(), arguments.batch
    leaving: list[LeavingFigure] = []
    rounds: list[SpeedRound] = []
    with watch.watched():
        async with arguments.open_image_engine(arguments.model, max_num_seqs=batch) as engine:
            # The engine reports errors better, so it loads the model before the pipeline does.
            pipeline = PlainPipeline(Path(arguments.model))
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
    print_figures(leaving=leaving, pipeline=plain, rounds=rounds)


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
    """Return the medians over the rounds, including the median of the rounds' ratios."""
    speeds = [median(getattr(one, name) for one in rounds) for name in ("together", "mixed", "pipeline")]
    ratio = median(one.mixed / one.together for one in rounds)
    return "".join(f"{speed:>10.2f}" for speed in speeds) + f"{ratio:>20.3f}"
