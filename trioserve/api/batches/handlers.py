"""Handlers of /v1/batches in OpenAI's shape: create, read, list and cancel. Only the owner of a batch can find it."""

from __future__ import annotations

import re

import msgspec

from trioserve.api.batches.batch_book import BatchGone
from trioserve.api.batches.batch_record import BATCH_KIND, BatchRecord, batch_object
from trioserve.api.error_responses import refusal
from trioserve.api.files.stored_files import (
    FILE_KIND,
    file_not_found,
    file_quota,
    quota_refused,
    read_file,
    record_of,
    required_store,
)
from trioserve.api.files.upload import EXPIRY_SECONDS_MAX, EXPIRY_SECONDS_MIN
from trioserve.api.query import Query
from trioserve.api.server_context import ServerContext
from trioserve.contracts.errors import InvalidRequest
from trioserve.store.store import LIST_MAX
from trioserve.store.stored_objects import ReplaceObject, StoredObject

__all__ = ["BATCH_ENDPOINTS", "BatchBody", "cancel_batch", "create_batch", "list_batches", "retrieve_batch"]

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


async def create_batch(context: ServerContext) -> None:
    store = required_store(context.store)
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
    # The input file must exist until the batch ends, possibly in a later process. Replacing it in the same transaction
    # checks that it still exists.
    seconds = None
    own_expires_at = context.server.batches.input_expires_at(stored.id)
    if stored.expires_at < record.expires_at + store.seconds_max:
        seconds = window_seconds + store.seconds_max
        own_expires_at = own_expires_at or stored.expires_at
    record = msgspec.structs.replace(record, input_expires_at=own_expires_at)
    needed = ReplaceObject(kind=FILE_KIND, id=stored.id, body=None, seconds=seconds)
    to_come = context.server.batches.files_to_come(context.owner) + 2  # a batch creates up to two files
    quota = file_quota(store, context.owner, to_come=to_come)
    try:
        with quota_refused():
            await context.server.batches.create(
                store, batch_id, context.owner, context.caller, record, [needed], quotas=[quota]
            )
    except BatchGone:  # deleted meanwhile
        raise file_not_found(stored.id, param="input_file_id") from None
    await context.respond_json(batch_object(batch_id, record))


async def list_batches(context: ServerContext) -> None:
    """Answer with a page of batches, newest first.

    Args:
        context: The request.
    """
    store = required_store(context.store)
    query = Query(context.exchange.query)
    limit = query.number("limit", LIST_DEFAULT, low=1, high=LIST_MAX)
    after = query.text("after")
    page = await store.page(BATCH_KIND, owner=context.owner, after=after, limit=limit)
    if page is None:
        raise InvalidRequest(f"after is {(after or '')[:80]!r}, but there is no such batch", param="after")
    more = page and await store.page(BATCH_KIND, owner=context.owner, after=page[-1].id, limit=1)
    await context.respond_json(
        {
            "object": "list",
            "data": [_shown(stored) for stored in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": bool(more),
        }
    )


async def retrieve_batch(context: ServerContext) -> None:
    await context.respond_json(_shown(await _batch(context)))


async def cancel_batch(context: ServerContext) -> None:
    """Cancel a batch. A batch that has ended does not change.

    Args:
        context: The request.
    """
    store = required_store(context.store)
    await context.server.batches.cancel(store, await _batch(context))
    await context.respond_json(_shown(await _batch(context)))


async def _batch(context: ServerContext) -> StoredObject:
    """Return the batch named in the path.

    Raises:
        Refusal: The caller has no such batch (404).
    """
    store = required_store(context.store)
    batch_id = context.exchange.path.split("/")[3]
    stored = await store.get(BATCH_KIND, batch_id, owner=context.owner)
    if stored is None:
        raise refusal("batch_not_found", f"there is no batch {batch_id[:80]!r}: it has expired, or has another owner")
    return stored


def _shown(stored: StoredObject) -> dict[str, object]:
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
