"""Tests that a router loads and unloads LoRA adapters at all endpoints or at named endpoints, and reports a result for
each endpoint.
"""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api.caller import AccessRules
from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.sampling import SamplingParams

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
LOADS: dict[str, Any] = {"access": AccessRules(loads_adapters=True)}
SQL = {"lora_name": "sql", "lora_path": "/adapters/sql"}


async def post(setup, path: str, body: object, **options: Any) -> tuple[int, dict[str, Any]]:
    response = await setup.client(**options).post(path, body)
    return response.status, await response.json()


async def where(setup, model: str = "sql") -> tuple[int, str | None]:
    response = await setup.client().post("/v1/completions", {"model": model, "prompt": "x", "max_tokens": 1})
    return response.status, response.headers.get("x-trioserve-endpoint")


def statuses(said: dict[str, Any]) -> dict[str, int]:
    return {answer["endpoint"]: answer["status"] for answer in said["data"]}


async def test_all_endpoints_load_an_adapter_and_the_next_request_uses_it(open_setup):
    async with open_setup("ab", engine=LOADS) as setup:
        assert await where(setup) == (404, None)
        status, said = await post(setup, LOAD, SQL)
        assert (status, statuses(said)) == (200, {"a": 200, "b": 200})
        assert said["data"][0]["message"] == "Success: LoRA adapter 'sql' added successfully."
        assert (await where(setup))[0] == 200
        status, said = await post(setup, UNLOAD, {"lora_name": "sql"})
        assert (status, statuses(said)) == (200, {"a": 200, "b": 200})
        assert await where(setup) == (404, None)
        assert (await where(setup, "fake"))[0] == 200
        await setup.assert_all_free()


async def test_only_the_named_endpoint_loads_an_adapter(open_setup):
    async with open_setup("abc", engine=LOADS) as setup:
        status, said = await post(setup, f"{LOAD}?id=c&id=b", SQL)
        assert (status, statuses(said)) == (200, {"c": 200, "b": 200})
        assert {await where(setup) for _ in range(6)} <= {(200, "b"), (200, "c")}
        status, said = await post(setup, f"{UNLOAD}?id=b", {"lora_name": "sql"})
        assert (status, statuses(said)) == (200, {"b": 200})
        assert {await where(setup) for _ in range(4)} == {(200, "c")}
        status, said = await post(setup, UNLOAD, {"lora_name": "sql"})
        assert (status, statuses(said)) == (200, {"a": 200, "b": 200, "c": 200}), (
            "the adapter is unloaded everywhere: a and b do not have it"
        )
        status, said = await post(setup, UNLOAD, {"lora_name": "sql"})
        assert (status, said["error"]["code"]) == (404, "adapter_failed"), "no endpoint has the adapter"
        status, said = await post(setup, f"{LOAD}?id=d", SQL)
        assert (status, said["error"]["param"]) == (400, "id")


async def test_load_failure_at_one_endpoint_is_reported_and_another_endpoint_keeps_the_adapter(open_setup):
    async with open_setup("ab", engine=LOADS) as setup:
        await setup.servers["a"].engine.load_adapter("sql", "/adapters/other")
        status, said = await post(setup, LOAD, SQL)
        assert (status, statuses(said)) == (502, {"a": 400, "b": 200})
        assert said["error"]["code"] == "adapter_failed_in_part"
        assert "a: 400 The lora adapter 'sql' has already been loaded" in said["error"]["message"]
        assert said["error"]["message"].endswith("It succeeded at b, and is not undone there.")
        assert {await where(setup) for _ in range(4)} <= {(200, "a"), (200, "b")}
        setup.unreachable.add("a")
        await setup.servers["a"].hang_up()
        status, said = await post(setup, LOAD, {**SQL, "lora_name": "more"})
        assert (status, statuses(said)) == (502, {"a": 502, "b": 200})
        assert await where(setup, "more") == (200, "b")


async def test_endpoints_with_fixed_adapters_refuse_to_load_another_adapter(open_setup):
    async with open_setup("ab", engine={"lora_modules": ("sql=/adapters/sql",)}) as setup:
        status, said = await post(setup, LOAD, {**SQL, "lora_name": "more"})
        assert (status, said["error"]["code"]) == (404, "adapter_failed")
        assert "start it with --enable-lora" in said["error"]["message"]
        status, said = await post(setup, UNLOAD, {"lora_name": "sql"})
        assert status == 404
        assert (await where(setup))[0] == 200, "the adapter is still loaded"


async def test_adapter_that_is_being_unloaded_gets_no_new_requests(open_setup):
    async with open_setup("ab", engine={**LOADS, "paused": True}) as setup, trio.open_nursery() as nursery:
        await post(setup, LOAD, SQL)
        engine = setup.servers["a"].engine
        async with engine.generate("x", SamplingParams(max_tokens=1), adapter="sql") as stream:
            answers: list[tuple[int, dict[str, Any]]] = []

            async def unload() -> None:
                answers.append(await post(setup, UNLOAD, {"lora_name": "sql"}))

            nursery.start_soon(unload)
            await wait_all_tasks_blocked()
            assert answers == [], "a request still uses the adapter"
            assert await where(setup) == (404, None)
            await engine.step()
            assert [delta.finish_reason async for delta in stream][-1] is not None
        await wait_all_tasks_blocked()
        assert [(status, statuses(said)) for status, said in answers] == [(200, {"a": 200, "b": 200})]


async def test_unload_reports_a_result_for_an_endpoint_that_is_removed_meanwhile(open_setup):
    async with open_setup("ab", engine={**LOADS, "paused": True}) as setup, trio.open_nursery() as nursery:
        await setup.servers["b"].engine.load_adapter("sql", "/adapters/sql")
        engine = setup.servers["b"].engine
        answers: list[tuple[int, dict[str, Any]]] = []

        async def unload() -> None:
            answers.append(await post(setup, UNLOAD, {"lora_name": "sql"}))

        async with engine.generate("x", SamplingParams(max_tokens=1), adapter="sql") as stream:
            nursery.start_soon(unload)
            # Endpoint a does not have the adapter. Endpoint b waits for its running request.
            await wait_all_tasks_blocked()
            setup.router.fleet.drain(EndpointId("a"))
            assert "a" not in setup.router.fleet.specs()
            await engine.step()
            assert [delta.finish_reason async for delta in stream][-1] is not None
        await wait_all_tasks_blocked()
        assert [(status, statuses(said)) for status, said in answers] == [(200, {"a": 200, "b": 200})]


async def test_client_that_leaves_cancels_the_requests_to_endpoints(open_setup):
    async with open_setup("ab", engine={**LOADS, "paused": True}) as setup:
        await post(setup, LOAD, SQL)
        async with setup.servers["a"].engine.generate("x", adapter="sql"), trio.open_nursery() as nursery:
            nursery.start_soon(post, setup, UNLOAD, {"lora_name": "sql"})
            await wait_all_tasks_blocked()
            assert setup.servers["a"].server.counters().exchanges_open == 1
            nursery.cancel_scope.cancel()
            await wait_all_tasks_blocked()
            await setup.router.assert_all_free()
            assert setup.servers["a"].server.counters().exchanges_open == 0
        await setup.assert_all_free()
        assert [len(server.engine.adapters.names) for server in setup.servers.values()] == [0, 0]


@pytest.mark.parametrize(("key", "status"), [("user", 403), ("admin", 200)])
async def test_loading_adapters_needs_the_admin_key(open_setup, key, status):
    options = {"api_keys": ("user",), "admin_api_key": "admin"}
    async with open_setup("ab", engine=LOADS, **options) as setup:
        found, _said = await post(setup, LOAD, SQL, headers={"authorization": f"Bearer {key}"})
        assert found == status
        assert [len(server.engine.adapters.names) for server in setup.servers.values()] == [int(status == 200)] * 2


@pytest.mark.parametrize("body", [{}, {"lora_name": "sql"}, {"lora_name": 1, "lora_path": "x"}])
async def test_invalid_adapter_request_reaches_no_endpoint(open_setup, body):
    async with open_setup("ab", engine=LOADS) as setup:
        status, said = await post(setup, LOAD, body)
        assert status == 400
        assert "data" not in said
