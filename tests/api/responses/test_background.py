"""Tests background responses: their state in each phase, and each kind of end."""

from __future__ import annotations

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api.limits import BackgroundSettings
from trioserve.api.responses import background
from trioserve.api.responses.response_types import ResponseEvent, ResponseObject
from trioserve.contracts.errors import EngineFault, StoreFull
from trioserve.testing.fake_engine import InjectedFault
from trioserve.testing.memory_server import open_memory_server

from .conftest import PATH, Asker, text_of


async def begin(api, **fields):
    return await api.ask(input="Hi", background=True, **fields)


async def ended(api, response_id):
    """Return the state of the response after all steps of the engine."""
    await api.server.app.wait_until_idle()
    return await api.call(response_id)


async def test_background_response_is_queued_then_in_progress_then_completed(opened, autojump_clock):
    async with opened(paused=True) as api:
        response = await begin(api)
        msgspec.convert(response, ResponseObject)
        assert (response["status"], response["output"], response["background"]) == ("queued", [], True)
        await api.server.engine.step(3)
        now = await api.call(response["id"])
        assert (now["status"], text_of(now)) == ("in_progress", "Hel")
        api.server.engine.resume()
        last = await ended(api, response["id"])
        assert (last["status"], text_of(last)) == ("completed", "Hello!")
        assert last["usage"]["output_tokens"] == 7


async def test_background_response_continues_after_its_client_left(opened, autojump_clock):
    async with opened(paused=True) as api:
        client = api.client()
        async with client.ask(PATH, {"model": "fake", "input": "Hi", "background": True, "stream": True}) as response:
            event = await anext(response)
            response_id = event["response"]["id"]
            await api.server.engine.step(2)
        client.close()
        api.server.engine.resume()
        assert text_of(await ended(api, response_id)) == "Hello!"


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("method", ["cancel", "delete"])
async def test_cancelling_a_background_response_frees_all_blocks_with_the_next_step(
    opened, autojump_clock, steps, method
):
    async with opened(response=None, paused=True) as api:
        response_id = (await begin(api))["id"]
        await api.server.engine.step(steps)
        async with trio.open_nursery() as nursery:
            results = []

            async def end():
                if method == "cancel":
                    results.append(await api.call(f"{response_id}/cancel", method="POST"))
                else:
                    results.append(await api.call(response_id, method="DELETE"))

            nursery.start_soon(end)
            await api.server.engine.step()
        await api.server.assert_all_free()
        if method == "cancel":
            assert results[0]["status"] == "cancelled"
            assert await api.call(response_id) == results[0]
            assert await api.call(f"{response_id}/cancel", method="POST") == results[0]
        else:
            assert results == [{"id": response_id, "object": "response", "deleted": True}]
            await api.call(response_id, status=404)


async def test_cancelling_during_a_step_frees_blocks_right_after_the_step(opened, autojump_clock):
    async with opened(response=None, paused=True) as api:
        response_id = (await begin(api))["id"]
        await api.server.engine.step()
        async with api.server.engine.held_step():
            assert (await api.call(f"{response_id}/cancel", method="POST"))["status"] == "cancelled"
            assert api.server.engine.stats().blocks_used > 0
        await api.server.assert_all_free()


async def test_only_a_background_response_can_be_cancelled(opened, autojump_clock):
    async with opened() as api:
        response = await api.ask(input="Hi")
        error = await api.call(f"{response['id']}/cancel", method="POST", status=400)
        assert "background=true" in error["message"]


async def test_stream_whose_first_events_exceed_the_limit_is_refused(opened, autojump_clock):
    async with opened(background=BackgroundSettings(events_bytes_max=20_000)) as api:
        error = await api.ask(input="Hi", background=True, stream=True, instructions="x" * 20_000, status=400)
        assert error["param"] == "stream"
        assert "20000 bytes" in error["message"]


async def test_bug_at_the_end_of_one_response_does_not_affect_others(opened, autojump_clock, monkeypatch):
    def broken(_stored):
        raise InjectedFault

    async with opened(paused=True) as api:
        response_id = (await begin(api))["id"]
        monkeypatch.setattr(background, "stored_bytes", broken)
        api.server.engine.resume()
        assert (await ended(api, response_id))["status"] == "failed"
        assert text_of(await api.ask(input="Hi")) == "Hello!"


async def test_background_response_ends_at_its_time_limit(opened, autojump_clock):
    async with opened(response=None, step_seconds=10, background=BackgroundSettings(seconds_max=25)) as api:
        last = await ended(api, (await begin(api, timeout=1000))["id"])
        assert last["status"] == "failed"
        assert "25 s" in last["error"]["message"]
        assert last["output"]
        await trio.sleep(10)  # The running step ends in this time.


async def test_number_of_background_responses_is_limited_in_total_and_per_caller(opened, autojump_clock):
    settings = BackgroundSettings(responses_max=3, responses_of_one_max=2)
    async with opened(keys=("a", "b"), response=None, paused=True, background=settings) as (first, second):
        ids = [(await begin(first))["id"] for _ in range(2)]
        error = await first.ask(input="Hi", background=True, status=429)
        assert (error["code"], "for this caller (allowed: 2)" in error["message"]) == ("overloaded", True)
        ids.append((await begin(second))["id"])
        await second.ask(input="Hi", background=True, status=429)
        await first.call(f"{ids[0]}/cancel", method="POST")
        ids.append((await begin(second))["id"])
        for api, response_id in ((first, ids[1]), (second, ids[2]), (second, ids[3])):
            await api.call(f"{response_id}/cancel", method="POST")


async def test_another_caller_cannot_find_a_background_response(opened, autojump_clock):
    async with opened(keys=("a", "b"), paused=True) as (mine, other):
        response_id = (await begin(mine))["id"]
        for _when in ("while it lives", "when it is over"):
            for call in (
                {"path": response_id},
                {"path": response_id, "method": "DELETE"},
                {"path": f"{response_id}/cancel", "method": "POST"},
                {"path": f"{response_id}/input_items"},
                {"path": f"{response_id}?stream=true"},
            ):
                assert (await other.call(**call, status=404))["code"] == "response_not_found"
            await other.ask(input="x", previous_response_id=response_id, status=404)
            await mine.call(f"{response_id}/cancel", method="POST")


@pytest.mark.parametrize("hostile", ["..", "%00", "a" * 200, "resp_%2e%2e%2fx", "resp_'--", "resp_ä"])
async def test_malformed_ids_are_not_found(opened, autojump_clock, hostile):
    async with opened() as api:
        path = hostile if hostile.isascii() else "resp_%C3%A4"
        async with api.client().ask(f"{PATH}/{path}") as response:
            assert await response.head() in (400, 404)


async def test_several_readers_get_events_from_any_number_on(opened, autojump_clock):
    async with opened(response=None, paused=True) as api:
        body = {"model": "fake", "input": "Hi", "background": True, "stream": True, "max_output_tokens": 6}
        async with api.client().ask(PATH, body) as first:
            event = await anext(first)
            response_id = event["response"]["id"]
            await api.server.engine.step(4)
            seen, late = [event], []
            async with trio.open_nursery() as nursery:

                async def read_first():
                    seen.extend([event async for event in first])

                async def read_late():
                    late.extend(await api.events(f"{response_id}?stream=true&starting_after=2"))

                nursery.start_soon(read_first)
                nursery.start_soon(read_late)
                await wait_all_tasks_blocked()
                api.server.engine.resume()
        assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
        assert [event["type"] for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
        assert late == seen[3:]
        for event in seen:
            msgspec.convert(event, ResponseEvent)
        await api.server.app.wait_until_idle()
        assert await api.events(f"{response_id}?stream=true") == seen
        assert await api.events(f"{response_id}?stream=true&starting_after={len(seen) - 2}") == seen[-1:]
        assert seen[-1]["response"] == await api.call(response_id)
        error = await api.call(f"{response_id}?stream=true&starting_after={len(seen)}", status=400)
        assert error["param"] == "starting_after"
        await api.call(f"{response_id}?stream=true&starting_after=-1", status=400)


async def test_response_without_stored_events_refuses_to_stream(opened, autojump_clock):
    async with opened() as api:
        response_id = (await begin(api))["id"]
        await api.server.app.wait_until_idle()
        assert (await api.call(f"{response_id}?stream=true", status=400))["param"] == "stream"


async def test_events_beyond_the_size_limit_fail_the_response(opened, autojump_clock):
    settings = BackgroundSettings(events_bytes_max=8_000)
    async with opened(response=None, step_seconds=0.01, background=settings) as api:
        *_, last = await api.stream(input="Hi", background=True, max_output_tokens=500)
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert "size limit" in last["response"]["error"]["message"]
        await trio.sleep(1)  # The running step ends in this time.


async def test_unfinished_response_has_failed_after_a_restart(opened, autojump_clock, tmp_path):
    async with open_memory_server(store_directory=tmp_path, paused=True) as server:
        api = Asker(server)
        response_id = (await begin(api))["id"]
        cancelled_id = (await begin(api))["id"]
        await server.engine.step()
        await api.call(f"{cancelled_id}/cancel", method="POST")
        # The server stops at once, as after a second Ctrl-C.
    async with opened(store_directory=tmp_path) as api:
        response = await api.call(response_id)
        assert response["status"] == "failed"
        assert "the server stopped" in response["error"]["message"]
        assert (await api.call(cancelled_id))["status"] == "cancelled"
        assert await api.call(f"{response_id}/cancel", method="POST") == response


async def test_drain_fails_queued_responses_and_finishes_running_ones(opened, autojump_clock, tmp_path):
    async with opened(store_directory=tmp_path, max_num_seqs=1, paused=True) as api:
        running, waiting = (await begin(api))["id"], (await begin(api))["id"]
        await api.server.engine.step(2)
        client = api.client()
        async with client.ask(f"{PATH}/{running}") as response:  # This connection is open when draining begins.
            await response.read()
        api.server.engine.drain()
        api.server.app.drain()
        assert (await api.ask(input="Hi", background=True, status=503))["code"] in ("draining", "no_background")
        api.server.engine.resume()
        await api.server.app.wait_until_idle()
        assert (await api.call(running))["status"] == "completed"
        told = await api.call(waiting)
        assert (told["status"], told["error"]["code"]) == ("failed", "draining")


async def test_drain_cancels_responses_that_no_durable_store_keeps(opened, autojump_clock):
    async with opened(paused=True, response=None) as api:
        await begin(api)
        await api.server.engine.step(2)
        api.server.app.drain()
        await wait_all_tasks_blocked()
        await api.server.engine.step()
        await api.server.app.wait_until_idle()


async def test_engine_fault_fails_a_background_response(opened, autojump_clock):
    with pytest.raises((EngineFault, BaseExceptionGroup)):
        async with opened(paused=True, response=None) as api:
            response_id = (await begin(api))["id"]
            await api.server.engine.step()
            api.server.engine.break_next_step()
            api.server.engine.on_fault = api.server.app.wait_until_idle
            api.server.engine.resume()
            await api.server.app.wait_until_idle()
            assert api.server.app._store is not None
            kept = await api.server.app._store.get("response", response_id, owner=None)
            assert b'"status":"failed"' in kept.body


# --- a full disk ---


async def test_response_on_a_full_disk_ends_at_once_and_is_stored_later(opened, tmp_path, autojump_clock):
    async with opened(step_seconds=0.1, store_directory=tmp_path) as api:
        responses = [await begin(api, metadata={"n": "x" * 500}, stream=False) for _ in range(3)]
        api.server.store.set_disk_full(True)
        told = []
        for response in responses:
            told.append(await ended(api, response["id"]))
            assert (told[-1]["status"], text_of(told[-1])) == ("completed", "Hello!")
        cancelled = await api.call(f"{responses[0]['id']}/cancel", method="POST")
        assert cancelled["status"] == "completed"
        await trio.sleep(60)
        api.server.store.set_disk_full(False)
        await trio.sleep(6)
        assert api.server.store.usage().unwritten_bytes == 0
        assert [await api.call(response["id"]) for response in responses] == told
    async with opened(store_directory=tmp_path) as api:
        assert [await api.call(response["id"]) for response in responses] == told


async def test_response_that_cannot_be_stored_is_reported_as_failed(opened, monkeypatch, autojump_clock):
    async with opened(step_seconds=0.1) as api:
        response = await begin(api)
        settle = api.server.store.settle
        sizes = []

        async def refuse_the_first(*changes):
            sizes.append(len(changes))
            if len(sizes) == 1:
                raise StoreFull("no room")
            return await settle(*changes)

        monkeypatch.setattr(api.server.store, "settle", refuse_the_first)
        last = await ended(api, response["id"])
        assert (last["status"], last["error"]["code"]) == ("failed", "result_not_kept")
        assert len(sizes) == 2
