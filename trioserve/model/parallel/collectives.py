"""Collective operations of ranks during a step: sum and gather. All ranks make the same calls in the same order.

Native kernels call them over shared memory, or as callbacks into Python. Ranks on one host exchange values through
shared memory. A rank that waits for other ranks spins for some microseconds, then sleeps. Native kernels use these
collectives without Python. cpu/shared_memory.h describes the protocol. If ranks are on several hosts, native kernels
call Collectives that are written in Python.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import Any, Protocol

import numpy as np

from trioserve.contracts.step import IsAbandoned, never_abandoned
from trioserve_kernels.native import Library
from trioserve_kernels.structs import SUM_DTYPES, CollectivesStruct, GatherFunction, RoomFunction, SumFunction

__all__ = [
    "Arrivals",
    "Collectives",
    "Lonely",
    "NativeCallbacks",
    "RankSums",
    "SharedMemoryCollectives",
    "make_shared_memory",
]


class Collectives(Protocol):
    """Connection of one rank to the other ranks. Only the thread that computes uses it.

    If another rank is lost, a call may block forever or raise an exception. The process that started the ranks then
    ends all of them.

    Attributes:
        rank: number of this rank.
        size: number of ranks.
        native: address of a CollectivesStruct, with which native kernels make the same calls without Python. The
            address is valid as long as this object exists. None: kernels need NativeCallbacks.
    """

    rank: int
    size: int
    native: int | None

    @property
    def seconds(self) -> float:
        """Seconds spent in sum_ and gather so far, including the wait for other ranks."""
        ...

    def sum_(self, values: Any, is_abandoned: bool = False) -> bool:
        """Replace values by the sum over all ranks, with the same bits in every rank.

        Args:
            values: contiguous numpy array or torch tensor, with the same shape and dtype in every rank. The values of
                the ranks are added in the order of the ranks.
            is_abandoned: True if this rank wants to abandon the step.

        Returns:
            True if at least one rank passed is_abandoned. Every rank gets the same result.
        """
        ...

    def gather(self, own: Any) -> Any:
        """Collect the values of all ranks.

        Args:
            own: contiguous numpy array or torch tensor, with the same shape and dtype in every rank.

        Returns:
            [size, *own.shape], in the order of the ranks.
        """
        ...

    def close(self) -> None: ...


class Lonely:
    """The Collectives of a single rank."""

    rank: int = 0
    size: int = 1
    native: int | None = None
    seconds: float = 0.0

    def sum_(self, values: Any, is_abandoned: bool = False) -> bool:
        return is_abandoned

    def gather(self, own: Any) -> Any:
        return own[None]

    def close(self) -> None:
        pass


class RankSums:
    """Computes sums over all ranks during one step. With each sum, the ranks agree whether the step is abandoned.

    Args:
        collectives: connection to the other ranks.
        is_abandoned: returns True if this rank wants to abandon the step. If one rank passes `never_abandoned`, all
            ranks must pass it. The ranks then exchange no votes.
    """

    def __init__(self, collectives: Collectives, is_abandoned: IsAbandoned) -> None:
        self._collectives = collectives
        self._is_abandoned = is_abandoned
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """True after the step was abandoned. Between two sums, the value is equal in all ranks."""
        return self._is_over or (self._collectives.size == 1 and self._is_abandoned())

    def add_(self, part: Any) -> None:
        """Replace a partial sum by the sum over all ranks.

        Args:
            part: this rank's partial sum, see `Collectives.sum_`.
        """
        if self._is_abandoned is never_abandoned:
            self._collectives.sum_(part)
        else:
            self._is_over |= self._collectives.sum_(part, self._is_abandoned())


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
