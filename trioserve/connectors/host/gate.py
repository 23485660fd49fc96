"""The right to touch an engine's blocks from another thread, which can be taken back at any moment.

A thread reads and writes blocks in pieces of at most PIECE_BYTES (copying.py), each with the gate entered. Closing it
waits for the piece at hand, some 30 us at memory speed or one transfer to a device, and from then on no block is
touched: that is what hold_expired has to promise when it returns, and no flag that the thread looks at could. So
threads may be left to themselves when their engine goes, even one that a dead disk keeps for ever.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from types import TracebackType

__all__ = ["Gate"]


class Gate:
    """`with gate as is_open: if is_open: ...touch a piece...`. One thread goes through it at a time.

    is_wanted: set to False from any thread to have the work behind it stop soon; that waits for nothing, and promises
    nothing."""

    def __init__(self, lock: AbstractContextManager[object] | None = None) -> None:
        self._lock = threading.Lock() if lock is None else lock
        self._is_open = True
        self.is_wanted = True

    @property
    def is_open(self) -> bool:
        return self._is_open

    def __enter__(self) -> bool:
        self._lock.__enter__()
        return self._is_open and self.is_wanted

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.__exit__(kind, error, traceback)

    def close(self) -> None:
        """When this returns, nobody touches a block behind it, and nobody will."""
        self.is_wanted = False  # so that no further piece begins while this waits for the one at hand
        with self._lock:
            self._is_open = False
