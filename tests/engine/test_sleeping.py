"""Tests of a sleeping engine. Its memory is released, in-flight requests continue later or have ended, and new requests
wait.
"""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.engine.test_pausing import Reader, undisturbed
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.errors import Draining, InvalidRequest
from trioserve.contracts.events import FinishReason
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.testing.memory_server import open_memory_server
from trioserve.testing.scripted_connector import ScriptedConnector

LEVELS = pytest.mark.parametrize("level", [1, 2])
KINDS: list[dict[str, Any]] = [{}, {"overlap_steps": True}, {"speculative_ngram": 4}, {"draft_model_tokens": 4}]


def sleep_states(fake: FakeEngine) -> list[float]:
    lines = fake.metrics.expose().decode().splitlines()
    return [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:engine_sleep_state{")]


@LEVELS
@pytest.mark.parametrize("options", KINDS, ids=str)
async def test_requests_kept_during_a_sleep_continue_with_equal_output(autojump_clock, level, options):
    expected = await undisturbed("one", **options)
    one, late = Reader(), Reader()
    async with open_fake_engine(step_seconds=0.01, opening_seconds=3.0, **options) as fake:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.read, fake, "one")
            await trio.sleep(0.055)
            core = fake.core
            await fake.sleep(level, "keep")
            assert fake.is_sleeping
            assert not fake.ready
            assert sleep_states(fake) == [0, *(asked == level for asked in (1, 2))]
            await wait_all_tasks_blocked()
            tokens = one.token_ids
            assert 0 < len(tokens) < 40
            nursery.start_soon(late.read, fake, "late")
            await trio.sleep(100)
            assert one.token_ids == tokens
            slept_at = trio.current_time()
            await fake.wake_up()
            assert trio.current_time() == pytest.approx(slept_at + 3)
            assert not fake.is_sleeping
            assert fake.ready
            assert fake.core is not core
            assert sleep_states(fake) == [1, 0, 0]
        assert one.token_ids == expected
        assert late.end[0] is FinishReason.LENGTH
        fake.assert_all_free()
        assert fake.metrics.engine_restarts_total._value.get() == 0


@LEVELS
async def test_sleep_with_abort_ends_requests_with_partial_results_and_empties_the_cache(autojump_clock, level):
    one = Reader()
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.read, fake, "a prompt of several blocks")
            await trio.sleep(0.055)
            await fake.sleep(level)
        assert one.end == (FinishReason.ABORT, "paused")
        assert one.token_ids
        await fake.wake_up()
        assert fake.stats().blocks_cached == 0
        async with fake.generate("a prompt of several blocks", SamplingParams(max_tokens=1)) as stream:
            async for _ in stream:
                pass
            assert stream.cached_token_count == 0
        fake.assert_all_free()


@LEVELS
async def test_engine_can_sleep_repeatedly_and_concurrently(autojump_clock, level):
    async with open_fake_engine(opening_seconds=1.0) as fake:
        for _ in range(3):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fake.sleep, level)
                nursery.start_soon(fake.sleep, level)
            assert fake.is_sleeping
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fake.wake_up)
                nursery.start_soon(fake.wake_up)
            assert not fake.is_sleeping
            assert fake.ready
        await fake.sleep(level)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fake.wake_up)
            await wait_all_tasks_blocked()
            await fake.sleep(level)  # The engine wakes up first.
            assert fake.is_sleeping
        await fake.wake_up()
        await fake.wake_up()
        assert fake.ready


@LEVELS
async def test_engine_paused_before_sleep_is_paused_after_it(autojump_clock, level):
    async with open_fake_engine() as fake:
        await fake.pause_generation("keep")
        await fake.sleep(level)
        await fake.wake_up()
        assert fake.is_paused
        fake.resume_generation()
        await fake.sleep(level)
        await fake.pause_generation("keep")
        await fake.wake_up()
        assert fake.is_paused
        await fake.sleep(level)
        fake.resume_generation()
        assert fake.is_sleeping
        assert not fake.ready
        await fake.wake_up()
        assert fake.ready


@LEVELS
async def test_deadlines_and_leaving_work_while_the_engine_sleeps(autojump_clock, level):
    kept, waits = Reader(), Reader()
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: kept.read(fake, "kept", deadlines=Deadlines(timeout=5)))
            await trio.sleep(0.055)
            await fake.sleep(level, "keep")
            nursery.start_soon(lambda: waits.read(fake, "waits", deadlines=Deadlines(queue_timeout=7)))
            with trio.move_on_after(1) as scope:
                async with fake.generate("leaves", SamplingParams(max_tokens=4)):
                    raise AssertionError("it does not begin")
            assert scope.cancelled_caught
        assert kept.end == (FinishReason.DEADLINE, "timeout")
        assert waits.end == (FinishReason.DEADLINE, "queue_timeout")
        await fake.wake_up()
        fake.assert_all_free()


@LEVELS
async def test_closing_a_sleeping_engine_ends_every_request(autojump_clock, level):
    kept, waits = Reader(), Reader()
    async with trio.open_nursery() as nursery, open_fake_engine(step_seconds=0.01) as fake:
        nursery.start_soon(kept.read, fake, "kept")
        await trio.sleep(0.055)
        await fake.sleep(level, "keep")
        nursery.start_soon(waits.read, fake, "waits")
        await wait_all_tasks_blocked()
    assert kept.end[0] is FinishReason.ABORT
    assert waits.end[0] is FinishReason.ABORT


@LEVELS
async def test_sleeping_engine_can_be_drained(autojump_clock, level):
    kept, waits = Reader(), Reader()
    async with open_fake_engine(step_seconds=0.01) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(kept.read, fake, "kept")
        await trio.sleep(0.055)
        await fake.sleep(level, "keep")
        nursery.start_soon(waits.read, fake, "waits")
        await wait_all_tasks_blocked()
        fake.drain()
        await fake.wait_until_idle()
        assert kept.end == (FinishReason.ABORT, "server_stopping")
        assert isinstance(waits.error, Draining)
        with pytest.raises(Draining):
            await fake.sleep(level)


@LEVELS
async def test_cancelled_sleep_undoes_its_pause(autojump_clock, level):
    one = Reader()
    async with open_fake_engine(step_seconds=0.01) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(one.read, fake, "one")
        await trio.sleep(0.055)
        with trio.move_on_after(0.1) as scope:
            await fake.sleep(level, "wait")
        assert scope.cancelled_caught
        assert fake.ready
    assert one.end[0] is FinishReason.LENGTH


async def test_failed_reopening_after_a_sleep_is_retried(autojump_clock):
    async with open_fake_engine(engine_restarts=3, opening_seconds=1.0) as fake:
        await fake.sleep(2)
        fake.break_openings(1)
        await fake.wake_up()
        assert fake.ready
        assert fake.metrics.engine_restarts_total._value.get() == 1


@LEVELS
async def test_engine_gets_a_new_connector_after_sleep(autojump_clock, level):
    async with open_fake_engine(connector=ScriptedConnector) as fake:
        connector = fake.connector
        await fake.sleep(level)
        await fake.wake_up()
        assert fake.connector is not connector
        async with fake.generate("one", SamplingParams(max_tokens=3)) as stream:
            deltas = [delta async for delta in stream]
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        fake.assert_all_free()


async def test_unknown_sleep_level_is_refused(autojump_clock):
    async with open_fake_engine() as fake:
        with pytest.raises(InvalidRequest, match="level is 3"):
            await fake.sleep(3)
        assert fake.ready


async def test_sleep_endpoints_of_vllm_work(autojump_clock):
    async with open_memory_server(step_seconds=0.01) as server:
        client = server.client()

        async def ask(path: str, method: str = "POST") -> tuple[int, Any]:
            async with client.ask(path, method=method) as response:
                return await response.head(), await response.json()

        asleep, awake = (200, {"is_sleeping": True}), (200, {"is_sleeping": False})
        assert await ask("/is_sleeping", "GET") == awake
        for query in ("", "?level=1", "?level=2", "?level=2&mode=keep"):
            assert await ask("/sleep" + query) == asleep
            assert await ask("/is_sleeping", "GET") == asleep
            assert await ask("/ready", "GET") == (503, {"ready": False, "reason": "sleeping"})
            assert (await ask("/health", "GET"))[0] == 200
            assert await ask("/wake_up") == awake
            assert (await ask("/ready", "GET"))[0] == 200
        assert (await ask("/sleep?level=0"))[0] == 400
        assert (await ask("/sleep?mode=freeze"))[0] == 400
        assert (await ask("/wake_up?tags=weights"))[0] == 400
        assert await ask("/is_sleeping", "GET") == awake


async def test_sleep_endpoints_need_the_admin_key(autojump_clock):
    async with open_memory_server(api_keys=("ordinary",), admin_api_key="admin") as server:
        paths = (("/sleep", "POST"), ("/is_sleeping", "GET"), ("/wake_up", "POST"), ("/kv_cache", "POST"))
        for path, method in paths:
            for key, status in (("ordinary", 403), ("wrong", 401), ("admin", 200)):
                client = server.client(headers={"authorization": f"Bearer {key}"})
                async with client.ask(path, method=method) as response:
                    assert await response.head() == status, (path, key)
