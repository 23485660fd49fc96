"""Tests of a step that does not end. Its age is reported, new requests are refused, and running requests may leave."""

from __future__ import annotations

import logging
import math

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.errors import StartupError, StepOverdue
from trioserve.contracts.events import AbortOutcome, FinishReason
from trioserve.contracts.request import KVTransferParams
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.lifecycle.step_times import StepWatch
from trioserve.engine.settings import EngineSettings
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.testing.memory_server import MemoryServer, open_memory_server
from trioserve.testing.scripted_connector import ScriptedConnector

CHAT = "/v1/completions"
LONG = SamplingParams(max_tokens=60, temperature=0)
LOAD = KVTransferParams(do_remote_prefill=True, remote_request_id="there")


def value(fake: FakeEngine, name: str) -> float:
    lines = fake.metrics.expose().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"trioserve:{name}{{"))


async def asked(server: MemoryServer, path: str) -> tuple[int, str | None]:
    """Return the status of a health check, and the reason if there is one."""
    response = await server.client().get(path)
    return response.status, (await response.json()).get("reason")


# --- limit of a step ---


def check(steps: list[float], expect: float, *, seconds_max: float | None = None) -> None:
    """Check the limit of a step after earlier steps with the given durations."""
    watch, now = StepWatch(seconds_max), 0.0
    for seconds in steps:
        watch.begin(now)
        now += seconds
        watch.end(now)
    assert watch.seconds_max == pytest.approx(expect)


def test_step_limit_is_ten_times_the_longest_step_and_at_least_a_minute():
    check([], 60)
    check([0.01, 3.0, 0.01], 60)
    check([0.01, 30.0, 0.01], 300)
    check([30.0, 7.0], 300)


def test_overdue_step_counts_only_up_to_the_limit():
    check([3600.0], 600)
    check([3600.0, 3600.0], 6000)


def test_configured_step_timeout_does_not_adapt():
    check([30.0, 300.0], 5, seconds_max=5)


def test_step_is_never_overdue_with_a_timeout_of_0():
    check([30.0], math.inf, seconds_max=0)


def test_step_timeout_out_of_range_is_refused():
    with pytest.raises(StartupError, match="step_seconds_max is -1, it must be 0 to 86400 seconds"):
        EngineSettings(step_seconds_max=-1)


def test_age_of_a_step_planned_ahead_begins_at_the_end_of_the_previous_step():
    watch = StepWatch()
    watch.begin(0.0)
    watch.begin(1.0)
    assert watch.age_seconds(5.0) == 5
    watch.end(5.0)
    assert watch.age_seconds(7.0) == 2
    watch.end(8.0)
    assert watch.age_seconds(9.0) == 0


async def test_long_steps_of_a_slow_machine_do_not_make_it_unready(autojump_clock):
    async with open_fake_engine(step_seconds=50.0) as fake, fake.generate("prompt", LONG) as stream:
        await anext(stream)
        fake.step_seconds = 400.0
        await anext(stream)  # This call begins the long step.
        await trio.sleep(390)
        assert fake.ready
        await anext(stream)
        assert value(fake, "step_age_seconds_max") == 4000


# --- readiness ---


async def test_engine_is_unready_while_a_step_is_overdue(autojump_clock, caplog):
    async with open_memory_server(paused=True) as server:
        fake = server.engine
        async with fake.generate("prompt", LONG):
            async with fake.held_step():
                await trio.sleep(59)
                assert await asked(server, "/ready") == (200, None)
                assert fake.ready
                await trio.sleep(2)
                response = await server.client().get("/ready")
                assert response.status == 503
                assert response.headers["x-trioserve-reason"] == "step_overdue"
                assert await response.json() == {
                    "ready": False,
                    "reason": "step_overdue",
                    "message": "the step in flight is 61.0 s old, and 60 s are allowed",
                }
                assert not fake.ready
                assert await asked(server, "/health") == (200, None)
            assert await asked(server, "/ready") == (200, None)
            assert fake.ready
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == [
        "the step in flight is overdue seconds=61.0 allowed=60",
        "a step ended late seconds=61.0 allowed=60",
    ]


async def test_health_fails_only_when_a_step_hangs(autojump_clock):
    async with open_memory_server(step_timeout=10, paused=True) as server, server.engine.generate("prompt", LONG):
        async with server.engine.held_step():
            await trio.sleep(49)
            assert await asked(server, "/health") == (200, None)
            await trio.sleep(2)
            assert await asked(server, "/health") == (503, "step_overdue")
        assert await asked(server, "/health") == (200, None)


async def test_without_step_limit_the_engine_stays_ready(autojump_clock):
    async with open_memory_server(step_timeout=0, paused=True) as server:
        fake = server.engine
        async with fake.generate("prompt", LONG), fake.held_step():
            await trio.sleep(3000)
            assert await asked(server, "/ready") == (200, None)
            assert await asked(server, "/health") == (200, None)
            assert value(fake, "step_age_seconds_max") == math.inf


async def test_hanging_overlapped_step_makes_the_engine_unready(autojump_clock):
    overlapping = open_fake_engine(overlap_steps=True, step_seconds=0.01)
    async with overlapping as fake, fake.generate("prompt", LONG) as stream:
        await anext(stream)
        fake.step_seconds = 100.0
        await trio.sleep(50)
        assert fake.ready
        await trio.sleep(15)
        assert not fake.ready


# --- requests ---


async def test_new_requests_are_refused_while_a_step_is_overdue(autojump_clock):
    async with open_memory_server(paused=True) as server:
        fake = server.engine
        async with fake.generate("prompt", LONG), fake.held_step():
            await trio.sleep(61)
            with pytest.raises(
                StepOverdue, match=r"is 61\.0 s old, and 60 s are allowed: send the request to another server"
            ):
                async with fake.generate("prompt"):
                    pass
            response = await server.client().post(CHAT, {"model": "fake", "prompt": "hello"})
            assert response.status == 503
            assert response.headers["x-trioserve-reason"] == "step_overdue"
            assert response.headers["retry-after"] == "5"
            assert (await response.json())["error"]["code"] == "step_overdue"
            assert value(fake, "requests_rejected_total") == 2
        fake.resume()
        async with fake.generate("prompt", SamplingParams(max_tokens=1)) as stream:
            assert [delta async for delta in stream]
        await server.assert_all_free()


async def test_request_queued_before_the_step_was_overdue_keeps_its_queue_slot(autojump_clock):
    async with open_fake_engine(max_num_seqs=1, paused=True) as fake, trio.open_nursery() as nursery:
        reasons = []

        async def read() -> None:
            async with fake.generate("prompt", SamplingParams(max_tokens=2)) as stream:
                reasons.extend([delta.finish_reason async for delta in stream][-1:])

        for _ in range(3):
            nursery.start_soon(read)
        async with fake.held_step():
            await trio.sleep(100)
            assert reasons == []
        fake.resume()
        nursery.cancel_scope.deadline = trio.current_time() + 5
    assert reasons == [FinishReason.LENGTH] * 3


async def test_abort_in_a_hanging_step_is_reported_at_once_and_frees_blocks_at_its_end(autojump_clock):
    async with open_fake_engine(paused=True) as fake, fake.generate("prompt", LONG, request_id="a") as stream:
        async with fake.held_step():
            await trio.sleep(100)
            aborted_at = trio.current_time()
            assert fake.abort(["a"]) == {"a": AbortOutcome.ABORTED}
            assert [delta.finish_reason async for delta in stream] == [FinishReason.ABORT]
            assert trio.current_time() == aborted_at
            assert fake.stats().blocks_used > 0
            assert value(fake, "no_progress_seconds") == 0  # No request waits any more.
            assert value(fake, "step_age_seconds") == 100
        assert fake.stats().blocks_used == 0
    fake.assert_all_free()


async def test_deadline_passes_while_a_step_hangs(autojump_clock):
    async with open_fake_engine(paused=True) as fake:
        entered_at = trio.current_time()
        async with fake.generate("prompt", LONG, deadlines=Deadlines(timeout=70)) as stream, fake.held_step():
            assert [delta.finish_reason async for delta in stream] == [FinishReason.DEADLINE]
            assert trio.current_time() == pytest.approx(entered_at + 70)
        fake.assert_all_free()


# --- metrics ---


async def test_step_age_and_time_without_progress_are_metrics(autojump_clock):
    async with open_fake_engine(paused=True, response="some words") as fake:
        assert [value(fake, name) for name in ("step_age_seconds", "no_progress_seconds")] == [0, 0]
        await trio.sleep(5)
        async with fake.generate("prompt", LONG) as stream:
            await wait_all_tasks_blocked()
            await trio.sleep(2)  # The request waits for a step.
            assert value(fake, "no_progress_seconds") == 2
            assert value(fake, "step_age_seconds") == 0
            async with fake.held_step():
                await trio.sleep(3)
                assert value(fake, "step_age_seconds") == 3
                assert value(fake, "no_progress_seconds") == 5
            assert value(fake, "step_age_seconds") == 0
            assert value(fake, "no_progress_seconds") == 0
            await anext(stream)
            await trio.sleep(4)
            assert value(fake, "no_progress_seconds") == 4
        await trio.sleep(1)
        assert value(fake, "no_progress_seconds") == 0


async def test_waiting_for_a_connector_counts_as_no_progress(autojump_clock):
    with_connector = open_fake_engine(connector=ScriptedConnector)
    async with with_connector as fake, fake.generate("a prompt of some blocks", LONG, kv_transfer=LOAD) as stream:
        await trio.sleep(7)
        assert value(fake, "no_progress_seconds") == 7
        assert value(fake, "step_age_seconds") == 0
        fake.connector.load_all()
        await anext(stream)
        assert value(fake, "no_progress_seconds") == 0


async def test_fully_held_block_pool_counts_as_no_progress(autojump_clock):
    hold = KVTransferParams(do_remote_decode=True)
    one = SamplingParams(max_tokens=1)
    async with (
        open_fake_engine(connector=ScriptedConnector, block_count=4, max_model_len=16, kv_held_share=1.0) as fake,
        fake.generate("fifteen letters", one, kv_transfer=hold) as first,
    ):
        assert [delta async for delta in first][-1].kv_transfer is not None
        async with fake.generate("other than them", one) as second:
            await trio.sleep(6)
            assert value(fake, "no_progress_seconds") == 6
            fake.connector.release_all()
            assert [delta async for delta in second]
            assert value(fake, "no_progress_seconds") == 0


async def test_request_that_gets_its_lease_while_a_step_is_overdue_continues(autojump_clock):
    """The request was admitted before the step was overdue. Only later requests are refused."""
    reasons = []
    two = SamplingParams(max_tokens=2)

    async def read(request_id: str) -> None:
        async with fake.generate("prompt", two, request_id=request_id) as stream:
            reasons.extend([delta.finish_reason async for delta in stream][-1:])

    async with open_fake_engine(max_num_seqs=1, paused=True) as fake, trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(read, str(number))
        async with fake.held_step():
            in_queue = fake.dispatch.core.stats().waiting
            assert in_queue > 0
            await trio.sleep(100)
            waiting = [view.id for view in fake.live_requests() if view.state == "waiting"]
            assert fake.abort(waiting[:1]) == {waiting[0]: AbortOutcome.ABORTED}
            await wait_all_tasks_blocked()
            assert fake.dispatch.core.stats().waiting == in_queue - 1
        fake.resume()
    assert sorted(reason.value for reason in reasons) == ["abort", *["length"] * 7]
