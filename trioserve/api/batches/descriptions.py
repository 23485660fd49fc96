"""Descriptions of the operations on batches, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from trioserve.api.anthropic.descriptions import own_statuses
from trioserve.api.anthropic.response_types import MessagesError
from trioserve.api.batches.handlers import LIST_DEFAULT, BatchBody
from trioserve.api.batches.message_batches import LIST_ASKED_MAX, MessageBatchBody
from trioserve.api.described_operation import READS_BODY, DescribedOperation
from trioserve.api.files.upload import EXPIRY_SECONDS_MAX, EXPIRY_SECONDS_MIN
from trioserve.api.query import LIST_FIELDS
from trioserve.contracts.sampling import Range
from trioserve.store.store import LIST_MAX

__all__ = ["OPERATIONS", "Batch", "BatchList"]


class _Described(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class BatchProblem(_Described, kw_only=True):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchProblems(_Described, kw_only=True):
    object: Literal["list"]
    data: list[BatchProblem]


class BatchRequestCounts(_Described, kw_only=True):
    total: int
    completed: int
    failed: int


class BatchCachedTokens(_Described, kw_only=True):
    cached_tokens: int


class BatchReasoningTokens(_Described, kw_only=True):
    reasoning_tokens: int


class BatchTokens(_Described, kw_only=True):
    input_tokens: int
    input_tokens_details: BatchCachedTokens
    output_tokens: int
    output_tokens_details: BatchReasoningTokens
    total_tokens: int


class Batch(_Described, kw_only=True):
    """A batch. Its output files are listed after its end, if they have lines."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchProblems | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    failed_at: int | None
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchRequestCounts
    usage: BatchTokens
    metadata: dict[str, str] | None


class BatchList(_Described, kw_only=True):
    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessageRequestCounts(_Described, kw_only=True):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(_Described, kw_only=True):
    """A batch of messages. Times are in RFC 3339 format."""

    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageRequestCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None
    results_url: str | None


class MessageBatches(_Described, kw_only=True):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class MessageBatchDeletion(_Described, kw_only=True):
    id: str
    type: Literal["message_batch_deleted"]


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

OPERATIONS: dict[tuple[str, str], DescribedOperation] = {
    ("POST", "/v1/batches"): DescribedOperation(
        summary="Send all requests of a file, with the lowest priority",
        description="Each line of the input file is an object with custom_id, method, url and body. If the store is on "
        "disk, the batch resumes after a restart.",
        body=BatchBody,
        ranges={"OutputExpiresAfter.seconds": Range(EXPIRY_SECONDS_MIN, EXPIRY_SECONDS_MAX)},
        response=Batch,
        errors=(*READS_BODY, 404, 507),
    ),
    ("GET", "/v1/batches"): DescribedOperation(
        summary="List batches, newest first", query=_LIST, response=BatchList, errors=(400, 503)
    ),
    ("GET", "/v1/batches/{batch}"): DescribedOperation(
        summary="Read the state of a batch", response=Batch, errors=(400, 404, 503), path_parameter=_PATH
    ),
    ("POST", "/v1/batches/{batch}/cancel"): DescribedOperation(
        summary="Cancel a batch",
        description="The engine frees its blocks at the latest one step later. Results of finished lines are kept.",
        response=Batch,
        errors=(400, 404, 503),
        path_parameter=_PATH,
    ),
    ("POST", "/v1/messages/batches"): DescribedOperation(
        summary="Send a batch of messages with the lowest priority, in Anthropic's shape",
        description="The params of each request are the body of a message. Otherwise as /v1/batches.",
        body=MessageBatchBody,
        response=MessageBatch,
        errors=own_statuses((*READS_BODY, 507)),
        error=MessagesError,
    ),
    ("GET", "/v1/messages/batches"): DescribedOperation(
        summary="List batches of messages, newest first",
        query=_MESSAGE_LIST,
        response=MessageBatches,
        errors=own_statuses((400, 503)),
        error=MessagesError,
    ),
    ("GET", "/v1/messages/batches/{batch}"): DescribedOperation(
        summary="Read the state of a batch of messages",
        response=MessageBatch,
        errors=own_statuses((400, 404, 503)),
        error=MessagesError,
        path_parameter=_PATH,
    ),
    ("DELETE", "/v1/messages/batches/{batch}"): DescribedOperation(
        summary="Delete a batch of messages that has ended",
        response=MessageBatchDeletion,
        errors=own_statuses((400, 404, 503)),
        error=MessagesError,
        path_parameter=_PATH,
    ),
    ("POST", "/v1/messages/batches/{batch}/cancel"): DescribedOperation(
        summary="Cancel a batch of messages",
        response=MessageBatch,
        errors=own_statuses((400, 404, 503)),
        error=MessagesError,
        path_parameter=_PATH,
    ),
    ("GET", "/v1/messages/batches/{batch}/results"): DescribedOperation(
        summary="Read the result of each message of a batch that has ended",
        response="application/x-jsonl",
        errors=own_statuses((400, 404, 503)),
        error=MessagesError,
        path_parameter=_PATH,
    ),
}
