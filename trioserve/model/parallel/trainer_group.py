"""A torch.distributed group of a trainer and the engines that it sends weights to: gloo, beside whatever default group
a process has.

It is made as SGLang and the trainers that know it make theirs (init_custom_process_group), so that both sides meet: by
a store at an address, below the group's name. torch has no public call for a second group that is not a part of the
first one, so this uses what init_process_group itself does, and the tests say if that has changed.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from trioserve.contracts.errors import StartupError
from trioserve.model.device import torch_now

__all__ = ["TrainerGroup"]


class TrainerGroup:
    """Calls wait for the others, in any one thread at a time. leave it when it is of no use any more, and whenever a
    call has raised: who sends what would not be known from then on."""

    def __init__(
        self, *, master_address: str, master_port: int, rank: int, world_size: int, group_name: str, seconds_max: float
    ) -> None:
        """Waits until all are here. Rank 0, the trainer, listens at this address. seconds_max: how long that may take,
        and every tensor. Raises StartupError if they do not find each other."""
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
            self._store = store  # rank 0 serves it to the others as long as it lives
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise StartupError(
                f"rank {rank} of {world_size} does not find the others by {master_address}:{master_port} within "
                f"{seconds_max:g} s: {reason}"
            ) from error

    def broadcast(self, tensor: Any) -> None:
        """From rank 0, in place. Raises RuntimeError if one of them is gone, or the time is over."""
        import torch.distributed as dist

        if self._is_left:
            raise RuntimeError("the group was left")
        dist.broadcast(tensor, src=0, group=self._group)

    def leave(self) -> None:
        """Waits for nobody, and whoever waits in it still does so until its time is over: but its name is free for
        another group of this process. A second call does nothing."""
        import torch.distributed as dist

        is_left, self._is_left = self._is_left, True
        if not is_left:
            dist.destroy_process_group(self._group)
