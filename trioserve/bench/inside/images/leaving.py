"""How soon a slot is back when a client leaves, in each phase of its request; and how long diffusers' pipeline goes on
for a caller who has left."""

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

from trioserve.bench.inside.images.asked import AskedPictures
from trioserve.bench.inside.images.watch import ImageWatch
from trioserve.contracts.events import IterativePhase
from trioserve.trio_tools.daemon_thread import call_abandonable
from trioserve.trio_tools.tcp_stream import connect_tcp

if TYPE_CHECKING:
    from trioserve.bench.inside.images.pipeline import PlainPipeline

__all__ = ["LeavingFigure", "PipelineFigure", "measure_answered", "measure_leaving", "measure_pipeline"]

FIRST_OTHER_SEED = 1_000_000  # those who leave have lower ones


class LeavingFigure(msgspec.Struct, frozen=True, kw_only=True):
    """Of clients that left in one phase, while so many others ran. median_ms, most_ms: from closing the connection
    until the slot, or the place in the queue, was back. steps: denoising steps that it waited for, at
    most. step_ms: how long one took, median."""

    phase: str
    others: int
    median_ms: float
    most_ms: float
    steps: int
    step_ms: float
    count: int


class PipelineFigure(msgspec.Struct, frozen=True, kw_only=True):
    """Of callers that left halfway. median_ms, most_ms: how long it went on. steps: so many were still begun."""

    median_ms: float
    most_ms: float
    steps: int
    count: int


async def measure_leaving(
    asked: AskedPictures, watch: ImageWatch, port: int, phase: IterativePhase, others: int, count: int
) -> LeavingFigure:
    """QUEUED is to be measured with as many others as there are slots."""
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
    asked: AskedPictures, watch: ImageWatch, port: int, others: int, count: int
) -> LeavingFigure:
    """Of clients that stay: from the first byte of the response until the slot is back. Below 0: it was back before, so
    that whoever leaves while it is sent has none."""
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


async def measure_pipeline(asked: AskedPictures, pipeline: PlainPipeline, count: int) -> PipelineFigure:
    """As in a server that computes in a thread: whoever waits leaves halfway, and the thread does not hear of it."""
    left = [await _leave_pipeline(asked, pipeline, seed) for seed in range(count)]
    seconds = [gone_on for gone_on, _ in left]
    return PipelineFigure(
        median_ms=1e3 * median(seconds),
        most_ms=1e3 * max(seconds),
        steps=max(begun for _, begun in left),
        count=count,
    )


async def _leave_pipeline(asked: AskedPictures, pipeline: PlainPipeline, seed: int) -> tuple[float, int]:
    """Seconds, and steps that were begun, after the caller had left."""
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
        token.run_sync_soon(ended.set)  # by then nobody waits whose name it could be done in

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
async def _others(asked: AskedPictures, watch: ImageWatch, count: int) -> AsyncIterator[None]:
    """So many run, with as many steps as may be asked for, again and again."""

    async def draw(seed: int) -> None:
        while True:
            await asked.draw(seed, steps=asked.steps_max)

    async with trio.open_nursery() as nursery:
        for seed in range(FIRST_OTHER_SEED, FIRST_OTHER_SEED + count):
            nursery.start_soon(draw, seed)
            await watch.wait_for_pass(seed, IterativePhase.DENOISE, 1)
        yield
        nursery.cancel_scope.cancel()


async def _ask_over_http(asked: AskedPictures, port: int, seed: int) -> trio.SocketStream:
    body = json.dumps(asked.body(seed)).encode()
    stream = await connect_tcp("127.0.0.1", port)
    head = f"POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    await stream.send_all(head.encode() + body)
    return stream
