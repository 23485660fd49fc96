"""Tests of the image engine without weights: single steps, and the report of resources that are still in use."""

from __future__ import annotations

import pytest
import trio

from trioserve.contracts.events import IterativePhase
from trioserve.contracts.image_generation import ImageParams
from trioserve.testing import assert_all_free, open_fake_image_engine


async def test_paused_image_engine_steps_only_on_request(autojump_clock):
    async with open_fake_image_engine(paused=True) as engine:
        assert await engine.step() is None
        async with engine.generate_image("a cat", ImageParams(steps=2)) as stream:
            await trio.sleep(10)
            assert engine.stats().steps_total == 0
            async with engine.held_step() as plan:
                assert plan.phase is IterativePhase.ENCODE
                await trio.sleep(10)
                assert engine.live_requests()[0].slot_count == 1
            assert (await engine.step(2)).works[0].step == 1
            engine.resume()
            assert await stream.pictures() == tuple(engine.expected(stream))


async def test_holding_a_step_without_a_request_is_an_error(autojump_clock):
    async with open_fake_image_engine() as engine:
        with pytest.raises(AssertionError, match="no request waits or runs"):
            async with engine.held_step():
                pass


async def test_resources_in_use_are_reported_by_request(autojump_clock):
    async with open_fake_image_engine(paused=True) as engine:
        async with engine.generate_image("a cat", ImageParams(n=2, steps=3), request_id="mine"):
            await engine.step(2)
            with pytest.raises(AssertionError) as caught:
                assert_all_free(engine)
            assert "2 latent slots in use" in str(caught.value)
            assert "mine: running, denoise, 2 of 6 steps, 2 slots" in str(caught.value)
        assert_all_free(engine)


async def test_slots_of_a_client_that_left_during_a_step_are_reported(autojump_clock):
    async with open_fake_image_engine(paused=True) as engine:
        async with engine.generate_image("a cat"):
            step = engine.held_step()
            await step.__aenter__()
        with pytest.raises(AssertionError, match="every client has left, but a step in flight still reads their slots"):
            assert_all_free(engine)
        await step.__aexit__(None, None, None)
        engine.assert_all_free()


@pytest.mark.fake_image_engine(max_num_seqs=1, seed=3)
async def test_image_engine_fixture_uses_the_options_of_its_marker(fake_image_engine):
    assert fake_image_engine.stats().slots_total == 1
    async with fake_image_engine.generate_image("a cat") as stream:
        seeds = stream.seeds
    async with open_fake_image_engine(seed=3) as other, other.generate_image("a cat") as stream:
        assert stream.seeds == seeds


async def test_fail_request_refuses_unknown_ids(autojump_clock):
    async with open_fake_image_engine(paused=True) as engine, engine.generate_image("a cat", request_id="a"):
        with pytest.raises(AssertionError, match=r"no request 'b' is open. Open: \['a'\]"):
            engine.fail_request("b")
