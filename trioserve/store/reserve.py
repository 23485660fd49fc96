"""A file beside the store that holds room on the disk, so that small final writes succeed when the disk is full.

    DATA_DIR/store.reserve           zeros, allocated for real; released by making it empty

Whoever fills the disk leaves this much. The store releases it when the disk refuses a final state or a deletion, and
allocates it again when there is room. Ordinary writes are refused until then, or they would use it up.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["RESERVE_BYTES", "RESERVE_FILE_NAME", "DiskReserve"]

RESERVE_FILE_NAME = "store.reserve"
RESERVE_BYTES = 4 * 2**20
"""An end of a batch or of a response takes some 20 to 100 KB of SQLite's log, so it is enough for tens of them."""
SHARE_OF_FREE = 8  # of a small disk it takes at most one part in so many of what is free


class DiskReserve:
    """Room on the disk that can be released.

    Args:
        path: of the file; None: the store is in memory, and there is no reserve.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._target_bytes = 0
        self._held_bytes = 0
        if path is not None:
            with contextlib.suppress(OSError):
                status = path.stat()
                self._held_bytes = min(status.st_size, status.st_blocks * 512)  # a copy of it may have holes
            free_bytes = self._free_bytes() + self._held_bytes
            self._target_bytes = max(self._held_bytes, min(RESERVE_BYTES, free_bytes // SHARE_OF_FREE))
            self.fill()

    @property
    def is_whole(self) -> bool:
        """Nothing of it was released."""
        return self._held_bytes >= self._target_bytes

    def release(self) -> None:
        """Give its room back to the disk."""
        if self._path is not None and self._held_bytes:
            with contextlib.suppress(OSError):
                os.truncate(self._path, 0)
            self._held_bytes = 0

    def fill(self) -> bool:
        """Allocate it again, or as much of it as there is room for. Returns whether it is whole."""
        if self._path is None or self.is_whole:
            return True
        wanted = min(self._target_bytes, self._free_bytes() + self._held_bytes)
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if wanted > self._held_bytes:
                    os.posix_fallocate(descriptor, 0, wanted)
                    self._held_bytes = wanted
            finally:
                os.close(descriptor)
        except OSError:
            pass  # a full or read-only disk, or a limit on file sizes: there is no more of it than there was
        return self.is_whole

    def _free_bytes(self) -> int:
        assert self._path is not None
        try:
            status = os.statvfs(self._path.parent)
        except OSError:
            return 0
        return status.f_bavail * status.f_frsize
