"""Changes that the disk has refused: kept in memory, in order, and shown to readers until they are written.

Only final states come here (see StoreDatabase.settle): what a batch or a response came to. So the owner reads the end
of it at once, whatever the disk does. Bounded in bytes. Half of the bound is for small changes alone, so that a large
result cannot push out the end of something else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from trioserve.store.stored_objects import AppendBlob, Change, DeleteObject, PutObject, ReplaceObject, StoredObject

__all__ = ["UNWRITTEN_BYTES_MAX", "UnwrittenChanges", "UnwrittenGroup", "bytes_of"]

UNWRITTEN_BYTES_MAX = 32 * 2**20
"""Of all changes together. Ends of 64 batches and 64 background responses fit many times; in memory, so no more."""
SMALL_BYTES_MAX = 65_536
CHANGE_BYTES = 256  # of a change besides its body

Look = Callable[[str, str], StoredObject | None]
"""What the database has under a kind and an id."""


class UnwrittenGroup(msgspec.Struct, frozen=True):
    """What one write wanted to change, all or nothing, and when."""

    changes: tuple[Change, ...]
    at: float


class _Shown(msgspec.Struct):
    """An object as readers see it.

    Args:
        stored: the object; None: it is deleted.
        written_blob_bytes: how much of its blob the database has.
        tail: the rest of its blob, in pieces.
        is_new: the database does not have it.
    """

    stored: StoredObject | None
    written_blob_bytes: int = 0
    tail: tuple[bytes, ...] = ()
    is_new: bool = False


class UnwrittenChanges:
    """The groups, and a view of the objects that they change."""

    def __init__(self, bytes_max: int = UNWRITTEN_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._groups: deque[UnwrittenGroup] = deque()
        self._shown: dict[tuple[str, str], _Shown] = {}
        self.byte_count = 0

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def first(self) -> UnwrittenGroup | None:
        """The group that has to be written before the others."""
        return self._groups[0] if self._groups else None

    def has_room(self, changes: Sequence[Change]) -> bool:
        """Whether a group of these changes fits into the bound."""
        byte_count = bytes_of(changes)
        is_small = byte_count <= SMALL_BYTES_MAX and not any(isinstance(change, PutObject) for change in changes)
        return self.byte_count + byte_count <= (self._bytes_max if is_small else self._bytes_max // 2)

    def add(self, group: UnwrittenGroup, look: Look, seconds_max: float) -> bool:
        """Keep a group, for which there is room.

        Args:
            look: finds an object in the database.
            seconds_max: the life of an object that is given no other.

        Returns:
            False if an object that has to be there is gone. Then nothing has changed.
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
        """The first group is in the database now, or cannot be applied any more."""
        self.byte_count -= bytes_of(self._groups.popleft().changes)
        groups, self._groups, self._shown, self.byte_count = list(self._groups), deque(), {}, 0
        for group in groups:
            self.add(group, look, seconds_max)

    # --- what readers see ---

    def get(self, kind: str, object_id: str, owner: str | None, now: float) -> tuple[bool, StoredObject | None]:
        """Whether a change concerns this object, and the object as its owner sees it."""
        shown = self._shown.get((kind, object_id))
        if shown is None:
            return False, None
        stored = shown.stored
        is_seen = stored is not None and stored.expires_at > now and owner in (None, stored.owner)
        return True, stored if is_seen else None

    def new_objects(self, kind: str, owner: str | None, now: float) -> list[StoredObject]:
        """Objects that the database does not have, the oldest first."""
        return [
            stored
            for shown in self._shown.values()
            if shown.is_new
            and (stored := shown.stored) is not None
            and (stored.kind, stored.expires_at > now) == (kind, True)
            and owner in (None, stored.owner)
        ]

    def tail(self, kind: str, object_id: str) -> tuple[int, bytes]:
        """How much of the object's blob the database has, and the rest of the blob."""
        shown = self._shown[kind, object_id]
        return shown.written_blob_bytes, b"".join(shown.tail)


def _changed(found: _Shown, change: Change, now: float, seconds_max: float) -> _Shown | None:
    """The object after the change; None: it has to be there, and is not."""
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
    """What the changes take in memory."""
    total = 0
    for change in changes:
        content = change.data if isinstance(change, AppendBlob) else getattr(change, "body", None)
        total += CHANGE_BYTES + len(content or b"")
    return total
