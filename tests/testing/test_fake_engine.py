"""Tests of the controls of an engine without weights."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve import ContextTooLong, Deadlines, EngineFault, FinishReason, SamplingParams, StartupError
from trioserve.testing import FakeEngine, InjectedFault, assert_all_free, open_fake_engine


async def text_of(engine: FakeEngine, prompt: str = "hello", **sampling: object) -> str:
    async with engine.generate(prompt, SamplingParams(**sampling)) as stream:
        return "".join([delta.text async for delta in stream])


# --- output ---


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"response": "yes, indéed"}, "yes, indéed"),
        ({"response": lambda prompt: prompt[::-1]}, "olleh"),
        ({"next_token": lambda ids: 256 if len(ids) == 8 else ids[0] + len(ids)}, "mno"),
    ],
)
async def test_output_of_a_fake_engine_follows_its_script(options, expected):
    async with open_fake_engine(**options) as engine:
        assert await text_of(engine) == expected


async def test_scripted_output_is_unchanged_by_preemption(autojump_clock):
    async with (
        open_fake_engine(response=lambda prompt: prompt * 3, block_count=12, max_model_len=48) as engine,
        trio.open_nursery() as nursery,
    ):

        async def ask(prompt: str) -> None:
            assert await text_of(engine, prompt) == prompt * 3

        for prompt in ("abcdefgh", "ijklmnop", "qrstuvwx"):
            nursery.start_soon(ask, prompt)
    assert engine.stats().preemptions_total > 0


async def test_max_tokens_and_stop_strings_end_scripted_output():
    async with open_fake_engine(response="one two three") as engine:
        assert await text_of(engine, max_tokens=3) == "one"
        assert await text_of(engine, stop=["two"]) == "one "


async def test_fake_engine_with_two_kinds_of_script_is_refused():
    with pytest.raises(AssertionError, match="give one of"):
        async with open_fake_engine(response="x", next_token=len):
            pass


def test_default_seeds_are_the_same_in_every_run_but_differ_between_engines():
    async def main() -> list[str]:
        said = []
        for _ in range(2):
            async with open_fake_engine() as engine:
                said += [await text_of(engine, max_tokens=20) for _ in range(2)]
        return said

    said = trio.run(main)
    assert trio.run(main) == said
    assert len(set(said)) == 4


async def test_fake_engines_with_equal_seeds_give_equal_output():
    said = []
    for seed in (7, 7, 8):
        async with open_fake_engine(seed=seed) as engine:
            said.append(await text_of(engine, max_tokens=20))
    assert said[0] == said[1] != said[2]


# --- steps ---


async def test_paused_engine_runs_no_step_by_itself():
    async with open_fake_engine(paused=True, response="abc") as engine, engine.generate("hello") as stream:
        await wait_all_tasks_blocked()
        assert (engine.stats().steps_total, engine.stats().waiting_count) == (0, 1)
        plan = await engine.step()
        assert plan.token_count == 5
        assert (await anext(stream)).text == "a"
        assert engine.stats().steps_total == 1
        await engine.step(2)
        assert (await anext(stream)).text == "bc"  # No reader fetched the first token, so one delta has both.
        engine.resume()
        assert (await anext(stream)).finish_reason is FinishReason.STOP


async def test_step_returns_none_if_there_is_nothing_to_compute():
    async with open_fake_engine(paused=True) as engine:
        assert await engine.step() is None
        assert await engine.step(3) is None
        with pytest.raises(AssertionError, match="no step begins"):
            async with engine.held_step():
                pass
        engine.resume()
        with pytest.raises(AssertionError, match="no step begins"):
            async with engine.held_step():
                pass
        assert await text_of(engine, max_tokens=3) != ""  # The engine runs again.


async def test_step_is_refused_if_the_engine_is_not_paused():
    async with open_fake_engine() as engine:
        with pytest.raises(AssertionError, match="is not paused"):
            await engine.step()


async def test_step_includes_requests_of_tasks_that_were_just_started():
    async with open_fake_engine(paused=True) as engine, trio.open_nursery() as nursery:
        for prompt in ("one", "two", "three"):
            nursery.start_soon(text_of, engine, prompt)
        assert len((await engine.step()).chunks) == 3
        nursery.cancel_scope.cancel()


async def test_pause_lets_the_step_in_flight_finish(autojump_clock):
    async with open_fake_engine(step_seconds=1, response="abcdef") as engine, engine.generate("hello") as stream:
        await wait_all_tasks_blocked()
        engine.pause()
        assert (await anext(stream)).text == "a"
        await trio.sleep(10)
        assert engine.stats().steps_total == 1
        assert (await engine.step()).token_count == 1
        assert trio.current_time() == 12.0


@pytest.mark.parametrize("paused", [True, False])
async def test_blocks_of_a_held_step_are_freed_right_after_the_step(paused, autojump_clock):
    async with open_fake_engine(paused=paused, step_seconds=0.1) as engine:
        stream = engine.generate("hello")
        await stream.__aenter__()
        async with engine.held_step() as plan:
            # An engine that is not paused has begun the prompt. The held step is the next one.
            assert [chunk.count for chunk in plan.chunks] == [5 if paused else 1]
            used = engine.stats().blocks_used
            assert used == 2
            await stream.__aexit__(None, None, None)
            assert engine.stats().blocks_used == used
            with pytest.raises(AssertionError, match="not all is free: 2 KV blocks in use"):
                assert_all_free(engine)
        engine.assert_all_free()


async def test_blocks_are_freed_at_once_between_steps():
    async with open_fake_engine(paused=True) as engine:
        async with engine.generate("hello"):
            await engine.step()
            assert engine.stats().blocks_used == 2
        engine.assert_all_free()


async def test_error_inside_a_held_step_releases_the_step():
    async with open_fake_engine(paused=True, response="a") as engine, engine.generate("hello") as stream:
        with pytest.raises(ZeroDivisionError):
            async with engine.held_step():
                raise ZeroDivisionError
        assert (await anext(stream)).text == "a"
        with trio.move_on_after(0):
            await engine.step()
        assert engine.stats().steps_total == 1  # A step that was cancelled before it began is not made up for later.
        await wait_all_tasks_blocked()
        assert engine.stats().steps_total == 1


# --- faults ---


async def test_injected_fault_reaches_clients_and_the_caller_that_opened_the_engine():
    with pytest.raises(EngineFault) as caught:
        async with open_fake_engine(paused=True) as engine, engine.generate("hello") as stream:
            engine.break_next_step()
            engine.resume()
            with pytest.raises(EngineFault):
                await anext(stream)
            reader_got_error = True
            await trio.sleep_forever()
    assert reader_got_error
    assert isinstance(caught.value.__cause__, InjectedFault)


async def test_failed_request_does_not_affect_other_requests():
    async with (
        open_fake_engine(paused=True, response="ok") as engine,
        engine.generate("hello", request_id="bad") as bad,
        engine.generate("hello, too", request_id="good") as good,
    ):
        with pytest.raises(AssertionError, match=r"no request 'ugly' is open. Open: \['bad', 'good'\]"):
            engine.fail_request("ugly")
        engine.fail_request("bad", "broken here")
        engine.resume()
        last = await anext(bad)
        assert (last.finish_reason, last.message) == (FinishReason.ERROR, "broken here")
        assert "".join([delta.text async for delta in good]) == "ok"


async def test_deadlines_of_a_fake_engine_have_defaults_and_limits(autojump_clock):
    options = {"request_timeout": 2, "max_queue_timeout": 1}
    async with open_fake_engine(paused=True, **options) as engine:
        async with engine.generate("hello", deadlines=Deadlines(queue_timeout=60)) as stream:
            last = await anext(stream)
        assert (last.finish_reason, last.stop_reason, trio.current_time()) == (
            FinishReason.DEADLINE,
            "queue_timeout",
            1.0,
        )


# --- options ---


async def test_default_context_and_pool_hold_4096_tokens():
    async with open_fake_engine() as engine:
        assert engine.model.context_tokens_max == 4096
        assert engine.core.settings.block_count * engine.core.settings.block_size == 4096


@pytest.mark.parametrize(
    ("options", "context_tokens", "block_count"),
    [
        ({"block_count": 8}, 32, 8),
        ({"max_model_len": 10_000}, 10_000, 2500),
        ({"max_model_len": 128}, 128, 1024),
        ({"block_size": 16}, 4096, 256),
    ],
)
async def test_context_length_and_pool_size_are_computed_from_each_other(options, context_tokens, block_count):
    async with open_fake_engine(**options) as engine:
        settings = engine.core.settings
        assert (settings.context_tokens_max, settings.block_count) == (context_tokens, block_count)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 0}, "max_model_len is 0, it must be at least 1"),
        ({"max_model_len": 40, "block_count": 4}, "lower max_model_len or raise block_count"),
        ({"max_num_seqs": 64}, "raise max_num_batched_tokens or lower max_num_seqs"),
        ({"max_queued_requests": -1}, "max_queued_requests is -1, it must be 0 or more"),
        ({"step_timeout": -1}, "step_timeout is -1, it must be 0 to 86400 seconds"),
        ({"kv_hold_timeout": 0}, "kv_hold_timeout is 0, it must be above 0"),
        ({"lora_modules": ("a",)}, "^lora_modules 'a' has no name and path"),
    ],
)
async def test_error_of_a_fake_engine_names_the_option_as_the_test_writes_it(options, message):
    with pytest.raises(StartupError, match=message):
        async with open_fake_engine(**options):
            pass


async def test_error_about_a_too_long_prompt_names_the_option():
    async with open_fake_engine() as engine:
        for prompt in ("x" * 5000, [97] * 5000, [97] * 4096):
            with pytest.raises(ContextTooLong, match=r"or raise max_model_len$"):
                await text_of(engine, prompt)


# --- resources at the end of a test ---


@pytest.mark.fake_engine(step_seconds=0.5, response="a" * 100)
@pytest.mark.parametrize("way", ["a break", "a deadline", "a cancelled scope"])
async def test_engine_fixture_waits_for_the_step_in_flight(fake_engine, autojump_clock, way):
    """The fixture itself asserts that all resources are free, because the tested programs are correct."""
    # The test ends in the middle of a step. At a multiple of 0.5 s, the deadline and the end of the step would run in
    # random order.
    mid_step = 3.25
    deadlines = Deadlines(timeout=mid_step) if way == "a deadline" else None
    with trio.move_on_after(mid_step if way == "a cancelled scope" else 100.0):
        async with fake_engine.generate("hi", SamplingParams(max_tokens=100), deadlines=deadlines) as response:
            async for _ in response:
                if way == "a break":
                    break
    assert fake_engine.stats().blocks_used > 0


@pytest.mark.fake_engine(step_seconds=0.5, response="a" * 100)
async def test_server_fixture_waits_for_the_step_in_flight(memory_server, autojump_clock):
    client = memory_server.client()
    async with client.ask("/v1/completions", {"prompt": "hi", "max_tokens": 100, "stream": True}) as response:
        assert await response.head() == 200


async def test_all_blocks_are_free_when_finish_step_returns(autojump_clock):
    async with open_fake_engine(step_seconds=0.5, response="a" * 100) as engine:
        async with engine.generate("hi") as response:
            await anext(response)
        assert engine.stats().blocks_used > 0
        await engine.wait_all_free()
        assert engine.stats().blocks_used == 0
        assert trio.current_time() % 0.5 == 0  # The wait ends exactly at the end of the step.


async def test_finish_step_returns_when_the_engine_breaks(autojump_clock):
    with pytest.raises(EngineFault):
        async with open_fake_engine(step_seconds=0.5) as engine, trio.open_nursery() as nursery:
            async with engine.generate("hi") as response:
                await anext(response)
                engine.break_next_step()
            nursery.start_soon(engine.wait_until_idle)
