"""Tests streams that resume at another endpoint. The client only sees a pause. The endpoints are scripted."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.endpoint import EndpointId, EndpointLoad
from trioserve.proxy.endpoint_watch import WatchSettings
from trioserve.proxy.router_context import RoutingRules

TEXT = "/v1/completions"
BODY = {"model": "fake", "prompt": "hello", "max_tokens": 5, "stream": True}
IDS = ("a", "b", "c")


def counted(pair, name: str) -> dict[str, float]:
    """Return the values of a router metric by label, without zeros."""
    found = {}
    for line in pair.router.metrics.expose().decode().splitlines():
        if line.startswith(f"trioserve_router:{name}{{") and float(line.rsplit(" ", 1)[1]):
            found[line.split('reason="')[1].split('"')[0]] = float(line.rsplit(" ", 1)[1])
    return found


async def the_ask(pair, *, without=()):
    """Return the only open request of all endpoints, together with the id of its endpoint."""
    await wait_all_tasks_blocked()
    [(id, ask)] = [(id, ask) for id, each in pair.endpoints.items() for ask in each.open if ask not in without]
    return id, ask


async def texts(response) -> str:
    return "".join([choice["text"] async for event in response for choice in event.get("choices", ())])


async def test_stream_resumes_at_another_endpoint_and_each_token_arrives_once(open_pair):
    async with open_pair("w1 w2") as pair, pair.client().ask(TEXT, {**BODY, "n": 2}) as response:
        first, ask = await the_ask(pair)
        assert ask.headers["x-trioserve-resumable"] == "1"
        assert "resume" not in ask.body
        ask.begin_resumable()
        ask.group("0:1,2")
        ask.group("1:3!")
        ask.say('data: {"choices": [{"index": 0, "text": "half a group"}]}\n\n')
        await wait_all_tasks_blocked()
        ask.hang_up()
        second, again = await the_ask(pair)
        assert second != first
        assert pair.leases() == {first: 0, second: 2}  # A request has one lease for each sequence.
        assert again.body == {
            **BODY,
            "n": 2,
            "resume": {"prompt_digest": "d", "seed": 7, "token_ids": [[1, 2], [3]], "finished": [False, True]},
        }
        assert again.headers["x-request-id"] == ask.headers["x-request-id"]
        again.begin_resumable()
        again.group("0:4")
        again.finish_resumable()
        assert await texts(response) == " 0:1,2 1:3! 0:4"
        assert "x-trioserve-resume" not in response.headers
        assert b"id:" not in response.body.replace(b'"id":', b"")
        assert b"x-trioserve-continued" not in response.body
        assert response.body.endswith(b"data: [DONE]\n\n")
        assert counted(pair, "streams_continued_total") == {"broke": 1}
    await pair.assert_all_free()


@pytest.mark.parametrize("stop", range(5))
@pytest.mark.parametrize("way", ["hang_up", "end", "engine_fault", "draining", "server_stopping"])
async def test_stream_resumes_after_any_failure_at_any_position(open_pair, stop, way):
    async with open_pair("w1 w2") as pair, pair.client().ask(TEXT, BODY) as response:
        _, ask = await the_ask(pair)
        ask.begin_resumable()
        for token in range(stop):
            ask.group(f"0:{token}")
        await wait_all_tasks_blocked()
        if way in ("hang_up", "end"):
            getattr(ask, way)()
        else:
            ask.fail(way)
        _, again = await the_ask(pair)
        assert ("resume" in again.body) == (stop > 0)
        again.begin_resumable()
        for token in range(stop, 5):
            again.group(f"0:{token}")
        again.finish_resumable()
        assert await texts(response) == " 0:0 0:1 0:2 0:3 0:4"
        assert b"error" not in response.body
    await pair.assert_all_free()


@pytest.mark.parametrize("code", ["request_aborted", "timeout", "context_length_exceeded", "anything_else"])
async def test_stream_that_was_ended_on_purpose_ends_with_the_endpoints_error(open_pair, code):
    async with open_pair("w1 w2") as pair, pair.client().ask(TEXT, BODY) as response:
        _, ask = await the_ask(pair)
        ask.begin_resumable()
        ask.group("0:1")
        ask.fail(code)
        events = [event async for event in response]
        assert [event.get("error", {}).get("code") for event in events] == [None, code]
        assert not any(endpoint.open for endpoint in pair.endpoints.values())
    await pair.assert_all_free()


async def test_stream_is_complete_if_the_connection_breaks_after_its_done_event(open_pair):
    async with open_pair("w1 w2") as pair, pair.client().ask(TEXT, BODY) as response:
        _, ask = await the_ask(pair)
        ask.begin_resumable()
        ask.group("0:1!")
        ask.say("id: .\ndata: [DONE]\n\n")
        ask.hang_up()
        assert await texts(response) == " 0:1!"
        assert response.body.endswith(b"data: [DONE]\n\n")
    await pair.assert_all_free()


async def test_client_can_ask_for_the_ids_and_the_resume_values(open_pair):
    asks = {"x-trioserve-resumable": "1"}
    async with open_pair("w1 w2") as pair, pair.client().ask(TEXT, BODY, headers=asks) as response:
        _, ask = await the_ask(pair)
        ask.begin_resumable()
        ask.group("0:1")
        await wait_all_tasks_blocked()
        ask.hang_up()
        _, again = await the_ask(pair)
        again.begin_resumable()
        again.group("0:2")
        again.finish_resumable()
        await response.read()
        assert [line for line in response.body.splitlines() if line.startswith(b"id:")] == [
            b"id: 0:1",
            b"id: 0:2",
            b"id: .",
        ]
        assert '"prompt_digest"' in response.headers["x-trioserve-resume"]
    await pair.assert_all_free()


async def test_router_resumes_from_the_state_that_a_resuming_client_sends(open_pair):
    resume = {"token_ids": [[1, 2]], "finished": [False], "prompt_digest": "d", "seed": 7}
    async with open_pair("w1 w2") as pair, pair.client().ask(TEXT, {**BODY, "resume": resume}) as response:
        _, ask = await the_ask(pair)
        assert ask.body["resume"] == resume
        ask.begin_resumable()
        ask.group("0:3")
        await wait_all_tasks_blocked()
        ask.hang_up()
        _, again = await the_ask(pair)
        assert again.body["resume"]["token_ids"] == [[1, 2, 3]]
        again.begin_resumable()
        again.finish_resumable()
        await response.read()
    await pair.assert_all_free()


@pytest.mark.parametrize("status", [200, 409])
async def test_reasoning_ended_by_an_operator_stays_ended_after_resuming(open_pair, status):
    headers = {"x-request-id": "mine"}
    async with open_pair("w1 w2") as pair, pair.client().ask(TEXT, BODY, headers=headers) as response:
        first, ask = await the_ask(pair)
        ask.begin_resumable()
        ask.group("0:1")
        async with pair.client().ask("/v1/requests/mine", {"end_thinking": True}) as control:
            where, told = await the_ask(pair, without=[ask])
            assert (where, told.path) == (first, "/v1/requests/mine")
            told.respond({"result": "ending"}) if status == 200 else told.refuse(status, "no_thought")
            assert await control.head() == status
        ask.hang_up()
        _, again = await the_ask(pair)
        assert ("end_thinking" in again.body["resume"]) == (status == 200)
        again.begin_resumable()
        again.finish_resumable()
        await response.read()
    await pair.assert_all_free()


async def test_known_tokens_of_a_resumed_request_count_as_waiting_prompt_tokens(open_pair):
    resume = {"token_ids": [[1] * 50], "finished": [False]}
    async with open_pair("w", leases_max=1) as pair, pair.client().ask(TEXT, BODY):  # noqa: SIM117
        async with pair.client().ask(TEXT, BODY):
            await wait_all_tasks_blocked()
            before = pair.router.dispatch.stats().waiting_prompt_tokens
            async with pair.client().ask(TEXT, {**BODY, "resume": resume}):
                await wait_all_tasks_blocked()
                assert pair.router.dispatch.stats().waiting_prompt_tokens >= 2 * before + 50
    await pair.assert_all_free()


@pytest.mark.parametrize(
    ("before", "after"), [("f1+exact", "f2+exact"), ("f1", "f1"), ("f1+exact", ""), ("f1+exact", "f1")]
)
async def test_comment_names_an_endpoint_that_may_compute_other_tokens(open_pair, before, after):
    async with open_pair("w1 w2") as pair, pair.client().ask(TEXT, BODY) as response:
        _, ask = await the_ask(pair)
        ask.begin_resumable(fingerprint=before)
        ask.group("0:1")
        await wait_all_tasks_blocked()
        ask.hang_up()
        second, again = await the_ask(pair)
        again.begin_resumable(fingerprint=after)
        again.group("0:2")
        again.finish_resumable()
        await response.read()
        remark = f": x-trioserve-continued endpoint={second} tokens=not-promised\n\n".encode()
        first, second = response.body.split(remark)
        assert b" 0:1" in first
        assert b" 0:2" in second
    await pair.assert_all_free()


@pytest.mark.parametrize("status", [409, 400])
async def test_stream_with_a_changed_prompt_ends_with_an_error(open_pair, status):
    """The client never gets a different text."""
    async with open_pair("w1 w2 w3") as pair, pair.client().ask(TEXT, BODY) as response:
        _, ask = await the_ask(pair)
        ask.begin_resumable()
        ask.group("0:1")
        await wait_all_tasks_blocked()
        ask.hang_up()
        _, again = await the_ask(pair)
        again.refuse(status, "resume_mismatch")
        events = [event async for event in response]
        assert events[-1]["error"]["code"] == "endpoint_lost"
        assert b"[DONE]" not in response.body
        assert counted(pair, "streams_not_resumable_total") == {"mismatch" if status == 409 else "refused": 1}
    await pair.assert_all_free()


async def test_endpoint_that_cannot_resume_is_skipped(open_pair):
    async with open_pair("w1 w2 w3") as pair, pair.client().ask(TEXT, BODY) as response:
        first, ask = await the_ask(pair)
        ask.begin_resumable()
        ask.group("0:1")
        await wait_all_tasks_blocked()
        ask.hang_up()
        second, other = await the_ask(pair)
        other.token("all of it again")
        await wait_all_tasks_blocked()
        assert other.is_gone
        third, again = await the_ask(pair)
        assert len({first, second, third}) == 3
        again.begin_resumable()
        again.group("0:2")
        again.finish_resumable()
        assert await texts(response) == " 0:1 0:2"
    await pair.assert_all_free()


async def test_full_or_unreachable_endpoint_is_skipped(open_pair):
    async with open_pair("w1 w2 w3", policy="round_robin") as pair, pair.client().ask(TEXT, BODY) as response:
        first, ask = await the_ask(pair)
        ask.begin_resumable()
        ask.group("0:1")
        await wait_all_tasks_blocked()
        ask.hang_up()
        second, full = await the_ask(pair)
        assert second != first
        full.refuse(429, "queue_full")
        _, again = await the_ask(pair)
        again.begin_resumable()
        again.finish_resumable()
        await response.read()
        assert response.body.endswith(b"[DONE]\n\n")
    await pair.assert_all_free()


async def test_request_that_crashes_engines_is_stopped_after_two(open_pair, caplog):
    headers = {"x-request-id": "poison"}
    async with open_pair("w1 w2 w3 w4") as pair, pair.client().ask(TEXT, BODY, headers=headers) as response:
        for token in range(2):
            _, ask = await the_ask(pair)
            ask.begin_resumable()
            ask.group(f"0:{token}")
            await wait_all_tasks_blocked()
            ask.hang_up()
        events = [event async for event in response]
        assert events[-1]["error"]["code"] == "request_poisoned"
        assert await texts(response) == ""
        assert sum(len(endpoint.asks) for endpoint in pair.endpoints.values()) == 2
        assert any("poison" in record.getMessage() and record.levelname == "WARNING" for record in caplog.records)
        assert counted(pair, "stream_continuations_refused_total") == {"poisoned": 1}
    await pair.assert_all_free()


async def on_trial(pair, *, code=None):
    """Break two endpoints in a row in the middle of a stream. The stream then waits for a third endpoint.

    Args:
        code: Error code with which the second endpoint ends. None: its connection breaks.
    """
    dispatch = pair.router.dispatch
    for id in pair.endpoints:
        load = EndpointLoad(running=0, waiting=0, clock=id)
        dispatch.note_load(EndpointId(id), load, sent_when_asked=0)
    left = []
    for token in range(2):
        id, ask = await the_ask(pair)
        ask.begin_resumable()
        ask.group(f"0:{token}")
        await wait_all_tasks_blocked()
        if code is not None:
            ask.say(f'data: {{"error": {{"code": "{code}"}}}}\n\n')
        ask.hang_up()
        left.append(id)
    await wait_all_tasks_blocked()
    return left


async def test_request_that_broke_at_two_endpoints_resumes_when_one_of_them_is_healthy(open_pair, autojump_clock):
    async with open_pair("w1 w2 w3") as pair, pair.client().ask(TEXT, BODY) as response:
        _, second = await on_trial(pair)
        assert not any(endpoint.open for endpoint in pair.endpoints.values())
        dispatch = pair.router.dispatch
        dispatch.note_health(EndpointId(second), True, hangs=False)
        dispatch.note_load(EndpointId(second), EndpointLoad(running=0, waiting=0, clock=second), sent_when_asked=0)
        _, ask = await the_ask(pair)
        ask.begin_resumable()
        ask.group("0:9")
        ask.finish_resumable()
        assert await texts(response) == " 0:0 0:1 0:9"
    await pair.assert_all_free()


async def test_stream_ends_with_an_error_and_a_warning_if_its_failed_endpoints_are_not_checked_in_time(
    open_pair, autojump_clock, caplog
):
    headers = {"x-request-id": "poison"}
    async with open_pair("w1 w2 w3") as pair, pair.client().ask(TEXT, BODY, headers=headers) as response:
        await on_trial(pair)
        events = [event async for event in response]
        assert events[-1]["error"]["code"] == "request_poisoned"
        assert any("poison" in record.getMessage() and record.levelname == "WARNING" for record in caplog.records)
        assert counted(pair, "stream_continuations_refused_total") == {"poisoned": 1}
    await pair.assert_all_free()


async def test_stream_ends_without_a_wait_for_checks_if_its_endpoints_report_their_own_failure(open_pair):
    async with open_pair("w1 w2 w3") as pair, pair.client().ask(TEXT, BODY) as response:
        await on_trial(pair, code="engine_fault")
        events = [event async for event in response]
        assert events[-1]["error"]["code"] == "request_poisoned"
    await pair.assert_all_free()


@pytest.mark.parametrize(("code", "is_asked_elsewhere"), [("draining", True), ("queue_full", False)])
async def test_endpoint_that_stops_before_it_began_the_request_costs_no_retry(open_pair, code, is_asked_elsewhere):
    settings = {"retry_share_max": 0.0, "retries_per_second_min": 0.0}
    async with open_pair("w1 w2", **settings) as pair, pair.client().ask(TEXT, BODY) as response:
        _, ask = await the_ask(pair)
        ask.refuse(503, code)
        if is_asked_elsewhere:
            _, again = await the_ask(pair)
            again.begin_resumable()
            again.group("0:1")
            again.finish_resumable()
            assert await texts(response) == " 0:1"
        else:
            assert await response.head() == 503
    await pair.assert_all_free()


async def test_stream_ends_with_an_error_without_another_endpoint(open_pair, autojump_clock):
    async with open_pair("w") as pair, pair.client().ask(TEXT, BODY) as response:
        _, ask = await the_ask(pair)
        ask.begin_resumable()
        ask.group("0:1")
        await wait_all_tasks_blocked()
        pair["w"].is_reachable = False
        ask.hang_up()
        events = [event async for event in response]
        assert events[-1]["error"]["code"] == "endpoint_lost"
        assert counted(pair, "rejections_total")
    await pair.assert_all_free()


async def test_waiting_client_gets_comments_that_keep_the_connection_alive(open_pair, autojump_clock):
    async with open_pair("w1 w2", leases_max=1) as pair:  # noqa: SIM117
        async with pair.client().ask(TEXT, BODY) as response, pair.client().ask(TEXT, BODY) as holder:
            await wait_all_tasks_blocked()
            [ask] = pair["w1"].open
            [other] = pair["w2"].open
            for each in (ask, other):
                each.begin_resumable()
                each.group("0:1")
            await wait_all_tasks_blocked()
            pair["w1"].is_reachable = False
            ask.hang_up()
            await trio.sleep(20)
            assert [state for _, state, _ in await pair.listed()] == ["waiting", "running"]
            other.finish_resumable()
            again = await pair.ask_of("w2")
            again.begin_resumable()
            again.group("0:2")
            again.finish_resumable()
            await response.read()
            await holder.read()
            assert response.body.count(b": keep-alive\n\n") == 1
            before, after = response.body.split(b": keep-alive\n\n")
            assert (b" 0:1" in before, b" 0:2" in after) == (True, True)
    await pair.assert_all_free()


async def test_client_gets_comments_until_the_next_endpoint_responds(open_pair, autojump_clock):
    async with open_pair("w1 w2") as pair, pair.client().ask(TEXT, BODY) as response:
        _, ask = await the_ask(pair)
        ask.begin_resumable()
        ask.group("0:1")
        await wait_all_tasks_blocked()
        ask.hang_up()
        await trio.sleep(40)
        _, again = await the_ask(pair)
        again.begin_resumable()
        again.group("0:2")
        again.finish_resumable()
        await response.read()
        before, after = response.body.split(b": keep-alive\n\n" * 2)
        assert (b" 0:1" in before, b" 0:2" in after) == (True, True)
    await pair.assert_all_free()


@pytest.mark.parametrize("how", ["leaves", "abort", "timeout", "drain"])
async def test_waiting_stream_can_be_ended_at_once(open_pair, autojump_clock, how):
    async with open_pair("w1 w2", leases_max=1) as pair, pair.client().ask(TEXT, BODY) as holder:
        _, held = await the_ask(pair)
        body = {**BODY, "timeout": 7} if how == "timeout" else BODY
        async with pair.client().ask(TEXT, body, headers={"x-request-id": "mine"}) as response:
            where, ask = await the_ask(pair, without=[held])
            ask.begin_resumable()
            ask.group("0:1")
            await wait_all_tasks_blocked()
            pair[where].is_reachable = False
            ask.hang_up()
            await wait_all_tasks_blocked()
            assert ("mine", "waiting", None) in await pair.listed()
            if how == "abort":
                await pair.client().post("/v1/requests/abort", {"ids": ["mine"]})
            if how == "drain":
                pair.router.drain()
                await wait_all_tasks_blocked()
                assert ("mine", "waiting") in [
                    (admission.id, admission.state) for admission in pair.router.dispatch.live_admissions()
                ]
                pair.router.dispatch.abort_all("over")
            if how != "leaves":
                events = [event async for event in response]
                code = {"abort": "request_aborted", "timeout": "timeout", "drain": "draining"}[how]
                assert events[-1]["error"]["code"] == code
        await wait_all_tasks_blocked()
        assert [admission.id for admission in pair.router.dispatch.live_admissions() if admission.id == "mine"] == []
        held.finish()
        await holder.read()
    await pair.assert_all_free()


async def test_first_token_deadlines_do_not_apply_to_a_resumed_stream(open_pair, autojump_clock):
    body = {**BODY, "timeout": 60, "ttft_timeout": 5, "queue_timeout": 3}
    async with open_pair("w1 w2") as pair, pair.client().ask(TEXT, body) as response:
        _, ask = await the_ask(pair)
        ask.begin_resumable()
        ask.group("0:1")
        await trio.sleep(20)
        ask.hang_up()
        _, again = await the_ask(pair)
        assert again.body["timeout"] == pytest.approx(40)
        assert "ttft_timeout" not in again.body
        assert "queue_timeout" not in again.body
        again.begin_resumable()
        again.finish_resumable()
        await response.read()
        assert response.body.endswith(b"[DONE]\n\n")
    await pair.assert_all_free()


async def test_streams_of_a_hanging_endpoint_resume_at_another(open_pair, autojump_clock):
    """The endpoint accepts connections but never answers, for example because its process is suspended or the network
    is cut.
    """
    watch = WatchSettings(health_seconds=1, load_seconds=1, response_seconds_max=1)
    async with open_pair("w1 w2", watch=watch, failures_max=2) as pair, pair.client().ask(TEXT, BODY) as response:
        first, ask = await the_ask_now(pair)
        ask.begin_resumable()
        ask.group("0:1")
        await trio.sleep(0.1)
        pair[first].is_silent = True
        await trio.sleep(10)
        [second] = {"w1", "w2"} - {first}
        assert ask.is_gone
        [again] = pair[second].open
        assert again.body["resume"]["token_ids"] == [[1]]
        again.begin_resumable()
        again.group("0:2")
        again.finish_resumable()
        assert await texts(response) == " 0:1 0:2"
        assert counted(pair, "streams_continued_total") == {"hung": 1}
    await pair.assert_all_free()


async def the_ask_now(pair):
    await trio.sleep(0.1)
    [(id, ask)] = [(id, ask) for id, each in pair.endpoints.items() for ask in each.open]
    return id, ask


async def test_hanging_endpoint_keeps_a_stream_that_cannot_resume(open_pair, autojump_clock):
    watch = WatchSettings(health_seconds=1, load_seconds=1, response_seconds_max=1)
    async with open_pair("w1", watch=watch, failures_max=2) as pair, pair.client().ask(TEXT, BODY) as response:
        first, ask = await the_ask_now(pair)
        ask.begin_resumable()
        ask.group("0:1")
        await trio.sleep(0.1)
        pair[first].is_silent = True
        await trio.sleep(20)
        assert not ask.is_gone
        ask.group("0:2")
        ask.finish_resumable()
        assert await texts(response) == " 0:1 0:2"
    await pair.assert_all_free()


async def test_streams_leave_a_drained_endpoint(open_pair):
    async with open_pair("w1 w2") as pair, pair.client().ask(TEXT, BODY) as response:
        first, ask = await the_ask(pair)
        ask.begin_resumable()
        ask.group("0:1")
        await wait_all_tasks_blocked()
        pair.router.dispatch.drain_endpoint(EndpointId(first), move_seconds=10)
        _, again = await the_ask(pair)
        assert ask.is_gone
        again.begin_resumable()
        again.group("0:2")
        again.finish_resumable()
        assert await texts(response) == " 0:1 0:2"
        assert counted(pair, "streams_continued_total") == {"leaving": 1}
        assert first not in pair.leases()
    await pair.assert_all_free()


async def test_hand_over_reports_the_location_of_the_kv_to_the_next_endpoint(open_pair):
    async with open_pair("w1 w2") as pair, pair.client().ask(TEXT, BODY) as response:
        _, ask = await the_ask(pair)
        ask.begin_resumable()
        ask.group("0:1")
        ask.say('data: {"object":"hand_over","kv_transfer_params":{"remote_host":"h"}}\nid: >\n\n')
        _, again = await the_ask(pair, without=[ask])
        assert again.body["kv_transfer_params"] == {"remote_host": "h"}
        assert again.body["resume"]["token_ids"] == [[1]]
        again.begin_resumable()
        again.group("0:2")
        again.finish_resumable()
        assert await texts(response) == " 0:1 0:2"
    await pair.assert_all_free()


async def test_stream_with_too_many_ids_does_not_resume(open_pair):
    rules = RoutingRules(continuation_bytes_max=16)
    async with open_pair("w1 w2", rules=rules) as pair, pair.client().ask(TEXT, BODY) as response:
        _, ask = await the_ask(pair)
        ask.begin_resumable()
        for token in range(10):
            ask.group(f"0:{token}")
        await wait_all_tasks_blocked()
        ask.hang_up()
        events = [event async for event in response]
        assert len(events) == 11
        assert events[-1]["error"]["code"] == "endpoint_lost"
        assert counted(pair, "streams_not_resumable_total") == {"bytes_max": 1}
    await pair.assert_all_free()


@pytest.mark.parametrize("fields", [{"stream": False}, {"pinned": True}, {"off": True}])
async def test_request_that_cannot_resume_does_not_ask_for_ids(open_pair, fields):
    rules = RoutingRules(continuation_bytes_max=0 if "off" in fields else 1000)
    path = f"{TEXT}?id=w1" if "pinned" in fields else TEXT
    body = {**BODY, "stream": fields.get("stream", True)}
    async with open_pair("w1", rules=rules) as pair, pair.client().ask(path, body):
        _, ask = await the_ask(pair)
        assert "x-trioserve-resumable" not in ask.headers
    await pair.assert_all_free()


async def test_endpoint_without_resume_support_serves_a_stream_unchanged(open_pair):
    async with open_pair("w1 w2") as pair, pair.client().ask(TEXT, BODY) as response:
        _, ask = await the_ask(pair)
        ask.token("good ")
        await wait_all_tasks_blocked()
        ask.hang_up()
        events = [event async for event in response]
        assert events[-1]["error"]["code"] == "endpoint_lost"
        assert counted(pair, "streams_not_resumable_total") == {"not_resumable": 1}
    await pair.assert_all_free()


async def test_disaggregated_stream_resumes_without_its_prefill(open_pair):
    long = "a prompt that is long enough to be computed elsewhere " * 4
    async with open_pair("p d w") as pair, pair.client().ask(TEXT, {**BODY, "prompt": long}) as response:
        (await pair.ask_of("p")).hold()
        ask = await pair.ask_of("d")
        assert ask.headers["x-trioserve-resumable"] == "1"
        ask.begin_resumable()
        ask.group("0:1")
        await wait_all_tasks_blocked()
        ask.hang_up()
        where, again = await the_ask(pair)
        assert where != "d"
        assert again.body["resume"]["token_ids"] == [[1]]
        assert "kv_transfer_params" not in again.body
        again.begin_resumable()
        again.group("0:2")
        again.finish_resumable()
        assert await texts(response) == " 0:1 0:2"
    await pair.assert_all_free()


async def test_bytes_that_a_router_keeps_of_streams_are_a_metric(open_pair):
    async with open_pair("w1 w2") as pair:
        async with pair.client().ask(TEXT, BODY):
            _, ask = await the_ask(pair)
            ask.begin_resumable()
            ask.group("0:12345")
            await wait_all_tasks_blocked()
            assert held(pair) == len("0:12345\n")
        await wait_all_tasks_blocked()
        assert held(pair) == 0


def held(pair) -> float:
    [line] = [
        line
        for line in pair.router.metrics.expose().decode().splitlines()
        if line.startswith("trioserve_router:continuation_bytes_held")
    ]
    return float(line.rsplit(" ", 1)[1])
