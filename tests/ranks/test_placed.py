"""Tests of ranks that Ray places. The process fake_placer.py stands in for Ray."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

import trioserve
from trioserve.contracts.errors import StartupError
from trioserve.contracts.extras import install_command
from trioserve.ranks import placed
from trioserve.ranks.host import cpu_shares
from trioserve.ranks.placed import PlacedRanks, RankNode, RanksRequest, placed_ranks

pytestmark = pytest.mark.slow

SECONDS_MAX = 180.0
SAMPLING = trioserve.SamplingParams(temperature=0.9, seed=5, max_tokens=30, ignore_eos=True)
WANTED = RanksRequest(count=2, model="/m", revision=None, cpus=1, gpus=0, address=None)


class Placer:
    def __init__(self, log: Path) -> None:
        self._log = log

    def command(self, how: str) -> list[str]:
        return [sys.executable, str(Path(__file__).with_name("fake_placer.py")), how, str(self._log)]

    def starts(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the process id of each start, and the ranks that it had to place."""
        lines = self._log.read_text(encoding="utf-8").splitlines() if self._log.exists() else []
        return [(int(pid), json.loads(wanted)) for pid, _, wanted in (line.partition(" ") for line in lines)]

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks of the last start."""
        pid, _ = self.starts()[-1]
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())

    def check_nobody_is_left(self) -> None:
        for pid, _ in self.starts():
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


@pytest.fixture
def placer(tmp_path: Path) -> Placer:
    return Placer(tmp_path / "placer")


@pytest.fixture
def ray(placer: Placer, monkeypatch: pytest.MonkeyPatch) -> Placer:
    """Let engines use the stand-in instead of Ray."""
    monkeypatch.setattr(placed, "COMMAND", placer.command("places"))
    monkeypatch.setattr("trioserve.assemble_ranks.check_ray_is_installed", lambda: None)
    return placer


def opened(path: Path, **options: Any) -> Any:
    given = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray", "ray_address": "10.0.0.7:6379"}
    return trioserve.open_engine(str(path), **{"dtype": "float32", "kv_cache_memory": 0.01, **given, **options})


async def generate(engine: trioserve.Engine, at_ten: Callable[[], None] = lambda: None) -> list[int]:
    tokens: list[int] = []
    async with engine.generate("Once upon a time", SAMPLING) as stream:
        async for delta in stream:
            if len(tokens) < 10 <= len(tokens) + len(delta.token_ids):
                at_ten()
            tokens += delta.token_ids
    return tokens


async def test_ranks_started_by_ray_give_the_tokens_of_one_process_and_restart_after_a_kill(
    tiny_model: Callable[[str], Path], ray: Placer, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_model("llama")
    async with opened(path, tensor_parallel_size=1, distributed_executor_backend="mp") as engine:
        expected = await generate(engine)
    with trio.fail_after(SECONDS_MAX):
        async with opened(path, threads=5) as engine:
            assert await generate(engine) == expected
            assert await generate(engine, lambda: os.kill(ray.ranks()[0], signal.SIGKILL)) == expected
    assert "(on 127.0.0.1) " in caplog.text
    wanted = {"count": 2, "model": str(path), "revision": None, "cpus": 2, "gpus": 0, "address": "10.0.0.7:6379"}
    assert [start for _, start in ray.starts()] == [wanted, wanted]
    ray.check_nobody_is_left()


async def test_ray_places_stages_like_ranks(tiny_model: Callable[[str], Path], ray: Placer) -> None:
    path = tiny_model("llama")
    async with opened(path, tensor_parallel_size=1, distributed_executor_backend="mp") as engine:
        expected = await generate(engine)
    with trio.fail_after(SECONDS_MAX):
        async with opened(path, tensor_parallel_size=1, pipeline_parallel_size=2, threads=2) as engine:
            assert await generate(engine) == expected
    assert [(start["count"], start["cpus"]) for _, start in ray.starts()] == [(2, 2)]


async def test_too_many_ranks_are_refused_before_ray_places_any(tiny_model: Callable[[str], Path], ray: Placer) -> None:
    with pytest.raises(StartupError, match="60 ranks cannot share"):
        async with opened(tiny_model("llama"), tensor_parallel_size=60):
            pass
    assert not ray.starts()


async def test_error_without_ray_names_the_package(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartupError) as caught:
        async with opened(tiny_model("llama")):
            pass
    assert install_command("ray") in str(caught.value)


@pytest.mark.parametrize(
    ("how", "expect"),
    [
        ("fails", "^there is no Ray here$"),
        ("ends", "^the process that asks Ray to place ranks has ended: its last word$"),
    ],
)
async def test_error_has_the_reason_why_ranks_cannot_be_placed(how: str, expect: str, placer: Placer) -> None:
    with trio.fail_after(SECONDS_MAX), pytest.raises(StartupError, match=expect):
        async with placed_ranks(WANTED, command=placer.command(how)):
            pass
    placer.check_nobody_is_left()


async def test_rank_that_dies_before_it_connects_raises_an_error(placer: Placer) -> None:
    awaited: list[list[int]] = []
    with trio.fail_after(SECONDS_MAX), pytest.raises(StartupError, match="the actor of rank 1 is gone: it was killed"):
        async with placed_ranks(WANTED, command=placer.command("loses")) as ranks:
            await ranks.come(on_wait=awaited.append)
    assert awaited == [[0, 1]]
    placer.check_nobody_is_left()


@pytest.mark.parametrize("how", ["waits", "stays"])
async def test_wait_for_cluster_resources_can_be_cancelled(
    how: str, placer: Placer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    if how == "stays":
        monkeypatch.setattr(placed, "LEAVE_SECONDS_MAX", 0.01)
    with trio.fail_after(SECONDS_MAX), trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def leave() -> None:
                while "waiting for room" not in caplog.text:
                    await trio.lowlevel.checkpoint()
                scope.cancel()

            nursery.start_soon(leave)
            async with placed_ranks(WANTED, command=placer.command(how)):
                raise AssertionError("there is no room")
    assert scope.cancelled_caught
    placer.check_nobody_is_left()


def test_count_of_ranks_beside_a_rank_covers_only_its_node() -> None:
    ranks = PlacedRanks(process=None)  # type: ignore[arg-type]
    ranks.nodes = tuple(RankNode(id, "10.0.0.1", 1) for id in ("a", "b", "a"))
    assert [ranks.count_beside(rank) for rank in range(3)] == [2, 1, 2]


def test_zero_ranks_get_no_cpu_shares() -> None:
    assert cpu_shares(0) == ()
