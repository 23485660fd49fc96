"""Measures images per second: requests that begin together, requests at different timesteps, and diffusers' pipeline.

Together: all clients begin at once, and each requests one image after another, so that all stay at the same timestep.
Mixed: the clients begin one after another, at equal distances in the steps of an image. Denoising steps are counted
from the first to the last pass that has all of them, so that the time includes encoding, decoding and waiting.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import msgspec
import trio

from trioserve.bench.inside.images.asked import ImageRequester
from trioserve.bench.inside.images.watch import ImageWatch
from trioserve.trio_tools.worker_thread import call_abandonable

if TYPE_CHECKING:
    from trioserve.bench.inside.images.pipeline import PlainPipeline

__all__ = ["SpeedRound", "measure_speed"]

IMAGES_EACH = 2  # With one image each, no pass would have all of the mixed requests.


class SpeedRound(msgspec.Struct, frozen=True, kw_only=True):
    """Images per second in one round, for each way."""

    together: float
    mixed: float
    pipeline: float


async def measure_speed(asked: ImageRequester, watch: ImageWatch, pipeline: PlainPipeline, batch: int) -> SpeedRound:
    """Measure the three ways one after another, with the same images.

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
    # In a thread that ends with the call: a lingering OpenMP team of one thread halves the engine's speed.
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
