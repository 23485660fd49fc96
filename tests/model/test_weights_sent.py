"""Weights that another process sends by torch.distributed: all of them, or some, and then nobody waits for ever."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
import trio
from safetensors.torch import load_file

from tests.model.test_weights_in_place import OPTIONS, changed, said, said_when_opened
from trioserve import open_engine
from trioserve.contracts.errors import InvalidRequest, WeightsLost
from trioserve.contracts.weights import BroadcastWeights, WeightGroup
from trioserve.engine.engine import Engine
from trioserve.model.parallel.trainer_group import TrainerGroup
from trioserve.model.weight_replacement import ArrivingWeights
from trioserve.ranks.host import free_port
from trioserve.rollouts import described_weights

TRAINER = """
import sys
from safetensors.torch import load_file
from trioserve.rollouts import WeightsGroup
from trioserve.model.parallel import trainer_group
import torch.distributed
path, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
print("listens", flush=True)
group = WeightsGroup("127.0.0.1", port, 2, seconds_max=20)
tensors = list(load_file(path).items())
for name, tensor in tensors[:count]:
    group.send({name: tensor})
if count < len(tensors):
    print("sent", flush=True)
    sys.stdin.read()
"""


@asynccontextmanager
async def sender(path: Path, engine: Engine, *, count: int = 1000, seconds_max: float = 20.0) -> AsyncIterator[Any]:
    """A trainer in a group with the engine, that sends so many of a directory's tensors; and then waits to be told to
    end, if there are more."""
    port = free_port()
    command = [sys.executable, "-c", TRAINER, str(path / "model.safetensors"), str(port), str(count)]
    start = functools.partial(trio.run_process, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, check=False)
    async with trio.open_nursery() as nursery:
        with trio.fail_after(90):
            process = await nursery.start(start)
            assert b"listens" in await process.stdout.receive_some()
            await engine.init_weights_update_group(
                WeightGroup(master_address="127.0.0.1", master_port=port, rank=1, world_size=2, seconds_max=seconds_max)
            )
            yield process
        process.kill()


def of(path: Path, **changes: Any) -> BroadcastWeights:
    """What its trainer sends."""
    described = described_weights(load_file(path / "model.safetensors")) | changes
    return BroadcastWeights(
        names=tuple(described["names"]),
        dtypes=tuple(described["dtypes"]),
        shapes=tuple(map(tuple, described["shapes"])),
    )


def told_of(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, *, after: bool) -> trio.Event:
    """Set when a thread has called this, or is about to."""
    token, told, function = trio.lowlevel.current_trio_token(), trio.Event(), getattr(owner, name)

    def call_and_tell(*arguments: Any, **options: Any) -> Any:
        try:
            if not after:
                token.run_sync_soon(told.set, idempotent=True)
            return function(*arguments, **options)
        finally:
            if after:
                token.run_sync_soon(told.set, idempotent=True)

    monkeypatch.setattr(owner, name, call_and_tell)
    return told


@pytest.fixture
async def has_begun(monkeypatch: pytest.MonkeyPatch) -> trio.Event:
    """The first tensor that was sent is there."""
    return told_of(monkeypatch, ArrivingWeights, "put", after=True)


@pytest.mark.parametrize(("kind", "kernels"), [("llama", "native"), ("phi3-part", "native"), ("llama-tied", "torch")])
async def test_what_is_sent_is_computed_with(
    kind: str, kernels: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    new = changed(tiny_checkpoint(kind), tmp_path / "new")
    options = {"dtype": "float32", "cpu_kernels": kernels}
    async with open_engine(str(tiny_checkpoint(kind)), **OPTIONS, **options) as engine:
        async with sender(new, engine):
            assert await engine.update_weights(of(new), version="sent") == "sent"
            await engine.destroy_weights_update_group()
            with pytest.raises(InvalidRequest, match="no group"):
                await engine.destroy_weights_update_group()
        assert await said(engine) == await said_when_opened(new, **options)


async def test_what_cannot_be_the_models_is_refused_before_it_comes(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    new = changed(tiny_checkpoint("llama"), tmp_path / "new")
    described = described_weights(load_file(new / "model.safetensors"))
    names, dtypes, shapes = described["names"], described["dtypes"], described["shapes"]
    async with open_engine(str(tiny_checkpoint("llama")), **OPTIONS, dtype="float32") as engine:
        before = await said(engine)
        with pytest.raises(InvalidRequest, match="no group"):
            await engine.update_weights(of(new))
        async with sender(new, engine):
            wrong: list[tuple[dict[str, Any], str]] = [
                ({"names": names[:-1], "dtypes": dtypes[:-1], "shapes": shapes[:-1]}, "names"),
                ({"names": names[:-1]}, "names"),
                ({"names": [*names[:-1], names[0]]}, "names"),
                ({"dtypes": ["int8", *dtypes[1:]]}, "dtypes"),
                ({"shapes": [[3, 5], *shapes[1:]]}, "names"),
            ]
            for changes, param in wrong:
                with pytest.raises(InvalidRequest) as refusal:
                    await engine.update_weights(of(new, **changes))
                assert refusal.value.param == param
            assert engine.ready
            assert await said(engine) == before
            await engine.update_weights(of(new))  # nothing of the trainer's was lost on them
        assert await said(engine) == await said_when_opened(new, dtype="float32")


@pytest.mark.parametrize("count", [0, 5])
@pytest.mark.parametrize("way", ["dies", "hangs"])
async def test_a_trainer_that_stops_does_not_hold_the_engine_up(
    way: str, count: int, tiny_checkpoint: Callable[..., Path], tmp_path: Path, has_begun: trio.Event
) -> None:
    old = tiny_checkpoint("llama")
    new = changed(old, tmp_path / "new")
    async with open_engine(str(old), **OPTIONS, dtype="float32") as engine:
        before = await said(engine)
        async with sender(new, engine, count=count, seconds_max=3.0) as trainer, trio.open_nursery() as nursery:

            async def kill_it() -> None:
                await trainer.stdout.receive_some()
                if count:
                    await has_begun.wait()  # what lies in its socket may be lost when it dies
                trainer.kill()

            if way == "dies":
                nursery.start_soon(kill_it)
            with pytest.raises(WeightsLost, match="sends nothing"):
                await engine.update_weights(of(new))
        assert engine.weight_version == "default"
        assert engine.has_half_weights == (count > 0)
        assert engine.ready == (count == 0)
        with pytest.raises(InvalidRequest, match="no group"):
            await engine.update_weights(of(new))
        if count:
            await engine.update_weights(old)
        assert engine.ready
        assert await said(engine) == before
        async with sender(new, engine):  # a new one of the same name
            await engine.update_weights(of(new))
        assert await said(engine) == await said_when_opened(new, dtype="float32")


async def test_a_caller_who_leaves_halfway_leaves_weights_in_part(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, has_begun: trio.Event
) -> None:
    old = tiny_checkpoint("llama")
    new = changed(old, tmp_path / "new")
    async with open_engine(str(old), **OPTIONS, dtype="float32") as engine:
        before = await said(engine)
        async with sender(new, engine, count=5), trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            async def update() -> None:
                with scope:
                    await engine.update_weights(of(new))

            nursery.start_soon(update)
            await has_begun.wait()
            scope.cancel()
        assert engine.has_half_weights
        await engine.update_weights(old)
        assert await said(engine) == before


async def test_a_caller_who_leaves_before_anything_comes_has_changed_nothing(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread still waits for that trainer. Another trainer need not, and may take the name."""
    old = tiny_checkpoint("llama")
    new = changed(old, tmp_path / "new")
    is_waiting = told_of(monkeypatch, torch.distributed, "broadcast", after=False)
    async with open_engine(str(old), **OPTIONS, dtype="float32") as engine:
        before = await said(engine)
        async with sender(new, engine, count=0, seconds_max=600.0):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.update_weights, of(new))
                await is_waiting.wait()
                nursery.cancel_scope.cancel()
            assert engine.ready
            assert await said(engine) == before
            async with sender(new, engine):
                await engine.update_weights(of(new))
        assert await said(engine) == await said_when_opened(new, dtype="float32")


async def test_a_group_whose_trainer_does_not_come_can_be_left(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And joined again at once, by its name, when the trainer has begun anew."""
    new = changed(tiny_checkpoint("llama"), tmp_path / "new")
    is_refused = trio.Event()
    is_joining = told_of(monkeypatch, TrainerGroup, "__init__", after=False)
    async with open_engine(str(tiny_checkpoint("llama")), **OPTIONS, dtype="float32") as engine:

        async def join() -> None:
            group = WeightGroup(
                master_address="127.0.0.1", master_port=free_port(), rank=1, world_size=2, seconds_max=4.0
            )
            with pytest.raises(InvalidRequest):
                await engine.init_weights_update_group(group)
            is_refused.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(join)
            await is_joining.wait()
            with pytest.raises(InvalidRequest, match="no group"):
                await engine.update_weights(of(new))
            await engine.destroy_weights_update_group()
            async with sender(new, engine):
                await engine.update_weights(of(new), version="sent")
                await is_refused.wait()  # what was left ends later, and takes nothing along
                await engine.destroy_weights_update_group()
        assert engine.weight_version == "sent"


async def test_a_trainer_that_does_not_come_is_not_waited_for_ever(tiny_checkpoint: Callable[..., Path]) -> None:
    async with open_engine(str(tiny_checkpoint("llama")), **OPTIONS) as engine:
        group = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2}
        with trio.fail_after(30), pytest.raises(InvalidRequest, match="cannot connect to the others"):
            await engine.init_weights_update_group(WeightGroup(rank=1, seconds_max=1.0, **group))
        with pytest.raises(InvalidRequest, match="rank 0 is the trainer's"):
            await engine.init_weights_update_group(WeightGroup(rank=0, **group))
        assert engine.ready
