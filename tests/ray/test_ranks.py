"""Tests ranks of one engine that Ray places on two nodes.

Streams must survive when the process, the actor or the node of a rank is killed. A closed engine must leave no process,
actor or placement group in the cluster. The processes and Ray are not fakes.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

import trioserve
from trioserve.contracts.errors import StartupError
from trioserve.ranks.placed import RanksRequest, placed_ranks
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped

from .conftest import MARK, SECONDS_MAX, Program, marked_processes, node_of, ray_nodes, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SAMPLING = trioserve.SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True)
RANK, ACTOR, PLACER = "trioserve.ranks.rank_process", "ray::RankActor", "trioserve.commands.ray_place"
LEFT = """
import json, ray
from trioserve.ray_engines import connected
with connected(None):
    groups = [group["state"] for group in ray.util.placement_group_table().values()]
    actors = [actor["State"] for actor in ray._private.state.actors().values()]
print(json.dumps({"groups": groups, "actors": actors}))
"""


class Nodes:
    def __init__(self, program: Program, environment: dict[str, str]) -> None:
        self.order = program.order
        self.environment = environment

    def processes(self, title: str) -> list[int]:
        return marked_processes(self.environment[MARK], title)

    def left(self) -> set[str]:
        """Return the states of all placement groups and actors of the cluster, including removed groups and actors."""
        ran = subprocess.run(
            [sys.executable, "-c", LEFT],
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=True,
            env=self.environment,
        )
        told = json.loads(ran.stdout.splitlines()[-1])
        assert told["groups"]
        assert told["actors"]
        return {*told["groups"], *told["actors"]}

    def check_nothing_is_left(self) -> None:
        wait_until(
            lambda: not [*self.processes(RANK), *self.processes(ACTOR), *self.processes(PLACER)], "for processes"
        )
        wait_until(lambda: self.left() == {"REMOVED", "DEAD"}, "for actors and placement groups")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes() as (program, environment), pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield Nodes(program, environment)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny Llama checkpoint and give its folder."""
    file = Path(__file__).parent.parent / "model" / "tiny_checkpoints.py"
    spec = importlib.util.spec_from_file_location("tiny_checkpoints", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path = tmp_path_factory.mktemp("llama")
    module.write_checkpoint(path, "llama", dtype="float32", sharded=False)
    return path


def opened(model: Path, **options: Any) -> Any:
    """Open an engine with two ranks that Ray places. Each rank has two of the four threads, and each node has two CPUs,
    so the ranks run on different nodes.
    """
    given: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray", "threads": 4}
    return trioserve.open_engine(str(model), **{"dtype": "float32", "kv_cache_memory": 0.01, **given, **options})


async def generated_tokens(engine: trioserve.Engine, at_ten: Callable[[], None] = lambda: None) -> list[int]:
    tokens: list[int] = []
    async with engine.generate("Once upon a time", SAMPLING) as stream:
        async for delta in stream:
            if len(tokens) < 10 <= len(tokens) + len(delta.token_ids):
                at_ten()
            tokens += delta.token_ids
    return tokens


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    """Generate the expected tokens with an engine in one process."""

    async def one_process() -> list[int]:
        async with opened(model, tensor_parallel_size=1, distributed_executor_backend="mp") as engine:
            return await generated_tokens(engine)

    return trio.run(one_process)


@pytest.mark.parametrize("lost", ["rank", "actor", "placer", "node"])
async def test_stream_continues_with_the_same_tokens_after_a_rank_is_lost(
    lost: str, nodes: Nodes, model: Path, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with trio.fail_after(SECONDS_MAX):
        async with opened(model) as engine:
            assert await generated_tokens(engine) == expected
            actors, ranks = nodes.processes(ACTOR), nodes.processes(RANK)
            raylets = {node_of(actor) for actor in actors}
            assert len(raylets) == 2, "each is to be on another node"
            assert raylets == set(nodes.order(raylets=True)["ids"])

            def lose() -> None:
                if lost == "node":
                    nodes.order(kill=node_of(actors[0]))
                    nodes.order(add=True)
                else:
                    os.kill(
                        {"rank": ranks, "actor": actors, "placer": nodes.processes(PLACER)}[lost][0], signal.SIGKILL
                    )

            assert await generated_tokens(engine, lose) == expected
            assert not {*actors, *ranks} & {*nodes.processes(ACTOR), *nodes.processes(RANK)}
            assert await generated_tokens(engine) == expected
    # The error must name the lost rank, not another rank that lost its connection to the lost rank.
    assert re.search(r"RankLost: rank \d \(on [\d.]+\) (has closed its connection|cannot be reached)", caplog.text)
    assert "the engine was reopened" in caplog.text
    nodes.check_nothing_is_left()


def test_killed_server_leaves_no_rank_actor_or_placement_group(nodes: Nodes, model: Path) -> None:
    options = ["--tensor-parallel-size", "2", "--distributed-executor-backend", "ray", "--kv-cache-memory", "0.01"]
    command = [sys.executable, "-m", "trioserve", "serve", str(model), "--port", "0", *options]
    with subprocess.Popen(command, env=nodes.environment) as server:
        try:
            wait_until(lambda: len(nodes.processes(RANK)) == 2, "for the ranks")
        finally:
            server.kill()
    nodes.check_nothing_is_left()


async def test_stages_are_placed_on_different_nodes(nodes: Nodes, model: Path, expected: list[int]) -> None:
    async with opened(model, tensor_parallel_size=1, pipeline_parallel_size=2, threads=2) as engine:
        assert len({node_of(actor) for actor in nodes.processes(ACTOR)}) == 2
        assert await generated_tokens(engine) == expected
    nodes.check_nothing_is_left()


async def test_ranks_that_fit_on_one_node_are_placed_on_one_node(
    nodes: Nodes, model: Path, expected: list[int]
) -> None:
    async with opened(model, threads=2) as engine:
        assert len({node_of(actor) for actor in nodes.processes(ACTOR)}) == 1
        assert await generated_tokens(engine) == expected
    nodes.check_nothing_is_left()


async def test_wait_for_free_nodes_can_be_cancelled(
    nodes: Nodes, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with trio.fail_after(SECONDS_MAX), trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def leave() -> None:
                while "waiting until Ray has free nodes for 2 ranks with 50 CPU each" not in caplog.text:
                    await trio.lowlevel.checkpoint()
                scope.cancel()

            nursery.start_soon(leave)
            async with opened(model, threads=100):
                raise AssertionError("there is no room")
    assert scope.cancelled_caught
    nodes.check_nothing_is_left()


def wanted(model: str) -> RanksRequest:
    return RanksRequest(count=2, model=model, revision=None, cpus=2, gpus=0, address=None)


async def test_actor_that_dies_before_its_rank_connects_raises_the_reason(nodes: Nodes, model: Path) -> None:
    with trio.fail_after(SECONDS_MAX):
        async with placed_ranks(wanted(str(model))) as ranks:
            os.kill(nodes.processes(ACTOR)[0], signal.SIGKILL)
            with pytest.raises(StartupError, match=r"the actor of rank \d is gone: .*died"), errors_unwrapped():
                await ranks.come(on_wait=lambda awaited: None)
    nodes.check_nothing_is_left()


async def test_model_that_is_missing_on_a_node_raises_an_error(nodes: Nodes) -> None:
    with trio.fail_after(SECONDS_MAX):
        async with placed_ranks(wanted("/no/such/model")) as ranks:
            with pytest.raises(StartupError, match=r"rank \d cannot run: ModelLoadError: "), errors_unwrapped():
                await ranks.come(on_wait=lambda awaited: None)
    nodes.check_nothing_is_left()


async def test_engine_without_a_ray_cluster_raises_how_to_start_one(model: Path) -> None:
    with pytest.raises(StartupError, match=r"there is no Ray at 127\.0\.0\.1:9: start it"):
        async with opened(model, ray_address="127.0.0.1:9"):
            raise AssertionError("there is none")
