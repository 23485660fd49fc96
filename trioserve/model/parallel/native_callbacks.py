"""Allows native kernels to call Collectives that are written in Python. Used if ranks are on several hosts."""

from __future__ import annotations

import ctypes

import numpy as np

from trioserve.model.parallel.collectives import Collectives
from trioserve_kernels.structs import CollectivesStruct, GatherFunction, RoomFunction, SumFunction

__all__ = ["NativeCallbacks"]


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
