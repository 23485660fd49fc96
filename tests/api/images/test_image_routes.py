"""What a server that makes pictures has besides: its description, what operators ask, whose requests are whose."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trioserve.api.images import response_types as images
from trioserve.api.images.descriptions import OPERATIONS
from trioserve.api.images.image_routes import IMAGE_ROUTES, IMAGE_TEMPLATES, MODEL, REQUEST, TEXT_PATHS
from trioserve.api.openai import response_types as operators
from trioserve.api.page.settings import PageSettings
from trioserve.api.routes import ROUTES
from trioserve.testing.memory_server import open_memory_image_server, open_memory_server

PATH = "/v1/images/generations"
CAT = {"prompt": "a cat"}


async def test_every_route_is_described_and_nothing_else() -> None:
    routes = (*IMAGE_ROUTES.values(), *IMAGE_TEMPLATES, MODEL, REQUEST)
    assert set(OPERATIONS) == {(method, route.path) for route in routes for method in route.operations}
    async with open_memory_image_server() as server:
        document = await (await server.client().get("/openapi.json")).json()
        assert set(document["paths"]) == {route.path for route in routes}
        check_references(document, document)
        body = document["components"]["schemas"]["ImageGenerationBody"]["properties"]
        assert body["guidance"]["anyOf"][0] == {"type": "number", "minimum": 0.0, "maximum": 100.0}
        assert body["style"] == {
            "type": "null",
            "description": "not supported: describe the style in the prompt",
        }


def check_references(document: dict[str, Any], value: Any) -> None:
    if isinstance(value, dict):
        if "$ref" in value:
            assert value["$ref"].removeprefix("#/components/schemas/") in document["components"]["schemas"]
        for inner in value.values():
            check_references(document, inner)
    elif isinstance(value, list):
        for inner in value:
            check_references(document, inner)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/models", images.ImageModels),
        ("/v1/models/fake", images.ImageModel),
        ("/v1/requests", images.LiveImageRequests),
        ("/health", operators.Alive),
        ("/ready", operators.Ready),
        ("/load", operators.Load),
        ("/version", operators.Version),
        ("/is_paused", operators.IsPaused),
        ("/is_sleeping", operators.IsSleeping),
    ],
)
async def test_what_can_be_read_is_as_it_is_described(path: str, kind: type) -> None:
    async with open_memory_image_server() as server:
        response = await server.client().get(path)
        assert response.status == 200
        msgspec.convert(await response.json(), kind)


async def test_a_model_says_what_may_be_asked_of_it() -> None:
    async with open_memory_image_server() as server:
        [card] = (await (await server.client().get("/v1/models")).json())["data"]
        takes = card["image"]
        assert (card["id"], card["family"], takes["size"], takes["steps"]) == ("fake", "fake", "16x16", 4)
        assert takes["samplers"] == ["euler", "ddim"]
        assert (takes["side_multiple"], takes["classes"], takes["takes_images"]) == (8, None, True)


@pytest.mark.parametrize("path", [*TEXT_PATHS, "/v1/responses/input_tokens"])
async def test_paths_of_texts_say_that_pictures_are_made(path: str) -> None:
    assert path in ROUTES, "it is a path of a server that makes texts"
    async with open_memory_image_server() as server:
        response = await server.client().post(path, {"prompt": "x"})
        assert response.status == 404
        assert response.headers["x-trioserve-reason"] == "makes_pictures"
        assert b"generates images, not text" in await response.read()


@pytest.mark.parametrize("path", [PATH, "/v1/images/edits"])
async def test_a_server_of_texts_says_that_it_makes_none(path: str) -> None:
    async with open_memory_server() as server:
        response = await server.client().post(path, CAT)
        assert response.status == 404
        assert response.headers["x-trioserve-reason"] == "makes_texts"
        assert "makes texts and no pictures" in (await response.json())["error"]["message"]


async def test_metrics_count_what_was_made() -> None:
    async with open_memory_image_server() as server:
        await server.client().post(PATH, CAT)
        page = (await server.client().get("/metrics")).body.decode()
        assert f'path="{PATH}"' in page or f'route="{PATH}"' in page


async def test_a_router_is_told_of_the_load_as_it_changes(autojump_clock: MockClock) -> None:
    async with open_memory_image_server(paused=True) as server:
        refused = await server.client().get("/kv_events")
        assert (refused.status, refused.headers["x-trioserve-reason"]) == (404, "kv_events_off")
        async with server.client().ask("/kv_events?load=only") as told:
            assert (await anext(told))["load"]["running"] == 0
            async with server.client().ask(PATH, CAT):
                await server.engine.step()
                with trio.fail_after(60):
                    while (await anext(told))["load"]["running"] != 1:
                        """One that was made before, or that says only that the server lives."""
        await server.assert_all_free()


async def test_a_key_sees_and_ends_its_own_requests_alone() -> None:
    async with open_memory_image_server(paused=True, api_keys=("a", "b"), admin_api_key="root") as server:
        clients = {key: server.client(headers={"Authorization": f"Bearer {key}"}) for key in ("a", "b", "root")}
        assert (await server.client().get("/v1/requests")).status == 401
        asking = server.client(headers={"Authorization": "Bearer a"})
        async with asking.ask(PATH, CAT, headers={"X-Request-Id": "mine"}):
            await wait_all_tasks_blocked()
            seen = {}
            for key, client in clients.items():
                listed = await (await client.get("/v1/requests")).json()
                seen[key] = [view["id"] for view in listed["data"]]
            assert seen == {"a": ["mine"], "b": [], "root": ["mine"]}
            async with clients["b"].ask("/v1/requests/mine", method="DELETE") as response:
                assert await response.head() == 404
            for path in ("/pause", "/sleep", "/wake_up"):
                assert (await server.client(headers={"x-api-key": "a"}).post(path, {})).status == 403
            aborted = await clients["a"].post("/v1/requests/abort", {"ids": ["mine"]})
            assert (await aborted.json())["data"][0]["result"] == "aborted"
        await server.assert_all_free()


async def test_a_better_priority_than_is_allowed_is_refused() -> None:
    async with open_memory_image_server(api_keys=("a",)) as server:
        response = await server.client(headers={"x-api-key": "a"}).post(PATH, {**CAT, "priority": -1})
        assert (response.status, (await response.json())["error"]["param"]) == (400, "priority")


async def test_a_pause_holds_pictures_up_and_they_go_on() -> None:
    async with open_memory_image_server() as server:
        client = server.client()
        assert (await client.post("/pause?mode=keep", {})).status == 200
        ready = await client.get("/ready")
        assert (ready.status, (await ready.json())["reason"]) == (503, "paused")
        async with server.client().ask(PATH, CAT) as response:
            await wait_all_tasks_blocked()
            assert response.status is None
            assert (await client.post("/resume", {})).status == 200
            assert await response.head() == 200
        await server.assert_all_free()


@pytest.mark.parametrize("level", [1, 2])
async def test_it_sleeps_as_a_server_of_texts_does_and_what_is_kept_is_made_anew(level: int) -> None:
    async with open_memory_image_server(paused=True) as server:
        client = server.client()
        async with server.client().ask(PATH, {**CAT, "seed": 1, "steps": 3}) as response:
            await server.engine.step(2)
            slept = await client.post(f"/sleep?level={level}&mode=keep", {})
            assert await slept.json() == {"is_sleeping": True}
            ready = await client.get("/ready")
            assert (ready.status, (await ready.json())["reason"]) == (503, "sleeping")
            assert await (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
            assert await (await client.post("/wake_up", {})).json() == {"is_sleeping": False}
            await server.engine.step(5)  # encoded, denoised and decoded: nothing is left of what it had
            assert await response.head() == 200
        await server.assert_all_free()


async def test_a_server_that_leaves_finishes_what_runs_and_refuses_the_rest() -> None:
    async with open_memory_image_server(paused=True, max_num_seqs=1) as server:
        running, waiting = server.client(), server.client()
        async with running.ask(PATH, CAT) as first, waiting.ask(PATH, CAT) as second:
            await server.engine.step(2)
            server.drain()
            assert await second.head() == 503
            server.engine.resume()
            assert await first.head() == 200
            await first.read()
        await server.assert_all_free()


async def test_the_page_is_that_of_pictures() -> None:
    async with open_memory_image_server() as server:
        page = await server.client().get("/")
        assert b"ui/images.js" in page.body
        assert (await server.client().get("/ui/images.js")).status == 200
        assert (await server.client().get("/ui/images.html")).status == 404
    async with open_memory_image_server(page=PageSettings(is_shown=False)) as server:
        assert (await server.client().get("/")).status == 404
