"""Tests disaggregated requests: the requests to both endpoints, the response, and the release of all resources after
failures and cancels.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.endpoint import EndpointId, PairOutcome
from trioserve.testing.memory_router import Ask, ScriptedEndpoints

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = "a prompt that is long enough to be computed elsewhere " * 4
RESPONSE = {
    "id": "cmpl-0",
    "object": "text_completion",
    "choices": [{"index": 0, "text": "good morning", "finish_reason": "length"}],
}


def body(**fields: object) -> dict[str, object]:
    return {"model": "fake", "prompt": PROMPT, "max_tokens": 5, **fields}


# --- requests without failures ---


@pytest.mark.parametrize("http", [1, 2])
async def test_prompt_is_computed_at_one_endpoint_and_response_at_another(open_pair, http):
    async with open_pair() as pair:
        asked = body(stream=True, stream_options={"include_usage": True}, seed=7, min_tokens=3)
        async with pair.client(http=http).ask(TEXT, asked, headers={"x-request-id": "mine"}) as response:
            prefill = await pair.ask_of("p")
            assert pair.leases() == {"p": 1, "d": 0}
            assert prefill.path == TEXT
            assert prefill.body == {
                "model": "fake",
                "prompt": PROMPT,
                "seed": 7,
                "min_tokens": 1,
                "max_tokens": 1,
                "stream": True,
                "kv_transfer_params": {
                    "do_remote_decode": True,
                    "do_remote_prefill": False,
                    "remote_engine_id": None,
                    "remote_block_ids": None,
                    "remote_host": None,
                    "remote_port": None,
                },
            }
            prefill.hold()
            decode = await pair.ask_of("d")
            assert pair.leases() == {"p": 0, "d": 1}
            assert decode.body == {**asked, "kv_transfer_params": pair["p"].params}
            assert [ask.headers["x-request-id"] for ask in (prefill, decode)] == ["mine", "mine"]
            assert [ask.headers["x-trioserve-stage"] for ask in (prefill, decode)] == ["prefill", "decode"]
            assert pair["p"].held_count == 1
            decode.say(": keep-alive\n\n")
            await wait_all_tasks_blocked()
            assert pair["p"].held_count == 1, "a comment is not a token"
            decode.token("good ")
            await wait_all_tasks_blocked()
            assert prefill.is_gone, "the blocks are no longer needed"
            decode.token("morning", finish_reason="length")
            decode.finish()
            assert "".join([event["choices"][0]["text"] async for event in response]) == "good morning"
        assert response.headers["x-trioserve-endpoint"] == "d"
        assert response.headers["x-trioserve-prefill-endpoint"] == "p"
        assert response.headers["x-request-id"] == "mine"
        assert pair.outcomes() == {"paired": 1}
        await pair.assert_all_free()


async def test_both_endpoints_get_the_salt_of_the_callers_key(open_pair):
    salts = []
    async with open_pair(api_keys=("alice", "bob")) as pair:
        for key in ("alice", "bob"):
            headers = {"authorization": f"Bearer {key}", "x-tenant-id": "invented"}
            async with pair.client().ask(TEXT, body(stream=True), headers=headers) as response:
                prefill = await pair.ask_of("p")
                prefill.hold()
                decode = await pair.ask_of("d")
                assert prefill.body["cache_salt"] == decode.body["cache_salt"]
                assert prefill.headers["x-tenant-id"] == decode.headers["x-tenant-id"] != "invented"
                salts.append(decode.body["cache_salt"])
                decode.token("x", finish_reason="length")
                decode.finish()
                assert [event async for event in response]
        assert salts[0] != salts[1]
        await pair.assert_all_free()


async def test_tools_and_schemas_reach_both_stages_unchanged(open_pair):
    function = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    fields = {
        "messages": [{"role": "user", "content": PROMPT}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        "structured_outputs": {"regex": "[a-z]{3}"},
        "reasoning_effort": "low",
        "thinking_token_budget": 20,
        "truncate_prompt_tokens": 500,
    }
    chat = {"model": "fake", "max_tokens": 9, "stream": True, **fields}
    async with open_pair() as pair:
        async with pair.client().ask(CHAT, chat) as response:
            prefill = await pair.ask_of("p")
            assert {name: prefill.body[name] for name in fields} == fields
            prefill.hold()
            decode = await pair.ask_of("d")
            assert decode.body == {**chat, "kv_transfer_params": pair["p"].params}
            decode.token("x", finish_reason="stop")
            decode.finish()
            assert [event async for event in response]
        await pair.assert_all_free()


async def test_prompt_that_is_truncated_to_fit_is_not_disaggregated(open_pair):
    async with open_pair() as pair:
        async with pair.client().ask(TEXT, body(truncate_prompt_tokens=-1, stream=True)):
            await wait_all_tasks_blocked()
            asks = [ask for id in "pd" for ask in pair[id].open]
            assert [("kv_transfer_params" in ask.body) for ask in asks] == [False]
        await pair.assert_all_free()


async def test_chat_is_disaggregated_and_its_response_arrives_whole(open_pair, nursery):
    async with open_pair() as pair:
        messages = [{"role": "user", "content": PROMPT}]
        chat = {"model": "fake", "messages": messages, "max_completion_tokens": 9, "stream": False}
        async with pair.client().ask(CHAT, chat) as response:
            prefill = await pair.ask_of("p")
            assert (prefill.body["max_tokens"], prefill.body["max_completion_tokens"]) == (1, 1)
            prefill.hold()
            decode = await pair.ask_of("d")
            assert decode.body == {**chat, "kv_transfer_params": pair["p"].params}
            # The decode endpoint has read all blocks, so the prefill endpoint releases them.
            prefill.finish()
            await wait_all_tasks_blocked()
            decode.respond(RESPONSE)
            assert await response.json() == RESPONSE
        assert pair.outcomes() == {"paired": 1}
        await pair.assert_all_free()


async def test_prefill_server_that_is_not_trioserve_sends_no_stream_and_ends_its_hold_by_itself(open_pair):
    async with open_pair("w1 w2", roles={"w1": "prefill", "w2": "decode"}) as pair:
        async with pair.client().ask(TEXT, body(stream=True)) as response:
            prefill = await pair.ask_of("w1")
            assert prefill.body["stream"] is False
            prefill.respond({**RESPONSE, "kv_transfer_params": pair["w1"].params})
            decode = await pair.ask_of("w2")
            assert decode.body["kv_transfer_params"] == pair["w1"].params
            decode.token("x", finish_reason="length")
            decode.finish()
            await response.read()
        assert pair.outcomes() == {"paired": 1}
        await pair.assert_all_free()


async def test_client_cannot_choose_the_address_from_which_an_engine_fetches_kv(open_pair):
    evil = {"do_remote_prefill": True, "remote_host": "169.254.169.254", "remote_port": 80}
    for ids in ("w", "p d"):
        async with open_pair(ids) as pair:
            for name in ("kv_transfer_params", "kv\\u005ftransfer_params"):
                raw = b'{"model": "fake", "prompt": "hi", "max_tokens": 5, "%b": %b}'
                content = raw % (name.encode(), str(evil).replace("'", '"').replace("True", "true").encode())
                async with pair.client().ask(TEXT, content) as response:
                    ask = await pair.ask_of("w" if ids == "w" else "d")
                    assert ask.body == {"model": "fake", "prompt": "hi", "max_tokens": 5}
                    ask.respond(RESPONSE)
                    await response.read()


@pytest.mark.parametrize(
    "asked",
    [
        body(prompt="short"),
        body(max_tokens=1),
        body(n=2),
        body(best_of=2),
        body(echo=True),
        body(prompt_logprobs=1),
        body(prompt=[PROMPT, PROMPT]),
        body(max_tokens="many"),
    ],
)
async def test_request_that_cannot_be_disaggregated_goes_to_a_decode_endpoint(open_pair, asked):
    async with open_pair() as pair:
        async with pair.client().ask(TEXT, asked) as response:
            ask = await pair.ask_of("d")
            assert ask.body == asked
            assert "x-trioserve-stage" not in ask.headers
            ask.respond(RESPONSE)
            await response.read()
        assert pair.outcomes() == {}
        await pair.assert_all_free()


@pytest.mark.parametrize("ids", ["p", "d", "p w", "w d", "b", "w1 w2"])
async def test_request_is_not_disaggregated_without_two_endpoints(open_pair, ids):
    async with open_pair(ids) as pair:
        async with pair.client().ask(TEXT, body()) as response:
            await wait_all_tasks_blocked()
            [ask] = [ask for endpoint in pair.endpoints.values() for ask in endpoint.open]
            assert ask.body == body()
            ask.respond(RESPONSE)
            await response.read()
        await pair.assert_all_free()


async def test_endpoint_with_role_both_can_compute_one_stage_of_a_request(open_pair):
    async with open_pair("b1 b2") as pair, pair.client().ask(TEXT, body()) as response:
        await wait_all_tasks_blocked()
        [(first, prefill)] = [(id, ask) for id, endpoint in pair.endpoints.items() for ask in endpoint.open]
        prefill.hold()
        decode = await pair.ask_of("b2" if first == "b1" else "b1")
        decode.respond(RESPONSE)
        await response.read()
        assert pair.outcomes() == {"paired": 1}
        await pair.assert_all_free()


async def test_configured_role_overrides_the_reported_role(open_pair):
    async with open_pair("d1 d2", roles={"d1": "prefill"}) as pair, pair.client().ask(TEXT, body()) as response:
        (await pair.ask_of("d1")).hold()
        (await pair.ask_of("d2")).respond(RESPONSE)
        await response.read()
        listed = (await (await pair.client().get("/endpoints")).json())["data"]
        assert {each["id"]: each["role"] for each in listed} == {"d1": "prefill", "d2": "decode"}


# --- fallbacks to one endpoint ---


async def responded_whole(pair: ScriptedEndpoints, response: Any, id: str, outcome: str) -> None:
    """Check that the endpoint gets the client's own body, and respond to it. The response is a stream if the client
    requested a stream.
    """
    ask = await pair.ask_of(id)
    assert "kv_transfer_params" not in ask.body
    assert ask.body["max_tokens"] == 5
    assert pair["p"].held_count == 0, "the whole request has the same id"
    if ask.body.get("stream"):
        ask.token("good morning", finish_reason="length")
        ask.finish()
        assert [event["choices"][0]["text"] async for event in response] == ["good morning"]
    else:
        ask.respond(RESPONSE)
        assert await response.json() == RESPONSE
        assert response.headers["x-trioserve-endpoint"] == id
        assert "x-trioserve-prefill-endpoint" not in response.headers
    assert pair.outcomes() == {outcome: 1}
    await pair.assert_all_free()


async def test_prefill_without_held_blocks_is_finished_at_the_same_endpoint(open_pair):
    async with open_pair() as pair, pair.client().ask(TEXT, body()) as response:
        prefill = await pair.ask_of("p")
        prefill.token(finish_reason="length")
        prefill.finish()
        await responded_whole(pair, response, "p", "not_held")


async def test_response_of_one_token_is_finished_at_the_prefill_endpoint(open_pair):
    async with open_pair() as pair, pair.client().ask(TEXT, body()) as response:
        prefill = await pair.ask_of("p")
        prefill.token(finish_reason="stop", kv_transfer_params=pair["p"].params)
        await responded_whole(pair, response, "p", "finished")


async def test_request_refused_by_a_prefill_endpoint_is_sent_again_with_the_clients_own_body(open_pair):
    """The client then reads an error about its own request, not about the prefill request of the router."""
    async with open_pair() as pair:
        async with pair.client().ask(TEXT, body(temperature=-1)) as response:
            (await pair.ask_of("p")).refuse(400)
            again = await pair.ask_of("p")
            assert again.body == body(temperature=-1)
            again.refuse(400, "too_cold")
            assert (await response.json())["error"]["code"] == "too_cold"
        await pair.assert_all_free()


def breaks(pair: ScriptedEndpoints, ask: Ask) -> None:
    ask.say(": alive\n\n")
    ask.hang_up()


def is_busy(pair: ScriptedEndpoints, ask: Ask) -> None:
    ask.refuse(429)


def fails(pair: ScriptedEndpoints, ask: Ask) -> None:
    ask.refuse(500)


def fails_in_an_event(pair: ScriptedEndpoints, ask: Ask) -> None:
    ask.event(error={"message": "no", "type": "server_error", "code": "request_failed"})
    ask.finish()


def ends_early(pair: ScriptedEndpoints, ask: Ask) -> None:
    ask.begin()
    ask.end()


def babbles(pair: ScriptedEndpoints, ask: Ask) -> None:
    ask.say("data: what?\n\n")


@pytest.mark.parametrize("failure", [breaks, is_busy, fails, fails_in_an_event, ends_early, babbles])
async def test_failed_prefill_is_retried_at_another_endpoint(open_pair, failure):
    async with open_pair("p1 p2 d") as pair:
        async with pair.client().ask(TEXT, body()) as response:
            await wait_all_tasks_blocked()
            [(first, prefill)] = [(id, ask) for id in ("p1", "p2") for ask in pair[id].open]
            failure(pair, prefill)
            second = await pair.ask_of("p2" if first == "p1" else "p1")
            second.hold()
            (await pair.ask_of("d")).respond(RESPONSE)
            await response.read()
        assert pair.outcomes() == {"paired": 1}
        assert pair.router.dispatch.core.stats().retries_total == 1
        await pair.assert_all_free()


@pytest.mark.parametrize("failure", [breaks, is_busy, fails, fails_in_an_event, ends_early, babbles])
async def test_decode_endpoint_computes_the_whole_request_if_the_only_prefill_endpoint_fails(open_pair, failure):
    async with open_pair() as pair, pair.client().ask(TEXT, body()) as response:
        failure(pair, await pair.ask_of("p"))
        await responded_whole(pair, response, "d", "prefill_failed")


async def test_unreachable_prefill_endpoint_is_replaced(open_pair):
    async with open_pair() as pair:
        pair.router.fleet.remote(EndpointId("p")).close()
        pair["p"].is_reachable = False
        async with pair.client().ask(TEXT, body()) as response:
            await responded_whole(pair, response, "d", "prefill_failed")


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [
        (breaks, "decode_failed"),
        (is_busy, "decode_failed"),
        (fails, "decode_failed"),
        (ends_early, "decode_failed"),
        (fails_in_an_event, "transfer_failed"),
        (lambda pair, ask: ask.refuse(500, "request_failed"), "transfer_failed"),
        (lambda pair, ask: ask.refuse(400, "kv_transfer_params"), "transfer_failed"),
    ],
)
async def test_prefill_endpoint_computes_all_if_the_decode_endpoint_fails(open_pair, failure, outcome):
    """Scenario S07 of tests/README.md: the decode endpoint refuses the request, and the prefill endpoint releases all
    blocks.
    """
    async with open_pair() as pair, pair.client().ask(TEXT, body(stream=True)) as response:
        prefill = await pair.ask_of("p")
        prefill.hold()
        failure(pair, await pair.ask_of("d"))
        await wait_all_tasks_blocked()
        assert prefill.is_gone
        await responded_whole(pair, response, "p", outcome)


async def test_invalid_request_is_refused_once(open_pair):
    async with open_pair() as pair:
        async with pair.client().ask(TEXT, body(max_tokens=10**6)) as response:
            (await pair.ask_of("p")).hold()
            (await pair.ask_of("d")).refuse(400, "context_length_exceeded")
            assert await response.head() == 400
        assert pair.router.dispatch.core.stats().retries_total == 0
        await pair.assert_all_free()


@pytest.mark.parametrize(("status", "code"), [(504, "queue_timeout"), (503, "request_aborted")])
@pytest.mark.parametrize("where", ["p", "d"])
async def test_request_ended_on_purpose_is_not_restarted(open_pair, status, code, where):
    async with open_pair() as pair:
        async with pair.client().ask(TEXT, body()) as response:
            prefill = await pair.ask_of("p")
            if where == "d":
                prefill.hold()
            (await pair.ask_of(where)).refuse(status, code)
            assert await response.head() == status
        assert pair.router.dispatch.core.stats().retries_total == 0
        assert {state._failures_in_a_row for state in pair.router.dispatch.core.endpoints.values()} == {0}
        await pair.assert_all_free()


async def test_aborted_prefill_is_not_restarted(open_pair):
    async with open_pair() as pair:
        async with pair.client().ask(TEXT, body()) as response:
            prefill = await pair.ask_of("p")
            prefill.event(error={"message": "x", "type": "server_error", "code": "request_aborted"})
            prefill.finish()
            assert await response.head() == 503
        assert not pair["d"].open
        await pair.assert_all_free()


async def test_abort_ends_a_request_that_waits_for_another_endpoint(open_pair):
    async with (
        open_pair("p d1 d2", leases_max=1) as pair,
        pair.client().ask(TEXT, body(n=2)),
        pair.client().ask(TEXT, body(stream=True), headers={"x-request-id": "mine"}) as response,
    ):
        (await pair.ask_of("p")).hold()
        await wait_all_tasks_blocked()
        [decode] = [ask for id in ("d1", "d2") for ask in pair[id].open if "kv_transfer_params" in ask.body]
        decode.refuse(503)
        await wait_all_tasks_blocked()
        assert pair["p"].held_count == 1
        aborted = await pair.client().post("/v1/requests/abort", {"ids": ["mine"]})
        assert "aborted" in str(await aborted.json())
        await wait_all_tasks_blocked()
        assert pair["p"].held_count == 0
        assert await response.head() == 503


async def test_second_decode_endpoint_gets_the_held_blocks_after_a_failure(open_pair):
    async with open_pair("p d1 d2") as pair:
        async with pair.client().ask(TEXT, body(stream=True)) as response:
            prefill = await pair.ask_of("p")
            prefill.hold()
            await wait_all_tasks_blocked()
            [(first, decode)] = [(id, ask) for id in ("d1", "d2") for ask in pair[id].open]
            fails_in_an_event(pair, decode)
            again = await pair.ask_of("d2" if first == "d1" else "d1")
            assert again.body["kv_transfer_params"] == pair["p"].params
            assert pair["p"].held_count == 1
            again.token(finish_reason="length")
            again.finish()
            events = [event async for event in response]
        assert [event["choices"][0]["text"] for event in events] == ["x"]
        assert pair.outcomes() == {"paired": 1}
        health = pair.router.dispatch.core.stats().health
        assert {state.value for state in health.values()} == {"healthy"}, "the fault is not clearly that of an endpoint"
        await pair.assert_all_free()


async def test_next_decode_endpoint_does_not_use_blocks_whose_hold_has_ended(open_pair):
    async with open_pair("p d1 d2") as pair, pair.client().ask(TEXT, body()) as response:
        prefill = await pair.ask_of("p")
        prefill.hold()
        await wait_all_tasks_blocked()
        [decode] = [ask for id in ("d1", "d2") for ask in pair[id].open]
        prefill.finish()
        await wait_all_tasks_blocked()
        decode.refuse(503)
        await responded_whole(pair, response, "p", "decode_failed")


@pytest.mark.parametrize("ends", [Ask.finish, Ask.hang_up])
async def test_end_of_the_hold_ends_the_wait_for_a_decode_endpoint(open_pair, ends):
    async with open_pair(leases_max=1) as pair:
        async with pair.client().ask(TEXT, body(n=2)) as other, pair.client().ask(TEXT, body()) as response:
            in_the_way = await pair.ask_of("d")
            prefill = await pair.ask_of("p")
            prefill.hold()
            await wait_all_tasks_blocked()
            assert pair.router.dispatch.core.stats().waiting == 1
            ends(prefill)
            whole = await pair.ask_of("p")
            assert "kv_transfer_params" not in whole.body
            whole.respond(RESPONSE)
            assert await response.json() == RESPONSE
            in_the_way.respond(RESPONSE)
            await other.read()
        assert pair.outcomes() == {"hold_lost": 1}
        await pair.assert_all_free()


async def test_prefill_endpoint_computes_the_whole_request_if_the_decode_endpoint_is_drained(open_pair):
    async with open_pair(leases_max=1) as pair:
        async with pair.client().ask(TEXT, body(n=2)) as other, pair.client().ask(TEXT, body()) as response:
            in_the_way = await pair.ask_of("d")
            (await pair.ask_of("p")).hold()
            await wait_all_tasks_blocked()
            pair.router.fleet.drain(EndpointId("d"))
            whole = await pair.ask_of("p")
            assert "kv_transfer_params" not in whole.body
            whole.respond(RESPONSE)
            assert await response.json() == RESPONSE
            in_the_way.respond(RESPONSE)
            await other.read()
        assert pair.outcomes() == {"no_endpoint": 1}
        await pair.assert_all_free()


async def test_failure_after_the_first_token_is_reported_to_the_client(open_pair):
    async with open_pair() as pair, pair.client().ask(TEXT, body(stream=True)) as response:
        (await pair.ask_of("p")).hold()
        decode = await pair.ask_of("d")
        decode.token()
        await wait_all_tasks_blocked()
        decode.hang_up()
        events = [event async for event in response]
        assert events[-1]["error"]["code"] == "endpoint_lost"
        await pair.assert_all_free()


async def test_attempts_of_both_stages_share_one_limit(open_pair):
    async with open_pair("p1 p2 d1 d2", attempts_max=3) as pair, pair.client().ask(TEXT, body()) as response:
        for _ in range(3):
            await wait_all_tasks_blocked()
            [ask] = [ask for endpoint in pair.endpoints.values() for ask in endpoint.open]
            ask.refuse(500, "too_much")
        assert await response.head() == 500
        assert (await response.json())["error"]["code"] == "too_much"
        await pair.assert_all_free()


# --- cancels and deadlines ---


async def queued_for_prefill(pair: ScriptedEndpoints) -> None:
    assert await pair.listed() == [("other", "prefill", "p"), ("mine", "waiting", None)]


async def during_prefill(pair: ScriptedEndpoints) -> None:
    await pair.ask_of("p")
    assert await pair.listed() == [("mine", "prefill", "p")]


async def queued_for_decode(pair: ScriptedEndpoints) -> None:
    (await pair.ask_of("p")).hold()
    await wait_all_tasks_blocked()
    assert await pair.listed() == [("other", "running", "d"), ("mine", "handover", None)]


async def before_the_first_token(pair: ScriptedEndpoints) -> None:
    (await pair.ask_of("p")).hold()
    await pair.ask_of("d")
    assert await pair.listed() == [("mine", "decode", "d")]


async def with_a_head_and_no_token(pair: ScriptedEndpoints) -> None:
    await before_the_first_token(pair)
    (await pair.ask_of("d")).begin()
    await wait_all_tasks_blocked()


async def during_decode(pair: ScriptedEndpoints) -> None:
    await before_the_first_token(pair)
    (await pair.ask_of("d")).token()
    await wait_all_tasks_blocked()
    assert await pair.listed() == [("mine", "decode", "d")]


async def when_it_is_finished_by_the_prefill_endpoint(pair: ScriptedEndpoints) -> None:
    (await pair.ask_of("p")).hold()
    (await pair.ask_of("d")).refuse(503)
    await pair.ask_of("p")
    assert await pair.listed() == [("mine", "running", "p")]


MOMENTS = [
    queued_for_prefill,
    during_prefill,
    queued_for_decode,
    before_the_first_token,
    with_a_head_and_no_token,
    during_decode,
    when_it_is_finished_by_the_prefill_endpoint,
]
IN_THE_WAY = {queued_for_prefill: body(), queued_for_decode: body(n=2)}


@asynccontextmanager
async def at(pair: ScriptedEndpoints, moment: Any, *, http: int = 1, **fields: object) -> AsyncIterator[Any]:
    """Open a request with the id "mine", and advance the request to the given moment.

    If the moment is a wait in the queue, another request occupies the endpoint for which the request waits.
    """
    async with pair.client().ask(TEXT, IN_THE_WAY.get(moment, body()), headers={"x-request-id": "other"}) as other:
        if moment not in IN_THE_WAY:
            (await pair.ask_of("p")).refuse(400)
            (await pair.ask_of("p")).respond(RESPONSE)
            await other.read()
        await wait_all_tasks_blocked()
        before = {id: endpoint.open for id, endpoint in pair.endpoints.items()}
        held = {id: endpoint.held_count for id, endpoint in pair.endpoints.items()}
        leases = pair.leases()
        headers = {"x-request-id": "mine"}
        async with pair.client(http=http).ask(TEXT, body(stream=True, **fields), headers=headers) as response:
            await wait_all_tasks_blocked()
            await moment(pair)
            yield response
        await wait_all_tasks_blocked()
        assert {id: endpoint.open for id, endpoint in pair.endpoints.items()} == before
        assert {id: endpoint.held_count for id, endpoint in pair.endpoints.items()} == held
        assert pair.leases() == leases
        assert pair.router.dispatch.core.stats().waiting == 0


@pytest.mark.parametrize("http", [1, 2])
@pytest.mark.parametrize("moment", MOMENTS)
async def test_client_that_leaves_ends_both_stages(open_pair, moment, http):
    """Scenarios S07 and S10 of tests/README.md: at any moment, both connections are closed and both leases are
    returned.
    """
    async with open_pair(leases_max=1) as pair:
        async with at(pair, moment, http=http):
            pass
        await pair.assert_all_free()


@pytest.mark.parametrize("moment", MOMENTS)
async def test_abort_by_id_ends_both_stages(open_pair, moment):
    async with open_pair(leases_max=1) as pair:
        async with at(pair, moment) as response:
            aborted = await pair.client().post("/v1/requests/abort", {"ids": ["mine"]})
            assert [each["result"] for each in (await aborted.json())["data"]] == ["aborted"]
            await wait_all_tasks_blocked()
            if await response.head() == 200:
                events = [event async for event in response]
                assert events[-1]["error"]["code"] == "request_aborted"
            else:
                assert (await response.json())["error"]["code"] == "request_aborted"
        await pair.assert_all_free()


@pytest.mark.parametrize("moment", MOMENTS)
async def test_total_deadline_covers_both_stages(open_pair, moment, autojump_clock):
    async with open_pair(leases_max=1) as pair:
        async with at(pair, moment, timeout=10) as response:
            if await response.head() == 200:
                assert [event async for event in response][-1]["error"]["code"] == "timeout"
            else:
                assert (response.status, (await response.json())["error"]["code"]) == (504, "timeout")
            assert trio.current_time() == pytest.approx(10, abs=0.1)
        await pair.assert_all_free()


async def test_first_token_deadline_covers_both_stages(open_pair, autojump_clock):
    async with open_pair() as pair:
        async with pair.client().ask(TEXT, body(ttft_timeout=10, timeout=100)) as response:
            prefill = await pair.ask_of("p")
            await trio.sleep(4)
            prefill.hold()
            decode = await pair.ask_of("d")
            assert decode.body["ttft_timeout"] == pytest.approx(6, abs=0.1)
            assert decode.body["timeout"] == pytest.approx(96, abs=0.1)
            assert await response.head() == 504
            assert (await response.json())["error"]["code"] == "ttft_timeout"
            assert trio.current_time() == pytest.approx(10, abs=0.1)
        await pair.assert_all_free()


async def test_prefill_time_does_not_count_as_queue_time(open_pair, autojump_clock):
    async with open_pair(leases_max=1) as pair:
        async with (
            pair.client().ask(TEXT, body(n=2)) as other,
            pair.client().ask(TEXT, body(queue_timeout=2)) as response,
        ):
            in_the_way = await pair.ask_of("d")
            prefill = await pair.ask_of("p")
            await trio.sleep(30)
            prefill.hold()
            await trio.sleep(1.5)
            assert await pair.listed() != []
            assert pair.router.dispatch.core.stats().waiting == 1
            assert await response.head() == 504
            assert (await response.json())["error"]["code"] == "queue_timeout"
            assert trio.current_time() == pytest.approx(32, abs=0.1)
            assert pair["p"].held_count == 0
            in_the_way.respond(RESPONSE)
            await other.read()
        await pair.assert_all_free()


async def test_request_waiting_for_prefill_does_not_block_requests_waiting_for_decode(open_pair):
    async with open_pair(leases_max=1) as pair:
        async with (
            pair.client().ask(TEXT, body()) as first,
            pair.client().ask(TEXT, body()) as second,
            pair.client().ask(TEXT, body(prompt="short")) as whole,
        ):
            await pair.ask_of("p")
            (await pair.ask_of("d")).respond(RESPONSE)
            await whole.read()
            assert pair.router.dispatch.core.stats().waiting == 1
            (await pair.ask_of("p")).hold()
            (await pair.ask_of("d")).respond(RESPONSE)
            await first.read()
            (await pair.ask_of("p")).hold()
            (await pair.ask_of("d")).respond(RESPONSE)
            await second.read()
        await pair.assert_all_free()


async def test_drain_continues_requests_after_prefill_and_refuses_others(open_pair):
    async with open_pair(leases_max=1) as pair:
        async with (
            pair.client().ask(TEXT, body(n=2)) as whole,
            pair.client().ask(TEXT, body()) as handed,
            pair.client().ask(TEXT, body()) as prefilling,
            pair.client().ask(TEXT, body()) as waiting,
        ):
            in_the_way = await pair.ask_of("d")
            (await pair.ask_of("p")).hold()
            await wait_all_tasks_blocked()
            pair.router.drain()
            assert await waiting.head() == 503
            in_the_way.respond(RESPONSE)
            await whole.read()
            (await pair.ask_of("d")).respond(RESPONSE)
            assert await handed.json() == RESPONSE
            [last] = [ask for ask in pair["p"].open if not ask.is_held]
            last.hold()
            (await pair.ask_of("d")).respond(RESPONSE)
            assert await prefilling.json() == RESPONSE
        await pair.assert_all_free()


async def test_prefill_at_a_hanging_endpoint_is_retried_when_its_checks_fail(open_pair, autojump_clock):
    from trioserve.proxy.endpoint_watch import WatchSettings

    watch = WatchSettings(health_seconds=1, load_seconds=1, response_seconds_max=1, listens=False)
    async with open_pair(watch=watch, failures_max=1) as pair, pair.client().ask(TEXT, body()) as response:
        prefill = await pair.ask_of("p")
        pair["p"].is_silent = True
        whole = None
        while whole is None:
            await trio.sleep(1)
            whole = next(iter(pair["d"].open), None)
        assert prefill.is_gone
        assert "kv_transfer_params" not in whole.body
        whole.respond(RESPONSE)
        assert await response.json() == RESPONSE
        assert pair.outcomes() == {"prefill_failed": 1}
        await pair.assert_all_free()


async def test_outcomes_of_disaggregated_requests_are_counted(open_pair, autojump_clock):
    async with open_pair() as pair:
        for stream in (False, True):
            async with pair.client().ask(TEXT, body(stream=stream)) as response:
                (await pair.ask_of("p")).hold()
                await trio.sleep(0.15)
                decode = await pair.ask_of("d")
                if stream:
                    decode.token(finish_reason="length")
                    decode.finish()
                else:
                    decode.respond(RESPONSE)
                await response.read()
        async with pair.client().ask(TEXT, body()):
            await pair.ask_of("p")
        await wait_all_tasks_blocked()
        page = (await pair.client().get("/metrics")).body.decode()
        assert '\ntrioserve_router:pairs_total{outcome="paired"} 2.0\n' in page
        assert '\ntrioserve_router:pairs_total{outcome="left"} 1.0\n' in page
        for outcome in PairOutcome:
            assert f'trioserve_router:pairs_total{{outcome="{outcome.value}"}} ' in page
        assert "\ntrioserve_router:pair_handover_seconds_count 1.0\n" in page
        assert "\ntrioserve_router:queue_wait_seconds_count 3.0\n" in page, "a request counts once in the queue"
        assert "\ntrioserve_router:pair_handover_seconds_sum 0.15" in page
        await pair.assert_all_free()


async def test_remaining_queue_time_does_not_shrink_during_prefill(open_pair, autojump_clock):
    async with open_pair() as pair:
        async with pair.client().ask(TEXT, body(queue_timeout=2)) as response:
            prefill = await pair.ask_of("p")
            assert prefill.body["queue_timeout"] == pytest.approx(2, abs=0.1)
            await trio.sleep(30)
            prefill.hold()
            decode = await pair.ask_of("d")
            assert decode.body["queue_timeout"] == pytest.approx(2, abs=0.1)
            decode.respond(RESPONSE)
            await response.read()
        await pair.assert_all_free()


async def test_error_that_arrives_in_pieces_is_recognized(open_pair):
    async with open_pair() as pair, pair.client().ask(TEXT, body(stream=True)) as response:
        (await pair.ask_of("p")).hold()
        decode = await pair.ask_of("d")
        for piece in ('data: {"error": {"code": "requ', 'est_failed", "message": "no"}}\n\n'):
            decode.say(piece)
            await wait_all_tasks_blocked()
        decode.finish()
        await responded_whole(pair, response, "p", "transfer_failed")


async def test_token_that_arrives_in_pieces_is_forwarded_whole(open_pair):
    async with open_pair() as pair, pair.client().ask(TEXT, body(stream=True)) as response:
        (await pair.ask_of("p")).hold()
        decode = await pair.ask_of("d")
        decode.say('data: {"choices": [{"te')
        await wait_all_tasks_blocked()
        assert pair["p"].held_count == 1
        decode.say('xt": "x"}]}\n\n')
        decode.finish()
        assert [event["choices"][0]["text"] async for event in response] == ["x"]


async def test_response_ended_on_purpose_is_not_restarted(open_pair):
    async with open_pair() as pair, pair.client().ask(TEXT, body(stream=True)) as response:
        (await pair.ask_of("p")).hold()
        decode = await pair.ask_of("d")
        decode.event(error={"message": "time is over", "type": "server_error", "code": "timeout"})
        decode.finish()
        assert [event["error"]["code"] async for event in response] == ["timeout"]
        await pair.assert_all_free()


async def test_client_cannot_set_the_stage_header(open_pair):
    headers = {"x-trioserve-stage": "decode"}
    async with open_pair("w") as pair, pair.client().ask(TEXT, body(), headers=headers):
        assert "x-trioserve-stage" not in (await pair.ask_of("w")).headers


async def test_router_stops_reading_a_prefill_response_that_is_too_long(open_pair):
    async with open_pair() as pair, pair.client().ask(TEXT, body()) as response:
        prefill = await pair.ask_of("p")
        for _ in range(18):
            prefill.say("x" * 65_536)
            await wait_all_tasks_blocked()
        assert prefill.is_gone
        await responded_whole(pair, response, "p", "not_held")


@pytest.mark.parametrize(("characters", "first"), [(122, "p"), (121, "d")])
async def test_only_prompts_above_a_length_are_disaggregated(open_pair, characters, first):
    """The length is estimated as 4 bytes per token, including quotation marks."""
    async with open_pair() as pair, pair.client().ask(TEXT, body(prompt="x" * characters)):
        await pair.ask_of(first)
