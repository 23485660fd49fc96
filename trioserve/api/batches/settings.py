"""Limits for batches: their number, their size and their share of the engine."""

from __future__ import annotations

import msgspec

__all__ = ["BatchSettings"]


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for batches.

    Attributes:
        batches_max: Unfinished batches of all callers.
        batches_of_one_max: Unfinished batches of one caller.
        running_max: Batches that run at a time. Other batches wait.
        lines_at_once: Running requests of all batches. At most half of the sequences that the engine runs, so that
            other requests have capacity.
        lines_max: Lines of one batch.
        line_bytes_max: Size of one line.
        response_bytes_max: Size of the response to one line.
    """

    batches_max: int = 64
    batches_of_one_max: int = 16
    running_max: int = 4
    lines_at_once: int = 32
    lines_max: int = 50_000  # as in OpenAI's API
    line_bytes_max: int = 4 * 2**20
    response_bytes_max: int = 8 * 2**20
