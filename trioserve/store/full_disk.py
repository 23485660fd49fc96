"""Handles a full disk: a reserve of disk space, and terminal states that stay in memory until they are written.

`DiskReserve` is a file in the directory of the store that occupies disk space. It lets small final writes succeed on a
full disk:

    DATA_DIR/store.reserve           contains zeros that occupy disk space. Released by truncating the file

Other programs that fill the disk cannot use the reserved space. The store releases the reserve when the disk refuses a
terminal state or a deletion, and allocates the reserve again when the disk has space. Until then, ordinary writes are
refused, because they would use up the released space.

`UnwrittenChanges` are changes that the disk has refused. They are kept in memory, in order, and readers see them until
they are written. Only terminal states of batches and responses are kept (see StoreDatabase.settle). So the owner can
read the terminal state at once, even if the disk is full. The bytes in memory are limited. Half of the limit is for
small changes only, so that a large result leaves space for the terminal states of other objects.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from trioserve.store.stored_objects import AppendBlob, Change, DeleteObject, PutObject, ReplaceObject, StoredObject

__all__ = [
    "RESERVE_BYTES",
    "RESERVE_FILE_NAME",
    "DiskReserve",
    "UNWRITTEN_BYTES_MAX",
    "UnwrittenChanges",
    "UnwrittenGroup",
    "bytes_of",
]


RESERVE_FILE_NAME = "store.reserve"
RESERVE_BYTES = 4 * 2**20
"""Enough for about 40: the final state of a batch or response takes 20 to 100 KB of SQLite's log."""
SHARE_OF_FREE = 8  # On a small disk, the reserve uses at most 1/8 of the free space.


class DiskReserve:
    """Disk space that is reserved, and can be released.

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
                # A file that was copied may be sparse, so the size alone is not enough.
                self._held_bytes = min(status.st_size, status.st_blocks * 512)
            free_bytes = self._free_bytes() + self._held_bytes
            self._target_bytes = max(self._held_bytes, min(RESERVE_BYTES, free_bytes // SHARE_OF_FREE))
            self.fill()

    @property
    def is_whole(self) -> bool:
        """Return True if the whole reserve is allocated."""
        return self._held_bytes >= self._target_bytes

    def release(self) -> None:
        """Release the reserved disk space."""
        if self._path is not None and self._held_bytes:
            with contextlib.suppress(OSError):
                os.truncate(self._path, 0)
            self._held_bytes = 0

    def fill(self) -> bool:
        """Allocate the reserve again, as far as the disk has space. Return True if the whole reserve is allocated."""
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
            pass  # The disk is full or read-only, or file sizes are limited. The size of the reserve does not change.
        return self.is_whole

    def _free_bytes(self) -> int:
        assert self._path is not None
        try:
            status = os.statvfs(self._path.parent)
        except OSError:
            return 0
        return status.f_bavail * status.f_frsize


UNWRITTEN_BYTES_MAX = 32 * 2**20
"""Limit of all changes together. Final states of 64 batches and 64 background responses fit many times."""
SMALL_BYTES_MAX = 65_536
CHANGE_BYTES = 256  # Memory for a change without its body, in bytes.

Look = Callable[[str, str], StoredObject | None]
"""Returns the object that the database has for a kind and an id."""


class UnwrittenGroup(msgspec.Struct, frozen=True):
    """The changes of one write. They are written together or not at all.

    Attributes:
        changes: the changes, in order.
        at: time of the write, in seconds since 1970.
    """

    changes: tuple[Change, ...]
    at: float


class _Shown(msgspec.Struct):
    """An object with its unwritten changes applied.

    Attributes:
        stored: the object. None if it is deleted.
        written_blob_bytes: number of bytes of its blob that are in the database.
        tail: the rest of the blob, which is not in the database.
        is_new: True if the object is not in the database.
    """

    stored: StoredObject | None
    written_blob_bytes: int = 0
    tail: tuple[bytes, ...] = ()
    is_new: bool = False


class UnwrittenChanges:
    """Groups of unwritten changes, and the resulting states of the objects that they change.

    Args:
        bytes_max: limit on the bytes of all groups together.
    """

    def __init__(self, bytes_max: int = UNWRITTEN_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._groups: deque[UnwrittenGroup] = deque()
        self._shown: dict[tuple[str, str], _Shown] = {}
        self.byte_count = 0

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def first(self) -> UnwrittenGroup | None:
        """Return the oldest group, which must be written first. None if there is no group."""
        return self._groups[0] if self._groups else None

    def has_room(self, changes: Sequence[Change]) -> bool:
        """Return True if the memory limit leaves space for a group of these changes.

        Args:
            changes: changes of one write.
        """
        byte_count = bytes_of(changes)
        is_small = byte_count <= SMALL_BYTES_MAX and not any(isinstance(change, PutObject) for change in changes)
        return self.byte_count + byte_count <= (self._bytes_max if is_small else self._bytes_max // 2)

    def add(self, group: UnwrittenGroup, look: Look, seconds_max: float) -> bool:
        """Store a group in memory. The caller must check has_room with its changes first.

        Args:
            group: changes of one write.
            look: finds an object in the database.
            seconds_max: lifetime in seconds of an object that is written without a lifetime.

        Returns:
            False if an object that must exist does not exist. In that case nothing was changed.
        """
        shown: dict[tuple[str, str], _Shown] = {}
        for change in group.changes:
            key = change.kind, change.id
            found = shown.get(key) or self._shown.get(key)
            if found is None:
                written = look(*key)
                found = _Shown(written, 0 if written is None else written.blob_bytes, is_new=written is None)
            after = _changed(found, change, group.at, seconds_max)
            if after is None:
                return False
            shown[key] = after
        self._shown.update(shown)
        self._groups.append(group)
        self.byte_count += bytes_of(group.changes)
        return True

    def drop_first(self, look: Look, seconds_max: float) -> None:
        """Drop the oldest group, because it was written or cannot be applied any more.

        Args:
            look: finds an object in the database.
            seconds_max: lifetime in seconds of an object that is written without a lifetime.
        """
        self.byte_count -= bytes_of(self._groups.popleft().changes)
        groups, self._groups, self._shown, self.byte_count = list(self._groups), deque(), {}, 0
        for group in groups:
            self.add(group, look, seconds_max)

    # --- reading ---

    def get(self, kind: str, object_id: str, owner: str | None, now: float) -> tuple[bool, StoredObject | None]:
        """Look for an object among the unwritten changes.

        Args:
            kind: kind of the object.
            owner: return only an object of this owner. None for an object of any owner.
            now: time in seconds since 1970.

        Returns:
            True if an unwritten change concerns the object. The second value is the object with its changes, or None.
        """
        shown = self._shown.get((kind, object_id))
        if shown is None:
            return False, None
        stored = shown.stored
        is_seen = stored is not None and stored.expires_at > now and owner in (None, stored.owner)
        return True, stored if is_seen else None

    def new_objects(self, kind: str, owner: str | None, now: float) -> list[StoredObject]:
        """Return the objects that are not in the database, oldest first.

        Args:
            kind: kind of the objects.
            owner: return only objects of this owner. None for objects of all owners.
            now: time in seconds since 1970.
        """
        return [
            stored
            for shown in self._shown.values()
            if shown.is_new
            and (stored := shown.stored) is not None
            and (stored.kind, stored.expires_at > now) == (kind, True)
            and owner in (None, stored.owner)
        ]

    def tail(self, kind: str, object_id: str) -> tuple[int, bytes]:
        """Return how many bytes of a blob are in the database, and the bytes of the blob that are not.

        Args:
            kind: kind of the object.
            object_id: id of an object with an unwritten change.
        """
        shown = self._shown[kind, object_id]
        return shown.written_blob_bytes, b"".join(shown.tail)


def _changed(found: _Shown, change: Change, now: float, seconds_max: float) -> _Shown | None:
    """Return the object after the change. None if the object must exist but does not."""
    if isinstance(change, DeleteObject):
        return _Shown(None, is_new=found.is_new)
    if isinstance(change, PutObject):
        expires_at = now + (seconds_max if change.seconds is None else change.seconds)
        stored = StoredObject(
            kind=change.kind,
            id=change.id,
            owner=change.owner,
            created_at=now,
            expires_at=expires_at,
            body=change.body,
        )
        return _Shown(stored, is_new=found.is_new)
    stored_before = found.stored
    if stored_before is None or stored_before.expires_at <= now:
        is_optional = isinstance(change, ReplaceObject) and not change.must_exist
        return found if is_optional else None
    if isinstance(change, AppendBlob):
        stored = msgspec.structs.replace(stored_before, blob_bytes=stored_before.blob_bytes + len(change.data))
        return _Shown(stored, found.written_blob_bytes, (*found.tail, change.data), found.is_new)
    stored = msgspec.structs.replace(
        stored_before,
        body=stored_before.body if change.body is None else change.body,
        expires_at=stored_before.expires_at if change.seconds is None else now + change.seconds,
    )
    return _Shown(stored, found.written_blob_bytes, found.tail, found.is_new)


def bytes_of(changes: Sequence[Change]) -> int:
    """Return the number of bytes that changes need in memory.

    Args:
        changes: changes of one write.
    """
    total = 0
    for change in changes:
        content = change.data if isinstance(change, AppendBlob) else getattr(change, "body", None)
        total += CHANGE_BYTES + len(content or b"")
    return total
