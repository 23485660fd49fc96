"""Weight updates over HTTP as SGLang's clients send them: their responses, and weight versions in other responses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio

from trioserve.api.app import OTHER_PATHS
from trioserve.api.routes import OPERATIONS
from trioserve.testing.memory_server import MemoryServer, open_memory_server

DISK = "/update_weights_from_disk"
LONG = {"prompt": "a prompt", "max_tokens": 20, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
CHAT = {**LONG, "messages": [{"role": "user", "content": "a prompt"}]}


async def ask(server: MemoryServer, path: str, body: Any = None, *, method: str = "POST") -> tuple[int, Any]:
    async with server.client().ask(path, body, method=method) as response:
        status = await response.head()
        return status, msgspec.json.decode(await response.read())


async def events(server: MemoryServer, path: str, body: dict[str, Any]) -> list[Any]:
    async with server.client().ask(path, {**body, "stream": True}) as response:
        assert await response.head() == 200
        lines = (await response.read()).decode().split("\n\n")
    data = [line.rpartition("data: ")[2] for line in lines]
    return [msgspec.json.decode(each.encode()) for each in data if each.startswith("{")]


async def test_sglangs_clients_can_replace_weights_and_read_the_version(autojump_clock):
    async with open_memory_server() as server:
        assert await ask(server, "/get_weight_version", method="GET") == (200, {"weight_version": "default"})
        _, load = await ask(server, "/load", method="GET")
        assert "weight_version" not in load
        body = {"model_path": "b", "flush_cache": True, "abort_all_requests": False, "weight_version": "step 1"}
        status, answer = await ask(server, DISK, body)
        assert (status, answer["success"], answer["weight_version"]) == (200, True, "step 1")
        assert "step 1" in answer["message"]
        assert await ask(server, "/get_weight_version", method="GET") == (200, {"weight_version": "step 1"})
        assert (await ask(server, "/load", method="GET"))[1]["weight_version"] == "step 1"
        assert (await ask(server, "/v1/models", method="GET"))[1]["data"][0]["weight_version"] == "step 1"
        status, answer = await ask(server, "/update_weights_from_shared_memory", {"name": "c"})
        assert (status, answer["success"]) == (200, True)
        assert answer["weight_version"] not in ("default", "step 1")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"model_path": "missing"}, "missing"),
        ({"model_path": "b", "weight_version": "default"}, 'weight_version is "default"'),
        ({"model_path": ""}, "model_path is empty"),
    ],
)
async def test_weights_that_do_not_fit_are_refused_with_success_false(autojump_clock, body: dict[str, Any], named: str):
    async with open_memory_server() as server:
        status, answer = await ask(server, DISK, body)
        assert (status, answer["success"]) == (400, False)
        assert named in answer["message"]
        assert answer["error"]["message"] == answer["message"]
        assert await ask(server, "/get_weight_version", method="GET") == (200, {"weight_version": "default"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("load_format", "dummy"),
        ("is_async", True),
        ("in_flight", "later"),
        ("model_path", 3),
        ("weight_version", 3),
    ],
)
async def test_unsupported_fields_of_a_weight_update_are_refused(autojump_clock, field: str, value: object):
    async with open_memory_server() as server:
        status, answer = await ask(server, DISK, {"model_path": "b", field: value})
        assert status == 400
        assert answer["error"]["param"] == field
        status, answer = await ask(server, DISK, {"model_path": "b", "abort_all_requests": True, "in_flight": "keep"})
        assert (status, answer["error"]["param"]) == (400, "in_flight")


async def test_server_is_not_ready_after_a_partial_weight_update(autojump_clock):
    async with open_memory_server() as server:
        server.engine.weights.breaks = True
        status, answer = await ask(server, DISK, {"model_path": "b"})
        assert (status, answer["success"]) == (500, False)
        status, answer = await ask(server, "/ready", method="GET")
        assert (status, answer["reason"]) == (503, "weights_in_part")
        assert (await ask(server, "/health", method="GET"))[0] == 200
        assert (await ask(server, DISK, {"model_path": "c"}))[0] == 200
        assert (await ask(server, "/ready", method="GET"))[0] == 200


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", LONG), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_response_has_the_weight_versions_of_its_tokens(
    autojump_clock, path: str, body: dict[str, Any], is_stream: bool
):
    told: list[Any] = []

    async def read() -> None:
        if is_stream:
            for event in await events(server, path, body):
                for choice in event["choices"]:
                    if count := len(choice.get("token_ids", ())):
                        told.extend(choice.get("weight_versions", [["default", count]]))
        else:
            told.extend((await ask(server, path, body))[1]["choices"][0]["weight_versions"])

    async with open_memory_server(step_seconds=0.01) as server:
        _, before = await ask(server, path, body)
        assert "weight_versions" not in before["choices"][0]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.sleep(0.105)
            assert (await ask(server, DISK, {"model_path": "b", "weight_version": "b"}))[0] == 200
        by_version = {version: sum(count for name, count in told if name == version) for version, _ in told}
        assert list(by_version) == ["default", "b"]
        assert sum(by_version.values()) == 20
        assert is_stream or len(told) == 2


MESSAGE = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 20}
RESPONSE = {"model": "fake", "input": "a", "max_output_tokens": 20, "ignore_eos": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**LONG, "return_token_ids": False}),
        ("/v1/chat/completions", {**CHAT, "return_token_ids": False}),
        ("/v1/messages", MESSAGE),
        ("/v1/responses", RESPONSE),
    ],
)
@pytest.mark.parametrize("is_stream", [True, False])
async def test_the_end_of_every_response_has_its_weight_versions(
    autojump_clock, path: str, body: dict[str, Any], is_stream: bool
):
    """The versions are sent even without token ids, and once in a stream."""
    told: list[Any] = []

    async def read() -> None:
        said = await events(server, path, body) if is_stream else [(await ask(server, path, body))[1]]
        told.extend(found for event in said for found in versions_in(event))

    async with open_memory_server(step_seconds=0.01) as server:
        await read()
        assert told == []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.sleep(0.105)
            assert (await ask(server, DISK, {"model_path": "b", "weight_version": "b"}))[0] == 200
        [[first, (last_version, last_count)]] = told
        assert (first[0], last_version) == ("default", "b")
        assert (first[1] + last_count, last_count > 0) == (20, True)


def versions_in(value: Any) -> list[Any]:
    """Return all values of the field, at any depth."""
    if isinstance(value, list):
        return [found for entry in value for found in versions_in(entry)]
    if not isinstance(value, dict):
        return []
    own = [value["weight_versions"]] if "weight_versions" in value else []
    return own + [found for entry in value.values() for found in versions_in(entry)]


async def test_abort_all_requests_ends_running_requests(autojump_clock):
    statuses: list[int] = []

    async def read() -> None:
        statuses.append((await ask(server, "/v1/completions", LONG))[0])

    async with open_memory_server(step_seconds=0.01) as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.sleep(0.105)
            await ask(server, DISK, {"model_path": "b", "abort_all_requests": True})
        assert statuses != [200]
        assert server.engine.stats().blocks_used == 0


@pytest.mark.parametrize("path", [DISK, "/update_weights_from_shared_memory", "/init_weights_update_group"])
async def test_only_the_admin_replaces_weights(autojump_clock, path: str):
    async with open_memory_server(api_keys=("ordinary",), admin_api_key="admin") as server:
        for key, status in (("ordinary", 403), ("wrong", 401), ("admin", 200)):
            client = server.client(headers={"authorization": f"Bearer {key}"})
            group = {"master_address": "127.0.0.1", "master_port": 29600, "rank_offset": 1, "world_size": 2}
            async with client.ask(path, {"model_path": "b", "name": "b", **group}) as response:
                assert await response.head() == status, key


async def test_trainer_can_send_new_weights_through_a_process_group(autojump_clock):
    async with open_memory_server() as server:
        group = {"master_address": "127.0.0.1", "master_port": 29600, "rank_offset": 1, "world_size": 2}
        for wrong, param in (({"backend": "nccl"}, "backend"), ({"master_port": "here"}, "master_port")):
            status, answer = await ask(server, "/init_weights_update_group", {**group, **wrong})
            assert (status, answer["error"]["param"]) == (400, param)
        status, answer = await ask(server, "/init_weights_update_group", {**group, "rank_offset": 0})
        assert (status, answer["success"]) == (400, False)
        status, answer = await ask(server, "/init_weights_update_group", {**group, "group_name": "g"})
        assert (status, answer["success"]) == (200, True)
        sent = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "g", "weight_version": "sent"}
        status, answer = await ask(server, "/update_weights_from_distributed", sent)
        assert (status, answer["success"], answer["weight_version"]) == (200, True, "sent")
        assert (await ask(server, "/update_weights_from_distributed", {**sent, "load_format": "flat"}))[0] == 400
        for status in (200, 400):
            assert (await ask(server, "/destroy_weights_update_group", {"group_name": "g"}))[0] == status


async def test_the_weight_version_is_available_under_vllms_path(autojump_clock):
    async with open_memory_server() as server:
        await ask(server, DISK, {"model_path": "b", "weight_version": "step 1"})
        assert await ask(server, "/weight_info", method="GET") == (200, {"weight_version": "step 1"})
        assert await ask(server, "/get_world_size", method="GET") == (200, {"world_size": 1})


@pytest.mark.parametrize("path", [path for path in OTHER_PATHS if not path.startswith("/api/")])
async def test_error_for_a_path_of_other_servers_names_the_path_to_use(autojump_clock, path: str):
    async with open_memory_server() as server:
        status, answer = await ask(server, path, {})
        assert (status, answer["error"]["code"]) == (404, "other_path")
        named = [word.strip(":,;") for word in answer["error"]["message"].split(path, 1)[1].split() if word[0] == "/"]
        paths = {operation.path for operation in OPERATIONS}
        assert set(named) <= paths, "the path that the message names exists"
        assert path not in paths
