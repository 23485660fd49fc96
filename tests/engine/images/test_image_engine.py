"""Tests of an image engine: images and partial results do not depend on other requests or on the reader's speed."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.errors import AlreadyEnded, InvalidRequest, Overloaded
from trioserve.contracts.events import FinishReason, IterativePhase
from trioserve.contracts.image_generation import ImageParams
from trioserve.testing.fake_image_engine import open_fake_image_engine


async def test_generated_images_are_returned_in_order(autojump_clock):
    async with open_fake_image_engine() as fake:
        stream = fake.generate_image("a cat", ImageParams(n=3, seed=7))
        async with stream:
            assert stream.seeds == (7, 8, 9)
            expected = fake.expected(stream)
            assert await stream.pictures() == tuple(expected)
        assert len({image.rgb for image in expected}) == 3
        assert (expected[0].width, expected[0].height) == (16, 16)
        assert await fake.generate_image("a cat", ImageParams(seed=8)) == (expected[1],)
        fake.assert_all_free()


async def test_each_denoising_step_gives_a_delta(autojump_clock):
    async with open_fake_image_engine(paused=True) as fake:
        async with fake.generate_image("a cat", ImageParams(steps=3)) as stream:
            told = []

            async def read() -> None:
                async for delta in stream:
                    told.append((delta.index, delta.steps_done, delta.step_count, delta.finish_reason))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                phases = [(await fake.step()).phase for _ in range(5)]
        assert phases == [IterativePhase.ENCODE, *[IterativePhase.DENOISE] * 3, IterativePhase.DECODE]
        assert told == [(0, 1, 3, None), (0, 2, 3, None), (0, 3, 3, None), (0, 3, 3, FinishReason.STOP)]
        assert await fake.step() is None
        fake.assert_all_free()


@pytest.mark.parametrize(
    ("steps", "partial_images", "expect"),
    [(20, 3, [5, 10, 15]), (10, 3, [3, 6, 9]), (4, 3, [1, 2, 3]), (3, 8, [1, 2]), (1, 2, []), (10, 0, [])],
)
async def test_partial_images_are_delivered_at_equal_step_intervals(steps, partial_images, expect, autojump_clock):
    async with open_fake_image_engine(step_seconds=0.1) as fake:
        async with fake.generate_image("a cat", ImageParams(steps=steps, partial_images=partial_images)) as stream:
            partials = {
                delta.steps_done: delta.image
                async for delta in stream
                if delta.image is not None and delta.finish_reason is None
            }
            for steps_done, image in partials.items():
                assert [image] == fake.expected(stream, steps_done=steps_done)
        assert list(partials) == expect


async def test_slow_reader_gets_the_newest_partial_result_and_the_last_delta(autojump_clock):
    asked = ImageParams(steps=6, partial_images=2, n=2)
    async with open_fake_image_engine(paused=True) as fake, fake.generate_image("a cat", asked) as stream:
        await fake.step(6)  # One encoding step and five of six denoising steps run, and nothing reads the stream.
        deltas = [await anext(stream) for _ in range(2)]
        assert [(delta.index, delta.steps_done) for delta in deltas] == [(0, 5), (1, 5)]
        assert [delta.image for delta in deltas] == fake.expected(stream, steps_done=4)
        await fake.step(2)
        ends = [delta async for delta in stream]
        assert [(delta.steps_done, delta.finish_reason) for delta in ends] == [(6, FinishReason.STOP)] * 2
        assert [delta.image for delta in ends] == fake.expected(stream)


async def test_image_does_not_depend_on_other_requests(autojump_clock):
    async def make(steps: int, seed: int, priority: int, made: dict[int, object]) -> None:
        await trio.sleep(seed % 5)
        params = ImageParams(steps=steps, seed=seed, guidance=float(seed % 3 + 1))
        made[seed] = await fake.generate_image(f"number {seed}", params, priority=priority)

    alone: dict[int, object] = {}
    crowd: dict[int, object] = {}
    async with open_fake_image_engine(step_seconds=0.5, max_queued_requests=40) as fake:
        for seed in range(20):
            await make(seed % 7 + 1, seed, 0, alone)
        async with trio.open_nursery() as nursery:
            for seed in range(20):
                nursery.start_soon(make, seed % 7 + 1, seed, seed % 3, crowd)
        assert fake.stats().preemptions_total > 0
        fake.assert_all_free()
    assert crowd == alone


async def test_request_preempted_by_a_lower_priority_number_continues_where_it_stopped(autojump_clock):
    async with open_fake_image_engine(max_num_seqs=1, kept_slots=1, step_seconds=1) as fake:
        ends: list[tuple[str, float]] = []
        begun_at = trio.current_time()

        async def make(name: str, steps: int, priority: int) -> None:
            async with fake.generate_image(name, ImageParams(steps=steps), priority=priority) as stream:
                expected = tuple(fake.expected(stream))
                assert await stream.pictures() == expected
                ends.append((name, trio.current_time() - begun_at))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(make, "patient", 6, 5)
            await trio.sleep(3.5)
            nursery.start_soon(make, "urgent", 2, 0)
        # The patient request takes 1 + 6 + 1 steps, the urgent one takes 1 + 2 + 1, and no step is repeated.
        assert sorted(ends) == [("patient", 12.0), ("urgent", 8.0)]
        assert fake.stats().preemptions_total == 1
        fake.assert_all_free()


@pytest.mark.parametrize("waiting_count", [0, 4, 5, 12])
async def test_lower_priority_number_waits_only_for_the_step_in_flight(waiting_count, autojump_clock):
    async with open_fake_image_engine(max_num_seqs=1, kept_slots=1, step_seconds=1) as fake:
        async with trio.open_nursery() as nursery:
            for number in range(1 + waiting_count):
                nursery.start_soon(fake.generate_image(f"number {number}", ImageParams(steps=9), priority=1)._all)
            await trio.sleep(5.5)
            await fake.generate_image("urgent", ImageParams(steps=2))
            # The urgent request waits for the step in flight, and then takes four steps.
            assert trio.current_time() == pytest.approx(10)
            nursery.cancel_scope.cancel()
        await trio.sleep(2)  # Wait for the end of the step in flight.
        fake.assert_all_free()


async def test_preemptions_are_limited_by_kept_latents(autojump_clock):
    async with open_fake_image_engine(max_num_seqs=1, kept_slots=2, max_queued_requests=20, paused=True) as fake:
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(fake.generate_image(f"number {number}", priority=1)._all)
            await fake.step()
            for number in range(4):
                nursery.start_soon(fake.generate_image(f"urgent {number}")._all)
            await wait_all_tasks_blocked()
            assert fake.stats().running_count + fake.stats().waiting_count == 5 + 2
            assert fake.dispatch.core.stats().waiting == 1 + 2
            nursery.cancel_scope.cancel()
        fake.assert_all_free()


async def test_full_queue_refuses_image_requests(autojump_clock):
    async with open_fake_image_engine(max_num_seqs=1, max_queued_requests=0, paused=True) as fake:
        async with fake.generate_image("one"):
            with pytest.raises(Overloaded) as refusal:
                await fake.generate_image("two")
            assert refusal.value.reason == "queue_full"
            assert len(fake.live_requests()) == 1
        fake.assert_all_free()


async def test_images_beyond_the_slots_are_computed_one_after_the_other(autojump_clock):
    async with open_fake_image_engine(max_num_seqs=2, step_seconds=1) as fake:
        assert len(await fake.generate_image("many", ImageParams(n=5))) == 5
        fake.assert_all_free()


async def test_request_for_more_images_than_may_ever_wait_is_refused(autojump_clock):
    async with open_fake_image_engine(max_num_seqs=1, max_queued_requests=2) as fake:
        with pytest.raises(InvalidRequest, match="n is 4, but at most 3 images may run and wait here"):
            await fake.generate_image("many", ImageParams(n=4))
        assert len(await fake.generate_image("many", ImageParams(n=3))) == 3
        fake.assert_all_free()


async def test_image_stream_is_readable_only_inside_its_scope(autojump_clock):
    async with open_fake_image_engine() as fake:
        stream = fake.generate_image("a cat")
        with pytest.raises(AlreadyEnded):
            await anext(stream)
        async with stream:
            pass
        with pytest.raises(AlreadyEnded):
            await anext(stream)
        with pytest.raises(AlreadyEnded):
            await stream


async def test_live_image_requests_show_their_progress(autojump_clock):
    async with open_fake_image_engine(paused=True, max_num_seqs=1) as fake:
        async with (
            fake.generate_image("a", ImageParams(steps=2), request_id="a", owner="x"),
            fake.generate_image("b", request_id="b", priority=1),
        ):
            await wait_all_tasks_blocked()
            await fake.step(2)
            first, second = fake.live_requests()
            assert (first.id, first.state, first.phase) == ("a", "running", IterativePhase.DENOISE)
            assert (first.steps_done, first.step_count, first.slot_count, first.image_count) == (1, 2, 1, 1)
            assert (second.id, second.state, second.phase) == ("b", "waiting", IterativePhase.QUEUED)
            assert (second.priority, second.slot_count) == (1, 0)
            assert [view.id for view in fake.live_requests(owner="x")] == ["a"]
        fake.assert_all_free()
