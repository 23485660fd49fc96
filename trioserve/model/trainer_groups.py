"""The groups in which trainers send this process weights, by their names."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from trioserve.contracts.errors import InvalidRequest, StartupError, WeightsLost
from trioserve.contracts.weights import BroadcastWeights, WeightGroup
from trioserve.model.loading.arriving_tensor import ArrivingTensor
from trioserve.model.number_formats import VALUE_BYTES, Dtype, Values, empty_values
from trioserve.model.parallel.trainer_group import TrainerGroup

__all__ = ["TrainerGroups", "arriving_tensors"]

GROUPS_MAX = 8


class TrainerGroups:
    """Joining and receiving wait for others: in threads of their own, one call of a group at a time."""

    def __init__(self) -> None:
        self._groups: dict[str, TrainerGroup | _Joining] = {}

    def join(self, asked: WeightGroup) -> None:
        """Raises InvalidRequest."""
        if asked.group_name in self._groups:
            raise InvalidRequest(f"a group {asked.group_name} is there already: destroy it first", param="group_name")
        if len(self._groups) >= GROUPS_MAX:
            raise InvalidRequest(f"{GROUPS_MAX} groups are there already: destroy one first", param="group_name")
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
        else:  # somebody left it meanwhile, or the engine was closed
            group.leave()
            raise InvalidRequest(f"the group {asked.group_name} was left meanwhile", param="group_name")

    def check(self, name: str) -> None:
        """Raises InvalidRequest if there is no such group."""
        if not isinstance(self._groups.get(name), TrainerGroup):
            raise InvalidRequest(f"no group {name} was joined: init it first", param="group_name")

    def leave(self, name: str) -> None:
        """Also one that is being joined, whose trainer may have gone. Raises InvalidRequest if there is no such
        group."""
        if name not in self._groups:
            self.check(name)
        group = self._groups.pop(name)
        if isinstance(group, TrainerGroup):
            with contextlib.suppress(RuntimeError):  # of one that is broken
                group.leave()

    def forget(self, name: str) -> None:
        """It is of no use any more, though a thread may still wait in it until its time is over: another one of this
        name can be joined. Never waits."""
        group = self._groups.pop(name, None)
        if isinstance(group, TrainerGroup):
            with contextlib.suppress(RuntimeError):
                group.leave()

    def close(self) -> None:
        """All of them are of no use any more."""
        for name in [*self._groups]:
            self.forget(name)

    def receive(self, name: str, shape: Sequence[int], dtype: Dtype) -> Values:
        """The next tensor. Raises WeightsLost, and the group is of no use any more."""
        import torch

        values = empty_values(tuple(shape), dtype)
        tensor = torch.from_numpy(values.reshape(-1))
        group = self._groups.get(name)
        try:
            if not isinstance(group, TrainerGroup):
                raise RuntimeError(f"the group {name} is gone")
            group.broadcast(tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor)
        except RuntimeError as error:
            raise WeightsLost(f"the trainer of the group {name} sends nothing: {str(error).splitlines()[0]}") from error
        return values


class _Joining:
    """A group that is not there yet."""


def arriving_tensors(source: BroadcastWeights) -> dict[str, ArrivingTensor]:
    """What is going to come. Raises InvalidRequest."""
    if not len(source.names) == len(source.dtypes) == len(source.shapes):
        raise InvalidRequest(
            f"there are {len(source.names)} names, {len(source.dtypes)} dtypes and {len(source.shapes)} shapes: each "
            "tensor has one of each",
            param="names",
        )
    tensors: dict[str, ArrivingTensor] = {}
    for name, dtype, shape in zip(source.names, source.dtypes, source.shapes, strict=True):
        if name in tensors:
            raise InvalidRequest(f"{name} is named twice", param="names")
        tensors[name] = ArrivingTensor(tuple(shape), dtype_named(dtype))
    return tensors


def dtype_named(name: str) -> Dtype:
    """Raises InvalidRequest for one that weights do not have."""
    for dtype in VALUE_BYTES:
        if name.removeprefix("torch.") == dtype:
            return dtype
    raise InvalidRequest(f"{name} is no type of weights, allowed are {', '.join(VALUE_BYTES)}", param="dtypes")
