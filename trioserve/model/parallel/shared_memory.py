"""Collectives of ranks on one host, through memory that their processes share; cpu/shared_memory.h says how they meet.

A rank that waits spins for some microseconds and then sleeps. The kernels' own step uses it without Python.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import Any

import numpy as np

from trioserve_kernels.native import SUM_DTYPES, Library

__all__ = ["Arrivals", "SharedMemoryCollectives", "make_shared_memory"]

SLOT_BYTES = 1 << 22  # as in cpu/shared_memory.h
ARRIVALS_BYTES = 128
DTYPES_OF_ARRAYS = {"float32": "float32", "float16": "float16", "uint16": "bfloat16"}  # numpy knows no bfloat16


def _byte_count(size: int) -> int:
    return size * (ARRIVALS_BYTES + 2 * SLOT_BYTES)


def make_shared_memory(size: int) -> int:
    """The descriptor of zeroed memory for a group of this size. It is not inherited unless it is passed on; when the
    last process has closed and unmapped it, the memory is gone."""
    descriptor = os.memfd_create("trioserve-ranks", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, _byte_count(size))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Arrivals:
    """How often each rank has arrived where all meet, seen from outside: who is behind is who the others wait for."""

    def __init__(self, descriptor: int, size: int) -> None:
        """descriptor: of make_shared_memory; it may be closed afterwards."""
        self._memory = mmap.mmap(descriptor, size * ARRIVALS_BYTES, prot=mmap.PROT_READ)
        self._size = size

    def counts(self) -> tuple[int, ...]:
        """By rank; they wrap around at 2**32."""
        return tuple(struct.unpack_from("=I", self._memory, rank * ARRIVALS_BYTES)[0] for rank in range(self._size))

    def missing(self) -> tuple[int, ...]:
        """The ranks that others wait for, or may be about to; none where all have arrived equally often."""
        counts = self.counts()
        most = max(counts, key=lambda count: (count - counts[0] + 2**31) % 2**32)
        return tuple(rank for rank, count in enumerate(counts) if count != most)

    def close(self) -> None:
        self._memory.close()


class SharedMemoryCollectives:
    """One rank's, of numpy's arrays and of torch's tensors on the CPU. Closed once, when nothing computes any more."""

    def __init__(self, library: Library, descriptor: int, rank: int, size: int) -> None:
        """descriptor: of make_shared_memory(size), which no other group has used; it may be closed afterwards."""
        assert 0 <= rank < size
        assert library.shared_memory_bytes(size) == _byte_count(size), "both sides lay it out alike"
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
        assert self._handle is not None, "asked after close"
        return float(self._library.shared_seconds(self._handle))

    def sum_(self, values: Any, is_abandoned: bool = False) -> bool:
        """float32, bfloat16 or float16; a uint16 array of numpy's is bfloat16. Added in float32 and rounded once."""
        dtype, address = _name_and_address(values)
        number = SUM_DTYPES[DTYPES_OF_ARRAYS.get(dtype, dtype)]
        count = values.nbytes // values.itemsize
        return bool(self._library.shared_sum(self._handle, number, address, count, is_abandoned))

    def gather(self, own: Any) -> Any:
        _, address = _name_and_address(own)
        shape = (self.size, *own.shape)
        if isinstance(own, np.ndarray):
            all_of_them: Any = np.empty(shape, dtype=own.dtype)
        else:
            all_of_them = own.new_empty(shape)
        _, to = _name_and_address(all_of_them)
        self._library.shared_gather(self._handle, address, own.nbytes, to)
        return all_of_them

    def close(self) -> None:
        """A second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self.native = None
            self._library.leave_shared_memory(handle)
            self._memory.close()


def _name_and_address(values: Any) -> tuple[str, int]:
    """Of an array's or a tensor's numbers, which lie one behind the other."""
    if isinstance(values, np.ndarray):
        assert values.flags.c_contiguous
        return str(values.dtype), values.ctypes.data
    assert values.is_contiguous()
    assert values.device.type == "cpu"
    return str(values.dtype).removeprefix("torch."), int(values.data_ptr())
