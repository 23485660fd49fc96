"""/v1/files, in OpenAI's format: input and output of batches, kept in the store with their owner."""

from __future__ import annotations

from functools import partial
from urllib.parse import quote

from trioserve.api.error_responses import Refusal, refusal
from trioserve.api.files.stored_files import (
    FILE_KIND,
    PURPOSES,
    FileRecord,
    file_not_found,
    file_object,
    file_quota,
    put_file,
    quota_refused,
    read_file,
    record_of,
    required_store,
)
from trioserve.api.files.upload import parsed_upload
from trioserve.api.form import INLINE_BYTES_MAX
from trioserve.api.query import Query
from trioserve.api.server_context import ServerContext
from trioserve.contracts.errors import InvalidRequest
from trioserve.store.store import LIST_MAX
from trioserve.store.stored_objects import DeleteObject, StoredObject

__all__ = ["FILE_LIST_MAX", "create_file", "delete_file", "list_files", "read_file_content", "retrieve_file"]

FILE_LIST_MAX = 10_000  # as in OpenAI's API. A page has at most LIST_MAX files, and sets has_more
SHOWN_PURPOSES = (*PURPOSES, "batch_output")


async def create_file(context: ServerContext) -> None:
    store = required_store(context.store)
    body = await context.exchange.body()
    content_type = context.exchange.headers.get("content-type")
    if len(body) <= INLINE_BYTES_MAX:
        upload = parsed_upload(body, content_type)
    else:
        upload = await context.server.uploads.call(partial(parsed_upload, body, content_type), key=context.owner)
    file_id = f"file-{context.clock_and_ids.new_request_id()}"
    record = FileRecord(filename=upload.filename, purpose=upload.purpose)
    quota = file_quota(store, context.owner, to_come=context.server.batches.files_to_come(context.owner))
    with quota_refused():
        changes = put_file(file_id, context.owner, record, upload.content, seconds=upload.seconds)
        await store.write(*changes, quotas=(quota,))
    await context.respond_json(file_object(await read_file(store, file_id, context.owner)))


async def list_files(context: ServerContext) -> None:
    """List files, newest first by default.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the query has a bad value.
        Refusal: the server has no store (503).
    """
    store = required_store(context.store)
    query = Query(context.exchange.query)
    limit = min(query.number("limit", LIST_MAX, low=1, high=FILE_LIST_MAX), LIST_MAX)
    order = query.choice("order", ("asc", "desc"), "desc")
    purpose = query.choice("purpose", SHOWN_PURPOSES, "batch") if query.text("purpose") is not None else None
    found: list[StoredObject] = []
    after = query.text("after")
    while len(found) <= limit:
        page = await store.page(
            FILE_KIND, owner=context.owner, after=after, limit=LIST_MAX, order="asc" if order == "asc" else "desc"
        )
        if page is None:
            raise InvalidRequest(f"after is {(after or '')[:80]!r}, which is no file", param="after")
        found += [stored for stored in page if purpose in (None, record_of(stored).purpose)]
        if len(page) < LIST_MAX:
            break
        after = page[-1].id
    shown = found[:limit]
    await context.respond_json(
        {
            "object": "list",
            "data": [file_object(stored) for stored in shown],
            "first_id": shown[0].id if shown else None,
            "last_id": shown[-1].id if shown else None,
            "has_more": len(found) > limit,
        }
    )


async def retrieve_file(context: ServerContext) -> None:
    store = required_store(context.store)
    await context.respond_json(file_object(await read_file(store, _file_id(context), context.owner)))


async def read_file_content(context: ServerContext) -> None:
    """Send a file piece by piece, with at most one piece in memory.

    Args:
        context: the request.

    Raises:
        Refusal: there is no such file (404), or the server has no store (503).
    """
    store = required_store(context.store)
    stored = await read_file(store, _file_id(context), context.owner)
    name = quote(record_of(stored).filename, safe="")
    disposition = ("content-disposition", f"attachment; filename*=UTF-8''{name}")
    offset = 0
    is_begun = False
    while offset < stored.blob_bytes:
        piece = await store.read_blob(FILE_KIND, stored.id, owner=context.owner, offset=offset)
        if not piece:
            raise file_not_found(stored.id)  # the file was deleted meanwhile
        piece = piece[: stored.blob_bytes - offset]
        if not is_begun:
            await context.start_bytes("application/octet-stream", headers=(disposition,))
            is_begun = True
        await context.exchange.send(piece)
        offset += len(piece)
    if is_begun:
        await context.finish()
    else:
        await context.respond_bytes(b"", "application/octet-stream", headers=(disposition,))


async def delete_file(context: ServerContext) -> None:
    store = required_store(context.store)
    file_id = _file_id(context)
    await read_file(store, file_id, context.owner)
    with context.server.batches.deleting(file_id) as batch_id:
        if batch_id is not None:
            raise _in_use(file_id, batch_id)
        await store.settle(DeleteObject(kind=FILE_KIND, id=file_id))
    await context.respond_json({"id": file_id, "object": "file", "deleted": True})


def _in_use(file_id: str, batch_id: str) -> Refusal:
    return refusal(
        "file_in_use",
        f"the batch {batch_id} uses the file {file_id} and has not ended: wait for its end, or cancel it first",
    )


def _file_id(context: ServerContext) -> str:
    return context.exchange.path.split("/")[3]
