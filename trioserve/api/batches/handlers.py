"""Handlers of /v1/batches in OpenAI's format, and the descriptions of all operations on batches.

Only the owner of a batch can find it.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from trioserve.api.batches.batch_book import BatchDeleted
from trioserve.api.batches.batch_record import BATCH_KIND, Batch, BatchRecord, batch_object
from trioserve.api.batches.files import EXPIRY_SECONDS_MAX, EXPIRY_SECONDS_MIN
from trioserve.api.batches.message_batches import (
    LIST_ASKED_MAX,
    MessageBatch,
    MessageBatchBody,
    MessageBatchDeletion,
    MessageBatches,
    cancel_message_batch,
    create_message_batch,
    delete_message_batch,
    list_message_batches,
    read_message_batch,
    read_message_results,
)
from trioserve.api.batches.stored_files import (
    FILE_KIND,
    file_not_found,
    file_quota,
    quota_refused,
    read_file,
    record_of,
    required_store,
)
from trioserve.api.error_responses import refusal
from trioserve.api.form import LIST_FIELDS, Query
from trioserve.api.response import Response
from trioserve.api.route_table import READS_BODY, Forwarding, Operation
from trioserve.api.server_context import ServerContext
from trioserve.api.surface import MessagesError, own_statuses
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.sampling import Range
from trioserve.store.store import LIST_MAX
from trioserve.store.stored_objects import ReplaceObject, StoredObject

__all__ = [
    "BATCH_ENDPOINTS",
    "OPERATIONS",
    "BatchBody",
    "BatchList",
    "cancel_batch",
    "create_batch",
    "list_batches",
    "retrieve_batch",
]

BATCH_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
WINDOW = re.compile(r"([1-9][0-9]{0,7})([smhd])")
UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
WINDOW_SECONDS_MAX = 14 * 86_400
METADATA_MAX = 16
METADATA_KEY_CHARACTERS_MAX = 64
METADATA_VALUE_CHARACTERS_MAX = 512
LIST_DEFAULT = 20


class OutputExpiresAfter(msgspec.Struct, frozen=True, kw_only=True):
    anchor: str
    seconds: int


class BatchBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a request for a batch.

    Attributes:
        completion_window: "24h", or another number with s, m, h or d. At most 14 days.
    """

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiresAfter | None = None


class BatchList(Response, tag_field="object", tag="list"):
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


async def create_batch(context: ServerContext) -> None:
    store = required_store(context.services.store)
    body = await context.body(BatchBody)
    window_seconds = _check(body, context.server.batch_endpoints)
    context.server.batches.check_room(context.owner)
    stored = await read_file(store, body.input_file_id, context.owner, param="input_file_id")
    purpose = record_of(stored).purpose
    if purpose != "batch":
        raise InvalidRequest(
            f'the file {stored.id} has the purpose {purpose!r}, but needs "batch": upload it with this purpose',
            param="input_file_id",
        )
    now = int(store.now())
    new_id = context.clock_and_ids.new_request_id
    record = BatchRecord(
        endpoint=body.endpoint,
        input_file_id=stored.id,
        completion_window=body.completion_window,
        metadata=body.metadata,
        tenant=context.named_tenant,
        created_at=now,
        expires_at=now + window_seconds,
        output_file_id=f"file-{new_id()}",
        error_file_id=f"file-{new_id()}",
        output_seconds=None if body.output_expires_after is None else float(body.output_expires_after.seconds),
    )
    batch_id = f"batch_{new_id()}"
    # The input file must exist until the batch ends, possibly in a later process. The transaction that stores the batch
    # also replaces the file's record, and so checks that the file still exists.
    seconds = None
    own_expires_at = context.server.batches.input_expires_at(stored.id)
    if stored.expires_at < record.expires_at + store.seconds_max:
        seconds = window_seconds + store.seconds_max
        own_expires_at = own_expires_at or stored.expires_at
    record = msgspec.structs.replace(record, input_expires_at=own_expires_at)
    needed = ReplaceObject(kind=FILE_KIND, id=stored.id, body=None, seconds=seconds)
    to_come = context.server.batches.files_to_come(context.owner) + 2  # A batch creates at most two files.
    quota = file_quota(store, context.owner, to_come=to_come)
    try:
        with quota_refused():
            await context.server.batches.create(
                store, batch_id, context.owner, context.caller, record, [needed], quotas=[quota]
            )
    except BatchDeleted:  # The input file was deleted after the check above.
        raise file_not_found(stored.id, param="input_file_id") from None
    await context.respond_json(batch_object(batch_id, record))


async def list_batches(context: ServerContext) -> None:
    """Answer with a page of batches, newest first.

    Args:
        context: The request.
    """
    store = required_store(context.services.store)
    query = Query(context.exchange.query)
    limit = query.number("limit", LIST_DEFAULT, low=1, high=LIST_MAX)
    after = query.text("after")
    page = await store.page(BATCH_KIND, owner=context.owner, after=after, limit=limit)
    if page is None:
        raise InvalidRequest(f"after is {(after or '')[:80]!r}, but there is no such batch", param="after")
    more = page and await store.page(BATCH_KIND, owner=context.owner, after=page[-1].id, limit=1)
    await context.respond_json(
        BatchList(
            data=[_shown(stored) for stored in page],
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=bool(more),
        )
    )


async def retrieve_batch(context: ServerContext) -> None:
    await context.respond_json(_shown(await _batch(context)))


async def cancel_batch(context: ServerContext) -> None:
    """Cancel a batch. A batch that has ended does not change.

    Args:
        context: The request.
    """
    store = required_store(context.services.store)
    await context.server.batches.cancel(store, await _batch(context))
    await context.respond_json(_shown(await _batch(context)))


async def _batch(context: ServerContext) -> StoredObject:
    """Return the batch named in the path.

    Raises:
        Refusal: The caller has no such batch (404).
    """
    store = required_store(context.services.store)
    batch_id = context.exchange.path.split("/")[3]
    stored = await store.get(BATCH_KIND, batch_id, owner=context.owner)
    if stored is None:
        raise refusal("batch_not_found", f"there is no batch {batch_id[:80]!r}: it has expired, or has another owner")
    return stored


def _shown(stored: StoredObject) -> Batch:
    return batch_object(stored.id, msgspec.json.decode(stored.body, type=BatchRecord))


def _check(body: BatchBody, endpoints: tuple[str, ...]) -> int:
    """Check the body. Return the completion window in seconds.

    Raises:
        InvalidRequest: A field is invalid.
    """
    if body.endpoint not in endpoints:
        raise InvalidRequest(
            f"endpoint is {body.endpoint[:80]!r}, allowed are {', '.join(endpoints)}", param="endpoint"
        )
    window = WINDOW.fullmatch(body.completion_window)
    seconds = 0 if window is None else int(window[1]) * UNIT_SECONDS[window[2]]
    if not 1 <= seconds <= WINDOW_SECONDS_MAX:
        raise InvalidRequest(
            f"completion_window is {body.completion_window[:40]!r}, allowed is a number of s, m, h or d up to 14d, "
            'such as "24h"',
            param="completion_window",
        )
    _check_metadata(body.metadata or {})
    expires = body.output_expires_after
    if expires is not None and (
        expires.anchor != "created_at" or not EXPIRY_SECONDS_MIN <= expires.seconds <= EXPIRY_SECONDS_MAX
    ):
        raise InvalidRequest(
            'output_expires_after must have the anchor "created_at" and '
            f"{EXPIRY_SECONDS_MIN} to {EXPIRY_SECONDS_MAX} seconds",
            param="output_expires_after",
        )
    return seconds


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > METADATA_MAX:
        raise InvalidRequest(f"metadata has {len(metadata)} keys, at most {METADATA_MAX} are allowed", param="metadata")
    for key, value in metadata.items():
        if len(key) > METADATA_KEY_CHARACTERS_MAX or len(value) > METADATA_VALUE_CHARACTERS_MAX:
            raise InvalidRequest(
                f"metadata[{key[:80]!r}] is too long: keys have up to {METADATA_KEY_CHARACTERS_MAX} characters, values "
                f"up to {METADATA_VALUE_CHARACTERS_MAX}",
                param="metadata",
            )


_PATH = "the batch's id"
_MESSAGE_LIST: dict[str, tuple[str, dict[str, Any]]] = {
    "after_id": ("id of the last batch of the previous page", {"type": "string"}),
    "before_id": ("id of the first batch of the next page", {"type": "string"}),
    "limit": ("a page has at most 100 batches", {"type": "integer", "minimum": 1, "maximum": LIST_ASKED_MAX}),
}
_LIST: dict[str, tuple[str, dict[str, Any]]] = {
    "after": LIST_FIELDS["after"],
    "limit": (f"default: {LIST_DEFAULT}", {"type": "integer", "minimum": 1, "maximum": LIST_MAX}),
}


OPERATIONS: tuple[Operation[ServerContext], ...] = (
    Operation(
        method="POST",
        path="/v1/batches",
        handler=create_batch,
        summary="Send all requests of a file, with the lowest priority",
        forwarding=Forwarding.BATCH,
        description="Each line of the input file is an object with custom_id, method, url and body. If the store is on "
        "disk, the batch resumes after a restart.",
        body=BatchBody,
        ranges={"OutputExpiresAfter.seconds": Range(EXPIRY_SECONDS_MIN, EXPIRY_SECONDS_MAX)},
        response=Batch,
        errors=(*READS_BODY, 404, 507),
    ),
    Operation(
        method="GET",
        path="/v1/batches",
        handler=list_batches,
        summary="List batches, newest first",
        forwarding=Forwarding.BATCH,
        query=_LIST,
        response=BatchList,
        errors=(400, 503),
    ),
    Operation(
        method="GET",
        path="/v1/batches/{batch}",
        handler=retrieve_batch,
        summary="Read the state of a batch",
        forwarding=Forwarding.KEPT,
        response=Batch,
        errors=(400, 404, 503),
        path_parameter=_PATH,
    ),
    Operation(
        method="POST",
        path="/v1/batches/{batch}/cancel",
        handler=cancel_batch,
        summary="Cancel a batch",
        forwarding=Forwarding.KEPT,
        description="The engine frees its blocks at the latest one step later. Results of finished lines are kept.",
        response=Batch,
        errors=(400, 404, 503),
        path_parameter=_PATH,
    ),
    Operation(
        method="POST",
        path="/v1/messages/batches",
        handler=create_message_batch,
        summary="Send a batch of messages with the lowest priority, in Anthropic's format",
        forwarding=Forwarding.HOME,
        description="The params of each request are the body of a message. Otherwise as /v1/batches.",
        body=MessageBatchBody,
        response=MessageBatch,
        errors=own_statuses((*READS_BODY, 507)),
        error=MessagesError,
    ),
    Operation(
        method="GET",
        path="/v1/messages/batches",
        handler=list_message_batches,
        summary="List batches of messages, newest first",
        forwarding=Forwarding.HOME,
        query=_MESSAGE_LIST,
        response=MessageBatches,
        errors=own_statuses((400, 503)),
        error=MessagesError,
    ),
    Operation(
        method="GET",
        path="/v1/messages/batches/{batch}",
        handler=read_message_batch,
        summary="Read the state of a batch of messages",
        forwarding=Forwarding.KEPT,
        response=MessageBatch,
        errors=own_statuses((400, 404, 503)),
        error=MessagesError,
        path_parameter=_PATH,
    ),
    Operation(
        method="DELETE",
        path="/v1/messages/batches/{batch}",
        handler=delete_message_batch,
        summary="Delete a batch of messages that has ended",
        forwarding=Forwarding.KEPT,
        response=MessageBatchDeletion,
        errors=own_statuses((400, 404, 503)),
        error=MessagesError,
        path_parameter=_PATH,
    ),
    Operation(
        method="POST",
        path="/v1/messages/batches/{batch}/cancel",
        handler=cancel_message_batch,
        summary="Cancel a batch of messages",
        forwarding=Forwarding.KEPT,
        response=MessageBatch,
        errors=own_statuses((400, 404, 503)),
        error=MessagesError,
        path_parameter=_PATH,
    ),
    Operation(
        method="GET",
        path="/v1/messages/batches/{batch}/results",
        handler=read_message_results,
        summary="Read the result of each message of a batch that has ended",
        forwarding=Forwarding.KEPT,
        response="application/x-jsonl",
        errors=own_statuses((400, 404, 503)),
        error=MessagesError,
        path_parameter=_PATH,
    ),
)
