"""Files in the store: what is kept of one, how it is told, whose it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from trioserve.api.error_responses import Refusal, refusal
from trioserve.contracts.errors import InvalidRequest
from trioserve.store.store import BLOB_PIECE_BYTES_MAX, Store
from trioserve.store.stored_objects import AppendBlob, Change, PutObject, Quota, QuotaExceeded, StoredObject

__all__ = [
    "FILE_KIND",
    "PURPOSES",
    "FileRecord",
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
PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
FILES_OF_ONE_MAX = 1000  # they are counted at each upload
SHARE_OF_ONE_MAX = 0.5  # of the store: a caller's files are kept until they expire, and must not fill it for all


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    filename: str
    purpose: str


def put_file(
    file_id: str,
    owner: str | None,
    record: FileRecord,
    content: bytes = b"",
    *,
    seconds: float | None = None,
    kind: str = FILE_KIND,
) -> list[Change]:
    """The changes that make it. seconds: its life; None: as the store's settings say."""
    body = msgspec.json.encode(record)
    put = PutObject(kind=kind, id=file_id, owner=owner, body=body, seconds=seconds, is_evictable=False)
    pieces = range(0, len(content), BLOB_PIECE_BYTES_MAX)
    return [
        put,
        *(AppendBlob(kind=kind, id=file_id, data=content[i : i + BLOB_PIECE_BYTES_MAX]) for i in pieces),
    ]


def record_of(stored: StoredObject) -> FileRecord:
    return msgspec.json.decode(stored.body, type=FileRecord)


def file_object(stored: StoredObject) -> dict[str, Any]:
    """As OpenAI's API shows it."""
    record = record_of(stored)
    return {
        "id": stored.id,
        "object": "file",
        "bytes": stored.blob_bytes,
        "created_at": int(stored.created_at),
        "expires_at": int(stored.expires_at),
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


async def read_file(store: Store, file_id: str, owner: str | None, *, param: str | None = None) -> StoredObject:
    """Raises Refusal (404): to anybody but its owner a file is not there."""
    stored = await store.get(FILE_KIND, file_id, owner=owner)
    if stored is None:
        raise file_not_found(file_id, param=param)
    return stored


def file_not_found(file_id: str, *, param: str | None = None) -> Refusal:
    return refusal(
        "file_not_found",
        f"there is no file {file_id[:80]!r}: it was deleted, or its time is over, or it is not yours",
        param=param,
    )


def file_quota(store: Store, owner: str | None, *, to_come: int = 0, kind: str = FILE_KIND) -> Quota:
    """What one caller may keep in files. To be written with a new file, inside of `quota_refused`.

    Args:
        to_come: how many files of the caller are promised, and not made yet.
    """
    return Quota(
        kind=kind,
        owner=owner,
        objects_max=FILES_OF_ONE_MAX - to_come,
        blob_bytes_max=int(store.bytes_max * SHARE_OF_ONE_MAX),
    )


@contextmanager
def quota_refused() -> Iterator[None]:
    """Turns QuotaExceeded into InvalidRequest."""
    try:
        yield
    except QuotaExceeded as exceeded:
        quota = exceeded.quota
        if exceeded.objects > quota.objects_max:
            raise InvalidRequest(
                f"with this one {exceeded.objects} files would be kept for you, and at most {quota.objects_max} may "
                f"be ({FILES_OF_ONE_MAX}, less those that your batches are about to write): delete some",
                param="file",
            ) from None
        raise InvalidRequest(
            f"with this one your files have {exceeded.blob_bytes} bytes, and at most {quota.blob_bytes_max} are kept "
            "(half of --store-max-bytes): delete some",
            param="file",
        ) from None


def required_store(store: Store | None) -> Store:
    """Raises Refusal (503) where nothing is kept."""
    if store is None:
        raise refusal("no_store", "this server keeps nothing: ask one with a store")
    return store
