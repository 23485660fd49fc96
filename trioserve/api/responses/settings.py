"""How many responses live in the background, for how long, and how much is kept of their events."""

from __future__ import annotations

import msgspec

__all__ = ["BackgroundSettings"]


class BackgroundSettings(msgspec.Struct, frozen=True, kw_only=True):
    """responses_max: at a time, of all callers; responses_of_one_max: of one. seconds_max: the life of one, its time in
    the queue included. events_bytes_max: of the events of one that was asked for as a stream; all are kept, since a
    reader may begin with the first."""

    responses_max: int = 64  # as many as run at a time by default
    responses_of_one_max: int = 32
    seconds_max: float = 3600.0
    events_bytes_max: int = 8 * 2**20  # some 40,000 tokens; of all together not more than the store takes
