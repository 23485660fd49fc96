"""Limits for work that outlives its request: detached streams, background responses and batches."""

from __future__ import annotations

import msgspec

__all__ = ["ROUTER_GRACE", "BackgroundSettings", "BatchSettings", "DetachSettings"]


class DetachSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for detached streams. The size of all kept events is at most `streams_max` * `bytes_max`.

    Attributes:
        seconds_max: Longest time without a reader that a request may ask for. 0: no stream outlives its client.
        streams_max: Streams of all callers at a time, including streams whose client is connected.
        streams_of_one_max: Streams of one caller at a time.
        bytes_max: Size of the kept events of one stream.
    """

    seconds_max: float = 0.0
    streams_max: int = 64  # The default is also the default number of running requests.
    streams_of_one_max: int = 32
    bytes_max: int = 2**20  # The default is enough for about 5,000 tokens, if each is an event of 200 bytes.


ROUTER_GRACE = DetachSettings(seconds_max=5.0, streams_max=256, streams_of_one_max=256)
"""Limits for streams that routers request. All requests of a router count as those of one caller.

Five seconds, because a client that has lost its connection retries within two or three seconds. All events of a stream
are kept, also while it has a reader. So `streams_max` bounds the memory, to 256 MiB. Streams beyond this number are
served but not kept.
"""


class BackgroundSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for background responses.

    Attributes:
        responses_max: Running background responses of all callers.
        responses_of_one_max: Running background responses of one caller.
        seconds_max: Time limit of one response, including its time in the queue.
        events_bytes_max: Size of the events of one streamed response. All events are kept, because a reader may begin
            with the first.
    """

    responses_max: int = 64  # The default is also the default number of running requests.
    responses_of_one_max: int = 32
    seconds_max: float = 3600.0
    # The default is enough for about 40,000 tokens. The store bounds the sum of all responses.
    events_bytes_max: int = 8 * 2**20


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
    lines_max: int = 50_000  # OpenAI's API has the same limit.
    line_bytes_max: int = 4 * 2**20
    response_bytes_max: int = 8 * 2**20
