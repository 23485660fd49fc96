"""The state of a batch, as an immutable value. The store keeps the state, and the owner of the batch can read it.

    validating ──► in_progress ──► finalizing ──► completed | expired
        │               │
        └──► failed ◄───┤                 (the input is invalid or gone, or the store is full)
        └───────────────┴──► cancelling ──► cancelled

Lines finish in any order. So the state has the number up to which all lines are done, and a list of later lines that
are done. Both are written in one transaction with the output of these lines. So after a crash at any moment, no line
has output twice.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from trioserve.api.batches.stored_files import FILE_KIND
from trioserve.api.response import Response

__all__ = [
    "BATCH_KIND",
    "FINAL",
    "LIVE_KIND",
    "MESSAGE_BATCH_KIND",
    "MESSAGE_BATCH_PREFIX",
    "MESSAGE_FILE_KIND",
    "BatchError",
    "BatchRecord",
    "BatchStatus",
    "BatchUsage",
    "batch_kind",
    "batch_object",
    "file_kind",
]

BATCH_KIND = "batch"
MESSAGE_BATCH_KIND = "message_batch"
MESSAGE_FILE_KIND = "message_file"
"""Kind of the files of a batch of Anthropic's API. Its owner can read results, but no files."""
MESSAGE_BATCH_PREFIX = "msgbatch_"
LIVE_KIND = "batch_live"
"""Kind of a marker that each unfinished batch has in the store.

So a start finds unfinished batches without reading all batches.
"""


def batch_kind(batch_id: str) -> str:
    """Return the store kind of a batch.

    Args:
        batch_id: Id of the batch. Its prefix determines the API.
    """
    return MESSAGE_BATCH_KIND if batch_id.startswith(MESSAGE_BATCH_PREFIX) else BATCH_KIND


def file_kind(batch_id: str) -> str:
    """Return the store kind of a batch's files.

    Args:
        batch_id: Id of the batch. Its prefix determines the API.
    """
    return MESSAGE_FILE_KIND if batch_id.startswith(MESSAGE_BATCH_PREFIX) else FILE_KIND


class BatchStatus(enum.Enum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_ending(self) -> bool:
        """True if no further line is sent to the engine."""
        return self in (BatchStatus.FINALIZING, BatchStatus.CANCELLING)


FINAL = frozenset({BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})
"""Terminal statuses."""

TRANSITIONS: dict[BatchStatus, frozenset[BatchStatus]] = {
    BatchStatus.VALIDATING: frozenset(
        {BatchStatus.IN_PROGRESS, BatchStatus.FAILED, BatchStatus.CANCELLING, BatchStatus.FINALIZING}
    ),
    BatchStatus.IN_PROGRESS: frozenset({BatchStatus.FINALIZING, BatchStatus.FAILED, BatchStatus.CANCELLING}),
    BatchStatus.FINALIZING: frozenset({BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.FAILED}),
    BatchStatus.CANCELLING: frozenset({BatchStatus.CANCELLED}),
} | {status: frozenset() for status in FINAL}
"""Allowed transitions between statuses."""


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """Reason why a batch failed, or an error of one line.

    Attributes:
        line: Line number in the input, from 1. None if the error concerns no single line.
    """

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of all responses of a batch."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def plus(self, other: BatchUsage) -> BatchUsage:
        return BatchUsage(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


class BatchErrors(Response, tag_field="object", tag="list"):
    data: list[BatchError]


class BatchRequestCounts(Response):
    total: int
    completed: int
    failed: int


class BatchCachedTokens(Response):
    cached_tokens: int


class BatchReasoningTokens(Response):
    reasoning_tokens: int


class BatchTokens(Response):
    input_tokens: int
    input_tokens_details: BatchCachedTokens
    output_tokens: int
    output_tokens_details: BatchReasoningTokens
    total_tokens: int


class Batch(Response, tag_field="object", tag="batch"):
    """A batch. Its output files are listed after its end, if they have lines."""

    id: str
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
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


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """State of a batch.

    Attributes:
        tenant: Tenant that the creating request named. None if that request named no tenant.
        times: Unix time in seconds for each status that the batch has had.
        is_expired: True if the time limit passed before the last line.
        total: Number of lines.
        completed: Lines with a response.
        failed: Lines with an error.
        dropped: Failed lines that were never sent to the engine, because the batch was cancelled or expired.
        output_seconds: Lifetime of the output files after the end of the batch. None: the store's default.
        input_expires_at: Time at which the input file would expire without the batch. None if the batch does not extend
            it.
        line_next: All lines before this line number (from 0) are done.
        offset_next: Offset in bytes of the line `line_next` in the input.
        done_beyond: Numbers of the lines after `line_next` that are done.
    """

    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None
    tenant: str | None
    created_at: int
    expires_at: int
    output_file_id: str
    error_file_id: str
    output_seconds: float | None = None
    input_expires_at: float | None = None
    status: BatchStatus = BatchStatus.VALIDATING
    times: dict[str, int] = {}
    is_expired: bool = False
    total: int = 0
    completed: int = 0
    failed: int = 0
    dropped: int = 0
    usage: BatchUsage = BatchUsage()
    errors: list[BatchError] = []
    line_next: int = 0
    offset_next: int = 0
    done_beyond: list[int] = []

    @property
    def is_final(self) -> bool:
        return self.status in FINAL

    def moved(self, status: BatchStatus, now: float, **fields: Any) -> BatchRecord:
        """Return the state after a change of the status.

        Args:
            status: New status.
            now: Unix time in seconds.
            fields: Further fields to change.
        """
        assert status in TRANSITIONS[self.status], f"no transition from {self.status.value} to {status.value}"
        times = {**self.times, status.value: int(now)}
        return msgspec.structs.replace(self, status=status, times=times, **fields)


def batch_object(batch_id: str, record: BatchRecord) -> Batch:
    """Describe a batch in OpenAI's format. Output files are listed after the end of the batch only.

    Args:
        record: State of the batch.
    """
    usage = record.usage
    times = {f"{status.value}_at": record.times.get(status.value) for status in BatchStatus}
    del times["validating_at"]
    return Batch(
        id=batch_id,
        endpoint=record.endpoint,
        errors=BatchErrors(data=record.errors) if record.errors else None,
        input_file_id=record.input_file_id,
        completion_window=record.completion_window,
        status=record.status,
        output_file_id=record.output_file_id if record.is_final and record.completed else None,
        error_file_id=record.error_file_id if record.is_final and record.failed else None,
        created_at=record.created_at,
        expires_at=record.expires_at,
        **times,
        request_counts=BatchRequestCounts(total=record.total, completed=record.completed, failed=record.failed),
        usage=BatchTokens(
            input_tokens=usage.input_tokens,
            input_tokens_details=BatchCachedTokens(cached_tokens=usage.cached_tokens),
            output_tokens=usage.output_tokens,
            output_tokens_details=BatchReasoningTokens(reasoning_tokens=usage.reasoning_tokens),
            total_tokens=usage.input_tokens + usage.output_tokens,
        ),
        metadata=record.metadata,
    )
