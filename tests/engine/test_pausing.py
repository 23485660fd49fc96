"""Tests of a paused engine. No step begins, in-flight requests are kept, ended or finished, and new requests wait."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.errors import Draining, InvalidRequest
from trioserve.contracts.events import AbortOutcome, FinishReason
from trioserve.contracts.output import Delta
from trioserve.contracts.resume import Resume
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.testing.memory_server import open_memory_server

LONG = SamplingParams(max_tokens=40, temperature=1.0, seed=3)
KINDS: list[dict[str, Any]] = [{}, {"overlap_steps": True}, {"speculative_ngram": 4}]


class Reader:
    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.error: Exception | None = None

    async def read(self, fake: FakeEngine, prompt: str, sampling: SamplingParams = LONG, **options: Any) -> None:
        try:
            async with fake.generate(prompt, sampling, **options) as stream:
                async for delta in stream:
                    self.deltas.append(delta)
        except Exception as error:
            self.error = error

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    @property
    def end(self) -> tuple[FinishReason | None, object]:
        last = self.deltas[-1]
        return last.finish_reason, last.stop_reason


def steps(fake: FakeEngine) -> int:
    return fake.stats().steps_total


async def undisturbed(prompt: str, **options: Any) -> list[int]:
    reader = Reader()
    async with open_fake_engine(step_seconds=0.01, **options) as fake:
        await reader.read(fake, prompt)
    return reader.token_ids


@pytest.mark.parametrize("options", KINDS, ids=str)
async def test_requests_kept_by_a_pause_continue_with_equal_output(autojump_clock, options):
    expected = await undisturbed("one", **options)
    one, late = Reader(), Reader()
    async with open_fake_engine(step_seconds=0.01, **options) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(one.read, fake, "one")
        await trio.sleep(0.055)
        await fake.pause_generation("keep")
        assert fake.is_paused
        assert not fake.core.flights
        await wait_all_tasks_blocked()
        count, tokens = steps(fake), one.token_ids
        assert 0 < len(tokens) < 40
        nursery.start_soon(late.read, fake, "late")
        await trio.sleep(1000)
        assert steps(fake) == count
        assert one.token_ids == tokens
        assert late.deltas == []
        fake.resume_generation()
        assert not fake.is_paused
    assert one.token_ids == expected
    assert one.end[0] is FinishReason.LENGTH
    assert late.end[0] is FinishReason.LENGTH
    fake.assert_all_free()


@pytest.mark.parametrize("options", KINDS, ids=str)
async def test_pause_with_abort_ends_begun_requests_and_keeps_queued_requests(autojump_clock, options):
    expected = await undisturbed("one", **options)
    one, late = Reader(), Reader()
    async with open_fake_engine(step_seconds=0.01, **options) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(one.read, fake, "one")
        await trio.sleep(0.055)
        await fake.pause_generation()
        await wait_all_tasks_blocked()
        assert one.end == (FinishReason.ABORT, "paused")
        assert 0 < len(one.token_ids) < len(expected)
        assert one.token_ids == expected[: len(one.token_ids)]
        fake.assert_all_free()
        nursery.start_soon(late.read, fake, "late")
        await wait_all_tasks_blocked()
        await fake.pause_generation()  # A second pause must not abort the request "late", which has not begun.
        assert late.deltas == []
        fake.resume_generation()
    assert late.end[0] is FinishReason.LENGTH


async def test_pause_with_wait_finishes_begun_requests_before_new_ones_begin(autojump_clock):
    one, late = Reader(), Reader()
    async with open_fake_engine(step_seconds=0.01) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(one.read, fake, "one", SamplingParams(max_tokens=20, n=3, seed=1))
        await trio.sleep(0.055)
        with trio.move_on_after(0.02) as scope:  # The caller is cancelled, and the engine still pauses.
            await fake.pause_generation("wait")
        assert scope.cancelled_caught
        assert not fake.is_paused
        assert not fake.ready
        nursery.start_soon(late.read, fake, "late")
        await fake.pause_generation("wait")
        await wait_all_tasks_blocked()
        assert fake.is_paused
        assert one.end[0] is FinishReason.LENGTH
        assert len(one.token_ids) == 60
        assert late.deltas == []
        fake.resume_generation()
    assert late.end[0] is FinishReason.LENGTH


async def test_pause_with_wait_takes_effect_at_once_without_requests(autojump_clock):
    async with open_fake_engine() as fake:
        await fake.pause_generation("wait")
        assert fake.is_paused


async def test_second_pause_ends_a_waiting_pause_and_both_callers_return(autojump_clock):
    one = Reader()
    returned: list[str] = []

    async def pause(fake: FakeEngine, mode: Any) -> None:
        await fake.pause_generation(mode)
        returned.append(mode)

    async with open_fake_engine(step_seconds=0.01) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(one.read, fake, "one")
        await trio.sleep(0.055)
        nursery.start_soon(pause, fake, "wait")
        await wait_all_tasks_blocked()
        nursery.start_soon(pause, fake, "keep")
        await trio.sleep(1)
        assert sorted(returned) == ["keep", "wait"]
        assert one.deltas[-1].finish_reason is None
        fake.resume_generation()
        fake.resume_generation()
    assert one.end[0] is FinishReason.LENGTH


async def test_pause_returns_after_the_step_in_flight_or_at_a_resume(autojump_clock):
    async with open_fake_engine(step_seconds=5.0) as fake, fake.generate("one", LONG), trio.open_nursery() as nursery:
        await trio.sleep(1)
        await fake.pause_generation("keep")
        assert trio.current_time() == pytest.approx(5, abs=0.1)
        fake.resume_generation()
        await trio.sleep(1)
        began_at = trio.current_time()
        nursery.start_soon(fake.pause_generation, "keep")
        await wait_all_tasks_blocked()
        fake.resume_generation()
        await wait_all_tasks_blocked()
        nursery.cancel_scope.shield = True
        assert trio.current_time() == began_at
    fake.assert_all_free()


@pytest.mark.parametrize("overlap_steps", [False, True])
async def test_request_that_leaves_during_a_pause_frees_its_blocks_at_once(autojump_clock, overlap_steps):
    async with open_fake_engine(step_seconds=0.01, overlap_steps=overlap_steps) as fake:
        kept = fake.generate("kept", LONG, request_id="kept")
        async with kept:
            async with fake.generate("leaves", LONG):
                await trio.sleep(0.055)
                await fake.pause_generation("keep")
                used = fake.stats().blocks_used
            assert fake.stats().blocks_used < used
            assert fake.abort("kept") == {"kept": AbortOutcome.ABORTED}
            assert fake.stats().blocks_used == 0
        with trio.move_on_after(1) as scope:
            async with fake.generate("waits", LONG):
                raise AssertionError("it does not begin")
        assert scope.cancelled_caught
        fake.assert_all_free()


async def test_deadlines_continue_for_kept_and_waiting_requests(autojump_clock):
    kept, waits = Reader(), Reader()
    async with open_fake_engine(step_seconds=0.01) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: kept.read(fake, "kept", deadlines=Deadlines(timeout=5)))
        await trio.sleep(0.055)
        await fake.pause_generation("keep")
        nursery.start_soon(lambda: waits.read(fake, "waits", deadlines=Deadlines(queue_timeout=7)))
        await trio.sleep(10)
        assert kept.end == (FinishReason.DEADLINE, "timeout")
        assert len(kept.token_ids) > 2
        assert waits.end == (FinishReason.DEADLINE, "queue_timeout")
        fake.assert_all_free()


async def test_pause_does_not_count_as_a_hanging_step(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake, fake.generate("one", LONG) as stream:
        await anext(stream)
        await fake.pause_generation("keep")

        def told(name: str) -> float:
            lines = fake.metrics.expose().decode().splitlines()
            return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"trioserve:{name}{{"))

        await trio.sleep(10_000)
        assert told("no_progress_seconds") == 0
        assert told("step_age_seconds") == 0
        fake.resume_generation()
        assert told("no_progress_seconds") == 0
        assert fake.ready


async def test_drain_ends_kept_requests_and_refuses_a_pause(autojump_clock):
    kept, waits = Reader(), Reader()
    async with open_fake_engine(step_seconds=0.01) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(kept.read, fake, "kept")
        await trio.sleep(0.055)
        await fake.pause_generation("keep")
        nursery.start_soon(waits.read, fake, "waits")
        await wait_all_tasks_blocked()
        fake.drain()
        await fake.wait_until_idle()
        assert kept.end == (FinishReason.ABORT, "server_stopping")
        assert isinstance(waits.error, Draining)
        with pytest.raises(Draining):
            await fake.pause_generation()
        fake.assert_all_free()


async def test_closing_a_paused_engine_ends_every_request(autojump_clock):
    kept, waits = Reader(), Reader()
    async with trio.open_nursery() as nursery, open_fake_engine(step_seconds=0.01) as fake:
        nursery.start_soon(kept.read, fake, "kept")
        await trio.sleep(0.055)
        await fake.pause_generation("keep")
        nursery.start_soon(waits.read, fake, "waits")
        await wait_all_tasks_blocked()
    assert kept.end[0] is FinishReason.ABORT
    assert waits.end[0] is FinishReason.ABORT
    fake.assert_all_free()


async def test_reopened_engine_is_still_paused(autojump_clock):
    one = Reader()
    async with open_fake_engine(step_seconds=1.0, engine_restarts=1, opening_seconds=2.0) as fake:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.read, fake, "one")
            await trio.sleep(0.5)
            fake.break_next_step()
            await trio.sleep(1)
            await fake.pause_generation("keep")
            await trio.sleep(100)
            assert fake.is_paused
            assert steps(fake) == 0
            fake.resume_generation()
        assert one.end[0] is FinishReason.LENGTH
        fake.assert_all_free()


async def test_unknown_pause_mode_is_refused_without_a_pause(autojump_clock):
    async with open_fake_engine() as fake:
        wrong: Any = "freeze"
        with pytest.raises(InvalidRequest, match="mode is 'freeze'"):
            await fake.pause_generation(wrong)
        assert fake.ready


# --- over HTTP ---


async def test_pause_endpoints_of_vllm_and_sglang_work(autojump_clock):
    async with open_memory_server(step_seconds=0.01) as server:
        client = server.client()

        async def ask(path: str, body: object = None, method: str = "POST") -> tuple[int, Any]:
            async with client.ask(path, body, method=method) as response:
                return await response.head(), await response.json()

        async def is_paused() -> bool:
            status, said = await ask("/is_paused", method="GET")
            assert status == 200
            return bool(said["is_paused"])

        assert not await is_paused()
        assert await ask("/pause?mode=keep") == (200, {"status": "paused"})
        assert await is_paused()
        assert await ask("/ready", method="GET") == (503, {"ready": False, "reason": "paused"})
        assert (await ask("/health", method="GET"))[0] == 200
        assert await ask("/resume") == (200, {"status": "resumed"})
        assert not await is_paused()
        assert (await ask("/ready", method="GET"))[0] == 200
        for body in (None, {"mode": "in_place"}, {"mode": "abort"}):
            paused = {"message": "Generation paused successfully.", "status": "ok"}
            assert await ask("/pause_generation", body) == (200, paused)
            assert await is_paused()
        continued = {"message": "Generation continued successfully.", "status": "ok"}
        assert await ask("/continue_generation", {}) == (200, continued)
        assert not await is_paused()
        assert await ask("/pause_generation", {"mode": "retract"}) == (200, paused)
        assert await ask("/pause?mode=keep&clear_cache=false") == (200, {"status": "paused"})
        assert await ask("/reset_prefix_cache?reset_running_requests=true") == (200, {"status": "ok"})
        assert await ask("/continue_generation", {}) == (200, continued)
        assert await ask("/reset_prefix_cache") == (200, {"status": "ok"})
        assert await ask("/flush_cache", method="POST") == (200, {"message": "Cache flushed.", "status": "ok"})
        assert (await ask("/reset_prefix_cache?reset_running_requests=true"))[0] == 400
        assert (await ask("/reset_prefix_cache?reset_external=true"))[0] == 400
        assert (await ask("/pause?clear_cache=maybe"))[0] == 400
        assert (await ask("/pause?mode=freeze"))[0] == 400
        assert (await ask("/pause?mode=freeze&wait_for_inflight_requests=true"))[0] == 400
        assert (await ask("/pause_generation", {"mode": "freeze"}))[0] == 400
        assert not await is_paused()


async def test_older_vllm_parameter_for_waiting_aborts_no_request(autojump_clock):
    body = {"prompt": "a prompt", "max_tokens": 20, "ignore_eos": True}
    answers: list[Any] = []
    async with open_memory_server(step_seconds=0.01) as server:

        async def one() -> None:
            async with server.client().ask("/v1/completions", body) as response:
                answers.append((await response.json())["usage"]["completion_tokens"])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await trio.sleep(0.055)
            async with server.client().ask("/pause?wait_for_inflight_requests=true", method="POST") as response:
                assert await response.head() == 200
            assert server.engine.is_paused
        assert answers == [20]


async def test_pause_endpoints_need_the_admin_key(autojump_clock):
    async with open_memory_server(api_keys=("ordinary",), admin_api_key="admin") as server:
        for path, method in (
            ("/pause", "POST"),
            ("/resume", "POST"),
            ("/is_paused", "GET"),
            ("/pause_generation", "POST"),
            ("/continue_generation", "POST"),
            ("/reset_prefix_cache", "POST"),
            ("/flush_cache", "POST"),
        ):
            for key, status in (("ordinary", 403), ("wrong", 401), ("admin", 200)):
                client = server.client(headers={"authorization": f"Bearer {key}"})
                async with client.ask(path, method=method) as response:
                    assert await response.head() == status, (path, key)
        assert server.engine.ready


async def test_stream_ended_by_a_pause_has_the_stop_reason(autojump_clock):
    async with open_memory_server(step_seconds=0.01) as server:
        body = {"prompt": "one", "max_tokens": 60, "temperature": 0}
        statuses = []

        async def ask(is_stream: bool) -> None:
            async with server.client().ask("/v1/completions", {**body, "stream": is_stream}) as response:
                statuses.append((await response.head(), b"paused" in await response.read()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, True)
            nursery.start_soon(ask, False)
            await trio.sleep(0.105)
            await server.engine.pause_generation()
        assert sorted(statuses) == [(200, True), (503, True)]


RETRACTING: list[tuple[str, bool]] = [("retract", False), ("retract", True), ("keep", True)]


@pytest.mark.parametrize(("mode", "clear_cache"), RETRACTING, ids=str)
@pytest.mark.parametrize("options", KINDS, ids=str)
async def test_retracted_requests_have_no_blocks_and_continue_with_equal_tokens(
    autojump_clock, options, mode, clear_cache
):
    expected = await undisturbed("one and a block", **options)
    one, late = Reader(), Reader()
    async with open_fake_engine(step_seconds=0.01, **options) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(one.read, fake, "one and a block")
        await trio.sleep(0.055)
        await fake.pause_generation(mode, clear_cache=clear_cache)
        assert fake.is_paused
        stats = fake.stats()
        assert (stats.blocks_used, stats.running_count, stats.preemptions_total) == (0, 0, 1)
        assert (stats.blocks_cached == 0) is clear_cache
        nursery.start_soon(late.read, fake, "late")
        await trio.sleep(10)
        assert late.deltas == []
        fake.resume_generation()
    assert one.token_ids == expected
    assert late.end[0] is FinishReason.LENGTH
    fake.assert_all_free()


async def test_retraction_happens_even_if_its_caller_stops_waiting(autojump_clock):
    one = Reader()
    async with open_fake_engine(step_seconds=0.01) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(one.read, fake, "one and a block")
        await trio.sleep(0.055)
        with trio.move_on_after(0.002) as scope:
            await fake.pause_generation("retract", clear_cache=True)
        assert scope.cancelled_caught
        await trio.sleep(1)
        stats = fake.stats()
        assert (stats.blocks_used, stats.blocks_cached, stats.preemptions_total) == (0, 0, 1)
        fake.resume_generation()
    assert one.end[0] is FinishReason.LENGTH


async def test_resume_before_the_end_of_the_step_cancels_the_retraction(autojump_clock):
    one = Reader()
    async with open_fake_engine(step_seconds=0.01) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(one.read, fake, "one")
        await trio.sleep(0.055)
        nursery.start_soon(fake.pause_generation, "retract")
        await trio.sleep(0.002)
        fake.resume_generation()
    assert fake.stats().preemptions_total == 0
    assert one.end[0] is FinishReason.LENGTH


@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_prefix_cache_is_cleared_when_begun_requests_have_ended(autojump_clock, mode):
    one, again = Reader(), Reader()
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.read, fake, "one and a block")
            await trio.sleep(0.055)
            await fake.pause_generation(mode, clear_cache=True)
            assert fake.stats().blocks_cached == 0
            assert fake.stats().preemptions_total == 0
        fake.resume_generation()
        await again.read(fake, "one and a block")
        assert fake.stats().prefix_hit_tokens_total == 0


async def test_prefix_cache_can_be_reset_while_requests_run(autojump_clock):
    expected = await undisturbed("one and a block")
    one, again = Reader(), Reader()
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.read, fake, "one and a block")
            await trio.sleep(0.055)
            fake.reset_prefix_cache()
            with pytest.raises(InvalidRequest, match="pause it before"):
                fake.reset_prefix_cache(retract=True)
            await again.read(fake, "one and a block")
        assert fake.stats().prefix_hit_tokens_total == 0
        assert fake.stats().preemptions_total == 0
        await fake.pause_generation("keep")
        fake.reset_prefix_cache(retract=True)
        assert fake.stats().blocks_cached == 0
        fake.resume_generation()
    assert one.token_ids == again.token_ids == expected
    fake.assert_all_free()


@pytest.mark.parametrize(("query", "cached"), [("", 0), ("&clear_cache=true", 0), ("&clear_cache=false", 1)])
async def test_http_pause_clears_the_cache_unless_disabled(autojump_clock, query, cached):
    one = Reader()
    async with open_memory_server(step_seconds=0.01) as server, trio.open_nursery() as nursery:
        nursery.start_soon(one.read, server.engine, "one and a block")
        await trio.sleep(0.055)
        async with server.client().ask(f"/pause?mode=keep{query}", method="POST") as response:
            assert await response.head() == 200
        stats = server.engine.stats()
        assert (stats.preemptions_total, stats.blocks_used > 0) == (1 - cached, bool(cached))
        server.engine.resume_generation()
    assert one.token_ids == await undisturbed("one and a block")


KNOWN = Resume(token_ids=((1, 2), (3, 4)), finished=(True, True))
KNOWN_SAMPLING = SamplingParams(n=2, max_tokens=2)


async def test_queued_complete_response_reports_its_passed_deadline(autojump_clock):
    reader, others = Reader(), Reader()
    async with open_fake_engine(max_num_seqs=2, step_seconds=0.01) as fake, trio.open_nursery() as nursery:
        for _ in range(12):  # Twelve requests take all slots, so the next request gets no lease.
            nursery.start_soon(lambda: others.read(fake, "other", request_id="other"))
        await trio.sleep(0.02)
        with trio.fail_after(1):
            await reader.read(fake, "one", KNOWN_SAMPLING, resume=KNOWN, deadlines=Deadlines(queue_timeout=0.05))
        assert reader.end == (FinishReason.DEADLINE, "queue_timeout")
        assert len(reader.deltas) == 1
        fake.abort("other")
    fake.assert_all_free()


async def test_complete_resumed_response_does_not_wait_for_the_end_of_a_pause(autojump_clock):
    async with open_fake_engine() as fake:
        await fake.pause_generation("keep")
        with trio.fail_after(1):
            async with fake.generate("one", KNOWN_SAMPLING, resume=KNOWN) as stream:
                assert [delta.token_ids async for delta in stream] == []
                assert [delta.finish_reason for delta in stream.known if delta.finish_reason] == [
                    FinishReason.LENGTH,
                    FinishReason.LENGTH,
                ]
        fake.assert_all_free()
