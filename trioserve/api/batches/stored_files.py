"""Files in the store: their records, their JSON, and limits for each owner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import msgspec

from trioserve.api.error_responses import Refusal, refusal
from trioserve.api.response import Response
from trioserve.contracts.errors import InvalidRequest
from trioserve.store.store import BLOB_PIECE_BYTES_MAX, Store
from trioserve.store.stored_objects import AppendBlob, Change, PutObject, Quota, QuotaExceeded, StoredObject

__all__ = [
    "FILE_KIND",
    "PURPOSES",
    "File",
    "FileRecord",
    "Purpose",
    "file_not_found",
    "file_object",
    "file_quota",
    "put_file",
    "quota_refused",
    "read_file",
    "record_of",
    "required_store",
]

FILE_KIND = "file"
Purpose = Literal["assistants", "batch", "evals", "fine-tune", "user_data", "vision"]
"""Purposes of uploaded files."""
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
FILES_OF_ONE_MAX = 1000  # The number is limited, because each upload counts the files of its owner.
SHARE_OF_ONE_MAX = 0.5  # An owner's files may use this fraction of the store, because files stay until they expire.


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a file.

    Attributes:
        filename: name that the client gave.
        purpose: purpose of an upload, or "batch_output".
    """

    filename: str
    purpose: Purpose | Literal["batch_output"]


class File(Response, tag_field="object", tag="file"):
    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose | Literal["batch_output"]
    status: Literal["processed"]
    status_details: None


def put_file(
    file_id: str,
    owner: str | None,
    record: FileRecord,
    content: bytes = b"",
    *,
    seconds: float | None = None,
    kind: str = FILE_KIND,
) -> list[Change]:
    """Make the changes that store a file.

    Args:
        owner: owner of the file. None: the file has no owner.
        record: properties of the file.
        content: bytes of the file.
        seconds: time until the file expires. None: the store's default.
        kind: kind of stored object.
    """
    body = msgspec.json.encode(record)
    put = PutObject(kind=kind, id=file_id, owner=owner, body=body, seconds=seconds, is_evictable=False)
    pieces = range(0, len(content), BLOB_PIECE_BYTES_MAX)
    return [
        put,
        *(AppendBlob(kind=kind, id=file_id, data=content[i : i + BLOB_PIECE_BYTES_MAX]) for i in pieces),
    ]


def record_of(stored: StoredObject) -> FileRecord:
    return msgspec.json.decode(stored.body, type=FileRecord)


def file_object(stored: StoredObject) -> File:
    """Describe a file in OpenAI's format.

    Args:
        stored: a stored file.
    """
    record = record_of(stored)
    return File(
        id=stored.id,
        bytes=stored.blob_bytes,
        created_at=int(stored.created_at),
        expires_at=int(stored.expires_at),
        filename=record.filename,
        purpose=record.purpose,
        status="processed",
        status_details=None,
    )


async def read_file(store: Store, file_id: str, owner: str | None, *, param: str | None = None) -> StoredObject:
    """Read a file's record. Only its owner can read it.

    Args:
        store: holds the file.
        owner: owner of the file. None: the caller sees all files.
        param: field that the error names.

    Raises:
        Refusal: the owner has no such file (404).
    """
    stored = await store.get(FILE_KIND, file_id, owner=owner)
    if stored is None:
        raise file_not_found(file_id, param=param)
    return stored


def file_not_found(file_id: str, *, param: str | None = None) -> Refusal:
    return refusal(
        "file_not_found",
        f"there is no file {file_id[:80]!r}: it was deleted, or has expired, or is not yours",
        param=param,
    )


def file_quota(store: Store, owner: str | None, *, to_come: int = 0, kind: str = FILE_KIND) -> Quota:
    """Make the quota of one owner's files. The caller writes the quota together with a new file, inside of
    `quota_refused`.

    Args:
        store: holds the owner's files.
        owner: owner of the files.
        to_come: number of files that batches of the owner will write.
        kind: kind of stored object.
    """
    return Quota(
        kind=kind,
        owner=owner,
        objects_max=FILES_OF_ONE_MAX - to_come,
        blob_bytes_max=int(store.bytes_max * SHARE_OF_ONE_MAX),
    )


@contextmanager
def quota_refused() -> Iterator[None]:
    """Convert QuotaExceeded into InvalidRequest."""
    try:
        yield
    except QuotaExceeded as exceeded:
        quota = exceeded.quota
        if exceeded.objects > quota.objects_max:
            raise InvalidRequest(
                f"with this file you would have {exceeded.objects} files, allowed are {quota.objects_max} "
                f"({FILES_OF_ONE_MAX} less the files that your batches will write): delete some files",
                param="file",
            ) from None
        raise InvalidRequest(
            f"with this file your files would have {exceeded.blob_bytes} bytes, allowed are {quota.blob_bytes_max} "
            "(half of --store-max-bytes): delete some files",
            param="file",
        ) from None


def required_store(store: Store | None) -> Store:
    """Return the store.

    Args:
        store: the store. None: the server has none.

    Raises:
        Refusal: the server has no store (503).
    """
    if store is None:
        raise refusal("no_store", "this server has no store: ask a server with a store")
    return store
