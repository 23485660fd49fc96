"""Tests of clients that cancel an image request in each phase. Its slot is free at once, or after the step in
flight.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.events import AbortOutcome, FinishReason, IterativePhase
from trioserve.contracts.image_generation import ImageParams
from trioserve.testing.fake_image_engine import FakeImageEngine, open_fake_image_engine

ASKED = ImageParams(steps=3)
# Number of steps before a step of each phase. An image has one encoding, three denoising and one decoding step.
PHASES = [
    (0, IterativePhase.ENCODE),
    (1, IterativePhase.DENOISE),
    (3, IterativePhase.DENOISE),
    (4, IterativePhase.DECODE),
]


def freed(fake: FakeImageEngine, phase: IterativePhase) -> tuple[float, float]:
    """Return how many images were aborted in this phase, and for how many steps in total they kept their slots."""
    lines = fake.metrics.expose().decode().splitlines()

    def value(name: str) -> float:
        start = f"trioserve:{name}{{"
        (line,) = [line for line in lines if line.startswith(start) and f'phase="{phase.value}"' in line]
        return float(line.rpartition(" ")[2])

    return value("aborts_total"), value("cancel_to_free_steps_sum")


@asynccontextmanager
async def a_leaver(fake: FakeImageEngine, params: ImageParams = ASKED) -> AsyncIterator[trio.CancelScope]:
    """Run a client that requests images and reads no deltas. Yield the scope with which a test cancels the client."""

    async def ask() -> None:
        with scope:
            async with fake.generate_image("leaves", params, request_id="leaver"):
                await trio.sleep_forever()

    scope = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        yield scope
        scope.cancel()


@pytest.mark.parametrize(("steps_before", "phase"), PHASES)
async def test_image_request_that_leaves_during_a_step_frees_its_slot_after_the_step(
    steps_before, phase, autojump_clock
):
    async with open_fake_image_engine(paused=True) as fake:
        async with a_leaver(fake) as scope:
            await fake.step(steps_before)
            async with fake.held_step() as plan:
                assert plan.phase is phase
                scope.cancel()
                await wait_all_tasks_blocked()
                assert not fake.live_requests()  # The request has left the engine without waiting for the step.
                assert fake.stats().slots_used == 1  # The step in flight still uses the slot.
            assert fake.stats().slots_used == 0
        assert freed(fake, phase) == (1, 1)
        fake.assert_all_free()


@pytest.mark.parametrize(("steps_before", "phase"), PHASES)
async def test_image_request_that_leaves_between_steps_frees_its_slot_at_once(steps_before, phase, autojump_clock):
    async with open_fake_image_engine(paused=True) as fake:
        async with a_leaver(fake) as scope:
            await fake.step(steps_before)
            assert fake.stats().slots_used == (1 if steps_before else 0)
            scope.cancel()
            await wait_all_tasks_blocked()
            fake.assert_all_free()
        assert freed(fake, phase if steps_before else IterativePhase.QUEUED) == (1, 0)


async def test_image_request_that_leaves_with_finished_images_frees_everything(autojump_clock):
    async with open_fake_image_engine(paused=True) as fake:
        async with a_leaver(fake) as scope:
            await fake.step(5)
            assert fake.stats().slots_used == 0  # The slot was free as soon as the image was decoded.
            scope.cancel()
        assert sum(freed(fake, phase)[0] for phase in IterativePhase) == 0
        fake.assert_all_free()


async def test_image_request_that_leaves_the_queue_frees_its_queue_slot(autojump_clock):
    async with open_fake_image_engine(max_num_seqs=1, max_queued_requests=1, paused=True) as fake:
        async with a_leaver(fake), a_leaver(fake) as scope:
            assert fake.dispatch.stats().waiting == 1
            scope.cancel()
            await wait_all_tasks_blocked()
            assert fake.dispatch.stats().waiting == 0
        assert freed(fake, IterativePhase.QUEUED) == (2, 0)
        fake.assert_all_free()


async def test_request_that_leaves_frees_the_slots_of_all_its_images(autojump_clock):
    async with open_fake_image_engine(paused=True) as fake:
        async with a_leaver(fake, ImageParams(n=4, steps=3)) as scope:
            async with fake.held_step():
                assert fake.stats().slots_used == 4
                scope.cancel()
                await wait_all_tasks_blocked()
            fake.assert_all_free()
        assert freed(fake, IterativePhase.ENCODE) == (4, 4)


async def test_freed_image_slot_goes_to_the_next_request(autojump_clock):
    async with open_fake_image_engine(max_num_seqs=1, step_seconds=1) as fake:
        async with a_leaver(fake) as scope, fake.generate_image("stays", ASKED) as stream:
            begun_at = trio.current_time()
            await trio.sleep(1.5)  # Leave during the first denoising step.
            scope.cancel()
            assert await stream.pictures() == tuple(fake.expected(stream))
            assert trio.current_time() - begun_at == 2.0 + 5.0
        fake.assert_all_free()


async def test_preempted_image_whose_reader_leaves_frees_its_kept_latent(autojump_clock):
    async with open_fake_image_engine(max_num_seqs=1, kept_slots=1, paused=True) as fake:
        async with a_leaver(fake) as scope:
            await fake.step(2)
            async with fake.generate_image("better", ASKED, priority=-1):
                await fake.step()
                assert (fake.stats().slots_used, fake.stats().kept_used) == (1, 1)
                scope.cancel()
                await wait_all_tasks_blocked()
                assert (fake.stats().slots_used, fake.stats().kept_used) == (1, 0)
        fake.assert_all_free()


@pytest.mark.parametrize(("steps_before", "phase"), PHASES)
async def test_abort_by_id_ends_all_image_requests_with_the_id(steps_before, phase, autojump_clock):
    async with (
        open_fake_image_engine(paused=True) as fake,
        fake.generate_image("one", ASKED, request_id="same") as one,
        fake.generate_image("two", ASKED, request_id="same", owner="x") as two,
        fake.generate_image("other", ASKED, request_id="other") as other,
    ):
        expected = tuple(fake.expected(other))
        await fake.step(steps_before)
        async with fake.held_step() as plan:
            assert plan.phase is phase
            assert fake.abort("same", owner="x") == {"same": AbortOutcome.ABORTED}
            assert fake.abort(["same", "nobody"]) == {
                "same": AbortOutcome.ABORTED,
                "nobody": AbortOutcome.UNKNOWN,
            }
            for stream in (one, two):  # The readers are notified at once.
                last = [delta async for delta in stream][-1]
                assert (last.finish_reason, last.image) == (FinishReason.ABORT, None)
                assert last.message == "the request was aborted by its id"
        assert fake.stats().slots_used == (0 if phase is IterativePhase.DECODE else 1)
        assert fake.abort("same") == {"same": AbortOutcome.ALREADY_FINISHED}
        fake.resume()
        assert await other.pictures() == expected


async def test_abort_of_a_queued_image_request_wakes_its_reader(autojump_clock):
    async with open_fake_image_engine(max_num_seqs=1, max_queued_requests=1, paused=True) as fake:

        async def wait() -> None:
            async with fake.generate_image("two", request_id="two") as stream:
                (last,) = [delta async for delta in stream]
                ends.append(last.finish_reason)

        ends: list[FinishReason] = []
        async with fake.generate_image("one"), trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            assert fake.abort("two") == {"two": AbortOutcome.ABORTED}
        assert ends == [FinishReason.ABORT]
        fake.assert_all_free()
