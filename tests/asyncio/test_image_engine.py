"""Tests of images in an asyncio program: generation, partial images and aborts. Afterwards every slot is free."""

from __future__ import annotations

import asyncio
import functools

import pytest

import trioserve.asyncio
from trioserve.asyncio.engine import opened_in_a_thread
from trioserve.contracts.errors import AlreadyEnded, RequestAborted
from trioserve.contracts.events import AbortOutcome, FinishReason
from trioserve.contracts.image_generation import ImageParams
from trioserve.testing.fake_image_engine import open_fake_image_engine

from .conftest import until


def open_fake(**options):
    return opened_in_a_thread(functools.partial(open_fake_image_engine, **options), trioserve.asyncio.ImageEngine)


def test_images_are_generated_with_partial_images(run):
    async def program() -> None:
        async with open_fake() as engine:
            asked = ImageParams(n=2, steps=6, partial_images=2, seed=7)
            whole = await engine.generate_image("a cat", asked)
            async with engine.generate_image("a cat", asked) as stream:
                assert (stream.seeds, stream.step_count, stream.size) == ((7, 8), 6, (16, 16))
                deltas = [delta async for delta in stream]
                assert stream.is_finished
            ends = {delta.index: delta for delta in deltas if delta.finish_reason is not None}
            assert (ends[0].image, ends[1].image) == whole
            assert (engine.model.name, engine.limits.n_max, engine.ready) == ("fake", 10, True)
            with pytest.raises(AlreadyEnded, match="can be read only inside"):
                await anext(stream)
            await engine.wait_until_idle()
            engine.thread.call(engine.on_trio.assert_all_free)

    run(program)


def test_cancelled_task_releases_its_slots(run):
    async def program() -> None:
        async with open_fake(paused=True) as engine:
            task = asyncio.ensure_future(engine.generate_image("a cat", ImageParams(n=2)))
            await until(lambda: len(engine.live_requests()) == 1)
            await engine.thread.run(engine.on_trio.step)
            assert engine.stats().slots_used == 2
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            engine.thread.call(engine.on_trio.assert_all_free)

    run(program)


def test_slow_reader_gets_the_newest_partial_image_and_the_end(run):
    async def program() -> None:
        asked = ImageParams(steps=6, partial_images=2)
        async with open_fake(paused=True) as engine, engine.generate_image("a cat", asked) as stream:
            await engine.thread.run(functools.partial(engine.on_trio.step, 6))
            delta = await anext(stream)
            assert (delta.steps_done, delta.finish_reason) == (5, None)
            (expected,) = engine.thread.call(lambda: engine.on_trio.expected(stream._stream, steps_done=4))
            assert delta.image == expected
            await engine.thread.run(functools.partial(engine.on_trio.step, 2))
            assert (await anext(stream)).finish_reason is FinishReason.STOP

    run(program)


def test_abort_by_id_ends_an_image_request(run):
    async def program() -> None:
        async with open_fake(paused=True) as engine, engine.generate_image("a cat", request_id="it") as stream:
            assert engine.abort("it") == {"it": AbortOutcome.ABORTED}
            with pytest.raises(RequestAborted):
                await stream.pictures()

    run(program)
