"""Pictures a second of requests that begin together, of requests at different timesteps, and of diffusers' pipeline.

Together: so many readers begin at once, and each asks for one picture after another, so that they stay at the same
timestep. Mixed: they came one after another, at even distances in a picture's steps; counted are the denoising steps
from the first pass with all of them in it to the last one, so that encoding, decoding and waiting is in the time.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import msgspec
import trio

from trioserve.bench.inside.images.asked import AskedPictures
from trioserve.bench.inside.images.watch import ImageWatch
from trioserve.trio_tools.daemon_thread import call_abandonable

if TYPE_CHECKING:
    from trioserve.bench.inside.images.pipeline import PlainPipeline

__all__ = ["SpeedRound", "measure_speed"]

PICTURES_EACH = 2  # with one, no time has all of the mixed ones in it


class SpeedRound(msgspec.Struct, frozen=True, kw_only=True):
    """Pictures a second."""

    together: float
    mixed: float
    pipeline: float


async def measure_speed(asked: AskedPictures, watch: ImageWatch, pipeline: PlainPipeline, batch: int) -> SpeedRound:
    """One after the other, with the same pictures."""
    watch.forget()
    began_at = perf_counter()
    await _draw_all(asked, batch, steps_apart=0)
    together = PICTURES_EACH * batch / (perf_counter() - began_at)

    watch.forget()
    await _draw_all(asked, batch, steps_apart=max(1, asked.steps // batch))
    mixed = watch.denoised_a_second(batch) / asked.steps

    seeds = range(batch)
    began_at = perf_counter()
    # In a thread that ends with it: OpenMP's team of one that lingers halves the speed of the engine's.
    pictures = await call_abandonable(
        pipeline.draw, asked.prompts(batch), seeds, asked.steps, asked.guidance, thread_name="pipeline"
    )
    plain = batch / (perf_counter() - began_at)
    asked.compare(seeds, pictures)
    return SpeedRound(together=together, mixed=mixed, pipeline=plain)


async def _draw_all(asked: AskedPictures, batch: int, *, steps_apart: int) -> None:
    """Each reader begins when the one before has done so many steps."""
    begins = [trio.Event() for _ in range(batch + 1)]
    begins[0].set()

    async def read(index: int) -> None:
        def on_step(steps_done: int) -> None:
            if steps_done >= steps_apart:
                begins[index + 1].set()

        if steps_apart == 0:
            begins[index + 1].set()
        await begins[index].wait()
        for number in range(PICTURES_EACH):
            await asked.draw(index + batch * number, on_step=on_step)

    async with trio.open_nursery() as nursery:
        for index in range(batch):
            nursery.start_soon(read, index)
