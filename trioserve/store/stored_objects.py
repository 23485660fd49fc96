"""What is kept: an object with its kind, its id and its owner, and the changes that are made to such objects.

Ids come from clients' paths, too, so what cannot be one is told before a database is asked.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

__all__ = ["AppendBlob", "Change", "DeleteObject", "Order", "PutObject", "ReplaceObject", "StoredObject", "is_id"]

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
    """Another body for an object; its owner, blob and time stay. If it is gone, nothing of its write happens: who has
    deleted it does not want it back. seconds: its life from now on, is_evictable: as above; None: as it was."""

    kind: str
    id: str
    body: bytes
    seconds: float | None = None
    is_evictable: bool | None = None


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


def is_id(text: str) -> bool:
    """Whether an object may bear this id: letters, digits and -_.: in ASCII, at most ID_CHARACTERS_MAX."""
    return _ID.fullmatch(text) is not None
