"""How many batches live, and how much of the server they take. Each bound has its reason."""

from __future__ import annotations

import msgspec

__all__ = ["BatchSettings"]


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """batches_max: that have not ended, of all callers; batches_of_one_max: of one. running_max: that run at a time;
    the others wait for their turn. lines_at_once: requests of all batches that are under way at a time, but never more
    than half of what the engine runs, so that others find room. lines_max: of one batch. line_bytes_max: of one line.
    response_bytes_max: of the response to one."""

    batches_max: int = 64
    batches_of_one_max: int = 16
    running_max: int = 4
    lines_at_once: int = 32
    lines_max: int = 50_000  # as in OpenAI's API
    line_bytes_max: int = 4 * 2**20
    response_bytes_max: int = 8 * 2**20
