"""What is known of a batch, in the store and to its owner. A value: every change is another one.

    validating ──► in_progress ──► finalizing ──► completed | expired
        │               │
        └──► failed ◄───┤                 (the input is no batch, is gone, or the store is full)
        └───────────────┴──► cancelling ──► cancelled

Lines end in any order, so what is done is a number, up to which all are, and a few beyond it. Both are written together
with the lines that they count: after the end of the process, in whatever moment, no line is there twice.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from trioserve.api.files.stored_files import FILE_KIND

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
"""Of what a batch of Anthropic's API reads and writes: its owner sees results, and no files."""
MESSAGE_BATCH_PREFIX = "msgbatch_"
LIVE_KIND = "batch_live"
"""A mark beside each batch that has not ended, so that a start finds those without looking at all."""


def batch_kind(batch_id: str) -> str:
    """Under which kind it is in the store; its id tells."""
    return MESSAGE_BATCH_KIND if batch_id.startswith(MESSAGE_BATCH_PREFIX) else BATCH_KIND


def file_kind(batch_id: str) -> str:
    """The same of its files."""
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
        """No line is asked any more."""
        return self in (BatchStatus.FINALIZING, BatchStatus.CANCELLING)


FINAL = frozenset({BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})

MOVES: dict[BatchStatus, frozenset[BatchStatus]] = {
    BatchStatus.VALIDATING: frozenset(
        {BatchStatus.IN_PROGRESS, BatchStatus.FAILED, BatchStatus.CANCELLING, BatchStatus.FINALIZING}
    ),
    BatchStatus.IN_PROGRESS: frozenset({BatchStatus.FINALIZING, BatchStatus.FAILED, BatchStatus.CANCELLING}),
    BatchStatus.FINALIZING: frozenset({BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.FAILED}),
    BatchStatus.CANCELLING: frozenset({BatchStatus.CANCELLED}),
} | {status: frozenset() for status in FINAL}


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch failed. line: of the input, from 1 on; None: not one of them."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all responses."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def plus(self, other: BatchUsage) -> BatchUsage:
        return BatchUsage(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """tenant: as the request that made it named one. times: when it got which status, in seconds since 1970.
    is_expired: its time was over before its last line. total, completed, failed: lines; dropped: of the failed ones,
    those that were not asked.
    output_seconds: the life of its files, from its end on; None: as long as the store keeps things.
    input_expires_at: when the input's own time is over, if it is kept longer for the batch.
    line_next: all lines before this one are done, and the next begins at offset_next. done_beyond: others that are.
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
        assert status in MOVES[self.status], f"a batch cannot become {status.value} that is {self.status.value}"
        times = {**self.times, status.value: int(now)}
        return msgspec.structs.replace(self, status=status, times=times, **fields)


def batch_object(batch_id: str, record: BatchRecord) -> dict[str, Any]:
    """As OpenAI's API shows it. Its files are named when they are complete."""
    usage = record.usage
    return {
        "id": batch_id,
        "object": "batch",
        "endpoint": record.endpoint,
        "errors": {"object": "list", "data": record.errors} if record.errors else None,
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": record.status.value,
        "output_file_id": record.output_file_id if record.is_final and record.completed else None,
        "error_file_id": record.error_file_id if record.is_final and record.failed else None,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        **{
            f"{status.value}_at": record.times.get(status.value)
            for status in BatchStatus
            if status is not BatchStatus.VALIDATING
        },
        "request_counts": {"total": record.total, "completed": record.completed, "failed": record.failed},
        "usage": {
            "input_tokens": usage.input_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.input_tokens + usage.output_tokens,
        },
        "metadata": record.metadata,
    }
