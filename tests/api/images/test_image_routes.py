"""Tests the other routes of a server that generates images: OpenAPI, operators' routes, and separation of keys."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trioserve.api.images import image_responses as images
from trioserve.api.images.image_routes import OPERATIONS, TEXT_PATHS
from trioserve.api.operations import health, pausing
from trioserve.api.page import PageSettings
from trioserve.api.routes import OPERATIONS as TEXT_OPERATIONS
from trioserve.contracts.endpoint import EndpointLoad
from trioserve.testing.memory_server import open_memory_image_server, open_memory_server

PATH = "/v1/images/generations"
CAT = {"prompt": "a cat"}


async def test_openapi_document_has_exactly_the_routes() -> None:
    async with open_memory_image_server() as server:
        document = await (await server.client().get("/openapi.json")).json()
        assert set(document["paths"]) == {operation.path for operation in OPERATIONS}
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
        ("/health", health.Alive),
        ("/ready", health.Ready),
        ("/load", EndpointLoad),
        ("/version", health.Version),
        ("/is_paused", pausing.IsPaused),
        ("/is_sleeping", pausing.IsSleeping),
    ],
)
async def test_image_responses_match_their_openapi_description(path: str, kind: type) -> None:
    async with open_memory_image_server() as server:
        response = await server.client().get(path)
        assert response.status == 200
        msgspec.convert(await response.json(), kind)


async def test_model_description_has_its_options_and_limits() -> None:
    async with open_memory_image_server() as server:
        [card] = (await (await server.client().get("/v1/models")).json())["data"]
        takes = card["image"]
        assert (card["id"], card["family"], takes["size"], takes["steps"]) == ("fake", "fake", "16x16", 4)
        assert takes["samplers"] == ["euler", "ddim"]
        assert (takes["side_multiple"], takes["classes"], takes["takes_images"]) == (8, None, True)


@pytest.mark.parametrize("path", [*TEXT_PATHS, "/v1/responses/input_tokens"])
async def test_text_paths_of_an_image_server_explain_the_refusal(path: str) -> None:
    assert path in {operation.path for operation in TEXT_OPERATIONS}, "it is a path of a server that makes texts"
    async with open_memory_image_server() as server:
        response = await server.client().post(path, {"prompt": "x"})
        assert response.status == 404
        assert response.headers["x-trioserve-reason"] == "makes_pictures"
        assert b"generates images, not text" in await response.read()


@pytest.mark.parametrize("path", [PATH, "/v1/images/edits"])
async def test_image_paths_of_a_text_server_explain_the_refusal(path: str) -> None:
    async with open_memory_server() as server:
        response = await server.client().post(path, CAT)
        assert response.status == 404
        assert response.headers["x-trioserve-reason"] == "makes_texts"
        assert "generates text and no images" in (await response.json())["error"]["message"]


async def test_metrics_count_images_and_steps() -> None:
    async with open_memory_image_server() as server:
        await server.client().post(PATH, CAT)
        page = (await server.client().get("/metrics")).body.decode()
        assert f'path="{PATH}"' in page or f'route="{PATH}"' in page


async def test_router_gets_a_load_report_after_each_change(autojump_clock: MockClock) -> None:
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


async def test_key_sees_and_aborts_only_its_own_image_requests() -> None:
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


async def test_priority_above_the_keys_limit_is_refused() -> None:
    async with open_memory_image_server(api_keys=("a",)) as server:
        response = await server.client(headers={"x-api-key": "a"}).post(PATH, {**CAT, "priority": -1})
        assert (response.status, (await response.json())["error"]["param"]) == (400, "priority")


async def test_pause_stops_images_and_resume_continues_them() -> None:
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
async def test_image_server_sleeps_and_restarts_kept_requests(level: int) -> None:
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
            await server.engine.step(
                5
            )  # The request is encoded, denoised and decoded again, because the state before the sleep was dropped.
            assert await response.head() == 200
        await server.assert_all_free()


async def test_draining_image_server_finishes_running_requests_and_refuses_waiting_requests() -> None:
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


async def test_image_server_serves_the_image_page() -> None:
    async with open_memory_image_server() as server:
        page = await server.client().get("/")
        assert b"ui/images.js" in page.body
        assert (await server.client().get("/ui/images.js")).status == 200
        assert (await server.client().get("/ui/images.html")).status == 404
    async with open_memory_image_server(page=PageSettings(is_shown=False)) as server:
        assert (await server.client().get("/")).status == 404
