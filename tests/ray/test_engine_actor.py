"""What an engine's actor tells of itself, and what Ray is asked for; without a cluster."""

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
    """The codes with which the process would have ended, at once."""
    codes: list[int] = []
    monkeypatch.setattr(ray_engines.os, "_exit", codes.append)
    monkeypatch.setattr(ray_engines, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(ray_engines.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    return codes


def made(**options: Any) -> tuple[EngineActor, threading.Thread]:
    before = set(threading.enumerate())
    actor = EngineActor(msgspec.json.encode(Config(**options)))
    [thread] = [thread for thread in set(threading.enumerate()) - before if thread.name == "trioserve"]
    return actor, thread


async def state_after(actor: EngineActor, known: EngineState) -> EngineState:
    """The next one that is another."""
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
def test_it_serves_at_its_nodes_address_until_it_is_stopped_and_tells_both(ended):
    actor, thread = made(max_num_seqs=2, kv_cache_memory=0.1, host="10.9.9.9", port=1)

    async def program() -> None:
        serving = await state_after(actor, LOADING)
        assert serving.url is not None
        assert serving.url.startswith("http://127.0.0.1:")
        assert await asyncio.to_thread(health, serving) == 200
        waiting = asyncio.create_task(state_after(actor, serving))
        await actor.stop()
        assert await waiting == LOADING
        await actor.stop()  # once more changes nothing

    asyncio.run(program())
    thread.join(SECONDS_MAX)
    assert ended == [], "whoever stopped it ends the process"


def test_one_that_cannot_be_opened_says_why_and_ends_its_process_so_that_ray_starts_it_anew(ended):
    actor, thread = made(model="/no/such/model")

    async def program() -> None:
        failed = await state_after(actor, LOADING)
        assert failed.url is None
        assert failed.failure is not None
        assert failed.failure.startswith("ModelLoadError: the model '/no/such/model' is not found")

    asyncio.run(program())
    thread.join(SECONDS_MAX)
    assert ended == [1]


def test_an_answer_comes_after_a_while_when_nothing_has_changed(ended):
    actor, thread = made(model="/no/such/model")

    async def program() -> None:
        failed = await state_after(actor, LOADING)
        assert await actor.state(failed, 0.01) == failed
        assert await actor.state(None, SECONDS_MAX) == failed

    asyncio.run(program())
    thread.join(SECONDS_MAX)
    assert ended == [1]


@pytest.mark.parametrize("is_loading", [False, True])
def test_one_that_is_stopped_before_it_serves_never_does(ended, monkeypatch, is_loading):
    begun = threading.Event()

    async def serve(config: Config, orders: trio.MemoryReceiveChannel[object], *, on_serving: Any) -> None:
        begun.set()
        await trio.sleep_forever()

    monkeypatch.setattr("trioserve.commands.serve.serve_configured", serve)
    actor, thread = made()

    async def program() -> None:
        if is_loading:
            await asyncio.to_thread(begun.wait)
        await actor.stop()
        assert (await actor.state(None, 0.0)).url is None

    asyncio.run(program())
    thread.join(SECONDS_MAX)
    assert ended == []


def up(*flags: str) -> tuple[GroupPlan, Config]:
    """What `ray up llm` with these asks for."""
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
def test_an_engine_needs_what_its_options_say_all_on_one_node(flags, bundle, threads):
    plan, config = up(*flags)
    assert plan.bundle == bundle
    assert config.threads == threads


def test_what_is_in_the_environment_for_a_router_does_not_count(monkeypatch):
    monkeypatch.setenv("TRIOSERVE_ENDPOINTS_RAY", "llm")
    monkeypatch.setenv("TRIOSERVE_PORT", "8000")
    monkeypatch.setenv("TRIOSERVE_MAX_NUM_SEQS", "5")
    _, config = up()
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
def test_a_plan_that_cannot_be_is_refused_by_name(options, expect):
    with pytest.raises(StartupError, match=expect):
        GroupPlan(**options)
