"""What is kept: an object with its kind, its id and its owner, and the changes that are made to such objects.

Ids come from clients' paths, too, so what cannot be one is told before a database is asked.
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
    """owner: to whom it is shown; None: to those alone who see everything. created_at, expires_at: seconds since 1970.
    body: what its kind makes of it, JSON as a rule. blob_bytes: size of the blob beside it."""

    kind: str
    id: str
    owner: str | None
    created_at: float
    expires_at: float
    body: bytes
    blob_bytes: int = 0


class PutObject(msgspec.Struct, frozen=True, kw_only=True):
    """A new object. seconds: how long it is kept; None: as the settings say. is_evictable: it may go before its time
    when room is needed, since whoever made it can make it again."""

    kind: str
    id: str
    owner: str | None
    body: bytes
    seconds: float | None = None
    is_evictable: bool = True


class ReplaceObject(msgspec.Struct, frozen=True, kw_only=True):
    """Another body for an object; its owner and blob stay.

    Args:
        body: None: as it was.
        seconds: its life from now on; None: its time stays as it was.
        is_evictable: as for PutObject; None: as it was.
        must_exist: if the object is gone, nothing of the write happens: its owner has deleted it and does not want it
            back. False: the other changes happen all the same.
    """

    kind: str
    id: str
    body: bytes | None
    seconds: float | None = None
    is_evictable: bool | None = None
    must_exist: bool = True


class AppendBlob(msgspec.Struct, frozen=True, kw_only=True):
    """More at the end of an object's blob: a file's content, the lines of a result. As for a replacement, the object
    must be there."""

    kind: str
    id: str
    data: bytes


class DeleteObject(msgspec.Struct, frozen=True, kw_only=True):
    """An object and its blob. That it is gone already is no error."""

    kind: str
    id: str


Change = PutObject | ReplaceObject | AppendBlob | DeleteObject


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """What one owner may have of one kind once a write is done. The store checks it in the write's own transaction, so
    writes at the same time cannot pass it together.

    Args:
        owner: None: objects without an owner.
        objects_max: how many objects.
        blob_bytes_max: how many bytes of blobs, together.
    """

    kind: str
    owner: str | None
    objects_max: int
    blob_bytes_max: int


class QuotaExceeded(Exception):
    """A write would pass a quota. Nothing of the write has happened.

    Args:
        objects, blob_bytes: what the owner would have.
    """

    def __init__(self, quota: Quota, objects: int, blob_bytes: int) -> None:
        super().__init__(f"{objects} objects and {blob_bytes} bytes of {quota.kind}")
        self.quota = quota
        self.objects = objects
        self.blob_bytes = blob_bytes


def is_id(text: str) -> bool:
    """Whether an object may bear this id: letters, digits and -_.: in ASCII, at most ID_CHARACTERS_MAX."""
    return _ID.fullmatch(text) is not None
