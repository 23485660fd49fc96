"""A router before servers that make pictures: requests go there and back, and a client that leaves frees its slots."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.testing.memory_router import MemoryRouter, open_memory_router
from trioserve.testing.memory_server import MemoryImageServer, open_memory_image_server

PATH = "/v1/images/generations"
CAT = {"model": "fake", "prompt": "a cat", "seed": 5, "n": 2}


@asynccontextmanager
async def opened(*, paused: bool = False) -> AsyncIterator[tuple[MemoryRouter, MemoryImageServer]]:
    async with open_memory_image_server(paused=paused) as server:

        async def connect() -> trio.abc.Stream:
            await trio.lowlevel.checkpoint()
            return server.connect()

        async with open_memory_router({"a": connect}) as router:
            yield router, server
            await router.assert_all_free()
        await wait_all_tasks_blocked()
        server.engine.assert_all_free()


async def test_pictures_come_through_a_router_whole() -> None:
    async with opened() as (router, server):
        routed = await router.client().post(PATH, CAT)
        assert routed.status == 200, routed.body
        own = await server.client().post(PATH, CAT)
        assert (await routed.json())["data"] == (await own.json())["data"]


async def test_pictures_come_through_a_router_as_they_become() -> None:
    async with opened(paused=True) as (router, server):
        async with router.client().ask(PATH, {**CAT, "stream": True, "partial_images": 1}) as response:
            while await server.engine.step() is not None:
                """Each step is read before the next one."""
            events = [event async for event in response]
        kinds = [event["type"].rpartition(".")[2] for event in events]
        assert sorted(kinds) == ["completed", "completed", "partial_image", "partial_image"]


async def test_what_is_refused_is_told_as_the_endpoint_says_it() -> None:
    async with opened() as (router, _server):
        response = await router.client().post(PATH, {**CAT, "size": "9x9"})
        assert (response.status, (await response.json())["error"]["param"]) == (400, "size")


async def test_a_client_that_leaves_the_router_frees_its_slots() -> None:
    async with opened(paused=True) as (router, server):
        for is_streamed in (False, True):
            async with router.client().ask(PATH, {**CAT, "stream": is_streamed}):
                await server.engine.step(2)
                assert server.engine.stats().slots_used == 2
            await wait_all_tasks_blocked()
            assert server.engine.stats().slots_used == 0


async def test_an_image_that_is_to_be_changed_goes_to_an_endpoint_itself() -> None:
    async with opened() as (router, _server):
        response = await router.client().post("/v1/images/edits", b"--x--")
        assert response.status == 404
        assert response.headers["x-trioserve-reason"] == "not_routed"
