"""Disk reserve: a file beside the store that occupies disk space, so that small final writes succeed on a full disk.

    DATA_DIR/store.reserve           zeros, really allocated. Released by making it empty

Other programs that fill the disk cannot take this space. The store releases the reserve when the disk refuses a
terminal state or a deletion, and allocates the reserve again when the disk has space. Until then, ordinary writes are
refused, because they would use up the released space.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["RESERVE_BYTES", "RESERVE_FILE_NAME", "DiskReserve"]

RESERVE_FILE_NAME = "store.reserve"
RESERVE_BYTES = 4 * 2**20
"""Enough for about 40: the final state of a batch or response takes 20 to 100 KB of SQLite's log."""
SHARE_OF_FREE = 8  # on a small disk the reserve takes at most 1/8 of the free space


class DiskReserve:
    """Disk space that can be released.

    Args:
        path: path of the file. None: the store is in memory, and there is no reserve.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._target_bytes = 0
        self._held_bytes = 0
        if path is not None:
            with contextlib.suppress(OSError):
                status = path.stat()
                self._held_bytes = min(status.st_size, status.st_blocks * 512)  # a copied file may be sparse
            free_bytes = self._free_bytes() + self._held_bytes
            self._target_bytes = max(self._held_bytes, min(RESERVE_BYTES, free_bytes // SHARE_OF_FREE))
            self.fill()

    @property
    def is_whole(self) -> bool:
        """Return True if the whole reserve is allocated."""
        return self._held_bytes >= self._target_bytes

    def release(self) -> None:
        """Release the reserved space to the disk."""
        if self._path is not None and self._held_bytes:
            with contextlib.suppress(OSError):
                os.truncate(self._path, 0)
            self._held_bytes = 0

    def fill(self) -> bool:
        """Allocate the reserve again, as far as the disk has space. Returns True if the whole reserve is allocated."""
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
            pass  # a full or read-only disk, or a limit on file sizes: the size of the reserve does not change
        return self.is_whole

    def _free_bytes(self) -> int:
        assert self._path is not None
        try:
            status = os.statvfs(self._path.parent)
        except OSError:
            return 0
        return status.f_bavail * status.f_frsize
