"""Tests all routes of an endpoint through a router: computed responses, and stored objects of a single endpoint."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api import routes
from trioserve.api.caller import AccessRules
from trioserve.proxy import router_app

RESPONSES = "/v1/responses"
ENGINE = {"response": "good morning", "max_model_len": 1000, "block_count": 600, "max_num_batched_tokens": 600}


def asked(text: str = "hello", **fields: object) -> dict[str, object]:
    return {"model": "fake", "input": text, **fields}


async def code(response: Any) -> str:
    return (await response.json())["error"]["code"]


@pytest.mark.parametrize(
    "path, body, field",
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 30}, "content"),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hi"}]}, "input_tokens"),
        (RESPONSES, {"input": "Hi"}, "output"),
        (RESPONSES + "/input_tokens", {"input": "Hi"}, "input_tokens"),
        ("/tokenize", {"prompt": "Hi"}, "tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, "choices"),
    ],
)
async def test_requests_of_every_api_are_forwarded(
    open_setup: Any, path: str, body: dict[str, Any], field: str
) -> None:
    async with open_setup(engine=ENGINE) as setup:
        response = await setup.client().post(path, {"model": "fake", **body})
        assert response.status == 200, response.body
        assert field in await response.json()
        assert response.headers["x-trioserve-endpoint"] in "ab"
        await setup.assert_all_free()


async def test_router_errors_have_the_format_of_the_requested_api(open_setup: Any) -> None:
    body = {"model": "nobody", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 30}
    async with open_setup(engine=ENGINE) as setup:
        refused = await (await setup.client().post("/v1/messages", body)).json()
        assert (refused["type"], refused["error"]["type"]) == ("error", "not_found_error")
        refused = await (await setup.client().post("/v1/messages", {**body, "model": "fake", "max_tokens": 0})).json()
        assert refused["error"]["type"] == "invalid_request_error"


async def test_messages_request_refused_by_a_leaving_endpoint_goes_to_another_endpoint(open_setup: Any) -> None:
    """The endpoint refuses with status 529, as Anthropic's API does."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 30}
    async with open_setup(engine=ENGINE) as setup:
        setup.servers["a"].engine.drain()
        for _ in range(3):
            response = await setup.client().post("/v1/messages", body)
            assert (response.status, response.headers["x-trioserve-endpoint"]) == (200, "b")
        await setup.assert_all_free()


async def test_client_that_leaves_a_messages_stream_frees_the_endpoint(open_setup: Any) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 500, "stream": True}
    async with open_setup("a", engine={**ENGINE, "response": "x" * 400}) as setup:
        engine = setup.servers["a"].engine
        engine.pause()
        client = setup.client()
        async with client.ask("/v1/messages", body) as response:
            await engine.step(3)
            assert await response.head() == 200
            async with engine.held_step():
                client.close()
                await wait_all_tasks_blocked()
        await wait_all_tasks_blocked()
        await setup.assert_all_free()


# --- stored objects ---


@pytest.mark.parametrize("stream", [False, True])
async def test_stored_response_is_found_at_its_endpoint(open_setup: Any, stream: bool) -> None:
    async with open_setup(engine=ENGINE, policy="round_robin") as setup:
        made: dict[str, str] = {}
        for _ in range(4):
            response = await setup.client().post(RESPONSES, asked(stream=stream))
            events = [event async for event in response] if stream else []
            id = events[0]["response"]["id"] if stream else (await response.json())["id"]
            made[id] = response.headers["x-trioserve-endpoint"]
        assert set(made.values()) == {"a", "b"}
        for id, endpoint in made.items():
            kept = await setup.client().get(f"{RESPONSES}/{id}")
            assert (kept.status, kept.headers["x-trioserve-endpoint"]) == (200, endpoint)
            assert (await kept.json())["output"][0]["content"][0]["text"] == "good morning"
            items = await setup.client().get(f"{RESPONSES}/{id}/input_items")
            assert len((await items.json())["data"]) == 1
            after = await setup.client().post(RESPONSES, asked("And now?", previous_response_id=id))
            assert (after.status, after.headers["x-trioserve-endpoint"]) == (200, endpoint)
        async with setup.client().ask(f"{RESPONSES}/{id}", method="DELETE") as deleted:
            assert (await deleted.json())["deleted"] is True
        assert (await setup.client().get(f"{RESPONSES}/{id}")).status == 404
        await setup.assert_all_free()


async def test_router_searches_endpoints_for_an_unknown_object(open_setup: Any) -> None:
    async with open_setup(engine=ENGINE) as setup:
        direct = await (await setup.servers["b"].client().post(RESPONSES, asked())).json()
        kept = await setup.client().get(f"{RESPONSES}/{direct['id']}")
        assert (kept.status, kept.headers["x-trioserve-endpoint"]) == (200, "b")
        direct = await (await setup.servers["a"].client().post(RESPONSES, asked())).json()
        after = await setup.client().post(RESPONSES, asked("Go on", previous_response_id=direct["id"]))
        assert (after.status, after.headers["x-trioserve-endpoint"]) == (200, "a")
        for path in (f"{RESPONSES}/resp_none", "/v1/streams/none"):
            assert (await setup.client().get(path)).status == 404
        missing = await setup.client().post(RESPONSES, asked(previous_response_id="resp_none"))
        assert missing.status == 404


async def test_object_is_not_reported_missing_while_an_endpoint_is_unreachable(open_setup: Any) -> None:
    async with open_setup(engine=ENGINE) as setup:
        setup.unreachable.add("b")
        for server in setup.servers.values():
            await server.hang_up()
        response = await setup.client().get(f"{RESPONSES}/resp_none")
        assert (response.status, response.headers["x-trioserve-reason"]) == (503, "no_endpoint")


@pytest.mark.parametrize("id", ["a b", "a\r\nx: y", "\u00fc", "../../health", "resp_x?stream=true", "", "x" * 70_000])
async def test_invalid_id_of_a_stored_object_is_not_found(open_setup: Any, id: str) -> None:
    async with open_setup(engine=ENGINE) as setup:
        response = await setup.client().post(RESPONSES, asked(previous_response_id=id))
        assert (response.status, await code(response)) == (404, "not_found")
        batch = {"input_file_id": id, "endpoint": "/v1/completions", "completion_window": "24h"}
        assert (await setup.client().post("/v1/batches", batch)).status == 404
        await setup.assert_all_free()


async def test_error_response_does_not_locate_an_object(open_setup: Any) -> None:
    async with open_setup(engine=ENGINE) as setup:
        made = await (await setup.servers["b"].client().post(RESPONSES, asked())).json()
        path = f"{RESPONSES}/{made['id']}"
        # The endpoint is "a", which does not have the object.
        assert (await setup.client().get(f"{path}?stream=true&starting_after=x")).status == 400
        kept = await setup.client().get(path)
        assert (kept.status, kept.headers["x-trioserve-endpoint"]) == (200, "b")
        await setup.assert_all_free()


async def test_stored_object_of_another_api_key_is_not_found(open_setup: Any) -> None:
    """The endpoints have no keys, so they cannot distinguish callers."""
    keys = {"api_keys": ("one", "two"), "admin_api_key": "admin"}
    async with open_setup(engine=ENGINE, **keys) as setup:

        def client(key: str) -> Any:
            return setup.client(headers={"authorization": f"Bearer {key}"})

        id = (await (await client("one").post(RESPONSES, asked())).json())["id"]
        assert (await client("one").get(f"{RESPONSES}/{id}")).status == 200
        assert (await client("admin").get(f"{RESPONSES}/{id}")).status == 200
        foreign = await client("two").get(f"{RESPONSES}/{id}")
        unknown = await client("two").get(f"{RESPONSES}/resp_none")
        assert (foreign.status, unknown.status) == (404, 404)
        assert foreign.body.replace(id.encode(), b"resp_none") == unknown.body
        assert (await client("two").post(RESPONSES, asked(previous_response_id=id))).status == 404
        async with client("two").ask(f"{RESPONSES}/{id}", method="DELETE") as refused:
            assert await refused.head() == 404
        # Only the endpoint reads the lines of a batch.
        batch = {"input_file_id": "file-x", "endpoint": RESPONSES, "completion_window": "24h"}
        refused = await client("two").post("/v1/batches", batch)
        assert (refused.status, (await refused.json())["error"]["param"]) == (400, "endpoint")
        # Objects that were not created through this router are hidden too, because it does not know their owners.
        direct = await (await setup.servers["b"].client().post(RESPONSES, asked())).json()
        assert (await client("one").get(f"{RESPONSES}/{direct['id']}")).status == 404
        assert (await client("admin").get(f"{RESPONSES}/{direct['id']}")).status == 200
        for item in (
            b'{"type": "item_reference", "id": "msg_1"}',
            b'{"type": "item_referenc\\u0065", "id": "msg_1"}',
            b'{"id": "msg_1"}',
        ):
            refused = await client("one").post(RESPONSES, b'{"model": "fake", "input": [%b]}' % item)
            assert refused.status == 400, item
            assert (await refused.json())["error"]["param"] == "input"
        assert (await client("one").get("/v1/files")).status == 501


async def test_sessions_of_two_keys_have_different_names_at_endpoints(open_pair: Any) -> None:
    async with open_pair("w", api_keys=("one", "two"), models={"fake": "fake"}) as pair:
        seen = []
        for key in ("one", "two", "one"):
            headers = {"authorization": f"Bearer {key}", "x-session-id": "mine"}
            async with pair.client(headers=headers).ask("/v1/completions", {"model": "fake", "prompt": "x"}):
                ask = await pair.ask_of("w")
                seen.append(dict(ask.headers)["x-session-id"])
            await wait_all_tasks_blocked()
        assert "mine" not in seen
        assert seen[0] == seen[2] != seen[1]


@pytest.mark.parametrize("keys", [(), ("one", "two")])
async def test_session_is_ended_at_the_endpoint_that_has_it(open_setup: Any, keys: tuple[str, ...]) -> None:
    async with open_setup(engine=ENGINE, policy="session", api_keys=keys) as setup:

        def client(key: str) -> Any:
            return setup.client(headers={"authorization": f"Bearer {key}"} if keys else {})

        async def delete(key: str, session: str) -> int:
            async with client(key).ask(f"/v1/sessions/{session}", method="DELETE") as response:
                return int(await response.head())

        def session_count() -> int:
            return sum(len(server.engine.sessions) for server in setup.servers.values())

        for session in ("mine", "user 1/chat", "mine"):
            fields = {"x-session-id": session}
            response = await client("one").post("/v1/completions", {"model": "fake", "prompt": "x"}, headers=fields)
            assert response.status == 200
        assert session_count() == 2
        if keys:
            assert await delete("two", "mine") == 404
        assert await delete("one", "mine") == 200
        assert await delete("one", "user%201/chat") == 200
        assert session_count() == 0


@pytest.mark.parametrize("name", ["x-session-id", "prompt_cache_key"])
async def test_requests_of_one_session_go_to_one_endpoint(open_setup: Any, name: str) -> None:
    async with open_setup(engine=ENGINE, policy="session") as setup:
        places: dict[str, set[str]] = {}
        for session in [f"session {number % 8}" for number in range(24)]:
            body = {"model": "fake", "prompt": "x", **({name: session} if name == "prompt_cache_key" else {})}
            fields = {name: session} if name == "x-session-id" else {}
            response = await setup.client().post("/v1/completions", body, headers=fields)
            places.setdefault(session, set()).add(response.headers["x-trioserve-endpoint"])
        assert all(len(found) == 1 for found in places.values())
        assert set.union(*places.values()) == {"a", "b"}


# --- requests and models ---


async def test_tokenizer_info_is_forwarded_to_an_endpoint(open_setup: Any) -> None:
    async with open_setup(engine=ENGINE) as setup:
        told = await (await setup.client().get("/tokenizer_info?model=fake")).json()
        assert told["eos_token"] == "<|end|>"
        assert (await setup.client().get("/tokenizer_info?model=nobody")).status == 404


async def test_control_request_reaches_the_endpoint_of_a_running_request(open_setup: Any) -> None:
    async with open_setup(engine=ENGINE) as setup:
        response = await setup.client().post("/v1/requests/none", {"end_thinking": True})
        assert (response.status, await code(response)) == (404, "request_not_found")
        body = {"model": "fake", "prompt": "hello", "max_tokens": 50, "stream": True}
        for server in setup.servers.values():
            server.engine.pause()
        async with setup.client().ask("/v1/completions", body, headers={"x-request-id": "r/1"}):
            await wait_all_tasks_blocked()
            response = await setup.client().post("/v1/requests/r/1", {"end_thinking": True})
            assert (response.status, await code(response)) == (409, "no_thought")


async def test_client_cannot_hand_over_requests(open_setup: Any) -> None:
    async with open_setup(engine={"paused": True}) as setup:
        body = {"model": "fake", "prompt": "hello", "max_tokens": 50, "stream": True}
        async with setup.client().ask("/v1/completions", body, headers={"x-request-id": "mine"}):
            for server in setup.servers.values():
                await server.engine.step(3)
            await wait_all_tasks_blocked()
            before = setup.leases()
            response = await setup.client().post("/v1/requests/mine/hand-over", {})
            assert response.status == 404
            await wait_all_tasks_blocked()
            assert setup.leases() == before
            assert all(state.busy_until <= trio.current_time() for state in setup.router.dispatch.endpoints)


async def test_router_needs_a_model_name_if_there_are_several(open_setup: Any) -> None:
    async with open_setup(engine=ENGINE, access=AccessRules(model_is_required=True)) as setup:
        response = await setup.client().post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert (response.status, (await response.json())["error"]["param"]) == (400, "model")


OF_ONE_ENGINE = (
    "/v1/requests/{request}/hand-over",
    "/debug/steps",
    "/kv_events",
    "/load",
    "/openapi.json",
    "/v1/kept_streams/{stream}",
    "/v1/sessions",
    *("/pause", "/resume", "/is_paused", "/pause_generation", "/continue_generation"),
    *("/reset_prefix_cache", "/flush_cache"),
    *("/update_weights_from_disk", "/update_weights_from_shared_memory", "/get_weight_version"),
    *("/weight_info", "/get_world_size"),
    *("/update_weights_from_distributed", "/init_weights_update_group", "/destroy_weights_update_group"),
    "/kv_cache",
)


def test_router_has_every_route_of_an_engine() -> None:
    ours = {(operation.method, operation.path) for operation in router_app.OPERATIONS}
    theirs = {(operation.method, operation.path) for operation in routes.OPERATIONS}
    assert {path for method, path in theirs - ours} == set(OF_ONE_ENGINE)


async def test_message_batch_is_found_at_its_endpoint(open_setup: Any, autojump_clock: Any) -> None:
    params = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 30}
    path = "/v1/messages/batches"
    async with open_setup(engine=ENGINE) as setup:
        made = await setup.client().post(path, {"requests": [{"custom_id": "one", "params": params}]})
        assert made.status == 200, made.body
        id = (await made.json())["id"]
        batch: dict[str, Any] = {}
        while batch.get("processing_status") != "ended":
            kept = await setup.client().get(f"{path}/{id}")
            batch = await kept.json()
            await trio.sleep(1)
        assert kept.headers["x-trioserve-endpoint"] == made.headers["x-trioserve-endpoint"]
        results = await setup.client().get(f"{path}/{id}/results")
        assert b"good morning" in results.body
        assert (await setup.client().get(f"{path}/msgbatch_none")).status == 404
