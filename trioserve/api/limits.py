"""Limits for work that outlives its request: detached streams, background responses, connections and batches."""

from __future__ import annotations

import msgspec

__all__ = ["ROUTER_GRACE", "BackgroundSettings", "BatchSettings", "ConnectionSettings", "DetachSettings"]


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


class ConnectionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for websocket connections of the Responses API.

    Attributes:
        seconds_max: Age of a connection. It bounds how long the connection keeps responses, and lets a load balancer
            move clients to other servers.
        running_max: Responses of one connection that run at a time. Further ones wait.
        lanes_max: Names of lanes (`stream_id`) on one connection.
        waiting_max: Responses of one connection that wait for their lane. Further ones are refused.
        waiting_bytes_max: Size of their messages.
        steers_max: Inputs (`response.steer`) of one connection that wait for a response.
        kept_max: Responses that one connection keeps in memory, so that its client continues them without the store.
        kept_bytes_max: Their size. A request may continue at most this size of earlier responses.
        all_kept_bytes_max: Size of the responses that all connections keep.
    """

    seconds_max: float = 3600.0  # OpenAI's API has this limit and the next two.
    running_max: int = 16
    lanes_max: int = 32
    waiting_max: int = 64  # Each lane may run one response and have another one wait.
    waiting_bytes_max: int = 16 * 2**20
    steers_max: int = 32  # Users type them. Each lane may have one.
    kept_max: int = 128  # The default is enough for four responses in each lane.
    kept_bytes_max: int = 16 * 2**20
    all_kept_bytes_max: int = 256 * 2**20  # The default is that of the store.


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
