"""Gate that lets a thread use an engine's blocks, and that the engine can close at any time.

A thread copies blocks in pieces of at most PIECE_BYTES (copying.py), and enters the gate for each piece. Closing the
gate waits for the current piece: about 30 us for host memory, or one transfer for a device. Afterwards the thread
cannot use the blocks. hold_expired must guarantee this when it returns. A plain flag could not. The engine can end
without waiting for its threads, even if a broken disk blocks a thread forever.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from types import TracebackType

__all__ = ["Gate"]


class Gate:
    """Lock that can be closed for good. Use: `with gate as is_open: if is_open: ...copy a piece...`.

    One thread at a time is inside of the gate.

    Args:
        lock: Lock to use. None makes a new lock.

    Attributes:
        is_wanted: Any thread may set it to False to stop the work soon. This does not wait, and guarantees nothing.
    """

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
        """Wait for the current piece, then close the gate. After the return, no thread uses the blocks."""
        self.is_wanted = False  # prevents that another piece starts while this waits for the current piece
        with self._lock:
            self._is_open = False
