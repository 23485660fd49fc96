"""Limits for background responses: number, time and size of their events."""

from __future__ import annotations

import msgspec

__all__ = ["BackgroundSettings"]


class BackgroundSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for background responses.

    Attributes:
        responses_max: Running background responses of all callers.
        responses_of_one_max: Running background responses of one caller.
        seconds_max: Time limit of one response, including its time in the queue.
        events_bytes_max: Size of the events of one streamed response. All events are kept, because a reader may begin
            with the first.
    """

    responses_max: int = 64  # the default number of running requests
    responses_of_one_max: int = 32
    seconds_max: float = 3600.0
    events_bytes_max: int = 8 * 2**20  # about 40,000 tokens. The store bounds the sum of all responses.
