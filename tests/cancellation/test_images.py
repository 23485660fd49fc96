"""Tests the scenarios of README.md with image requests.

The tests in tests/engine/images and tests/api/images cover clients that leave in each phase.
"""

from __future__ import annotations

from random import Random

import msgspec
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.errors import Draining
from trioserve.contracts.events import AbortOutcome, FinishReason, IterativePhase
from trioserve.contracts.image_generation import ImageParams, IterativeRequest, RGBImage
from trioserve.testing.fake_image_engine import (
    FAKE_IMAGE_MODEL,
    FakeImageEngine,
    FakeImageExecutor,
    open_fake_image_engine,
)
from trioserve.testing.memory_server import open_memory_image_server

GENERATIONS = "/v1/images/generations"
STEPS = 3


def ended(fake: FakeImageEngine, reason: str) -> float:
    return fake.metrics.request_success_total.labels(reason)._value.get()


async def test_image_request_aborted_during_its_last_step_counts_as_aborted(autojump_clock):
    """Scenario S01 of tests/README.md: the request does not count as a success, and its slot is free before the next
    schedule.
    """
    async with open_fake_image_engine(paused=True) as fake:
        async with fake.generate_image("a cat", ImageParams(steps=STEPS), request_id="it") as stream:
            await fake.step(1 + STEPS)
            async with fake.held_step() as plan:
                assert plan.phase is IterativePhase.DECODE
                assert fake.abort("it") == {"it": AbortOutcome.ABORTED}
            last = [delta async for delta in stream][-1]
            assert (last.finish_reason, last.image) == (FinishReason.ABORT, None)
            assert (ended(fake, "abort"), ended(fake, "stop")) == (1, 0)
            assert fake.stats().slots_used == 0
        fake.assert_all_free()


async def test_drain_lets_a_preempted_image_resume_from_its_kept_latent(autojump_clock):
    """Scenario S21 of tests/README.md: a drain refuses only requests that have not run yet."""
    async with open_fake_image_engine(max_num_seqs=1, kept_slots=1, paused=True) as fake:
        outcomes: dict[str, object] = {}

        async def make(name: str, priority: int) -> None:
            try:
                async with fake.generate_image(name, ImageParams(steps=STEPS), priority=priority) as stream:
                    expected = tuple(fake.expected(stream))
                    outcomes[name] = await stream.pictures() == expected
            except Draining:
                outcomes[name] = "refused"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(make, "worse", 1)
            await fake.step(2)
            nursery.start_soon(make, "better", 0)
            plan = await fake.step()
            assert plan.preempted
            assert (fake.stats().slots_used, fake.stats().kept_used) == (1, 1)
            nursery.start_soon(make, "late", 1)
            await wait_all_tasks_blocked()
            fake.drain()
            await wait_all_tasks_blocked()
            assert outcomes == {"late": "refused"}
            assert fake.stats().kept_used == 1
            fake.resume()
        assert outcomes == {"late": "refused", "better": True, "worse": True}
        assert fake.stats().denoised_total == 2 * STEPS  # No denoising step was computed twice.
        fake.assert_all_free()


async def test_deadline_of_a_preempted_image_frees_its_kept_latent_at_once(autojump_clock):
    """The step that moves the latent into its kept slot may still be in flight."""
    async with open_fake_image_engine(max_num_seqs=1, kept_slots=1, paused=True) as fake:
        ends = []

        async def make(name: str, priority: int, seconds: float | None) -> None:
            asked = ImageParams(steps=STEPS)
            deadlines = Deadlines(timeout=seconds)
            async with fake.generate_image(name, asked, priority=priority, deadlines=deadlines) as stream:
                ends.extend([delta.finish_reason async for delta in stream if delta.finish_reason])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(make, "worse", 1, 5.0)
            await fake.step(2)
            nursery.start_soon(make, "better", 0, None)
            await wait_all_tasks_blocked()
            async with fake.held_step() as plan:
                assert plan.preempted
                assert fake.stats().kept_used == 1
                await trio.sleep(6)
                assert ends == [FinishReason.DEADLINE]
                assert (fake.stats().slots_used, fake.stats().kept_used) == (1, 0)
            fake.resume()
        assert ends == [FinishReason.DEADLINE, FinishReason.STOP]
        fake.assert_all_free()


async def test_failure_of_one_image_does_not_end_the_other_images_of_its_request(autojump_clock):
    """Each image ends once, and the slot of the failed image is free after the step in which it failed."""
    async with open_fake_image_engine(paused=True) as fake:
        async with fake.generate_image("a cat", ImageParams(n=3, steps=STEPS)) as stream:
            plan = await fake.step(2)
            fake.executor.errors[plan.works[0].request.id] = "no numbers"
            await fake.step()
            assert fake.stats().slots_used == 2
            fake.resume()
            ends = {delta.index: delta async for delta in stream if delta.finish_reason is not None}
            assert [ends[index].finish_reason for index in range(3)] == [
                FinishReason.ERROR,
                FinishReason.STOP,
                FinishReason.STOP,
            ]
            assert ends[0].message == "no numbers"
            assert [ends[1].image, ends[2].image] == fake.expected(stream)[1:]
        fake.assert_all_free()


async def test_image_stream_can_be_aborted_before_its_first_event_by_the_id_in_its_head():
    """Scenario S25 of tests/README.md: a request can be aborted by the id in the head of its response."""
    async with open_memory_image_server(paused=True) as server:
        body = {"prompt": "a cat", "steps": STEPS, "stream": True}
        async with server.client().ask(GENERATIONS, body) as response:
            async with server.engine.held_step() as plan:
                assert plan.phase is IterativePhase.ENCODE
                assert await response.head() == 200
                request_id = response.headers["x-request-id"]
                answer = await server.client().post("/v1/requests/abort", {"ids": [request_id]})
                (ended_one,) = (await answer.json())["data"]
                assert (ended_one["id"], ended_one["result"]) == (request_id, "aborted")
            await response.read()
        assert b"request_aborted" in response.body
        assert await server.engine.step() is None
        await server.assert_all_free()


class Noise(FakeImageExecutor):
    """A model that generates images of random pixels, whose files are large."""

    def shown(self, request: IterativeRequest, latent: int) -> RGBImage:
        image = super().shown(request, latent)
        return RGBImage(image.width, image.height, Random(latent).randbytes(len(image.rgb)))


async def test_image_client_that_reads_nothing_delays_neither_its_own_images_nor_other_requests():
    """Scenario S49 of tests/README.md: slots are free when the images are done, and only the newest preview of each
    image is kept.
    """
    model = msgspec.structs.replace(FAKE_IMAGE_MODEL, side_max=512, pixels_per_work=256 * 256)
    async with open_memory_image_server(model=model, new_executor=Noise) as server:
        body = {"prompt": "a cat", "size": "256x256", "n": 4, "steps": 6, "partial_images": 5, "stream": True}
        async with server.client(http=2).ask(GENERATIONS, body):
            await wait_all_tasks_blocked()
            (view,) = server.engine.live_requests()
            assert (view.state, view.slot_count, view.steps_done) == ("finished", 0, 24)
            (request,) = server.engine.open_requests
            assert len(request._pending) <= 4
            other = await server.client().post(GENERATIONS, {"prompt": "a dog", "steps": 2})
            assert other.status == 200
        await server.assert_all_free()
