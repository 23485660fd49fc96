"""Tests of weights that another process sends through torch.distributed. If the process sends only some of the weights,
no task waits forever.
"""

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
from trioserve.model.trainer_groups import TrainerGroup
from trioserve.model.weight_replacement import ArrivingWeights
from trioserve.ranks.host import free_port
from trioserve.rollouts import described_weights

pytestmark = pytest.mark.slow

TRAINER = """
import sys
from safetensors.torch import load_file
from trioserve.rollouts import WeightsGroup
from trioserve.model import trainer_groups
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
    """Run a trainer that is in a group with the engine and sends some tensors of a directory. If tensors remain, the
    trainer waits until it must end.
    """
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
    """Return the description of the tensors that the trainer sends."""
    described = described_weights(load_file(path / "model.safetensors")) | changes
    return BroadcastWeights(
        names=tuple(described["names"]),
        dtypes=tuple(described["dtypes"]),
        shapes=tuple(map(tuple, described["shapes"])),
    )


def event_of_call(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, *, after: bool) -> trio.Event:
    """Return an event that is set when a thread calls this method or is about to call it."""
    token, called, function = trio.lowlevel.current_trio_token(), trio.Event(), getattr(owner, name)

    def call_and_notify(*arguments: Any, **options: Any) -> Any:
        try:
            if not after:
                token.run_sync_soon(called.set, idempotent=True)
            return function(*arguments, **options)
        finally:
            if after:
                token.run_sync_soon(called.set, idempotent=True)

    monkeypatch.setattr(owner, name, call_and_notify)
    return called


@pytest.fixture
async def has_begun(monkeypatch: pytest.MonkeyPatch) -> trio.Event:
    """Return an event that is set when the first tensor has arrived."""
    return event_of_call(monkeypatch, ArrivingWeights, "put", after=True)


@pytest.mark.parametrize(("kind", "kernels"), [("llama", "native"), ("phi3-part", "native"), ("llama-tied", "torch")])
async def test_engine_computes_with_sent_weights(
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


async def test_wrong_description_of_tensors_is_refused_before_any_is_sent(
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
            await engine.update_weights(of(new))  # After the refusals, no rank has received data from the trainer.
        assert await said(engine) == await said_when_opened(new, dtype="float32")


@pytest.mark.parametrize("count", [0, 5])
@pytest.mark.parametrize("way", ["dies", "hangs"])
async def test_trainer_that_stops_does_not_block_the_engine(
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
                    await has_begun.wait()  # Data in the trainer's socket may be lost when the trainer dies.
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
        async with sender(new, engine):  # A new trainer uses the same group name.
            await engine.update_weights(of(new))
        assert await said(engine) == await said_when_opened(new, dtype="float32")


async def test_cancelled_weight_update_leaves_half_of_the_weights(
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


async def test_weight_update_cancelled_before_the_first_tensor_changes_nothing(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread still waits for the first trainer. Another trainer need not wait, and may use the same group name."""
    old = tiny_checkpoint("llama")
    new = changed(old, tmp_path / "new")
    is_waiting = event_of_call(monkeypatch, torch.distributed, "broadcast", after=False)
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


async def test_engine_can_leave_a_group_without_a_trainer(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted trainer can join the group under its name at once."""
    new = changed(tiny_checkpoint("llama"), tmp_path / "new")
    is_refused = trio.Event()
    is_joining = event_of_call(monkeypatch, TrainerGroup, "__init__", after=False)
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
                await is_refused.wait()  # The abandoned attempt ends later and has no effect.
                await engine.destroy_weights_update_group()
        assert engine.weight_version == "sent"


async def test_waiting_for_a_missing_trainer_has_a_timeout(tiny_checkpoint: Callable[..., Path]) -> None:
    async with open_engine(str(tiny_checkpoint("llama")), **OPTIONS) as engine:
        group = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2}
        with trio.fail_after(30), pytest.raises(InvalidRequest, match="cannot connect to the others"):
            await engine.init_weights_update_group(WeightGroup(rank=1, seconds_max=1.0, **group))
        with pytest.raises(InvalidRequest, match="rank 0 is the trainer's"):
            await engine.init_weights_update_group(WeightGroup(rank=0, **group))
        assert engine.ready
