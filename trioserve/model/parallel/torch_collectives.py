"""What ranks do together, by torch.distributed: gloo between CPUs, NCCL between GPUs.

On a CPU a sum is made of what all ranks gather, in their order, since gloo's own has an order of its own. It takes some
hundred microseconds, so it is for ranks that share no memory. NCCL's sum has the same bits in every rank. It is
captured in CUDA graphs as torch's documents ask for it: the communicator is made before any capture, other threads may
use CUDA during one (see cuda_graphs.py), and nothing waits for the host in between. What goes through NCCL was written
by those documents, and has not run on any machine with two GPUs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trioserve.contracts.errors import StartupError
from trioserve.model.device import DeviceType

__all__ = ["TorchCollectives"]


class TorchCollectives:
    """A Collectives. A process has one at most, since torch's group is the process's. If a rank is gone, gloo raises
    RuntimeError in the others at once, or when the time is over; NCCL ends their processes."""

    native: int | None = None
    seconds: float = 0.0
    """On a GPU, that asking for them took."""

    def __init__(
        self,
        *,
        master_addr: str,
        master_port: int,
        rank: int,
        size: int,
        timeout_seconds: float,
        device: DeviceType = "cpu",
    ) -> None:
        """Waits until all ranks are here. Rank 0 listens at this address, and the others connect to it.
        timeout_seconds: how long that may take, and every call. device: where models compute; on a GPU it is torch's
        current one. Raises StartupError if the ranks do not find each other."""
        self.rank, self.size = rank, size
        self._is_on_gpu = device == "cuda"
        timeout = timedelta(seconds=timeout_seconds)
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]  # torch leaves it out of __all__
                master_addr, master_port, size, rank == 0, timeout
            )
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self._is_on_gpu else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=timeout,
                # Makes NCCL's communicator here; made by the first sum, it would be captured with it.
                device_id=torch.device("cuda", torch.cuda.current_device()) if self._is_on_gpu else None,
            )
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise StartupError(
                f"rank {rank} of {size} does not find the others by {master_addr}:{master_port} within "
                f"{timeout_seconds:g} s: {reason}; is rank 0 running there, and the port free and reachable?"
            ) from error

    def sum_(self, values: Any, is_abandoned: bool | None = None) -> bool:
        """See Collectives. On a GPU is_abandoned is exchanged between the hosts, which costs some hundred microseconds:
        None, which all ranks have to give then, exchanges nothing, and is what a CUDA graph can capture."""
        with self._timed():
            return self._sum(values, is_abandoned)

    def _sum(self, values: Any, is_abandoned: bool | None) -> bool:
        tensor = _as_tensor(values)
        if tensor.device.type == "cuda":
            dist.all_reduce(tensor)
            return False if is_abandoned is None else self._any(is_abandoned)
        own = _bytes_of(tensor)
        votes = own.new_tensor([bool(is_abandoned)])
        gathered = self._gathered(torch.cat((own, votes)))
        parts = gathered[:, :-1].clone(memory_format=torch.contiguous_format).view(tensor.dtype)
        total = parts[0].float() if tensor.dtype in (torch.bfloat16, torch.float16) else parts[0].clone()
        for part in parts[1:]:
            total += part
        tensor.copy_(total.view(tensor.shape))
        return bool(gathered[:, -1].any())

    def gather(self, own: Any) -> Any:
        with self._timed():
            return self._gather(own)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        begun_at = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begun_at

    def _gather(self, own: Any) -> Any:
        tensor = _as_tensor(own)
        if tensor.device.type == "cuda":
            result = tensor.new_empty(self.size, *tensor.shape)
            dist.all_gather_into_tensor(result, tensor)
            return result
        gathered = self._gathered(_bytes_of(tensor)).view(tensor.dtype).view(self.size, *tensor.shape)
        return gathered.numpy() if isinstance(own, np.ndarray) else gathered

    def close(self) -> None:
        """A second call does nothing."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _gathered(self, own: Tensor) -> Tensor:
        """own: uint8 [n], on the CPU. Returns [size, n]. Bytes are what gloo has of every format."""
        result = own.new_empty(self.size, own.shape[0])
        dist.all_gather(list(result.unbind(0)), own)
        return result

    def _any(self, vote: bool) -> bool:
        """Through gloo, whatever the device does meanwhile."""
        votes = torch.tensor([int(vote)])
        dist.all_reduce(votes, dist.ReduceOp.MAX)
        return bool(votes.item())


def _as_tensor(values: Any) -> Tensor:
    """In the same memory."""
    tensor: Tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    assert tensor.is_contiguous(), "see Collectives"
    return tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
