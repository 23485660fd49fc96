"""Groups through which trainers send weights to this process, by name."""

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
    """All groups of this process.

    Joining and receiving wait for other processes. Call them in threads, one call per group at a time.
    """

    def __init__(self) -> None:
        self._groups: dict[str, TrainerGroup | _Joining] = {}

    def join(self, asked: WeightGroup) -> None:
        """Join a group, and wait for its other members.

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
        else:  # another call left the group meanwhile, or the engine was closed
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
        """Leave a group. It may still be joining, because its trainer may have disappeared.

        Args:
            name: name of the group.

        Raises:
            InvalidRequest: there is no such group.
        """
        if name not in self._groups:
            self.check(name)
        group = self._groups.pop(name)
        if isinstance(group, TrainerGroup):
            with contextlib.suppress(RuntimeError):  # leaving a broken group fails
                group.leave()

    def forget(self, name: str) -> None:
        """Drop a group without waiting. Another group with this name can then be joined.

        A thread may still wait in the old group until its timeout.

        Args:
            name: name of the group. An unknown name is ignored.
        """
        group = self._groups.pop(name, None)
        if isinstance(group, TrainerGroup):
            with contextlib.suppress(RuntimeError):
                group.leave()

    def close(self) -> None:
        """Drop all groups."""
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
