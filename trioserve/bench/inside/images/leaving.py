"""Measures when a slot is free after its client leaves, and how long diffusers' pipeline continues for an absent
caller.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec
import trio

from trioserve.bench.inside.images.asked import ImageRequester
from trioserve.bench.inside.images.watch import ImageWatch
from trioserve.contracts.events import IterativePhase
from trioserve.trio_tools.tcp_stream import connect_tcp
from trioserve.trio_tools.worker_thread import call_abandonable

if TYPE_CHECKING:
    from trioserve.bench.inside.images.pipeline import PlainPipeline

__all__ = ["LeavingFigure", "PipelineFigure", "measure_answered", "measure_leaving", "measure_pipeline"]

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
    """Callers of the pipeline that left halfway.

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
    """Measure the pipeline in a thread, as in a server: the caller leaves halfway, and the thread is not notified.

    Args:
        asked: requests and results.
        pipeline: the pipeline.
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
    """Return the seconds, and the number of begun steps, after the caller has left."""
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
        token.run_sync_soon(ended.set)  # By then, no task waits for this thread.

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
    """Keep a number of other requests running, each with the maximum number of steps."""

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
