"""Tests of models that are loaded on demand, by clients of a router in memory. Each model is a server in memory."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.admission.model_runs import ModelRuns
from trioserve.api.caller import AccessRules
from trioserve.contracts.errors import EndpointLost
from trioserve.proxy.fleet import EndpointSpec
from trioserve.router.hosted_models import ModelSpec
from trioserve.router.settings import HostedModelsSettings
from trioserve.testing.memory_router import MemoryRouter, open_memory_router
from trioserve.testing.memory_server import MemoryServer, open_memory_server

PATH = "/v1/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def body(model: str, **fields: object) -> dict[str, object]:
    return {"model": model, "prompt": "hello", "max_tokens": 5, "seed": 1, **fields}


class Models:
    """Models that are loaded in memory.

    Attributes:
        host: Runs of the models.
        router: Router with the host.
        servers: Server of each loaded model.
        loading: Event by model that ends its load.
        crashes: Event by model that ends its process.
        loads: Names of the models in the order of their loads.
        failures: Reasons of loads that fail, by model.
        progress: Function by model that reports the progress of its load.
        sizes: Options of the servers.
    """

    def __init__(self) -> None:
        self.host: ModelRuns[EndpointSpec]
        self.router: MemoryRouter
        self.servers: dict[str, MemoryServer] = {}
        self.loading: dict[str, trio.Event] = {}
        self.crashes: dict[str, trio.Event] = {}
        self.loads: list[str] = []
        self.failures: dict[str, str] = {}
        self.streams: dict[str, object] = {}
        self.progress: dict[str, Callable[[str, float | None], None]] = {}
        self.sizes: dict[str, Any] = {}

    async def run_model(self, name, *, on_loaded, on_progress, stopping):
        self.loads.append(name)
        self.progress[name] = on_progress
        crash = self.crashes[name] = trio.Event()
        adapters = [adapter for adapter in self.host.served_names - self.host.names if self.host.base(adapter) == name]
        modules = tuple(f"{adapter}=/{adapter}" for adapter in adapters)
        async with open_memory_server(lora_modules=modules, **self.sizes) as server, trio.open_nursery() as nursery:

            async def end(event: trio.Event) -> None:
                await event.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(end, stopping)
            nursery.start_soon(end, crash)
            if name in self.loading:
                await self.loading[name].wait()
            if name in self.failures:
                nursery.cancel_scope.cancel()
                return self.failures[name]
            self.servers[name] = server
            id = f"{name}-{len(self.loads)}"

            async def connect():
                if name not in self.servers:
                    raise ConnectionRefusedError(111, "Connection refused")
                return server.connect()

            self.streams[id] = connect
            on_loaded(
                EndpointSpec(url=f"http://{id}", id=id, models={name: "fake", **{each: each for each in adapters}})
            )
            try:
                await trio.sleep_forever()
            finally:
                del self.servers[name]
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                    await server.hang_up()
        return "the process ended with code 1" if crash.is_set() else "the process ended"

    def state(self, name: str) -> str:
        return self.host.status(name).state


@asynccontextmanager
async def open_models(*specs: ModelSpec, memory: int = 100, **settings: float) -> AsyncIterator[Models]:
    models = Models()

    settings = HostedModelsSettings(memory_bytes=memory, **settings)
    models.host = ModelRuns(settings, specs, models.run_model)
    async with open_memory_router(models.streams, hosted=models.host) as models.router:
        yield models


def spec(name: str, **fields) -> ModelSpec:
    return ModelSpec(name=name, **{"bytes": 40, **fields})


async def test_first_request_loads_its_model_once_for_all_that_wait(autojump_clock):
    async with open_models(spec("a"), spec("b")) as models:
        models.loading["a"] = trio.Event()
        client = models.router.client()
        async with (
            client.ask(PATH, body("a")) as first,
            models.router.client().ask(PATH, body("a")) as second,
        ):
            await wait_all_tasks_blocked()
            assert (models.state("a"), models.host.status("a").waiting, models.state("b")) == ("loading", 2, "unloaded")
            models.loading["a"].set()
            assert await first.head() == await second.head() == 200
            await first.read()
            await second.read()
        assert models.loads == ["a"]
        await wait_all_tasks_blocked()
        assert (models.host.status("a").leases, models.host.status("a").waiting) == (0, 0)
        assert await (await models.router.client().post(PATH, body("a"))).head() == 200
        assert models.loads == ["a"]
        await models.router.assert_all_free()


async def test_cache_of_an_idle_model_becomes_smaller_for_a_model_that_waits(autojump_clock):
    cache = {"kv_blocks": 64, "kv_blocks_min": 32, "kv_block_bytes": 1, "kv_block_tokens": 4}
    async with open_models(spec("a", bytes=80, **cache), spec("b")) as models:
        models.sizes = {"block_count": 64, "max_model_len": 128}
        for name in "aba":
            assert await (await models.router.client().post(PATH, body(name))).head() == 200
        assert models.loads == ["a", "b"]
        assert models.servers["a"].engine.stats().blocks_total == 44
        assert (models.host.held_bytes, models.host.status("a").bytes) == (100, 60)
        await models.router.assert_all_free()


async def test_operator_lets_a_model_sleep_and_a_request_wakes_it(autojump_clock):
    cache = {"kv_blocks": 64, "kv_blocks_min": 32, "kv_block_bytes": 1, "kv_block_tokens": 4}
    async with open_models(spec("a", bytes=80, **cache), spec("b")) as models:
        models.sizes = {"block_count": 64, "max_model_len": 128}
        client = models.router.client
        asked = (("POST", "/sleep", True), ("GET", "/is_sleeping", True), ("POST", "/wake_up", False))

        async def ask(method: str, path: str) -> tuple[int, object]:
            async with client().ask(f"{path}?model=a", None, method=method) as response:
                return await response.head(), await response.json()

        assert (await ask("POST", "/sleep"))[0] == 400
        unnamed = await client().post("/sleep", {})
        assert (await unnamed.head(), (await unnamed.json())["error"]["message"]) == (
            400,
            "the query names no model: add ?model= with one of a, b",
        )
        assert await (await client().post(PATH, body("a"))).head() == 200
        for method, path, is_sleeping in asked:
            assert await ask(method, path) == (200, {"is_sleeping": is_sleeping})
            assert models.servers["a"].engine.is_sleeping == is_sleeping
            assert models.host.held_bytes == (16 if is_sleeping else 80)
        await ask("POST", "/sleep")
        assert models.state("a") == "sleeping"
        assert b'hosted_model_sleeping{hosted_model="a"} 1.0' in await (await client().get("/metrics")).read()
        assert await (await client().post(PATH, body("a"))).head() == 200
        assert (models.state("a"), models.loads) == ("loaded", ["a"])
        await models.router.assert_all_free()


async def test_model_that_does_not_wake_up_is_loaded_again(autojump_clock):
    cache = {"kv_blocks": 64, "kv_blocks_min": 32, "kv_block_bytes": 1, "kv_block_tokens": 4}
    async with open_models(spec("a", bytes=80, **cache)) as models:
        assert await (await models.router.client().post(PATH, body("a"))).head() == 200
        set_asleep = models.host.follower.set_asleep

        async def fail_to_wake(loaded: EndpointSpec, asleep: bool) -> None:
            if not asleep:
                raise EndpointLost("it does not answer")
            await set_asleep(loaded, asleep)

        models.host.follower.set_asleep = fail_to_wake
        models.host.sleep("a")
        assert (await models.host.wait_until_settled("a")).state == "sleeping"
        assert await (await models.router.client().post(PATH, body("a"))).head() == 200
        assert models.loads == ["a", "a"]


@pytest.mark.parametrize("hangs_at", [True, False], ids=["sleep", "wake_up"])
async def test_model_that_hangs_in_a_sleep_or_wake_up_is_loaded_again(autojump_clock, hangs_at: bool):
    cache = {"kv_blocks": 64, "kv_blocks_min": 32, "kv_block_bytes": 1, "kv_block_tokens": 4}
    async with open_models(spec("a", bytes=80, **cache), stall_seconds=20) as models:
        assert await (await models.router.client().post(PATH, body("a"))).head() == 200
        set_asleep = models.host.follower.set_asleep

        async def hang(loaded: EndpointSpec, asleep: bool) -> None:
            if asleep == hangs_at:
                await trio.sleep_forever()
            await set_asleep(loaded, asleep)

        models.host.follower.set_asleep = hang
        models.host.sleep("a")
        await wait_all_tasks_blocked()
        assert models.state("a") == "sleeping"
        assert await (await models.router.client().post(PATH, body("a"))).head() == 200
        assert (models.loads, models.host.held_bytes) == (["a", "a"], 80)


async def test_cache_of_a_model_that_is_being_unloaded_keeps_its_size(autojump_clock):
    async with open_models(spec("a")) as models:
        with pytest.raises(EndpointLost, match="the model is being unloaded"):
            await models.host.follower.resize(EndpointSpec(url="http://gone", id="gone"), 4)


async def test_server_is_ready_although_no_model_is_loaded():
    async with open_models(spec("a")) as models:
        response = await models.router.client().get("/ready")
        assert (await response.head(), await response.json()) == (200, {"ready": True})


async def test_load_is_cancelled_when_the_last_waiting_client_leaves(autojump_clock):
    async with open_models(spec("a")) as models:
        models.loading["a"] = trio.Event()
        async with models.router.client().ask(PATH, body("a")), models.router.client().ask(PATH, body("a")):
            await wait_all_tasks_blocked()
            assert models.state("a") == "loading"
        with trio.fail_after(5):
            assert (await models.host.wait_until_settled("a")).state == "unloaded"
        assert models.host.held_bytes == 0
        await models.router.assert_all_free()


async def test_load_that_an_unload_cancels_is_refused_and_unload_reports_a_model_that_a_request_keeps(autojump_clock):
    async with open_models(spec("a")) as models:
        client = models.router.client
        answers: dict[str, tuple[int, Any]] = {}

        async def post(path: str) -> None:
            response = await client().post(path, {"model": "a"})
            answers[path] = await response.head(), await response.json()

        for has_request, load, unload in ((False, 400, True), (True, 200, False)):
            models.loading["a"] = trio.Event()
            async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
                nursery.start_soon(post, "/models/load")
                if has_request:
                    await stack.enter_async_context(client().ask(PATH, body("a")))
                await wait_all_tasks_blocked()
                assert models.state("a") == "loading"
                nursery.start_soon(post, "/models/unload")
                await wait_all_tasks_blocked()
                models.loading["a"].set()
            assert (answers["/models/load"][0], answers["/models/unload"][1]["success"]) == (load, unload)
            if not has_request:
                message = "the model a is unloaded, because it was unloaded meanwhile: no request waits for it any more"
                assert answers["/models/load"][1]["error"]["message"] == message
        await models.router.assert_all_free()


async def test_stream_that_waits_for_its_model_begins_early_with_the_progress_of_the_load(autojump_clock):
    async with open_models(spec("a")) as models:
        models.loading["a"] = trio.Event()
        async with AsyncExitStack() as scopes:
            first = await scopes.enter_async_context(AsyncExitStack())
            await first.enter_async_context(models.router.client().ask(PATH, body("a")))
            await wait_all_tasks_blocked()
            stream = await scopes.enter_async_context(models.router.client().ask(PATH, body("a", stream=True)))
            await trio.sleep(4)
            models.progress["a"]("loading a", 0.42)
            listed = (await (await models.router.client().get("/v1/models/a")).json())["status"]
            assert (listed["value"], listed["activity"], listed["progress"]) == ("loading", "loading a", 0.42)
            await trio.sleep(1.5)
            await first.aclose()
            models.progress["a"]("warming up a", None)
            await trio.sleep(1)
            models.loading["a"].set()
            assert await stream.head() == 200
            *comments, rest = (await stream.read()).decode().split("\n\n", 2)
        assert [msgspec.json.decode(comment.removeprefix(": loading ")) for comment in comments] == [
            {"model": "a", "state": "loading", "position": 2, "activity": "loading a", "progress": 0.42},
            {"model": "a", "state": "loading", "position": 1, "activity": "warming up a"},
        ]
        assert ": loading" not in rest
        assert rest.endswith("data: [DONE]\n\n")
        assert "activity" not in (await (await models.router.client().get("/v1/models/a")).json())["status"]
        await models.router.assert_all_free()


async def test_stream_that_began_early_ends_with_the_error_of_the_load_or_of_the_model(autojump_clock):
    async with open_models(spec("a")) as models:
        for fields, code in (({}, "model_load_failed"), ({"max_tokens": 10**9}, None)):
            models.loading["a"] = trio.Event()
            async with models.router.client().ask(PATH, body("a", stream=True, **fields)) as stream:
                await trio.sleep(6)
                if code is not None:
                    models.failures["a"] = "its weights are damaged"
                models.loading["a"].set()
                assert await stream.head() == 200
                *_, last = [event async for event in stream]
            if code is not None:
                assert (last["error"]["code"], "are damaged" in last["error"]["message"]) == (code, True)
                del models.failures["a"]
            else:
                assert (last["error"]["param"], last["error"]["type"]) == ("max_tokens", "invalid_request_error")
            await trio.sleep(5.1)
        await models.router.assert_all_free()


async def test_lines_that_wait_for_their_model_begin_early_with_blanks(autojump_clock):
    async with open_models(spec("a")) as models:
        models.loading["a"] = trio.Event()
        asked = {"model": "a", "prompt": "hello", "options": {"num_predict": 5}}
        async with models.router.client().ask("/api/generate", asked) as stream:
            await trio.sleep(6)
            models.loading["a"].set()
            assert await stream.head() == 200
            lines = (await stream.read()).decode().split("\n")
        assert lines[0].startswith(" ")
        assert msgspec.json.decode([line for line in lines if line.strip()][-1])["done"] is True


async def test_failed_load_refuses_all_that_wait_and_is_repeated_after_a_time(autojump_clock):
    async with open_models(spec("a")) as models:
        models.loading["a"] = trio.Event()
        models.failures["a"] = "its weights are damaged"
        async with (
            models.router.client().ask(PATH, body("a")) as one,
            models.router.client().ask(PATH, body("a")) as two,
        ):
            await wait_all_tasks_blocked()
            models.loading["a"].set()
            for response in (one, two):
                assert await response.head() == 503
                error = (await response.json())["error"]
                assert (error["code"], "its weights are damaged" in error["message"]) == ("model_load_failed", True)
        assert await (await models.router.client().post(PATH, body("a"))).head() == 503
        assert models.loads == ["a"]
        del models.failures["a"]
        await trio.sleep(5.1)
        assert await (await models.router.client().post(PATH, body("a"))).head() == 200
        assert models.loads == ["a", "a"]


async def test_load_that_hangs_refuses_all_that_wait_and_is_repeated_after_a_time(autojump_clock):
    async with open_models(spec("a"), stall_seconds=20) as models:
        models.loading["a"] = trio.Event()
        async with (
            models.router.client().ask(PATH, body("a")) as one,
            models.router.client().ask(PATH, body("a", stream=True)) as two,
        ):
            assert await one.head() == 503
            error = (await one.json())["error"]
            assert (error["code"], "its load made no progress for 20 s" in error["message"]) == (
                "model_load_failed",
                True,
            )
            *_, last = [event async for event in two]
            assert last["error"]["code"] == "model_load_failed"
        assert await (await models.router.client().post(PATH, body("a"))).head() == 503
        assert (models.host.held_bytes, models.host.failures_total["a"]) == (0, 1)
        await trio.sleep(5.1)
        models.loading["a"].set()
        assert await (await models.router.client().post(PATH, body("a"))).head() == 200
        assert models.loads == ["a", "a"]
        await models.router.assert_all_free()


async def test_idle_model_that_was_used_least_recently_gives_way(autojump_clock):
    async with open_models(spec("a"), spec("b"), spec("c")) as models:
        for name in "abac":
            assert await (await models.router.client().post(PATH, body(name))).head() == 200
            await trio.sleep(1)
        assert [models.state(name) for name in "abc"] == ["loaded", "unloaded", "loaded"]
        assert (models.loads, models.host.status("b").reason) == (["a", "b", "c"], "c needs its memory")
        async with models.router.client().ask("/ui/events", None, method="GET") as feed:
            snapshot = await anext(aiter(feed))
            assert {name: model["state"] for name, model in snapshot["models"].items()} == {
                "a": "loaded",
                "b": "unloaded",
                "c": "loaded",
            }
        page = (await (await models.router.client().get("/metrics")).read()).decode()
        for name, outcome, count in (
            ("a", "unloaded", 0),
            ("b", "unloaded", 1),
            ("b", "loaded", 1),
            ("b", "failed", 0),
        ):
            assert f'hosted_model_loads_total{{hosted_model="{name}",outcome="{outcome}"}} {count}.0' in page
        assert "hosted_models_bytes 80.0" in page
        assert "hosted_model_load_seconds_count 3" in page
        assert set(models.servers) == {"a", "c"}
        await models.router.assert_all_free()


async def test_busy_model_gives_way_after_its_turn_and_loses_no_request(autojump_clock):
    async with open_models(spec("a"), spec("b"), memory=50) as models:
        async with models.router.client().ask(PATH, body("a", stream=True, max_tokens=500)) as long:
            await long.head()
            engine = models.servers["a"].engine
            engine.pause()
            async with models.router.client().ask(PATH, body("b")) as other:
                await trio.sleep(5)
                assert models.host.status("b").reason == "it waits for the memory of other models"
                assert models.host.status("b").state_seconds == pytest.approx(5, abs=0.1)
                await trio.sleep(15)
                assert models.state("a") == "draining"
                async with models.router.client().ask(PATH, body("a")) as late:
                    await wait_all_tasks_blocked()
                    assert models.host.status("a").waiting == 1
                    engine.resume()
                    await long.read()
                    assert await other.head() == 200
                    await other.read()
                    assert await late.head() == 200
                    await late.read()
        assert models.loads == ["a", "b", "a"]
        await models.router.assert_all_free()


async def test_stream_of_a_crashed_model_resumes_after_it_is_loaded_again(autojump_clock):
    async with open_models(spec("a")) as models:
        async with models.router.client().ask(PATH, body("a", stream=True, max_tokens=30)) as stream:
            await stream.head()
            models.servers["a"].engine.pause()
            await wait_all_tasks_blocked()
            models.crashes["a"].set()
            events = [event async for event in stream]
        text = "".join(event["choices"][0]["text"] for event in events if event.get("choices"))
        whole = await (await models.router.client().post(PATH, body("a", max_tokens=30))).json()
        assert text == whole["choices"][0]["text"]
        assert models.loads == ["a", "a"]


async def test_request_that_is_sent_while_its_model_begins_to_drain_is_served(autojump_clock, monkeypatch):
    async with open_models(spec("a")) as models:
        refused: list[str] = []
        await (await models.router.client().post(PATH, body("a"))).read()
        with monkeypatch.context() as patch:
            patch.setattr(models.host, "lease", lambda name, tenant: refused.append(name))
            response = await models.router.client().post(PATH, body("a"))
            assert (await response.head(), refused) == (200, ["a"])
            await response.read()
        await wait_all_tasks_blocked()
        assert (models.host.status("a").waiting, models.host.status("a").leases) == (0, 0)
        assert await (await models.router.client().post(PATH, body("a"))).head() == 200
        await models.router.assert_all_free()


async def test_request_whose_deadline_passes_while_its_model_loads_is_refused(autojump_clock):
    async with open_models(spec("a")) as models:
        models.loading["a"] = trio.Event()
        response = await models.router.client().post(PATH, body("a", queue_timeout=3))
        assert (await response.head(), (await response.json())["error"]["code"]) == (504, "queue_timeout")
        assert (await models.host.wait_until_settled("a")).state == "unloaded"


async def test_model_is_unloaded_after_keep_alive_from_the_end_of_its_last_request(autojump_clock):
    async with open_models(spec("a", keep_alive_seconds=60)) as models:
        await models.router.client().post(PATH, body("a"))
        await trio.sleep(59)
        assert models.state("a") == "loaded"
        await models.router.client().post(PATH, body("a"))
        await trio.sleep(59)
        assert models.state("a") == "loaded"
        await trio.sleep(2)
        assert (models.state("a"), models.host.status("a").reason) == ("unloaded", "it was idle")


async def test_first_model_of_a_tenant_is_loaded_before_further_models_of_another_tenant(autojump_clock):
    async with open_models(spec("a"), spec("b"), spec("c"), spec("d"), memory=50) as models:
        models.loading["a"] = trio.Event()
        async with trio.open_nursery() as nursery:
            for name, tenant in (("a", "one"), ("b", "one"), ("c", "one"), ("d", "other")):
                post = models.router.client().post
                nursery.start_soon(partial(post, PATH, body(name), headers={"x-tenant-id": tenant}))
                await trio.sleep(1)
            models.loading["a"].set()
        assert models.loads == ["a", "b", "d", "c"]


async def test_request_for_an_adapter_loads_its_model(autojump_clock):
    async with open_models(spec("a", adapters=("fr", "de")), spec("b"), memory=50) as models:
        client = models.router.client
        plain = await (await client().post(PATH, body("a"))).json()
        await client().post(PATH, body("b"))
        assert (models.loads, models.state("fr")) == (["a", "b"], "unloaded")
        french = await (await client().post(PATH, body("fr"))).json()
        assert (french["model"], french["choices"] != plain["choices"]) == ("fr", True)
        assert (models.loads, models.state("fr"), models.state("de")) == (["a", "b", "a"], "loaded", "loaded")
        listed = {card["id"]: card for card in (await (await client().get("/v1/models")).json())["data"]}
        assert {name: card.get("parent") for name, card in listed.items()} == {
            "a": None,
            "b": None,
            "de": "a",
            "fr": "a",
        }
        assert listed["fr"]["status"]["value"] == "loaded"
        await models.router.assert_all_free()


async def test_adapter_that_an_operator_loads_is_routed_and_loaded_again_with_its_model(autojump_clock):
    async with open_models(spec("a"), spec("b"), memory=50) as models:
        models.sizes = {"access": AccessRules(loads_adapters=True)}
        kept: list[tuple[str, str, str | None]] = []
        models.host.on_adapter = lambda *adapter: kept.append(adapter)
        client = models.router.client
        sql = {"lora_name": "sql", "lora_path": "/adapters/sql"}

        async def status(path: str, asked: dict[str, object]) -> int:
            return await (await client().post(path, asked)).head()

        assert await status(LOAD, sql) == 400
        assert await status(f"{LOAD}?model=a", {**sql, "lora_name": "b"}) == 400
        assert models.loads == []
        assert await status(f"{LOAD}?model=a", sql) == 200
        assert (models.loads, kept) == (["a"], [("a", "sql", "/adapters/sql")])
        assert await status(PATH, body("sql")) == 200
        assert await status(f"{LOAD}?model=b", sql) == 400
        assert await status(PATH, body("b")) == 200
        assert models.state("sql") == "unloaded"
        assert await status(PATH, body("sql")) == 200
        assert models.loads == ["a", "b", "a"]
        assert await (await client().get("/v1/models/sql")).head() == 200
        assert await status(UNLOAD, {"lora_name": "sql"}) == 200
        assert await status(PATH, body("sql")) == 404
        assert await status(PATH, body("a")) == 200
        assert kept[1:] == [("a", "sql", None)]
        await models.router.assert_all_free()


async def test_adapter_of_a_model_that_is_not_loaded_is_removed_without_a_load(autojump_clock):
    async with open_models(spec("a", adapters=("fr",))) as models:
        response = await models.router.client().post(UNLOAD, {"lora_name": "fr"})
        assert (await response.head(), models.loads) == (200, [])
        assert await (await models.router.client().post(PATH, body("fr"))).head() == 404


async def test_request_without_a_model_uses_the_only_model_although_it_has_adapters(autojump_clock):
    async with open_models(spec("a", adapters=("fr", "de"))) as models:
        asked = {key: value for key, value in body("a").items() if key != "model"}
        response = await models.router.client().post(PATH, asked)
        assert await response.head() == 200


async def test_failed_load_refuses_the_requests_for_its_adapters(autojump_clock):
    async with open_models(spec("a", adapters=("fr",))) as models:
        models.loading["a"] = trio.Event()
        models.failures["a"] = "its weights are damaged"
        async with models.router.client().ask(PATH, body("fr")) as response:
            await wait_all_tasks_blocked()
            models.loading["a"].set()
            assert await response.head() == 503


async def test_operator_loads_lists_and_unloads_models(autojump_clock):
    async with open_models(spec("a"), spec("b")) as models:
        client = models.router.client()
        loaded = await (await client.post("/models/load", {"model": "a"})).json()
        assert (loaded["success"], loaded["status"]["value"]) == (True, "loaded")
        listed = (await (await client.get("/v1/models")).json())["data"]
        assert {each["id"]: each["status"]["value"] for each in listed} == {"a": "loaded", "b": "unloaded"}
        assert (await (await client.get("/models")).json())["data"] == listed
        running = (await (await client.get("/api/ps")).json())["models"]
        assert [each["name"] for each in running] == ["a:latest"]
        unloaded = await (await client.post("/models/unload", {"model": "a"})).json()
        assert (unloaded["status"]["value"], models.host.held_bytes) == ("unloaded", 0)
        refused = await client.post("/models/load", {"model": "c"})
        assert (await refused.head(), "a, b" in (await refused.json())["error"]["message"]) == (400, True)


async def test_ollama_client_unloads_by_an_empty_prompt_and_sets_keep_alive(autojump_clock):
    async with open_models(spec("a", keep_alive_seconds=60)) as models:
        prompt = {"model": "a", "prompt": "hello", "stream": False, "options": {"num_predict": 5}}

        def post(body: object):
            return models.router.client().post("/api/generate", body)

        await post({**prompt, "keep_alive": "5s"})
        await trio.sleep(4)
        assert models.state("a") == "loaded"
        await trio.sleep(2)
        assert models.state("a") == "unloaded"
        await post({**prompt, "keep_alive": -1})
        await trio.sleep(100)
        assert models.state("a") == "loaded"
        answer = await (await post({"model": "a", "keep_alive": 0})).json()
        assert (answer["done"], answer["done_reason"]) == (True, "unload")
        assert (await models.host.wait_until_settled("a")).state == "unloaded"
        refused = await post({**prompt, "keep_alive": "soon"})
        assert (await refused.head(), "5m" in (await refused.json())["error"]) == (400, True)


@pytest.mark.slow
@pytest.mark.timeout(900)  # seconds. It takes 40 on two quiet cores.
async def test_thousand_switches_lose_no_request_and_leave_nothing(autojump_clock):
    """Ten models have memory for three. Half of the clients leave at a random time."""
    names, rng = [f"m{number}" for number in range(10)], random.Random(7)
    answered = left = 0
    async with open_models(*(spec(name, bytes=10) for name in names), memory=30, turn_seconds=1) as models:

        async def ask(name: str, leaves_after: float | None) -> None:
            nonlocal answered, left
            client = models.router.client()
            with trio.move_on_after(leaves_after or 3600) as patience:
                async with client.ask(PATH, body(name, stream=True, queue_timeout=3000)) as response:
                    assert await response.head() == 200, await response.read()
                    await response.read()
                    answered += 1
            left += patience.cancelled_caught

        async with trio.open_nursery() as nursery:
            for _ in range(1_500):
                nursery.start_soon(ask, rng.choice(names), rng.uniform(0, 3) if rng.random() < 0.5 else None)
                await trio.sleep(rng.expovariate(2))
        assert sum(models.host.unloads_total.values()) >= 1_000
        assert answered + left == 1_500
        assert answered >= 600
        for name in names:
            models.host.unload(name)
            await models.host.wait_until_settled(name)
        assert (models.host.held_bytes, models.servers) == (0, {})
        await models.router.assert_all_free()


async def test_router_prefers_the_server_that_has_loaded_the_model(autojump_clock):
    async with open_models(spec("x"), spec("y")) as one, open_models(spec("x"), spec("y")) as two:
        assert await (await two.router.client().post(PATH, body("y"))).head() == 200
        servers = {"a": one.router, "b": two.router}

        def opener(server):
            async def connect():
                return server.connect()

            return connect

        async with open_memory_router({id: opener(server) for id, server in servers.items()}) as router:
            for _ in range(3):
                assert await (await router.client().post(PATH, body("y"))).head() == 200
            assert (one.loads, two.loads) == ([], ["y"])
            assert await (await router.client().post(PATH, body("x"))).head() == 200
            assert sorted(one.loads + two.loads) == ["x", "y"]
