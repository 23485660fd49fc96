"""Requests for pictures end as those for texts do: what failed elsewhere, for what is denoised and decoded.

tests/engine/images and tests/api/images have a leaver at each phase.
"""

from __future__ import annotations

from random import Random

import msgspec
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.errors import Draining
from trioserve.contracts.events import AbortOutcome, FinishReason, IterativePhase
from trioserve.contracts.image_generation import ImageParams, Picture
from trioserve.contracts.iterative import IterativeRequest
from trioserve.testing.fake_image_engine import FAKE_IMAGE_MODEL, FakeImageEngine, open_fake_image_engine
from trioserve.testing.fake_pictures import FakePictureExecutor
from trioserve.testing.memory_server import open_memory_image_server

GENERATIONS = "/v1/images/generations"
STEPS = 3


def ended(fake: FakeImageEngine, reason: str) -> float:
    return fake.metrics.request_success_total.labels(reason)._value.get()


async def test_during_the_last_step_it_counts_as_aborted(autojump_clock):
    """S01: not as a success, and its slot is back before the next schedule."""
    async with open_fake_image_engine(paused=True) as fake:
        async with fake.generate_image("a cat", ImageParams(steps=STEPS), request_id="it") as stream:
            await fake.step(1 + STEPS)
            async with fake.held_step() as plan:
                assert plan.phase is IterativePhase.DECODE
                assert fake.abort("it") == {"it": AbortOutcome.ABORTED}
            last = [delta async for delta in stream][-1]
            assert (last.finish_reason, last.picture) == (FinishReason.ABORT, None)
            assert (ended(fake, "abort"), ended(fake, "stop")) == (1, 0)
            assert fake.stats().slots_used == 0
        fake.assert_all_free()


async def test_a_drain_lets_a_preempted_picture_go_on_from_its_kept_latent(autojump_clock):
    """S21: it has run, so it is not refused; what has not is."""
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
        assert fake.stats().denoised_total == 2 * STEPS  # nothing was computed twice
        fake.assert_all_free()


async def test_a_deadline_that_passes_while_the_latent_is_kept_gives_it_back_at_once(autojump_clock):
    """Also while the step is in flight whose moves bring it there."""
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


async def test_one_of_several_pictures_fails_and_the_others_come(autojump_clock):
    """Each has one end, and the slot of the one that failed is back with its step."""
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
            assert [ends[1].picture, ends[2].picture] == fake.expected(stream)[1:]
        fake.assert_all_free()


async def test_a_stream_can_be_ended_by_the_id_in_its_head_before_there_is_anything_to_see():
    """S25"""
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


class Noise(FakePictureExecutor):
    """Pictures that make large files."""

    def shown(self, request: IterativeRequest, latent: int) -> Picture:
        picture = super().shown(request, latent)
        return Picture(picture.width, picture.height, Random(latent).randbytes(len(picture.rgb)))


async def test_a_client_that_reads_nothing_holds_up_neither_its_pictures_nor_anybody_else():
    """S49: its slots are free when the pictures are made, and of each only the newest look is kept."""
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
