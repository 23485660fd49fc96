"""Tests that deadlines, drains, pauses, sleep and faults work in an image engine as in a text engine."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.errors import (
    DeadlinePassed,
    Draining,
    EngineFault,
    EngineReopening,
    RequestAborted,
    RequestFailed,
    StepOverdue,
)
from trioserve.contracts.events import FinishReason
from trioserve.contracts.image_generation import ImageParams
from trioserve.contracts.output import REQUEST_POISONED
from trioserve.testing.fake_image_engine import FakeImageEngine, FakeImageExecutor, open_fake_image_engine
from trioserve.testing.stepped_by_hand import InjectedFault

ASKED = ImageParams(steps=4)


async def ends_of(fake: FakeImageEngine, prompt: str = "a cat", params: ImageParams = ASKED, **arguments):
    """Return the last delta of each image."""
    async with fake.generate_image(prompt, params, **arguments) as stream:
        return [delta async for delta in stream if delta.finish_reason is not None]


@pytest.mark.parametrize(
    ("deadlines", "params", "seconds"),
    [
        (Deadlines(timeout=2.5), ImageParams(steps=4), 2.5),
        (Deadlines(ttft_timeout=3.5), ImageParams(steps=4), 3.5),
        # The first partial result comes after two steps.
        (Deadlines(ttft_timeout=3.5), ImageParams(steps=4, partial_images=3), None),
        (Deadlines(timeout=5.5), ImageParams(steps=4), 5.5),
        (Deadlines(timeout=6.5), ImageParams(steps=4), None),
        (Deadlines(queue_timeout=0.5), ImageParams(steps=4), None),
    ],
)
async def test_image_request_ends_at_its_deadline(deadlines, params, seconds, autojump_clock):
    async with open_fake_image_engine(step_seconds=1) as fake:
        begun_at = trio.current_time()
        (last,) = await ends_of(fake, params=params, deadlines=deadlines)
        if seconds is None:
            assert last.finish_reason is FinishReason.STOP
            assert trio.current_time() - begun_at == 6.0
        else:
            assert last.finish_reason is FinishReason.DEADLINE
            assert trio.current_time() - begun_at == seconds
            assert last.steps_done == int(seconds) - 1
            assert last.message == f"the request's {last.stop_reason} of {seconds:g} s has passed"
        await trio.sleep(2)  # Wait for the end of the step in flight.
        fake.assert_all_free()


async def test_queue_deadline_applies_until_all_images_run(autojump_clock):
    async with open_fake_image_engine(max_num_seqs=1, step_seconds=1) as fake:
        ends = await ends_of(fake, params=ImageParams(n=2, steps=4), deadlines=Deadlines(queue_timeout=3.5))
        assert [end.finish_reason for end in ends] == [FinishReason.DEADLINE] * 2
        with pytest.raises(DeadlinePassed, match="queue_timeout"):
            await fake.generate_image("a", ImageParams(n=2), deadlines=Deadlines(queue_timeout=3.25))
        await trio.sleep(2)  # Wait for the end of the step in flight.
        fake.assert_all_free()


async def test_drain_refuses_queued_image_requests_and_finishes_begun_ones(autojump_clock):
    async with open_fake_image_engine(max_num_seqs=1, step_seconds=1) as fake:
        outcomes: list[object] = []

        async def ask() -> None:
            try:
                outcomes.append(len(await fake.generate_image("a cat", ASKED)))
            except Draining as error:
                outcomes.append(error.reason)

        async with trio.open_nursery() as nursery:
            for _ in range(7):  # One request runs, four requests have a lease, and two wait in the queue.
                nursery.start_soon(ask)
                await trio.sleep(0.1)
            fake.drain()
            assert not fake.ready
            await wait_all_tasks_blocked()
            assert outcomes == ["draining"] * 6
            with pytest.raises(Draining):
                await fake.generate_image("late")
            await fake.wait_until_idle()
        assert outcomes == ["draining"] * 6 + [1]
        fake.assert_all_free()


async def test_closing_the_engine_ends_running_image_requests_with_a_message(autojump_clock):
    ends = []

    async def read() -> None:
        async with fake.generate_image("a cat", ASKED) as stream:
            ends.extend([delta async for delta in stream if delta.finish_reason is not None])

    async with trio.open_nursery() as nursery, open_fake_image_engine(step_seconds=1) as fake:
        nursery.start_soon(read)
        await trio.sleep(2.5)
    assert [(end.finish_reason, end.message) for end in ends] == [(FinishReason.ABORT, "the engine was closed")]
    fake.assert_all_free()


# --- faults ---


async def test_fault_reaches_every_reader_and_ends_the_image_engine(autojump_clock):
    caught: list[EngineFault] = []

    async def ask() -> None:
        try:
            await fake.generate_image("a cat", ASKED)
        except EngineFault as fault:
            caught.append(fault)

    with pytest.raises(EngineFault, match="a step of the engine failed: InjectedFault"):
        async with open_fake_image_engine(step_seconds=1) as fake:
            told: list[str] = []

            async def tell() -> None:
                told.append(str(fake.fault))

            fake.on_fault = tell
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(ask)
                await trio.sleep(2.5)
                fake.break_next_step()
                await trio.sleep_forever()
    assert len(caught) == 3
    assert len(told) == 1
    assert not fake.live_requests()


async def test_failed_image_ends_only_its_request(autojump_clock):
    async with (
        open_fake_image_engine(paused=True) as fake,
        fake.generate_image("bad", ASKED, request_id="bad") as bad,
        fake.generate_image("good", ASKED) as good,
    ):
        await fake.step(2)
        fake.fail_request("bad", "its numbers are none")
        await fake.step()
        assert fake.stats().slots_used == 1
        fake.resume()
        with pytest.raises(RequestFailed, match="its numbers are none"):
            await bad.pictures()
        assert await good.pictures() == tuple(fake.expected(good))


async def test_begun_images_are_computed_again_after_a_reopening(autojump_clock):
    async with open_fake_image_engine(step_seconds=1, engine_restarts=3, opening_seconds=2) as fake:
        params = ImageParams(steps=4, partial_images=3, n=2)
        async with fake.generate_image("a cat", params) as stream:
            expected = tuple(fake.expected(stream))
            seen: list[tuple[int, int]] = []
            made = {}

            async def read() -> None:
                async for delta in stream:
                    seen.append((delta.index, delta.steps_done))
                    if delta.finish_reason is not None:
                        made[delta.index] = delta.image

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await trio.sleep(3.5)
                fake.break_next_step()
                await trio.sleep(1)
                with pytest.raises(EngineReopening):
                    await fake.generate_image("meanwhile")
            assert (made[0], made[1]) == expected
        # No delta is repeated, although the first steps are computed again.
        assert [steps for index, steps in seen if index == 0] == [1, 2, 3, 4, 4]
        assert fake.metrics.total("engine_restarts_total") == 1
        assert len(await fake.generate_image("afterwards")) == 1
        fake.assert_all_free()


@pytest.mark.parametrize("steps_before", [0, 2, 5])
async def test_image_request_that_fails_every_step_is_ended_and_others_continue(steps_before, autojump_clock):
    """A step of any phase may fail, so the test breaks steps of each phase."""

    class Breaking(FakeImageExecutor):
        steps_of_bad = 0

        def execute(self, plan, *rest):
            if any(work.request.task.prompt == "bad" for work in plan.works):
                self.steps_of_bad += 1
                if self.steps_of_bad > steps_before:
                    raise InjectedFault("bad")
            return super().execute(plan, *rest)

    async with open_fake_image_engine(step_seconds=1, engine_restarts=5, new_executor=Breaking) as fake:
        ends: dict[str, object] = {}

        async def ask(prompt: str) -> None:
            (ends[prompt],) = await ends_of(fake, prompt)

        async with trio.open_nursery() as nursery:
            for prompt in ("good", "bad", "better"):
                nursery.start_soon(ask, prompt)
        assert {prompt: end.finish_reason for prompt, end in ends.items()} == {
            "good": FinishReason.STOP,
            "better": FinishReason.STOP,
            "bad": FinishReason.ERROR,
        }
        assert ends["bad"].stop_reason == REQUEST_POISONED
        fake.assert_all_free()


async def test_new_image_requests_are_refused_while_a_step_hangs(autojump_clock):
    async with open_fake_image_engine(paused=True, step_timeout=5) as fake, fake.generate_image("a cat", ASKED):
        async with fake.held_step():
            await trio.sleep(6)
            assert not fake.ready
            with pytest.raises(StepOverdue):
                await fake.generate_image("another")
        assert fake.ready


# --- pauses ---


async def test_paused_engine_keeps_latents_and_continues_with_them(autojump_clock):
    async with open_fake_image_engine(step_seconds=1) as fake, fake.generate_image("a cat", ASKED) as stream:
        await trio.sleep(2.5)
        await fake.pause_generation("keep")
        steps = fake.stats().steps_total
        await trio.sleep(100)
        assert fake.is_paused
        assert (fake.stats().steps_total, fake.stats().slots_used) == (steps, 1)
        fake.resume_generation()
        assert await stream.pictures() == tuple(fake.expected(stream))
        assert fake.stats().steps_total == 6  # No step was repeated.


async def test_pause_with_abort_ends_begun_image_requests(autojump_clock):
    async with open_fake_image_engine(step_seconds=1) as fake, fake.generate_image("a cat", ASKED) as stream:
        await trio.sleep(2.5)
        await fake.pause_generation("abort")
        fake_free = fake.stats()
        assert (fake_free.slots_used, fake_free.running_count) == (0, 0)
        with pytest.raises(RequestAborted, match="the engine was paused"):
            await stream.pictures()
        fake.resume_generation()
        assert len(await fake.generate_image("next")) == 1


async def test_pause_with_wait_finishes_begun_images_and_delays_new_ones(autojump_clock):
    async with open_fake_image_engine(step_seconds=1) as fake:
        made: list[str] = []

        async def ask(name: str) -> None:
            await fake.generate_image(name, ASKED)
            made.append(name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "first")
            await trio.sleep(2.5)
            nursery.start_soon(fake.pause_generation, "wait")
            await wait_all_tasks_blocked()
            nursery.start_soon(ask, "second")
            await trio.sleep(20)
            assert (made, fake.is_paused) == (["first"], True)
            fake.resume_generation()
        assert made == ["first", "second"]
        fake.assert_all_free()


async def test_drain_ends_requests_kept_by_a_pause(autojump_clock):
    async with open_fake_image_engine(step_seconds=1) as fake, fake.generate_image("a cat", ASKED) as stream:
        await trio.sleep(2.5)
        await fake.pause_generation("keep")
        fake.drain()
        with pytest.raises(RequestAborted, match="the server is shutting down"):
            await stream.pictures()


@pytest.mark.parametrize("level", [1, 2])
async def test_begun_images_are_computed_again_after_sleep(level, autojump_clock):
    async with open_fake_image_engine(step_seconds=1, opening_seconds=3) as fake:
        async with fake.generate_image("a cat", ASKED) as stream:
            await trio.sleep(2.5)
            await fake.sleep(level, "keep")
            assert fake.is_sleeping
            await trio.sleep(50)
            await fake.wake_up()
            assert not fake.is_sleeping
            assert await stream.pictures() == tuple(fake.expected(stream))
        fake.assert_all_free()
