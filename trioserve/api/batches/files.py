"""/v1/files, in OpenAI's format: input and output of batches, kept in the store with their owner."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any
from urllib.parse import quote

import msgspec

from trioserve.api.batches.stored_files import (
    FILE_KIND,
    PURPOSES,
    File,
    FileRecord,
    Purpose,
    file_not_found,
    file_object,
    file_quota,
    put_file,
    quota_refused,
    read_file,
    record_of,
    required_store,
)
from trioserve.api.error_responses import Refusal, refusal
from trioserve.api.form import INLINE_BYTES_MAX, LIST_FIELDS, Form, Query, parsed_form
from trioserve.api.response import Response
from trioserve.api.route_table import READS_BODY, Forwarding, Operation
from trioserve.api.server_context import ServerContext
from trioserve.contracts.errors import InvalidRequest
from trioserve.store.store import LIST_MAX
from trioserve.store.stored_objects import DeleteObject, StoredObject

__all__ = [
    "EXPIRY_SECONDS_MAX",
    "EXPIRY_SECONDS_MIN",
    "FILE_LIST_MAX",
    "OPERATIONS",
    "FileDeletion",
    "FileForm",
    "Files",
    "Upload",
    "create_file",
    "delete_file",
    "list_files",
    "parsed_upload",
    "read_file_content",
    "retrieve_file",
]

FILENAME_CHARACTERS_MAX = 255
EXPIRY_SECONDS_MIN = 3600
EXPIRY_SECONDS_MAX = 30 * 86_400


class Files(Response, tag_field="object", tag="list"):
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeletion(Response, tag_field="object", tag="file"):
    id: str
    deleted: bool


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """An uploaded file.

    Attributes:
        content: bytes of the file.
        filename: name that the client gave.
        purpose: purpose that the client gave.
        seconds: time until the file expires. None: the store's default.
    """

    content: bytes
    filename: str
    purpose: Purpose
    seconds: float | None


def parsed_upload(body: bytes, content_type: str | None) -> Upload:
    """Parse the form of an upload.

    Args:
        body: the request's body.
        content_type: value of the header Content-Type. None: not sent.

    Raises:
        InvalidRequest: a part is missing or has a bad value. The error names the part.
    """
    form = parsed_form(body, content_type, files=("file",))
    sent = form.files.get("file")
    if sent is None or sent.filename is None:
        raise InvalidRequest('the form has no file: send one as the part "file", with a filename', param="file")
    filename = sent.filename
    if len(filename) > FILENAME_CHARACTERS_MAX or not filename.isprintable():
        raise InvalidRequest(
            f"filename is {filename[:80]!r}, allowed are up to {FILENAME_CHARACTERS_MAX} printable characters",
            param="file",
        )
    purpose = form.texts.get("purpose")
    if purpose not in PURPOSES:
        what = "missing" if purpose is None else f"{purpose[:40]!r}"
        raise InvalidRequest(f"purpose is {what}, allowed are {', '.join(PURPOSES)}", param="purpose")
    return Upload(content=sent.content, filename=filename, purpose=purpose, seconds=_seconds(form))


def _seconds(form: Form) -> float | None:
    anchor = form.texts.get("expires_after[anchor]")
    seconds = form.texts.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest('expires_after[anchor] must be "created_at"', param="expires_after[anchor]")
    is_number = seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) < 10
    if seconds is None or not is_number or not EXPIRY_SECONDS_MIN <= int(seconds) <= EXPIRY_SECONDS_MAX:
        raise InvalidRequest(
            f"expires_after[seconds] is {'missing' if seconds is None else repr(seconds[:40])}, allowed is a number "
            f"from {EXPIRY_SECONDS_MIN} to {EXPIRY_SECONDS_MAX}",
            param="expires_after[seconds]",
        )
    return float(seconds)


# A larger `limit` is refused, as in OpenAI's API. A page has at most LIST_MAX files, and has_more reports further
# files.
FILE_LIST_MAX = 10_000
SHOWN_PURPOSES = (*PURPOSES, "batch_output")


async def create_file(context: ServerContext) -> None:
    store = required_store(context.services.store)
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
    store = required_store(context.services.store)
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
        Files(
            data=[file_object(stored) for stored in shown],
            first_id=shown[0].id if shown else None,
            last_id=shown[-1].id if shown else None,
            has_more=len(found) > limit,
        )
    )


async def retrieve_file(context: ServerContext) -> None:
    store = required_store(context.services.store)
    await context.respond_json(file_object(await read_file(store, _file_id(context), context.owner)))


async def read_file_content(context: ServerContext) -> None:
    """Send a file piece by piece, with at most one piece in memory.

    Args:
        context: the request.

    Raises:
        Refusal: there is no such file (404), or the server has no store (503).
    """
    store = required_store(context.services.store)
    stored = await read_file(store, _file_id(context), context.owner)
    name = quote(record_of(stored).filename, safe="")
    disposition = ("content-disposition", f"attachment; filename*=UTF-8''{name}")
    offset = 0
    is_begun = False
    while offset < stored.blob_bytes:
        piece = await store.read_blob(FILE_KIND, stored.id, owner=context.owner, offset=offset)
        if not piece:
            raise file_not_found(stored.id)  # The file was deleted while it was read.
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
    store = required_store(context.services.store)
    file_id = _file_id(context)
    await read_file(store, file_id, context.owner)
    with context.server.batches.deleting(file_id) as batch_id:
        if batch_id is not None:
            raise _in_use(file_id, batch_id)
        await store.settle(DeleteObject(kind=FILE_KIND, id=file_id))
    await context.respond_json(FileDeletion(id=file_id, deleted=True))


def _in_use(file_id: str, batch_id: str) -> Refusal:
    return refusal(
        "file_in_use",
        f"the batch {batch_id} uses the file {file_id} and has not ended: wait for its end, or cancel it first",
    )


def _file_id(context: ServerContext) -> str:
    return context.exchange.path.split("/")[3]


class FileForm(msgspec.Struct, kw_only=True):
    """Parts of the form. The part with a filename is the file."""

    file: Annotated[str, msgspec.Meta(extra_json_schema={"format": "binary"})]
    purpose: Purpose


_PATH = "the file's id"
_LIST: dict[str, tuple[str, dict[str, Any]]] = {
    **LIST_FIELDS,
    "limit": (
        "length of the page, which has at most 100 files",
        {"type": "integer", "minimum": 1, "maximum": FILE_LIST_MAX},
    ),
    "purpose": ("list only files with this purpose", {"type": "string", "enum": list(SHOWN_PURPOSES)}),
}


OPERATIONS: tuple[Operation[ServerContext], ...] = (
    Operation(
        method="POST",
        path="/v1/files",
        handler=create_file,
        summary="Store a file",
        forwarding=Forwarding.HOME,
        description="For batches. The file expires after the store's time to live, or after expires_after[seconds] "
        "with expires_after[anchor]=created_at.",
        body=FileForm,
        body_media="multipart/form-data",
        response=File,
        errors=(*READS_BODY, 507),
    ),
    Operation(
        method="GET",
        path="/v1/files",
        handler=list_files,
        summary="List files",
        forwarding=Forwarding.HOME,
        query=_LIST,
        response=Files,
        errors=(400, 503),
    ),
    Operation(
        method="GET",
        path="/v1/files/{file}",
        handler=retrieve_file,
        summary="Read a file's name, size and dates",
        forwarding=Forwarding.KEPT,
        response=File,
        errors=(400, 404, 503),
        path_parameter=_PATH,
    ),
    Operation(
        method="GET",
        path="/v1/files/{file}/content",
        handler=read_file_content,
        summary="Read a file's content",
        forwarding=Forwarding.KEPT,
        response="application/octet-stream",
        errors=(400, 404, 503),
        path_parameter=_PATH,
    ),
    Operation(
        method="DELETE",
        path="/v1/files/{file}",
        handler=delete_file,
        summary="Delete a file",
        forwarding=Forwarding.KEPT,
        description="Refused with 409 while a running batch uses the file.",
        response=FileDeletion,
        errors=(400, 404, 409, 503),
        path_parameter=_PATH,
    ),
)
