"""Tests aborts with partial results through a router: the caller of the abort and the client get the output so far."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.testing.memory_client import memory_connection

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
BODY = {"model": "fake", "prompt": "hello", "max_tokens": 50, "temperature": 1, "seed": 3, "ignore_eos": True}


async def asked(setup: Any, path: str, body: Any, answers: list[Any], *, id: str = "r", **headers: str) -> None:
    async with setup.client().ask(path, body, headers={"x-request-id": id, **headers}) as response:
        status = await response.head()
        is_events = response.headers["content-type"].startswith("text/event-stream")
        answers.append((status, [event async for event in response] if is_events else await response.json()))


async def rows_of(setup: Any, path: str, body: Any, **headers: str) -> list[Any]:
    async with setup.client().ask(path, body, headers=headers) as response:
        assert await response.head() == 200, await response.read()
        return (await response.json())["data"]


@pytest.mark.parametrize(
    ("path", "order"),
    [
        ("/v1/requests/abort", {"ids": ["r", "nobody"]}),
        ("/abort_request", {"rid": "r"}),
        ("/abort_request", {"abort_all": True}),
    ],
    ids=["ours", "sglang's", "sglang's for all"],
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_abort_returns_the_partial_result(open_setup, path, order, is_streamed):
    """The client of the request gets the usual error about the abort."""
    async with open_setup("ab", engine={"paused": True}) as setup:
        answers: list[Any] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked, setup, PATH, {**BODY, "stream": is_streamed}, answers)
            await wait_all_tasks_blocked()
            [there] = [id for id, count in setup.leases().items() if count]
            await setup.servers[there].engine.step(5)
            row, *others = await rows_of(setup, path, {**order, "return_partial": True})
        assert (row["id"], row["result"], len(row["partials"])) == ("r", "aborted", 1)
        assert len(row["partials"][0]["resume"]["token_ids"][0]) == 5
        assert [(other["id"], other["result"], other["partials"]) for other in others] == [
            ("nobody", "unknown", []) for _ in others
        ]
        [(status, said)] = answers
        code = said[-1]["error"]["code"] if is_streamed else said["error"]["code"]
        assert (status, code) == (200 if is_streamed else 503, "request_aborted")
        await setup.assert_all_free()


@pytest.mark.parametrize("how", ["by id", "by ids", "deadline"])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_client_gets_the_partial_result_and_can_resume(autojump_clock, open_setup, how, is_streamed):
    async with open_setup("ab", engine={"paused": True}) as setup:
        limit = {"timeout": 3} if how == "deadline" else {}
        body = {**BODY, "stream": is_streamed, "return_partial": True, "return_token_ids": True}
        answers: list[Any] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked, setup, PATH, {**body, **limit}, answers)
            await wait_all_tasks_blocked()
            [there] = [id for id, count in setup.leases().items() if count]
            await setup.servers[there].engine.step(5)
            await wait_all_tasks_blocked()
            if how == "by id":
                async with setup.client().ask("/v1/requests/r", None, method="DELETE") as response:
                    assert (await response.json())["result"] == "aborted"
            elif how == "by ids":
                [row] = await rows_of(setup, "/v1/requests/abort", {"ids": ["r"]})
                assert row == {"id": "r", "object": "request.abort", "result": "aborted"}
        [(status, said)] = answers
        assert status == 200
        resume = said[-1]["resume"] if is_streamed else said["resume"]
        assert len(resume["token_ids"][0]) == 5
        [choice] = [choice for event in said[-2:] for choice in event["choices"]] if is_streamed else said["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "timeout" if limit else None)
        await setup.assert_all_free()
        for server in setup.servers.values():
            server.engine.resume()
        await asked(setup, PATH, {**body, "stream": False, "resume": resume}, answers)
        await asked(setup, PATH, {**body, "stream": False, "seed": 3}, answers)
        continued, whole = (said["choices"] for _, said in answers[1:])
        assert continued == whole


async def test_request_ends_without_partial_result_if_the_endpoint_does_not_answer(autojump_clock, open_setup):
    """The request still ends one second later."""
    async with open_setup("a", engine={"paused": True}) as setup:
        answers: list[Any] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked, setup, PATH, {**BODY, "return_partial": True}, answers)
            await setup.servers["a"].engine.step(2)
            await wait_all_tasks_blocked()
            setup.servers["a"].connect = SilentConnect()
            setup.router.fleet.remote("a").close()  # This call closes the idle connections.
            began_at = trio.current_time()
            [row] = await rows_of(setup, "/v1/requests/abort", {"ids": ["r"], "return_partial": True})
            assert trio.current_time() - began_at == pytest.approx(1)
        assert (row["result"], row["partials"]) == ("aborted", [])
        assert [(status, said["error"]["code"]) for status, said in answers] == [(503, "request_aborted")]
        await setup.assert_all_free()


async def test_queued_request_is_aborted_in_the_queue_of_the_router(open_setup):
    async with open_setup("a", engine={"paused": True}, leases_max=1) as setup:
        answers: list[Any] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked, setup, PATH, BODY, answers)
            await wait_all_tasks_blocked()
            nursery.start_soon(asked_as_waiting, setup, answers)
            await wait_all_tasks_blocked()
            rows = await rows_of(setup, "/v1/requests/abort", {"ids": ["waits", "r"], "return_partial": True})
        assert [(row["id"], row["result"], len(row["partials"])) for row in rows] == [
            ("waits", "aborted", 0),
            ("r", "aborted", 1),
        ]
        assert {said["error"]["code"] for _, said in answers} == {"request_aborted"}
        await setup.assert_all_free()


async def asked_as_waiting(setup: Any, answers: list[Any]) -> None:
    await asked(setup, PATH, {**BODY, "return_partial": True}, answers, id="waits")


async def test_request_is_aborted_even_if_the_aborting_caller_leaves(autojump_clock, open_setup):
    async with open_setup("a", engine={"paused": True}) as setup:
        answers: list[Any] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked, setup, PATH, BODY, answers)
            await setup.servers["a"].engine.step(2)
            await wait_all_tasks_blocked()
            silent = setup.servers["a"].connect = SilentConnect()
            setup.router.fleet.remote("a").close()
            client = setup.client()
            async with client.ask("/v1/requests/abort", {"ids": ["r"], "return_partial": True}):
                await silent.asked.wait()
        assert [said["error"]["code"] for _, said in answers] == ["request_aborted"]
        await setup.assert_all_free()


class SilentConnect:
    """Connections to an endpoint that never answers.

    Attributes:
        asked: Event that is set when a connection was requested.
    """

    def __init__(self) -> None:
        self.asked = trio.Event()
        self._ends: list[Any] = []

    def __call__(self) -> trio.abc.Stream:
        client, server = memory_connection()
        self._ends.append(server)
        self.asked.set()
        return client


async def test_request_of_another_api_key_is_not_aborted(open_setup):
    async with open_setup("a", engine={"paused": True}, api_keys=("one", "two")) as setup:
        mine, other = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        answers: list[Any] = []
        order = {"ids": ["r"], "return_partial": True}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: asked(setup, PATH, BODY, answers, **mine))
            await setup.servers["a"].engine.step(2)
            await wait_all_tasks_blocked()
            [row] = await rows_of(setup, "/v1/requests/abort", order, **other)
            assert (row["result"], row["partials"]) == ("unknown", [])
            assert await rows_of(setup, "/abort_request", {"abort_all": True}, **other) == []
            assert setup.servers["a"].engine.stats().blocks_used > 0
            [row] = await rows_of(setup, "/v1/requests/abort", order, **mine)
            assert (row["result"], len(row["partials"])) == ("aborted", 1)
        await setup.assert_all_free()


@pytest.mark.parametrize("order", [{"request_ids": ["r", "nobody"]}, {}, {"request_ids": []}])
async def test_vllm_abort_route_returns_the_number_of_aborted_requests(open_setup, order):
    """The route works at the router, and at the endpoint itself."""
    async with open_setup("a", engine={"paused": True}) as setup:
        for place in (setup, setup.servers["a"]):
            answers: list[Any] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(asked, place, PATH, BODY, answers)
                await wait_all_tasks_blocked()
                response = await place.client().post("/abort_requests", order)
                assert (response.status, await response.json()) == (200, {"status": "aborted", "aborted": 1})
            assert [said["error"]["code"] for _, said in answers] == ["request_aborted"]
        await setup.assert_all_free()
