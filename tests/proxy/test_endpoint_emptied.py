"""Tests draining an endpoint with `move`: its requests continue at other endpoints, and no client notices the move."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.admission.admission_scope import Withdrawn
from trioserve.contracts.endpoint import EndpointId, RoutedRequest
from trioserve.proxy.endpoint_watch import WatchSettings

TEXT = "/v1/completions"
BODY = {"model": "fake", "prompt": "hello", "max_tokens": 5, "stream": True}


async def asks_of(pair, count: int = 1):
    """Return the open requests of all endpoints. Each request comes with its endpoint id. The order is that of the
    endpoints.
    """
    await wait_all_tasks_blocked()
    found = [(id, ask) for id, each in pair.endpoints.items() for ask in each.open]
    assert len(found) == count
    return found


async def texts(response) -> str:
    return "".join([choice["text"] async for event in response for choice in event.get("choices", ())])


async def empty(pair, id: str, query: str = "move=true"):
    response = await pair.client().post(f"/endpoints/{id}/drain?{query}", {})
    assert response.status == 200, response.body
    return response


def begin(ask, *groups: str) -> None:
    ask.begin_resumable()
    for group in groups:
        ask.group(group)


async def test_stream_moves_to_another_endpoint_and_the_drained_endpoint_is_removed(open_pair):
    async with open_pair("w1 w2") as pair, pair.client().ask(TEXT, BODY) as response:
        [(first, ask)] = await asks_of(pair)
        begin(ask, "0:1")
        await wait_all_tasks_blocked()
        answered = await empty(pair, first)
        assert await answered.json() == {
            "id": first,
            "object": "endpoint",
            "draining": True,
            "moving": True,
            "seconds": 30.0,
        }
        [(second, again)] = await asks_of(pair)
        assert second != first
        assert ask.is_gone
        assert pair.leases() == {second: 1}
        assert again.body["resume"]["token_ids"] == [[1]]
        begin(again, "0:2")
        again.finish_resumable()
        assert await texts(response) == " 0:1 0:2"
        stats = pair.router.dispatch.stats()
        assert (stats.moves_total, stats.continuations_total) == (1, 0)
    await pair.assert_all_free()


async def test_endpoint_hands_over_a_stream_with_its_kv(open_pair):
    """The router asks for the hand-over with the client's key."""
    key = {"authorization": "Bearer mine"}
    async with open_pair("w1 w2") as pair, pair.client().ask(TEXT, BODY, headers=key) as response:
        [(first, ask)] = await asks_of(pair)
        pair[first].hands_over = True
        begin(ask, "0:1")
        await wait_all_tasks_blocked()
        await empty(pair, first)
        [(_, again)] = await asks_of(pair)
        assert ask.is_over
        assert not ask.is_gone
        assert again.body["kv_transfer_params"] == pair[first].params
        begin(again, "0:2")
        again.finish_resumable()
        assert await texts(response) == " 0:1 0:2"
        assert pair.router.dispatch.stats().moves_total == 1
    await pair.assert_all_free()


async def test_stream_continues_until_an_unanswered_hand_over_times_out(open_pair, autojump_clock):
    async with open_pair("w1 w2") as pair, pair.client().ask(TEXT, BODY) as response:
        await trio.sleep(0.1)
        [(first, ask)] = [(id, ask) for id, each in pair.endpoints.items() for ask in each.open]
        begin(ask, "0:1")
        await trio.sleep(0.1)
        pair[first].is_silent = True
        await empty(pair, first)
        await trio.sleep(4)
        ask.group("0:2")
        await trio.sleep(2)
        assert ask.is_gone
        [again] = [ask for each in pair.endpoints.values() for ask in each.open]
        assert again.body["resume"]["token_ids"] == [[1, 2]]
        begin(again, "0:3")
        again.finish_resumable()
        assert await texts(response) == " 0:1 0:2 0:3"
    await pair.assert_all_free()


async def test_stream_stays_until_another_endpoint_has_a_free_slot(open_pair):
    async with open_pair("w1 w2", leases_max=1) as pair:  # noqa: SIM117
        async with pair.client().ask(TEXT, BODY) as response, pair.client().ask(TEXT, BODY) as other:
            [(first, ask), (_, held)] = await asks_of(pair, 2)
            begin(ask, "0:1")
            await wait_all_tasks_blocked()
            await empty(pair, first)
            ask.group("0:2")
            held.token()
            held.finish()
            [(_, again)] = await asks_of(pair)
            assert again.body["resume"]["token_ids"] == [[1, 2]]
            begin(again)
            again.finish_resumable()
            whole = [await texts(response), await texts(other)]
            assert sorted(whole) == [" 0:1 0:2", "x"]
    await pair.assert_all_free()


@pytest.mark.parametrize("stream", [True, False])
async def test_requests_without_output_change_endpoint_at_the_move_deadline(open_pair, autojump_clock, stream):
    async with open_pair("w1 w2") as pair, pair.client().ask(TEXT, {**BODY, "stream": stream}) as response:
        await trio.sleep(0.1)
        [(first, ask)] = [(id, ask) for id, each in pair.endpoints.items() for ask in each.open]
        await empty(pair, first, "move=true&seconds=3")
        await trio.sleep(2.5)
        assert not ask.is_gone
        await trio.sleep(1)
        assert ask.is_gone
        [again] = [ask for each in pair.endpoints.values() for ask in each.open]
        assert "resume" not in again.body
        again.respond({"choices": []})
        assert await response.head() == 200
        await response.read()
    await pair.assert_all_free()


async def test_stream_that_cannot_resume_ends_at_its_endpoint(open_pair, autojump_clock):
    async with open_pair("w1 w2") as pair, pair.client().ask(TEXT, BODY) as response:
        await trio.sleep(0.1)
        [(first, ask)] = [(id, ask) for id, each in pair.endpoints.items() for ask in each.open]
        ask.token("a")
        await empty(pair, first, "move=true&seconds=1")
        await trio.sleep(5)
        assert not ask.is_gone
        ask.token("b")
        ask.finish()
        assert await texts(response) == "ab"
        assert first not in pair.leases()
    await pair.assert_all_free()


@pytest.mark.parametrize(
    "query", ["move=yes", "move=true&seconds=x", "move=true&seconds=-1", "seconds=3", "move=true&seconds=nan"]
)
async def test_invalid_drain_query_is_refused(open_pair, query):
    async with open_pair("w1 w2") as pair:
        response = await pair.client().post(f"/endpoints/w1/drain?{query}", {})
        assert response.status == 400
        assert (await response.json())["error"]["param"] in ("move", "seconds")
        assert sorted(pair.leases()) == ["w1", "w2"]


async def test_drain_of_an_unknown_endpoint_is_not_found(open_pair):
    async with open_pair("w1 w2") as pair:
        for path in ("/endpoints/w3/drain", "/endpoints/w1"):
            assert (await pair.client().post(path, {})).status == 404


async def test_drain_without_move_keeps_running_requests(open_pair):
    async with open_pair("w1 w2") as pair, pair.client().ask(TEXT, BODY) as response:
        [(first, ask)] = await asks_of(pair)
        begin(ask, "0:1")
        await wait_all_tasks_blocked()
        await empty(pair, first, "move=false")
        await wait_all_tasks_blocked()
        assert not ask.is_gone
        ask.finish_resumable()
        assert await texts(response) == " 0:1"
        assert first not in pair.leases()
    await pair.assert_all_free()


async def test_request_does_not_move_while_an_event_is_being_sent_to_the_client(open_pair):
    async with open_pair("w1 w2") as pair:
        dispatch = pair.router.dispatch
        await wait_all_tasks_blocked()
        is_sent = False
        with dispatch.enter(RoutedRequest(model="fake")) as admission:
            first = await admission.lease()
            admission.can_resume = lambda: True

            async def send() -> None:
                nonlocal is_sent
                dispatch.drain_endpoint(EndpointId(first), move_seconds=10)
                for _ in range(5):
                    await trio.lowlevel.checkpoint()
                is_sent = True

            with pytest.raises(Withdrawn), admission.attempt():
                admission.first_token()
                await admission.send(send())
            assert is_sent
            assert admission.attempts == 1


WATCH = WatchSettings(health_seconds=1, load_seconds=1, response_seconds_max=1, hang_seconds_max=3, move_seconds=20)


async def a_stream(pair):
    await trio.sleep(0.1)
    [(first, ask)] = [(id, ask) for id, each in pair.endpoints.items() for ask in each.open]
    begin(ask, "0:1")
    await trio.sleep(0.1)
    return first, ask


@pytest.mark.parametrize("how", ["takes no connections", "says so"])
async def test_streams_leave_a_stopping_endpoint_that_returns_when_it_is_healthy(open_pair, autojump_clock, how):
    async with open_pair("w1 w2", watch=WATCH) as pair, pair.client().ask(TEXT, BODY) as response:
        first, ask = await a_stream(pair)
        if how == "takes no connections":
            pair[first].is_reachable = False
        else:
            pair[first].unready_reason = "draining"
        await trio.sleep(1.5)
        assert ask.is_gone
        [(second, again)] = await asks_of(pair)
        begin(again, "0:2")
        again.finish_resumable()
        assert await texts(response) == " 0:1 0:2"
        assert pair.router.dispatch.stats().moves_total == 1
        pair[first].is_reachable, pair[first].unready_reason = True, None
        await trio.sleep(2)
        assert {state.id for state in pair.router.dispatch.endpoints if state.accepts_requests} == {first, second}
    await pair.assert_all_free()


async def test_requests_leave_a_hanging_endpoint_after_the_time_limit(open_pair, autojump_clock):
    async with open_pair("w1 w2", watch=WATCH, failures_max=100) as pair, pair.client().ask(TEXT, BODY) as response:
        first, ask = await a_stream(pair)
        pair[first].is_silent = True
        await trio.sleep(2)
        assert not ask.is_gone
        await trio.sleep(4)
        assert ask.is_gone
        [(_, again)] = await asks_of(pair)
        begin(again, "0:2")
        again.finish_resumable()
        assert await texts(response) == " 0:1 0:2"
        assert b'endpoint_hangs_total{endpoint="%b"} 1.0' % first.encode() in pair.router.metrics.expose()
    await pair.assert_all_free()


async def test_requests_leave_an_endpoint_with_an_overdue_step_at_once(open_pair, autojump_clock):
    async with open_pair("w1 w2", watch=WATCH, failures_max=100) as pair, pair.client().ask(TEXT, BODY) as response:
        first, ask = await a_stream(pair)
        pair[first].unready_reason = "step_overdue"
        await trio.sleep(1.5)
        assert ask.is_gone
        [(_, again)] = await asks_of(pair)
        begin(again)
        again.finish_resumable()
        assert await texts(response) == " 0:1"
    await pair.assert_all_free()


async def test_requests_leave_an_endpoint_that_discovery_no_longer_lists(open_pair):
    async with open_pair("w1 w2") as pair, pair.client().ask(TEXT, BODY) as response:
        [(first, ask)] = await asks_of(pair)
        begin(ask, "0:1")
        await wait_all_tasks_blocked()
        fleet = pair.router.fleet
        fleet.set_all([spec for id, spec in fleet.specs().items() if id != first], source="configured")
        [(second, again)] = await asks_of(pair)
        assert second != first
        assert ask.is_gone
        begin(again)
        again.finish_resumable()
        assert await texts(response) == " 0:1"
    await pair.assert_all_free()
