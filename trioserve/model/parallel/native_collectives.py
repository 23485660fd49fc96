"""Collectives of ranks that native kernels can call: over shared memory, or as callbacks into Python.

Ranks on one host exchange values through shared memory. A rank that waits for other ranks spins for some microseconds,
then sleeps. Native kernels use these collectives without Python. cpu/shared_memory.h describes the protocol. If ranks
are on several hosts, native kernels call Collectives that are written in Python.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import Any

import numpy as np

from trioserve.model.parallel.collectives import Collectives
from trioserve_kernels.native import Library
from trioserve_kernels.structs import SUM_DTYPES, CollectivesStruct, GatherFunction, RoomFunction, SumFunction

__all__ = ["Arrivals", "NativeCallbacks", "SharedMemoryCollectives", "make_shared_memory"]

SLOT_BYTES = 1 << 22  # cpu/shared_memory.h must have the same number.
ARRIVALS_BYTES = 128
DTYPES_OF_ARRAYS = {"float32": "float32", "float16": "float16", "uint16": "bfloat16"}  # numpy has no bfloat16.


def _byte_count(size: int) -> int:
    return size * (ARRIVALS_BYTES + 2 * SLOT_BYTES)


def make_shared_memory(size: int) -> int:
    """Allocate zeroed shared memory for a group of ranks.

    Args:
        size: number of ranks.

    Returns:
        File descriptor of the memory. A child process inherits the descriptor only if it is passed explicitly. Linux
        frees the memory when the last process has closed and unmapped it.
    """
    descriptor = os.memfd_create("trioserve-ranks", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, _byte_count(size))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Arrivals:
    """Reads the number of collectives that each rank has entered. Others wait for ranks with a lower number.

    Args:
        descriptor: result of make_shared_memory. It may be closed afterwards.
        size: number of ranks.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._memory = mmap.mmap(descriptor, size * ARRIVALS_BYTES, prot=mmap.PROT_READ)
        self._size = size

    def counts(self) -> tuple[int, ...]:
        """Return the number of collectives that each rank has entered, modulo 2**32."""
        return tuple(struct.unpack_from("=I", self._memory, rank * ARRIVALS_BYTES)[0] for rank in range(self._size))

    def missing(self) -> tuple[int, ...]:
        """Return the ranks that other ranks wait for now or soon. The result is empty if all counts are equal."""
        counts = self.counts()
        most = max(counts, key=lambda count: (count - counts[0] + 2**31) % 2**32)
        return tuple(rank for rank, count in enumerate(counts) if count != most)

    def close(self) -> None:
        self._memory.close()


class SharedMemoryCollectives:
    """Collectives of one rank, for numpy arrays and CPU tensors of torch. Close it after the last step.

    Args:
        library: the native kernels.
        descriptor: result of make_shared_memory(size). No other group may use it. It may be closed afterwards.
        rank: number of this rank.
        size: number of ranks.

    Raises:
        MemoryError: there is not enough memory for the rank's state.
    """

    def __init__(self, library: Library, descriptor: int, rank: int, size: int) -> None:
        assert 0 <= rank < size
        assert library.shared_memory_bytes(size) == _byte_count(size), "Python and C++ use the same layout"
        self.rank, self.size = rank, size
        self._library = library
        self._memory = mmap.mmap(descriptor, _byte_count(size))
        handle = library.join_shared_memory(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)), rank, size)
        if handle is None:
            raise MemoryError("no memory for a rank's collectives")
        self._handle: int | None = handle
        self.native: int | None = library.shared_collectives(handle)

    @property
    def seconds(self) -> float:
        assert self._handle is not None, "seconds after close"
        return float(self._library.shared_seconds(self._handle))

    def sum_(self, values: Any, is_abandoned: bool = False) -> bool:
        """Replace values by the sum over all ranks, see Collectives. Sums are computed in float32 and rounded once.

        Args:
            values: contiguous float32, bfloat16 or float16. A numpy array of uint16 contains bfloat16.
            is_abandoned: True if this rank wants to abandon the step.

        Returns:
            True if at least one rank passed is_abandoned.
        """
        dtype, address = _name_and_address(values)
        number = SUM_DTYPES[DTYPES_OF_ARRAYS.get(dtype, dtype)]
        count = values.nbytes // values.itemsize
        return bool(self._library.shared_sum(self._handle, number, address, count, is_abandoned))

    def gather(self, own: Any) -> Any:
        _, address = _name_and_address(own)
        shape = (self.size, *own.shape)
        if isinstance(own, np.ndarray):
            gathered: Any = np.empty(shape, dtype=own.dtype)
        else:
            gathered = own.new_empty(shape)
        _, to = _name_and_address(gathered)
        self._library.shared_gather(self._handle, address, own.nbytes, to)
        return gathered

    def close(self) -> None:
        """Leave the group. A second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self.native = None
            self._library.leave_shared_memory(handle)
            self._memory.close()


def _name_and_address(values: Any) -> tuple[str, int]:
    """Return dtype name and address of contiguous values."""
    if isinstance(values, np.ndarray):
        assert values.flags.c_contiguous
        return str(values.dtype), values.ctypes.data
    assert values.is_contiguous()
    assert values.device.type == "cpu"
    return str(values.dtype).removeprefix("torch."), int(values.data_ptr())


class NativeCallbacks:
    """C functions that call the methods of Collectives. The object must exist as long as a step may run.

    Each call acquires the GIL, in the thread that computes.

    Args:
        collectives: the object to call.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._error: BaseException | None = None
        self._struct = CollectivesStruct(
            rank=collectives.rank,
            size=collectives.size,
            room=RoomFunction(lambda _context, _count: None),
            sum=SumFunction(self._sum),
            gather=GatherFunction(self._gather),
        )

    @property
    def native(self) -> int:
        """Address of the CollectivesStruct, see Collectives."""
        return ctypes.addressof(self._struct)

    def check(self) -> None:
        """If a call has raised an exception since the last check, raise the exception.

        After an exception, later calls send nothing and report that the step is abandoned. The results of the step are
        then invalid.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _sum(self, _context: int | None, own: int | None, count: int, is_abandoned: int, total: int | None) -> int:
        if self._error is not None:
            return True
        try:
            values = _floats(total, count)
            values[:] = _floats(own, count)
            return self._collectives.sum_(values, bool(is_abandoned))
        except BaseException as error:  # Exceptions cannot pass through C code, so `check` raises this one later.
            self._error = error
            return True

    def _gather(self, _context: int | None, own: int | None, byte_count: int, everything: int | None) -> None:
        if self._error is not None:
            return
        try:
            found = self._collectives.gather(_bytes(own, byte_count))
            if everything is not None:
                _bytes(everything, self._collectives.size * byte_count)[:] = found.reshape(-1)
        except BaseException as error:  # `check` raises the exception, as in _sum.
            self._error = error


def _floats(address: int | None, count: int) -> np.ndarray:
    """Return a view of the float32 numbers at an address."""
    if address is None or count == 0:
        return np.empty(0, dtype=np.float32)
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


def _bytes(address: int | None, count: int) -> np.ndarray:
    assert address is not None
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))
