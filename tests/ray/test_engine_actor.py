"""Tests the reports of the actor of an engine, and the resources that it requests from Ray, without a cluster."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import threading
from contextlib import closing
from typing import Any

import msgspec
import pytest
import trio

from trioserve.commands.option_groups import PLACED_OPTIONS
from trioserve.config import Config, add_arguments
from trioserve.contracts.errors import StartupError

from .conftest import SECONDS_MAX, why_skipped

if why_skipped() is None:
    from trioserve import ray_engines
    from trioserve.commands.ray_group import plan_of
    from trioserve.ray_engines import EngineActor, EngineState, GroupPlan


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the function that exits the process.

    Give the list of exit codes, which is empty until the function is called.
    """
    codes: list[int] = []
    monkeypatch.setattr(ray_engines.os, "_exit", codes.append)
    monkeypatch.setattr(ray_engines, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(ray_engines.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    return codes


def start_actor(**options: Any) -> tuple[EngineActor, threading.Thread]:
    before = set(threading.enumerate())
    actor = EngineActor(msgspec.json.encode(Config(**options)))
    [thread] = [thread for thread in set(threading.enumerate()) - before if thread.name == "trioserve"]
    return actor, thread


async def state_after(actor: EngineActor, known: EngineState) -> EngineState:
    """Wait for a state that differs from the known state."""
    while (state := await actor.state(known, SECONDS_MAX)) == known:
        pass
    return state


LOADING = None if why_skipped() else EngineState(None, None, "127.0.0.1")


def health(state: EngineState) -> int:
    assert state.url is not None
    with closing(http.client.HTTPConnection(state.url.removeprefix("http://"), timeout=60)) as connection:
        connection.request("GET", "/ready")
        return connection.getresponse().status


@pytest.mark.slow
def test_actor_serves_at_the_address_of_its_node_and_reports_start_and_stop(ended):
    actor, thread = start_actor(max_num_seqs=2, kv_cache_memory=0.1, host="10.9.9.9", port=1)

    async def program() -> None:
        serving = await state_after(actor, LOADING)
        assert serving.url is not None
        assert serving.url.startswith("http://127.0.0.1:")
        assert await asyncio.to_thread(health, serving) == 200
        waiting = asyncio.create_task(state_after(actor, serving))
        await actor.stop()
        assert await waiting == LOADING
        await actor.stop()  # A second stop changes nothing.

    asyncio.run(program())
    thread.join(SECONDS_MAX)
    assert ended == [], "whoever stopped it ends the process"


def test_actor_reports_why_its_engine_cannot_be_opened_and_ends_its_process(ended):
    actor, thread = start_actor(model="/no/such/model")

    async def program() -> None:
        failed = await state_after(actor, LOADING)
        assert failed.url is None
        assert failed.failure is not None
        assert failed.failure.startswith("ModelLoadError: the model '/no/such/model' is not found")

    asyncio.run(program())
    thread.join(SECONDS_MAX)
    assert ended == [1]


def test_state_is_returned_after_the_timeout_if_it_did_not_change(ended):
    actor, thread = start_actor(model="/no/such/model")

    async def program() -> None:
        failed = await state_after(actor, LOADING)
        assert await actor.state(failed, 0.01) == failed
        assert await actor.state(None, SECONDS_MAX) == failed

    asyncio.run(program())
    thread.join(SECONDS_MAX)
    assert ended == [1]


@pytest.mark.parametrize("is_loading", [False, True])
def test_actor_that_is_stopped_before_it_serves_never_serves(ended, monkeypatch, is_loading):
    begun = threading.Event()

    async def serve(config: Config, orders: trio.MemoryReceiveChannel[object], *, on_serving: Any) -> None:
        begun.set()
        await trio.sleep_forever()

    monkeypatch.setattr("trioserve.commands.serve.serve_configured", serve)
    actor, thread = start_actor()

    async def program() -> None:
        if is_loading:
            await asyncio.to_thread(begun.wait)
        await actor.stop()
        assert (await actor.state(None, 0.0)).url is None

    asyncio.run(program())
    thread.join(SECONDS_MAX)
    assert ended == []


def plan_for_flags(*flags: str) -> tuple[GroupPlan, Config]:
    """Return the plan and the configuration of `trioserve ray up llm` with these flags."""
    parser = argparse.ArgumentParser()
    parser.set_defaults(name="llm", replicas=1, num_cpus=None, num_gpus=None, placement="spread")
    for name, kind in (("--replicas", int), ("--num-cpus", float), ("--num-gpus", float)):
        parser.add_argument(name, type=kind)
    add_arguments(parser, only=PLACED_OPTIONS)
    return plan_of(parser.parse_args(flags))


@pytest.mark.parametrize(
    ("flags", "bundle", "threads"),
    [
        ([], {"CPU": 1}, 1),
        (["--num-cpus", "8"], {"CPU": 8}, 8),
        (["--num-cpus", "8", "--threads", "3"], {"CPU": 8}, 3),
        (["--num-cpus", "0.5"], {"CPU": 0.5}, 1),
        (["--device", "cuda"], {"CPU": 1, "GPU": 1}, None),
        (["--num-gpus", "0.5"], {"CPU": 1, "GPU": 0.5}, None),
        (["--tensor-parallel-size", "2"], {"CPU": 2}, 2),
        (["--tensor-parallel-size", "2", "--num-cpus", "8"], {"CPU": 8}, 8),
        (["--tensor-parallel-size", "2", "--device", "cuda"], {"CPU": 2, "GPU": 2}, None),
    ],
)
def test_resources_of_an_engine_follow_its_options_and_form_one_bundle(flags, bundle, threads):
    plan, config = plan_for_flags(*flags)
    assert plan.bundle == bundle
    assert config.threads == threads


def test_router_settings_in_the_environment_are_ignored_for_engines(monkeypatch):
    monkeypatch.setenv("TRIOSERVE_ENDPOINTS_RAY", "llm")
    monkeypatch.setenv("TRIOSERVE_PORT", "8000")
    monkeypatch.setenv("TRIOSERVE_MAX_NUM_SEQS", "5")
    _, config = plan_for_flags()
    assert (config.endpoints_ray, config.port, config.max_num_seqs) == (None, Config().port, 5)


@pytest.mark.parametrize(
    ("options", "expect"),
    [
        ({"name": "a/b"}, 'the name of a group is "a/b"'),
        ({"name": ""}, "must not be empty"),
        ({"name": "a", "replicas": 0}, "--replicas is 0"),
        ({"name": "a", "cpus": 0.0}, "--num-cpus is 0"),
        ({"name": "a", "gpus": -1.0}, "--num-gpus -1"),
    ],
)
def test_invalid_plan_is_refused_with_the_name_of_the_option(options, expect):
    with pytest.raises(StartupError, match=expect):
        GroupPlan(**options)
