"""Handlers of /v1/messages/batches, in Anthropic's format.

These handlers use the same batches as /v1/batches. The body of one HTTP request has all requests of a batch, and the
results are sent as one stream of lines.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

import msgspec

from trioserve.api.batches.batch_record import (
    MESSAGE_BATCH_KIND,
    MESSAGE_BATCH_PREFIX,
    MESSAGE_FILE_KIND,
    BatchRecord,
    BatchStatus,
)
from trioserve.api.batches.batch_run import CANCELLED_CODE, EXPIRED_CODE
from trioserve.api.batches.input_lines import InputDeleted, LineReader
from trioserve.api.batches.stored_files import FileRecord, file_quota, put_file, quota_refused, required_store
from trioserve.api.error_responses import refusal
from trioserve.api.form import Query
from trioserve.api.openai.request_types import decode_body
from trioserve.api.response import Response
from trioserve.api.server_context import ServerContext
from trioserve.api.surface import MESSAGES_PATH
from trioserve.contracts.errors import InvalidRequest
from trioserve.store.store import LIST_MAX
from trioserve.store.stored_objects import DeleteObject, Order, StoredObject

__all__ = [
    "MessageBatch",
    "MessageBatchBody",
    "MessageBatchDeletion",
    "MessageBatches",
    "cancel_message_batch",
    "create_message_batch",
    "delete_message_batch",
    "list_message_batches",
    "read_message_batch",
    "read_message_results",
]

BATCHES_PATH = f"{MESSAGES_PATH}/batches"
WINDOW_SECONDS = 86_400
CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
REQUESTS_MAX = 50_000
# A body up to this size is decoded on the event loop, because a switch to a thread would cost more.
INLINE_BYTES_MAX = 65_536
RESULT_BYTES_MAX = 64 * 2**20  # The longest line of results, which is far above the limit for a response.
LIST_DEFAULT = 20
LIST_ASKED_MAX = 1000  # A larger `limit` is refused, as in Anthropic's API. But a page has at most LIST_MAX batches.
STATUSES: dict[BatchStatus, Literal["canceling"]] = {BatchStatus.CANCELLING: "canceling"}


class MessageBatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a batch. `params` is the body of a message request."""

    custom_id: str
    params: dict[str, Any]


class MessageBatchBody(msgspec.Struct, frozen=True, kw_only=True):
    requests: list[MessageBatchRequest]


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    custom_id: str
    params: msgspec.Raw


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    requests: list[_Request]


class MessageRequestCounts(Response):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(Response, tag_field="type", tag="message_batch"):
    """A batch of messages. Times are in RFC 3339 format."""

    id: str
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageRequestCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None
    results_url: str | None


class MessageBatches(Response):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class MessageBatchDeletion(Response, tag_field="type", tag="message_batch_deleted"):
    id: str


async def create_message_batch(context: ServerContext) -> None:
    store = required_store(context.services.store)
    raw = await context.exchange.body()
    if len(raw) <= INLINE_BYTES_MAX:
        count, lines = _lines(raw)
    else:
        count, lines = await context.server.uploads.call(partial(_lines, raw), key=context.owner)
    context.server.batches.check_room(context.owner)
    now = int(store.now())
    new_id = context.clock_and_ids.new_request_id
    batch_id = MESSAGE_BATCH_PREFIX + new_id()
    record = BatchRecord(
        endpoint=MESSAGES_PATH,
        input_file_id=f"{batch_id}_input",
        completion_window="24h",
        metadata=None,
        tenant=context.named_tenant,
        created_at=now,
        expires_at=now + WINDOW_SECONDS,
        output_file_id=f"{batch_id}_output",
        error_file_id=f"{batch_id}_errors",
        total=count,
    )
    name = FileRecord(filename=record.input_file_id, purpose="batch")
    seconds = WINDOW_SECONDS + store.seconds_max
    files = put_file(record.input_file_id, context.owner, name, lines, seconds=seconds, kind=MESSAGE_FILE_KIND)
    quota = file_quota(store, context.owner, kind=MESSAGE_FILE_KIND)
    with quota_refused():
        await context.server.batches.create(
            store, batch_id, context.owner, context.caller, record, files, quotas=[quota]
        )
    await context.respond_json(_shown(batch_id, record))


async def list_message_batches(context: ServerContext) -> None:
    """Answer with a page of batches, newest first.

    With `before_id` in the query, the page has the batches that are just newer than that batch.

    Args:
        context: The request.
    """
    store = required_store(context.services.store)
    query = Query(context.exchange.query)
    limit = min(query.number("limit", LIST_DEFAULT, low=1, high=LIST_ASKED_MAX), LIST_MAX)
    after, before = query.text("after_id"), query.text("before_id")
    if after is not None and before is not None:
        raise InvalidRequest("after_id and before_id are both set: send only one of them", param="after_id")
    cursor = before if before is not None else after
    order: Order = "asc" if before is not None else "desc"
    page = await store.page(MESSAGE_BATCH_KIND, owner=context.owner, after=cursor, limit=limit, order=order)
    if page is None:
        name = "before_id" if before is not None else "after_id"
        raise InvalidRequest(f"{name} is {(cursor or '')[:80]!r}, but there is no such batch", param=name)
    more = page and await store.page(MESSAGE_BATCH_KIND, owner=context.owner, after=page[-1].id, limit=1, order=order)
    if before is not None:
        page = page[::-1]
    await context.respond_json(
        MessageBatches(
            data=[_shown(stored.id, _record(stored)) for stored in page],
            has_more=bool(more),
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
        )
    )


async def read_message_batch(context: ServerContext) -> None:
    stored = await _stored(context)
    await context.respond_json(_shown(stored.id, _record(stored)))


async def cancel_message_batch(context: ServerContext) -> None:
    """Cancel a batch. A batch that has ended does not change.

    Args:
        context: The request.
    """
    store = required_store(context.services.store)
    await context.server.batches.cancel(store, await _stored(context))
    await read_message_batch(context)


async def delete_message_batch(context: ServerContext) -> None:
    stored = await _stored(context)
    record = _ended(stored, "be deleted")
    store = required_store(context.services.store)
    files = (record.input_file_id, record.output_file_id, record.error_file_id)
    await store.settle(
        *(DeleteObject(kind=MESSAGE_FILE_KIND, id=file_id) for file_id in files),
        DeleteObject(kind=MESSAGE_BATCH_KIND, id=stored.id),
    )
    await context.respond_json(MessageBatchDeletion(id=stored.id))


async def read_message_results(context: ServerContext) -> None:
    """Answer with one line for each request: first all successful requests, then all other requests.

    Within each group, the order is that in which the requests ended.

    Args:
        context: The request.
    """
    stored = await _stored(context)
    record = _ended(stored, "have results")
    store = required_store(context.services.store)
    await context.start_bytes("application/x-jsonl")
    for file_id in (record.output_file_id, record.error_file_id):
        reader = LineReader(store, file_id, context.owner, line_bytes_max=RESULT_BYTES_MAX, kind=MESSAGE_FILE_KIND)
        while (line := await _next(reader)) is not None:
            await context.exchange.send(_result(line))
    await context.finish()


async def _next(reader: LineReader) -> bytes | None:
    """Return the next line, or None at the end.

    A missing file counts as empty, because files without lines are deleted.
    """
    try:
        line = await reader.next()
    except InputDeleted:
        return None
    return None if line is None else line.raw


class _Answer(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Fault(msgspec.Struct):
    code: str
    message: str


class _Done(msgspec.Struct):
    custom_id: str | None
    response: _Answer | None
    error: _Fault | None


def _result(line: bytes) -> bytes:
    """Return a line of results in the shape of Anthropic's API.

    Args:
        line: Line of an output file.
    """
    done = msgspec.json.decode(line, type=_Done)
    result: dict[str, object]
    if done.response is not None:
        is_error = done.response.status_code != 200
        kind, name = ("errored", "error") if is_error else ("succeeded", "message")
        result = {"type": kind, name: done.response.body}
    else:
        assert done.error is not None
        kind = {CANCELLED_CODE: "canceled", EXPIRED_CODE: "expired"}.get(done.error.code, "errored")
        result = {"type": kind}
        if kind == "errored":
            error = {"type": "invalid_request_error", "message": done.error.message}
            result["error"] = {"type": "error", "error": error, "request_id": None}
    return msgspec.json.encode({"custom_id": done.custom_id, "result": result}) + b"\n"


def _lines(raw: bytes) -> tuple[int, bytes]:
    """Return the number of requests, and the requests as input lines of a batch.

    Raises:
        InvalidRequest: The body is invalid.
    """
    body = decode_body(raw, _Body, values_max=None)  # The values of each request are counted when that request is sent.
    if not 1 <= len(body.requests) <= REQUESTS_MAX:
        raise InvalidRequest(
            f"requests has {len(body.requests)} entries, allowed are 1 to {REQUESTS_MAX}", param="requests"
        )
    lines: list[bytes] = []
    ids: set[str] = set()
    for index, request in enumerate(body.requests):
        field = f"requests[{index}].custom_id"
        if not CUSTOM_ID.fullmatch(request.custom_id):
            raise InvalidRequest(
                f"custom_id is {request.custom_id[:80]!r}, allowed are 1 to 64 letters, digits, _ and -", param=field
            )
        if request.custom_id in ids:
            raise InvalidRequest(
                f"custom_id {request.custom_id!r} is used twice: send a different one for each request", param=field
            )
        ids.add(request.custom_id)
        params = msgspec.Raw(msgspec.json.format(request.params, indent=-1))
        line = {"custom_id": request.custom_id, "method": "POST", "url": MESSAGES_PATH, "body": params}
        lines.append(msgspec.json.encode(line) + b"\n")
    return len(lines), b"".join(lines)


async def _stored(context: ServerContext) -> StoredObject:
    """Return the batch named in the path.

    Raises:
        Refusal: The caller has no such batch (404).
    """
    store = required_store(context.services.store)
    batch_id = context.exchange.path.split("/")[4]
    stored = await store.get(MESSAGE_BATCH_KIND, batch_id, owner=context.owner)
    if stored is None:
        raise refusal(
            "batch_not_found",
            f"there is no batch {batch_id[:80]!r}: it was deleted, has expired, or has another owner",
        )
    return stored


def _record(stored: StoredObject) -> BatchRecord:
    return msgspec.json.decode(stored.body, type=BatchRecord)


def _ended(stored: StoredObject, action: str) -> BatchRecord:
    """Return the state of a batch that has ended.

    Raises:
        InvalidRequest: The batch has not ended.
    """
    record = _record(stored)
    if not record.is_final:
        raise InvalidRequest(f"the batch {stored.id} cannot {action} before it has ended: wait, or cancel it")
    return record


def _shown(batch_id: str, record: BatchRecord) -> MessageBatch:
    """Describe a batch in Anthropic's format.

    Counts are reported after the end of the batch. Until then, all requests count as processing, as in Anthropic's API.
    """
    times = record.times
    is_ended = record.is_final
    ended = [times[status] for status in ("completed", "expired", "cancelled", "failed") if status in times]
    # A failed batch counts its lines without a result as errors, because the server failed.
    lost = record.total - record.completed - record.failed
    return MessageBatch(
        id=batch_id,
        processing_status="ended" if is_ended else STATUSES.get(record.status, "in_progress"),
        request_counts=MessageRequestCounts(
            processing=0 if is_ended else record.total,
            succeeded=record.completed if is_ended else 0,
            errored=record.failed - record.dropped + lost if is_ended else 0,
            canceled=record.dropped if is_ended and not record.is_expired else 0,
            expired=record.dropped if is_ended and record.is_expired else 0,
        ),
        created_at=_time(record.created_at),
        expires_at=_time(record.expires_at),
        ended_at=_time(ended[0]) if is_ended else None,
        cancel_initiated_at=_time(times["cancelling"]) if "cancelling" in times else None,
        archived_at=None,
        results_url=f"{BATCHES_PATH}/{batch_id}/results" if is_ended else None,
    )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
