"""Collectives over torch.distributed: gloo between CPUs, NCCL between GPUs.

On a CPU, sum_ gathers the values of all ranks and adds them in the order of the ranks, because gloo's sum uses a
different order. This takes some hundred microseconds, so only ranks without shared memory use these collectives.

NCCL's sum has the same bits in every rank. For capturing the sum in CUDA graphs, torch's documentation has these
conditions: the communicator exists before any capture, other threads may use CUDA during a capture (see
CudaGraphRecorder), and no call waits for the host. The NCCL code meets these conditions, but has not run on a machine
with two GPUs.
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
    """Collectives over torch.distributed. A process can have only one instance, because torch has one default group.

    The constructor waits until all ranks have connected. If a rank is lost, gloo raises RuntimeError in all other
    ranks, immediately or after the timeout. NCCL ends their processes.

    Args:
        master_addr: address where rank 0 listens.
        master_port: port where rank 0 listens.
        rank: number of this rank.
        size: number of ranks.
        timeout_seconds: longest time to connect, and for each call.
        device: where models compute. "cuda" is torch's current device.

    Raises:
        StartupError: the ranks could not connect.
    """

    native: int | None = None
    seconds: float = 0.0
    """Time spent in calls. On a GPU this is only the time to launch them."""

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
                # With device_id, torch creates NCCL's communicator now. Otherwise, the first sum would create it
                # during a capture.
                device_id=torch.device("cuda", torch.cuda.current_device()) if self._is_on_gpu else None,
            )
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise StartupError(
                f"rank {rank} of {size} cannot connect to the others at {master_addr}:{master_port} within "
                f"{timeout_seconds:g} s: {reason}; is rank 0 running there, and is the port free and reachable?"
            ) from error

    def sum_(self, values: Any, is_abandoned: bool | None = None) -> bool:
        """Replace values by the sum over all ranks, see Collectives.

        Args:
            values: contiguous array or tensor.
            is_abandoned: True if this rank wants to abandon the step. If all ranks pass None, they exchange no votes. A
                CUDA graph can only capture a sum without votes.

        Returns:
            True if at least one rank passed is_abandoned.

        Cost:
            On a GPU, votes take some hundred microseconds, because the hosts exchange them.
        """
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
        """Leave the group. A second call does nothing."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _gathered(self, own: Tensor) -> Tensor:
        """Gather uint8 [n] of all ranks into [size, n], on the CPU. Values are bytes because gloo lacks some dtypes."""
        result = own.new_empty(self.size, own.shape[0])
        dist.all_gather(list(result.unbind(0)), own)
        return result

    def _any(self, vote: bool) -> bool:
        """Return True if at least one rank votes True. The ranks vote through gloo, which does not wait for the GPU."""
        votes = torch.tensor([int(vote)])
        dist.all_reduce(votes, dist.ReduceOp.MAX)
        return bool(votes.item())


def _as_tensor(values: Any) -> Tensor:
    """Return a tensor that shares the memory of an array or tensor."""
    tensor: Tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    assert tensor.is_contiguous(), "Collectives need contiguous values"
    return tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
