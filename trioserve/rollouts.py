"""The trainer's side of replacing an engine's weights: for a program of its own, which needs nothing of an engine."""

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
"""What safetensors calls them."""

ALIGNED_BYTES = 64

SEGMENTS = Path("/dev/shm")
"""Where Linux shows the segments of POSIX shared memory as files."""


class PublishedWeights:
    """Weights in shared memory, for engines on this machine. A segment holds what a safetensors file does: the length
    of a header, the header, and the tensors one behind the other.

    name: what engines find them by. Leave the scope, or call close, when no engine is to read them any more. A process
    that ends takes its segments along.
    """

    def __init__(self, tensors: Mapping[str, Any], name: str | None = None) -> None:
        self._forms = {key: _form(key, tensor) for key, tensor in tensors.items()}
        header, self._offsets, byte_count = _header(self._forms)
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
        """Put other values in, of the same names, types and shapes; no engine may be reading them. Raises
        ValueError."""
        if self._memory is None:
            raise ValueError(f"the segment {self.name} was closed")
        forms = {key: _form(key, tensor) for key, tensor in tensors.items()}
        if forms != self._forms:
            raise ValueError(f"the tensors are not those that {self.name} was made for: publish them anew")
        for key, tensor in tensors.items():
            values = _bytes_of(tensor)
            start = self._offsets[key]
            _buffer(self._memory)[start : start + values.nbytes] = values.data

    def close(self) -> None:
        """The segment is gone when nobody has it open any more. A second call does nothing."""
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
    """A group of torch.distributed in which this process, rank 0, sends engines weights. Making it waits until every
    engine was told to join (POST /init_weights_update_group): tell them in another thread. It is gloo's, beside any
    default group that the process has."""

    def __init__(
        self,
        master_address: str,
        master_port: int,
        world_size: int,
        *,
        group_name: str = "weight_update_group",
        seconds_max: float = 60.0,
    ) -> None:
        """This process listens at the address. seconds_max: how long the others may take to come, and each tensor.
        Raises trioserve.contracts.errors.StartupError if they do not come."""
        from trioserve.model.parallel.trainer_group import TrainerGroup

        self._group = TrainerGroup(
            master_address=master_address,
            master_port=master_port,
            rank=0,
            world_size=world_size,
            group_name=group_name,
            seconds_max=seconds_max,
        )

    def send(self, tensors: Mapping[str, Any]) -> None:
        """Every tensor in its turn, to engines that were told of them (described_weights) by POST
        /update_weights_from_distributed: tell them in another thread. Raises RuntimeError if one does not take it."""
        for tensor in tensors.values():
            self._group.broadcast(tensor.detach().cpu().contiguous())

    def close(self) -> None:
        """Leave it."""
        self._group.leave()


def described_weights(tensors: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What is going to be sent, as the fields of POST /update_weights_from_distributed. Raises ValueError for a type
    that weights do not have."""
    for key, tensor in tensors.items():
        _form(key, tensor)
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def publish_weights(tensors: Mapping[str, Any], name: str | None = None) -> PublishedWeights:
    """Copy a model's state_dict() into shared memory, for engine.update_weights(SharedWeights(name)) or POST
    /update_weights_from_shared_memory on the same machine. On Linux.

    tensors: of torch, or arrays of numpy, by the names of the model's checkpoint; bfloat16, float16 or float32. name:
    default is a new one. Raises ValueError for others, and OSError if shared memory has no room for them.
    """
    return PublishedWeights(tensors, name)


def _buffer(memory: SharedMemory) -> memoryview:
    assert memory.buf is not None, "it was closed"
    return memory.buf


def _claim(name: str, byte_count: int) -> None:
    """Have all of a segment there before it is written to: where memory lacks by then, that ends the process. Raises
    OSError."""
    with SEGMENTS.joinpath(name).open("r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, byte_count)
        except OSError as error:
            raise OSError(
                error.errno,
                f"shared memory ({SEGMENTS}) has no room for weights of {byte_count} bytes: give it more (docker run "
                "--shm-size), or save them in a directory",
            ) from error


def _header(forms: Mapping[str, tuple[str, tuple[int, ...], int]]) -> tuple[bytes, dict[str, int], int]:
    """The header with its length before it, where each tensor begins, and how many bytes all of it takes."""
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


def _form(key: str, tensor: Any) -> tuple[str, tuple[int, ...], int]:
    dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"{key} is of type {tensor.dtype}, allowed are {', '.join(DTYPES)}")
    return dtype, tuple(tensor.shape), int(tensor.nbytes)


def _bytes_of(tensor: Any) -> npt.NDArray[np.uint8]:
    if not isinstance(tensor, np.ndarray):
        import torch

        # numpy knows no bfloat16.
        tensor = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
