"""Tests LoRA adapters over HTTP: requests name an adapter as their model in every API, and the admin loads and unloads
adapters.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from trio.testing import wait_all_tasks_blocked

from trioserve.api.caller import AccessRules
from trioserve.testing.memory_server import MemoryServer, open_memory_server

ADAPTERS = ("one=/adapters/one", "two=/adapters/two")
LOADS = AccessRules(loads_adapters=True)
SHORT: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
CHAT = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def served(access: AccessRules = LOADS, **app: Any) -> AsyncIterator[MemoryServer]:
    async with open_memory_server(lora_modules=ADAPTERS, access=access, **app) as server:
        yield server
        await wait_all_tasks_blocked()
        server.engine.assert_all_free()


async def ask(server: MemoryServer, path: str, body: object = None, key: str | None = None) -> tuple[int, Any]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    client = server.client(headers=headers)
    async with client.ask(path, body, method="GET" if body is None else "POST") as response:
        status = await response.head()
        said = (await response.read()).decode()
    return status, said


SURFACES = {
    "/v1/completions": {"prompt": "hello", **SHORT},
    "/v1/chat/completions": {"messages": CHAT, **SHORT},
    "/v1/responses": {"input": "hello", "max_output_tokens": 8, "temperature": 0},
    "/v1/messages": {"messages": CHAT, **SHORT},
    "/api/chat": {"messages": CHAT, "stream": False, "options": {"num_predict": 8, "temperature": 0}},
    "/api/generate": {"prompt": "hello", "stream": False, "options": {"num_predict": 8, "temperature": 0}},
    "/v1/embeddings": {"input": "hello"},
    "/api/embed": {"input": "hello"},
}


def content_of(path: str, said: str) -> str:
    body = json.loads(said)
    for name in ("choices", "output", "content", "message", "response", "data", "embeddings"):
        if name in body:
            found = body[name]
            if name == "output":
                found = [item.get("content") for item in found]
            return json.dumps(found)
    raise AssertionError(f"{path} answers with {body}")


@pytest.mark.parametrize("path", SURFACES)
async def test_request_names_its_adapter_as_its_model(path: str):
    async with served() as server:
        contents = {}
        for model in ("fake", "one", "two"):
            status, said = await ask(server, path, {"model": model, **SURFACES[path]})
            assert status == 200, said
            assert json.loads(said)["model"].removesuffix(":latest") == model
            contents[model] = content_of(path, said)
        assert len(set(contents.values())) == 3, contents
        status, said = await ask(server, path, {"model": "three", **SURFACES[path]})
        assert status == 404
        assert "one, two" in said


async def test_models_list_has_adapters_with_their_parent():
    async with served() as server:
        _, said = await ask(server, "/v1/models")
        cards = {card["id"]: card for card in json.loads(said)["data"]}
        assert list(cards) == ["fake", "one", "two"]
        assert (cards["one"]["parent"], cards["one"]["root"]) == ("fake", "/adapters/one")
        assert cards["fake"]["parent"] is None
        assert len({card["fingerprint"] for card in cards.values()}) == 3
        assert all(card["fingerprint"].endswith("+exact") for card in cards.values())
        status, said = await ask(server, "/v1/models/two")
        assert (status, json.loads(said)) == (200, cards["two"])
        _, said = await ask(server, "/api/tags")
        assert [model["name"] for model in json.loads(said)["models"]] == ["fake:latest", "one:latest", "two:latest"]


async def test_adapters_are_loaded_and_unloaded_as_in_vllm():
    async with served() as server:
        body = {"lora_name": "three", "lora_path": "/adapters/three"}
        assert await ask(server, "/v1/load_lora_adapter", body) == (
            200,
            "Success: LoRA adapter 'three' added successfully.",
        )
        status, said = await ask(server, "/v1/load_lora_adapter", body)
        assert (status, "has already been loaded" in said) == (400, True)
        status, _ = await ask(server, "/v1/load_lora_adapter", {**body, "load_inplace": True})
        assert status == 200
        status, _ = await ask(server, "/v1/completions", {"model": "three", "prompt": "x", **SHORT})
        assert status == 200
        assert await ask(server, "/v1/unload_lora_adapter", {"lora_name": "three"}) == (
            200,
            "Success: LoRA adapter 'three' removed successfully.",
        )
        status, said = await ask(server, "/v1/unload_lora_adapter", {"lora_name": "three"})
        assert (status, "cannot be found" in said) == (404, True)
        status, _ = await ask(server, "/v1/completions", {"model": "three", "prompt": "x", **SHORT})
        assert status == 404


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/load_lora_adapter", {"lora_name": "x"}, "must be provided"),
        ("/v1/load_lora_adapter", {"lora_path": "/x"}, "must be provided"),
        ("/v1/load_lora_adapter", {"lora_name": 3, "lora_path": "/x"}, "lora_name"),
        ("/v1/load_lora_adapter", {"lora_name": "fake", "lora_path": "/x"}, "the name of the model itself"),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/missing"}, "adapter_config.json"),
        ("/v1/unload_lora_adapter", {}, "needs to be provided"),
        ("/v1/unload_lora_adapter", {"lora_name": "one", "timeout": -1}, "timeout"),
    ],
)
async def test_invalid_load_or_unload_is_refused(path: str, body: dict[str, Any], words: str):
    async with served() as server:
        status, said = await ask(server, path, body)
        assert status == 400
        assert words in said
        assert server.engine.adapters.names == ("one", "two")


async def test_only_the_admin_loads_adapters_and_only_if_the_operator_allows_it():
    body = {"lora_name": "three", "lora_path": "/adapters/three"}
    async with served(AccessRules()) as server:
        status, said = await ask(server, "/v1/load_lora_adapter", body)
        assert (status, "--allow-runtime-lora-updating" in said) == (404, True)
        status, _ = await ask(server, "/v1/unload_lora_adapter", {"lora_name": "one"})
        assert status == 404
    async with served(api_keys=("alice",), admin_api_key="admin") as server:
        for key, expected in ((None, 401), ("alice", 403), ("admin", 200)):
            status, _ = await ask(server, "/v1/load_lora_adapter", body, key)
            assert status == expected
        status, _ = await ask(server, "/v1/unload_lora_adapter", {"lora_name": "one"}, "alice")
        assert status == 403
        status, _ = await ask(server, "/v1/completions", {"model": "three", "prompt": "x", **SHORT}, "alice")
        assert status == 200


async def test_metrics_count_requests_of_each_adapter():
    async with (
        served(paused=True) as server,
        server.client().ask("/v1/completions", {"model": "two", "prompt": "x", "stream": True, **SHORT}) as response,
    ):
        await wait_all_tasks_blocked()
        await server.engine.step()
        await response.head()
        _, page = await ask(server, "/metrics")
        assert 'trioserve:adapters{engine="0",model_name="fake",state="ready"} 2.0' in page
        assert 'trioserve:adapter_requests{adapter="two",engine="0",model_name="fake"} 1.0' in page
        assert 'trioserve:adapter_requests{adapter="one",engine="0",model_name="fake"} 0.0' in page
        assert 'running_lora_adapters="two"' in page
        assert "vllm:lora_requests_info{" in page
        server.engine.resume()
        await response.read()
