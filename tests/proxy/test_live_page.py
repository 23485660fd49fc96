"""Tests the live page of a router in memory: endpoints, the position of each request, and the cleanup after readers
leave.
"""

from __future__ import annotations

import json
from typing import Any

import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api.page import PageSettings, fold
from trioserve.testing.memory_client import MemoryResponse
from trioserve.testing.memory_router import open_memory_router
from trioserve.testing.memory_server import MemoryServer, open_memory_server


async def shown(response: MemoryResponse) -> dict[str, Any]:
    """Return the page's state after all pending events were applied."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(response.read)
            await wait_all_tasks_blocked()
            scope.cancel()
    state: dict[str, Any] = {}
    for event in response.body.decode().split("\n\n"):
        if event.startswith("event: "):
            data = json.loads(event.partition("data: ")[2])
            if event.startswith("event: snapshot"):
                state = data
            else:
                fold(state, data)
    return state


def to(server: MemoryServer) -> Any:
    async def connect() -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        return server.connect()

    return connect


async def test_reader_sees_endpoints_and_the_position_of_a_request(mock_clock):
    async with (
        open_memory_server(paused=True) as server,
        open_memory_router({"a": to(server)}) as router,
        router.client().ask("/ui/events") as page,
    ):
        state = await shown(page)
        assert (state["server"]["kind"], state["server"]["model"]) == ("router", "fake")
        assert (state["endpoints"]["a"]["health"], state["endpoints"]["a"]["in_flight"]) == ("healthy", 0)
        assert (state["blocks"], state["requests"], state["queues"]["waiting"]) == (None, {}, 0)
        body = {"model": "fake", "prompt": "hi", "max_tokens": 2, "stream": True}
        async with router.client().ask("/v1/completions", body, headers={"x-request-id": "r"}) as response:
            await server.engine.step()
            mock_clock.jump(0.4)
            state = await shown(page)
            assert state["requests"]["r"]["endpoint"] == "a"
            assert state["requests"]["r"]["state"] == "running"
            assert state["endpoints"]["a"]["in_flight"] == state["stats"]["running"] == 1
            server.engine.resume()
            await response.read()
        mock_clock.jump(0.4)
        state = await shown(page)
        assert (state["requests"]["r"]["state"], state["requests"]["r"]["outcome"]) == ("finished", "finished")
        assert state["endpoints"]["a"]["in_flight"] == 0
        mock_clock.jump(31)
        await shown(page)
        mock_clock.jump(0.4)
        assert (await shown(page))["requests"] == {}


async def test_reader_is_notified_when_the_router_drains(mock_clock):
    async with open_memory_server() as server, open_memory_router({"a": to(server)}) as router:
        async with router.client().ask("/ui/events") as page:
            await shown(page)
            router.drain()
            state = await shown(page)
            assert page.is_complete
            assert state["server"]["is_draining"] is True
        await router.assert_all_free()


async def test_live_page_of_a_router_shows_a_key_only_its_own_requests(mock_clock):
    async with (
        open_memory_server(paused=True) as server,
        open_memory_router({"a": to(server)}, api_keys=("x", "y"), admin_api_key="boss") as router,
    ):
        for path in ("/", "/router"):
            response = await router.client().get(path)
            assert (response.status, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert (await router.client().get("/ui/events")).status == 401
        body = {"model": "fake", "prompt": "hi", "max_tokens": 2, "stream": True}
        headers = {"x-request-id": "of-x", "authorization": "Bearer x"}
        async with router.client().ask("/v1/completions", body, headers=headers):
            await wait_all_tasks_blocked()
            for key, expected in (("x", {"of-x"}), ("y", set()), ("boss", {"of-x"})):
                asked = router.client().ask("/ui/events", headers={"authorization": f"Bearer {key}"})
                async with asked as page:
                    assert set((await shown(page))["requests"]) == expected
                    assert (b"of-x" in page.body) == bool(expected)
                mock_clock.jump(0.1)


async def test_router_without_a_live_page_answers_404(mock_clock):
    async with (
        open_memory_server() as server,
        open_memory_router({"a": to(server)}, page=PageSettings(is_shown=False)) as router,
    ):
        for path in ("/", "/router", "/ui/events", "/ui/page.js"):
            assert (await router.client().get(path)).status == 404
