"""Manages the torch.distributed groups through which trainers send weights to this process. Each group has a name.

The members of a group are a trainer and the engines that receive its weights. Groups use gloo.

A group is independent of the process's default group. It is created as in SGLang and in trainers that support SGLang
(init_custom_process_group), so that both sides can connect: through a store at an address, with the group's name as
prefix. torch has no public function for a second group that is not a part of the default group. Therefore, this module
calls the private functions that init_process_group uses. Tests fail if a torch release changes these functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from trioserve.contracts.errors import InvalidRequest, StartupError, WeightsLost
from trioserve.contracts.weights import BroadcastWeights, WeightGroup
from trioserve.model.device import torch_now
from trioserve.model.loading.described_tensors import ArrivingTensor
from trioserve.model.number_formats import VALUE_BYTES, Dtype, Values, empty_values

__all__ = ["TrainerGroup", "TrainerGroups", "arriving_tensors"]


class TrainerGroup:
    """A group that consists of a trainer, which is rank 0, and engines. Only one thread at a time may call its methods.

    The constructor waits until all members have connected. Call `leave` at the end, and also after a call that raised
    an exception, because the position in the trainer's stream is then unknown.

    Args:
        master_address: address where the trainer listens.
        master_port: port where the trainer listens.
        rank: number of this member.
        world_size: number of members.
        group_name: name that all members use.
        seconds_max: longest time to connect, and for each tensor.

    Raises:
        StartupError: the members could not connect.
    """

    def __init__(
        self, *, master_address: str, master_port: int, rank: int, world_size: int, group_name: str, seconds_max: float
    ) -> None:
        torch_now("a group that weights come from")
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        self.rank = rank
        self._is_left = False
        timeout = timedelta(seconds=seconds_max)
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]  # torch leaves it out of __all__
                master_address, master_port, world_size, rank == 0, timeout
            )
            self._group, _ = c10d._new_process_group_helper(
                world_size,
                rank,
                [],
                c10d.Backend("gloo"),
                c10d.PrefixStore(group_name, store),
                group_name=c10d.GroupName(group_name),
                timeout=timeout,
            )
            c10d._world.pg_group_ranks[self._group] = {index: index for index in range(world_size)}
            self._store = store  # Rank 0 must not free the store, because all other ranks use it.
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise StartupError(
                f"rank {rank} of {world_size} cannot connect to the others at {master_address}:{master_port} within "
                f"{seconds_max:g} s: {reason}"
            ) from error

    def broadcast(self, tensor: Any) -> None:
        """Send a tensor from rank 0 to all other members. The members overwrite their tensors with its values.

        Args:
            tensor: CPU tensor, with the same shape and dtype in all members.

        Raises:
            RuntimeError: a member is lost, or the call takes too long.
        """
        import torch.distributed as dist

        if self._is_left:
            raise RuntimeError("the group was left")
        dist.broadcast(tensor, src=0, group=self._group)

    def leave(self) -> None:
        """Leave the group without waiting. A second call does nothing.

        Afterwards, another group of this process can use the name. Members that wait in a call continue to wait until
        their timeout.
        """
        import torch.distributed as dist

        is_left, self._is_left = self._is_left, True
        if not is_left:
            dist.destroy_process_group(self._group)


GROUPS_MAX = 8


class TrainerGroups:
    """All groups of this process.

    `join` and `receive` wait for other processes. Call them in threads, with at most one call per group at a time.
    """

    def __init__(self) -> None:
        self._groups: dict[str, TrainerGroup | _Joining] = {}

    def join(self, asked: WeightGroup) -> None:
        """Join a group, and wait for all other members.

        Args:
            asked: name and address of the group.

        Raises:
            InvalidRequest: the name is in use, there are too many groups, the trainer cannot be reached, or the group
                was left meanwhile.
        """
        if asked.group_name in self._groups:
            raise InvalidRequest(f"a group {asked.group_name} already exists: destroy it first", param="group_name")
        if len(self._groups) >= GROUPS_MAX:
            raise InvalidRequest(f"{GROUPS_MAX} groups already exist: destroy one first", param="group_name")
        joining = self._groups[asked.group_name] = _Joining()
        try:
            group = TrainerGroup(
                master_address=asked.master_address,
                master_port=asked.master_port,
                rank=asked.rank,
                world_size=asked.world_size,
                group_name=asked.group_name,
                seconds_max=asked.seconds_max,
            )
        except StartupError as error:
            if self._groups.get(asked.group_name) is joining:
                del self._groups[asked.group_name]
            raise InvalidRequest(str(error), param="master_address") from error
        if self._groups.get(asked.group_name) is joining:
            self._groups[asked.group_name] = group
        else:  # While this call waited, another call left the group, or the engine was closed.
            group.leave()
            raise InvalidRequest(f"the group {asked.group_name} was left meanwhile", param="group_name")

    def check(self, name: str) -> None:
        """Check that a group was joined.

        Args:
            name: name of the group.

        Raises:
            InvalidRequest: there is no such group.
        """
        if not isinstance(self._groups.get(name), TrainerGroup):
            raise InvalidRequest(f"no group {name} was joined: init it first", param="group_name")

    def leave(self, name: str) -> None:
        """Leave a group, even while it is being joined. Its trainer may be lost.

        Args:
            name: name of the group.

        Raises:
            InvalidRequest: there is no such group.
        """
        if name not in self._groups:
            self.check(name)
        group = self._groups.pop(name)
        if isinstance(group, TrainerGroup):
            with contextlib.suppress(RuntimeError):  # Leaving a broken group raises this exception.
                group.leave()

    def forget(self, name: str) -> None:
        """Forget a group without waiting. A different group with this name can then be joined.

        A thread that waits in the old group may continue to wait until its timeout.

        Args:
            name: name of the group. An unknown name is ignored.
        """
        group = self._groups.pop(name, None)
        if isinstance(group, TrainerGroup):
            with contextlib.suppress(RuntimeError):
                group.leave()

    def close(self) -> None:
        """Forget all groups."""
        for name in [*self._groups]:
            self.forget(name)

    def receive(self, name: str, shape: Sequence[int], dtype: Dtype) -> Values:
        """Wait for the next tensor of a group.

        Args:
            name: name of the group.
            shape: shape of the tensor.
            dtype: number format of the tensor.

        Raises:
            WeightsLost: the trainer is lost. The group cannot be used any more.
        """
        import torch

        values = empty_values(tuple(shape), dtype)
        tensor = torch.from_numpy(values.reshape(-1))
        group = self._groups.get(name)
        try:
            if not isinstance(group, TrainerGroup):
                raise RuntimeError(f"the group {name} was left")
            group.broadcast(tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor)
        except RuntimeError as error:
            raise WeightsLost(f"the trainer of the group {name} sends nothing: {str(error).splitlines()[0]}") from error
        return values


class _Joining:
    """Placeholder for a group that is being joined."""


def arriving_tensors(source: BroadcastWeights) -> dict[str, ArrivingTensor]:
    """Return a description of each tensor that a trainer will send, by name.

    Args:
        source: names, dtypes and shapes from the request.

    Raises:
        InvalidRequest: the lists have different lengths, a name occurs twice, or a dtype is unknown.
    """
    if not len(source.names) == len(source.dtypes) == len(source.shapes):
        raise InvalidRequest(
            f"there are {len(source.names)} names, {len(source.dtypes)} dtypes and {len(source.shapes)} shapes: each "
            "tensor needs one of each",
            param="names",
        )
    tensors: dict[str, ArrivingTensor] = {}
    for name, dtype, shape in zip(source.names, source.dtypes, source.shapes, strict=True):
        if name in tensors:
            raise InvalidRequest(f"{name} is named twice", param="names")
        tensors[name] = ArrivingTensor(tuple(shape), dtype_named(dtype))
    return tensors


def dtype_named(name: str) -> Dtype:
    """Return a dtype by its name, with or without "torch.".

    Args:
        name: name from the request.

    Raises:
        InvalidRequest: weights cannot have this dtype.
    """
    for dtype in VALUE_BYTES:
        if name.removeprefix("torch.") == dtype:
            return dtype
    raise InvalidRequest(f"{name} is no dtype of weights, allowed are {', '.join(VALUE_BYTES)}", param="dtypes")
