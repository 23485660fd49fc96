"""Stored objects, and the changes that can be made to them.

Ids also come from clients, in URL paths. An id that no object can have is recognized without a database query.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

__all__ = [
    "AppendBlob",
    "Change",
    "DeleteObject",
    "Order",
    "PutObject",
    "Quota",
    "QuotaExceeded",
    "ReplaceObject",
    "StoredObject",
    "is_id",
]

ID_CHARACTERS_MAX = 128
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")

Order = Literal["asc", "desc"]


class StoredObject(msgspec.Struct, frozen=True, kw_only=True):
    """An object that the store contains.

    Attributes:
        owner: owner who may see the object. If it is None, only readers of all owners' objects may see the object.
        created_at, expires_at: times in seconds since 1970.
        body: content in the format of its kind, usually JSON.
        blob_bytes: size of the blob that belongs to the object.
    """

    kind: str
    id: str
    owner: str | None
    created_at: float
    expires_at: float
    body: bytes
    blob_bytes: int = 0


class PutObject(msgspec.Struct, frozen=True, kw_only=True):
    """A change that adds an object.

    Attributes:
        seconds: lifetime in seconds from the time of the write. None for the lifetime in the settings.
        is_evictable: True if the object may be evicted before the end of its lifetime, because it can be computed
            again.
    """

    kind: str
    id: str
    owner: str | None
    body: bytes
    seconds: float | None = None
    is_evictable: bool = True


class ReplaceObject(msgspec.Struct, frozen=True, kw_only=True):
    """A change that replaces the body of an object. The owner and the blob stay the same.

    Attributes:
        body: the new body. None to keep the old body.
        seconds: new lifetime in seconds from the time of the write. None to keep the old lifetime.
        is_evictable: as for PutObject. None to keep the old value.
        must_exist: True if the whole write must do nothing when the owner has deleted the object. False if the other
            changes of the write must still be made.
    """

    kind: str
    id: str
    body: bytes | None
    seconds: float | None = None
    is_evictable: bool | None = None
    must_exist: bool = True


class AppendBlob(msgspec.Struct, frozen=True, kw_only=True):
    """A change that appends data to an object's blob, such as a file's content or lines of a result.

    If the object does not exist any more, the whole write does nothing.
    """

    kind: str
    id: str
    data: bytes


class DeleteObject(msgspec.Struct, frozen=True, kw_only=True):
    """A change that deletes an object and its blob. It does nothing if the object does not exist any more."""

    kind: str
    id: str


Change = PutObject | ReplaceObject | AppendBlob | DeleteObject


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one owner's objects of one kind, checked after a write.

    The store checks the limits in the write's own transaction, so concurrent writes cannot exceed them together.

    Attributes:
        owner: owner whose objects are limited. None for objects without an owner.
        objects_max: highest number of objects.
        blob_bytes_max: highest number of bytes of all blobs together.
    """

    kind: str
    owner: str | None
    objects_max: int
    blob_bytes_max: int


class QuotaExceeded(Exception):
    """Raised if a write would exceed a quota. Nothing was changed.

    Args:
        quota: the quota that would be exceeded.
        objects: number of objects that the owner would have.
        blob_bytes: number of blob bytes that the owner would have.
    """

    def __init__(self, quota: Quota, objects: int, blob_bytes: int) -> None:
        super().__init__(f"{objects} objects and {blob_bytes} bytes of {quota.kind}")
        self.quota = quota
        self.objects = objects
        self.blob_bytes = blob_bytes


def is_id(text: str) -> bool:
    """Return True if an object may have this id.

    Args:
        text: the text to check. Ids contain ASCII letters, digits and -_.: and have at most ID_CHARACTERS_MAX
            characters.
    """
    return _ID.fullmatch(text) is not None
