"""Tests a router in front of image servers: requests and responses are forwarded, and a client that leaves frees its
slots.
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from PIL import Image
from trio.testing import wait_all_tasks_blocked

from tests.api.images.forms import multipart
from trioserve.api.form import INLINE_BYTES_MAX
from trioserve.testing.memory_router import MemoryRouter, open_memory_router
from trioserve.testing.memory_server import MemoryImageServer, open_memory_image_server

PATH = "/v1/images/generations"
EDITS = "/v1/images/edits"
CAT = {"model": "fake", "prompt": "a cat", "seed": 5, "n": 2}


@asynccontextmanager
async def opened(*, paused: bool = False, **options: Any) -> AsyncIterator[tuple[MemoryRouter, MemoryImageServer]]:
    async with open_memory_image_server(paused=paused) as server:

        async def connect() -> trio.abc.Stream:
            await trio.lowlevel.checkpoint()
            return server.connect()

        async with open_memory_router({"a": connect}, **options) as router:
            yield router, server
            await router.assert_all_free()
        await wait_all_tasks_blocked()
        server.engine.assert_all_free()


async def test_router_forwards_whole_image_responses() -> None:
    async with opened() as (router, server):
        routed = await router.client().post(PATH, CAT)
        assert routed.status == 200, routed.body
        own = await server.client().post(PATH, CAT)
        assert (await routed.json())["data"] == (await own.json())["data"]


async def test_image_events_are_forwarded_as_they_arrive() -> None:
    async with opened(paused=True) as (router, server):
        async with router.client().ask(PATH, {**CAT, "stream": True, "partial_images": 1}) as response:
            while await server.engine.step() is not None:
                """Each step is read before the next one."""
            events = [event async for event in response]
        kinds = [event["type"].rpartition(".")[2] for event in events]
        assert sorted(kinds) == ["completed", "completed", "partial_image", "partial_image"]


async def test_refusal_of_an_image_endpoint_is_forwarded() -> None:
    async with opened() as (router, _server):
        response = await router.client().post(PATH, {**CAT, "size": "9x9"})
        assert (response.status, (await response.json())["error"]["param"]) == (400, "size")


async def test_client_that_leaves_frees_its_image_slots() -> None:
    async with opened(paused=True) as (router, server):
        for is_streamed in (False, True):
            async with router.client().ask(PATH, {**CAT, "stream": is_streamed}):
                await server.engine.step(2)
                assert server.engine.stats().slots_used == 2
            await wait_all_tasks_blocked()
            assert server.engine.stats().slots_used == 0


def form(*parts: tuple[str, str], image: bytes | None = None) -> tuple[bytes, dict[str, str]]:
    """Return the body and headers of an image edit."""
    body, content_type = multipart(*parts, ("image", image or red_png(), "a.png"))
    return body, {"content-type": content_type}


def red_png(size: int = 16) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size), "red").save(file, "PNG", compress_level=0)
    return file.getvalue()


DOG = (("prompt", "a dog"), ("seed", "5"), ("n", "2"))


@pytest.mark.parametrize("size", [16, 200])  # The second form is parsed in a thread.
async def test_image_edit_is_forwarded(size: int) -> None:
    async with opened() as (router, server):
        body, headers = form(*DOG, ("model", "fake"), ("size", "16x16"), image=red_png(size))
        assert (len(body) > INLINE_BYTES_MAX) is (size == 200)
        async with router.client().ask(EDITS, body, headers=headers) as routed:
            assert await routed.head() == 200, await routed.read()
            changed = (await routed.json())["data"]
        async with server.client().ask(EDITS, body, headers=headers) as own:
            assert changed == (await own.json())["data"]


async def test_form_gets_the_endpoints_model_name_and_the_remaining_deadlines(autojump_clock) -> None:
    async with opened(aliases={"painter": "fake"}) as (router, _server):
        body, headers = form(*DOG, ("model", "painter"), ("timeout", "30"))
        async with router.client().ask(EDITS, body, headers={**headers, "x-queue-timeout": "20"}) as response:
            assert await response.head() == 200, await response.read()
            assert len((await response.json())["data"]) == 2
        body, headers = form(*DOG, ("model", "painter"), ("timeout", "-1"))
        async with router.client().ask(EDITS, body, headers=headers) as response:
            assert (await response.json())["error"]["param"] == "timeout"


async def test_events_of_an_image_edit_are_forwarded_as_they_arrive() -> None:
    for has_peers in (False, True):
        async with opened(paused=True, has_peers=has_peers) as (router, server):
            body, headers = form(*DOG, ("stream", "true"), ("partial_images", "1"))
            headers |= {"x-request-id": "mine", "last-event-id": ""}
            async with router.client().ask(EDITS, body, headers=headers) as response:
                while await server.engine.step() is not None:
                    """Each step is read before the next one."""
                kinds = [event["type"] async for event in response]
            assert kinds == ["image_edit.partial_image"] * 2 + ["image_edit.completed"] * 2


async def test_client_that_leaves_an_image_edit_frees_its_slots() -> None:
    async with opened(paused=True) as (router, server):
        for is_streamed in ("false", "true"):
            body, headers = form(*DOG, ("stream", is_streamed))
            async with router.client().ask(EDITS, body, headers=headers):
                await server.engine.step(2)
                assert server.engine.stats().slots_used == 2
            await wait_all_tasks_blocked()
            assert server.engine.stats().slots_used == 0


async def test_router_refuses_an_invalid_form() -> None:
    async with opened() as (router, _server):
        response = await router.client().post(EDITS, {"prompt": "a dog"})
        assert (response.status, (await response.json())["error"]["param"]) == (400, "content-type")


async def test_router_checks_the_key_before_it_reads_a_form() -> None:
    async with opened(api_keys=("secret",)) as (router, _server):
        body, headers = form(*DOG)
        async with router.client().ask(EDITS, body, headers=headers) as response:
            assert await response.head() == 401
        async with router.client().ask(EDITS, body, headers={**headers, "authorization": "Bearer secret"}) as response:
            assert await response.head() == 200
