"""A torch.distributed group of a trainer and the engines that it sends weights to. It uses gloo.

The group is independent of a default group of the process. It is created like in SGLang and in trainers that support
SGLang (init_custom_process_group), so that both sides connect: through a store at an address, with the group's name as
prefix. torch has no public function for a second group that is not a part of the default one. So this module calls the
private functions that init_process_group uses. Tests fail if a torch release changes them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from trioserve.contracts.errors import StartupError
from trioserve.model.device import torch_now

__all__ = ["TrainerGroup"]


class TrainerGroup:
    """A group of a trainer, rank 0, and engines. Only one thread at a time may call it.

    The constructor waits until all members have connected. Call leave at the end, and after any call that raised,
    because the position in the trainer's stream is unknown then.

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
            self._store = store  # in rank 0 the others need this object, so it must not be freed
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise StartupError(
                f"rank {rank} of {world_size} cannot connect to the others at {master_address}:{master_port} within "
                f"{seconds_max:g} s: {reason}"
            ) from error

    def broadcast(self, tensor: Any) -> None:
        """Send a tensor from rank 0 to the other members, who receive it in place.

        Args:
            tensor: CPU tensor, with the same shape and dtype in all members.

        Raises:
            RuntimeError: a member is lost, or the time is over.
        """
        import torch.distributed as dist

        if self._is_left:
            raise RuntimeError("the group was left")
        dist.broadcast(tensor, src=0, group=self._group)

    def leave(self) -> None:
        """Leave the group without waiting. A second call does nothing.

        The name is free for another group of this process. Members that wait in a call do so until their timeout.
        """
        import torch.distributed as dist

        is_left, self._is_left = self._is_left, True
        if not is_left:
            dist.destroy_process_group(self._group)
