"""Weight updates from the trainer's side. The trainer is a separate program and needs no engine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["PublishedWeights", "WeightsGroup", "described_weights", "publish_weights"]

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Names of the data types in safetensors."""

ALIGNED_BYTES = 64

SEGMENTS = Path("/dev/shm")
"""Directory in which Linux shows segments of POSIX shared memory as files."""


class PublishedWeights:
    """Weights in shared memory, for engines on this machine.

    A segment has the format of a safetensors file: the length of the header, the header, and the tensors. End the
    scope, or call `close`, when no engine needs to read the weights any more. The segment is also removed when the
    process ends.

    Args:
        tensors: tensors by the names of the model's checkpoint.
        name: name of the segment. None creates a new name.

    Attributes:
        name: name by which engines find the segment.
    """

    def __init__(self, tensors: Mapping[str, Any], name: str | None = None) -> None:
        self._descriptions = {key: _description(key, tensor) for key, tensor in tensors.items()}
        header, self._offsets, byte_count = _header(self._descriptions)
        self._memory: SharedMemory | None = SharedMemory(name, create=True, size=byte_count)
        self.name = self._memory.name
        try:
            _claim(self.name, byte_count)
            _buffer(self._memory)[: len(header)] = header
            self.write(tensors)
        except BaseException:
            self.close()
            raise

    def write(self, tensors: Mapping[str, Any]) -> None:
        """Replace the values by tensors with equal names, types and shapes. No engine may read them during the call.

        Args:
            tensors: the new tensors.

        Raises:
            ValueError: the tensors differ in name, type or shape, or the segment was closed.
        """
        if self._memory is None:
            raise ValueError(f"the segment {self.name} was closed")
        forms = {key: _description(key, tensor) for key, tensor in tensors.items()}
        if forms != self._descriptions:
            raise ValueError(f"the tensors differ in name, type or shape from those of {self.name}: publish them again")
        for key, tensor in tensors.items():
            values = _bytes_of(tensor)
            start = self._offsets[key]
            _buffer(self._memory)[start : start + values.nbytes] = values.data

    def close(self) -> None:
        """Remove the segment. Its memory becomes free when no process uses it any more. A second call has no effect."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
            memory.unlink()

    def __enter__(self) -> PublishedWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class WeightsGroup:
    """A group of torch.distributed in which this process, rank 0, sends weights to engines.

    The constructor waits until every engine has joined the group. So another thread must send the requests to join
    (POST /init_weights_update_group). The group uses gloo, in addition to any default group of the process.
    """

    def __init__(
        self,
        master_address: str,
        master_port: int,
        world_size: int,
        *,
        group_name: str = "weight_update_group",
        seconds_max: float = 60.0,
    ) -> None:
        """Create the group, and wait for the engines. This process listens at the address.

        Args:
            master_address: address at which the engines reach this process.
            master_port: TCP port.
            world_size: number of members, including this process.
            seconds_max: longest time for the engines to join, and for each tensor.

        Raises:
            StartupError: the engines did not join in time.
        """
        from trioserve.model.trainer_groups import TrainerGroup

        self._group = TrainerGroup(
            master_address=master_address,
            master_port=master_port,
            rank=0,
            world_size=world_size,
            group_name=group_name,
            seconds_max=seconds_max,
        )

    def send(self, tensors: Mapping[str, Any]) -> None:
        """Send tensors to the engines, one after the other.

        Before this call, another thread must send the description of the tensors (`described_weights`) to the engines
        with POST /update_weights_from_distributed.

        Args:
            tensors: tensors by the names of the model's checkpoint.

        Raises:
            RuntimeError: an engine did not receive a tensor.
        """
        for tensor in tensors.values():
            self._group.broadcast(tensor.detach().cpu().contiguous())

    def close(self) -> None:
        """Leave the group."""
        self._group.leave()


def described_weights(tensors: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Describe tensors as the fields of POST /update_weights_from_distributed.

    Args:
        tensors: the tensors that will be sent.

    Raises:
        ValueError: a tensor has a data type that weights cannot have.
    """
    for key, tensor in tensors.items():
        _description(key, tensor)
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def publish_weights(tensors: Mapping[str, Any], name: str | None = None) -> PublishedWeights:
    """Copy a model's state_dict() into shared memory, for engines on this machine. This works only on Linux.

    Engines read the tensors with engine.update_weights(SharedWeights(name)) or POST /update_weights_from_shared_memory.

    Args:
        tensors: torch tensors or numpy arrays by the names of the model's checkpoint, in bfloat16, float16 or float32.
        name: name of the segment. None creates a new name.

    Raises:
        ValueError: a tensor has another data type.
        OSError: there is not enough shared memory.
    """
    return PublishedWeights(tensors, name)


def _buffer(memory: SharedMemory) -> memoryview:
    assert memory.buf is not None, "the segment was closed"
    return memory.buf


def _claim(name: str, byte_count: int) -> None:
    """Allocate all memory of a segment before it is written. Otherwise, a lack of memory would kill the process. Raises
    OSError if there is not enough memory.
    """
    with SEGMENTS.joinpath(name).open("r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, byte_count)
        except OSError as error:
            raise OSError(
                error.errno,
                f"shared memory ({SEGMENTS}) is too small for weights of {byte_count} bytes: enlarge it (docker run "
                "--shm-size), or save the weights in a directory",
            ) from error


def _header(forms: Mapping[str, tuple[str, tuple[int, ...], int]]) -> tuple[bytes, dict[str, int], int]:
    """Return the length of the header with the header, the offset of each tensor, and the bytes of the segment."""
    entries: dict[str, object] = {}
    places: dict[str, int] = {}
    end = 0
    for key, (dtype, shape, byte_count) in forms.items():
        places[key] = end
        entries[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + byte_count]}
        end += byte_count
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED_BYTES)
    header = len(text).to_bytes(8, "little") + text
    return header, {key: len(header) + place for key, place in places.items()}, max(1, len(header) + end)


def _description(key: str, tensor: Any) -> tuple[str, tuple[int, ...], int]:
    dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"{key} is of type {tensor.dtype}, allowed are {', '.join(DTYPES)}")
    return dtype, tuple(tensor.shape), int(tensor.nbytes)


def _bytes_of(tensor: Any) -> npt.NDArray[np.uint8]:
    if not isinstance(tensor, np.ndarray):
        import torch

        # numpy does not support bfloat16.
        tensor = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
