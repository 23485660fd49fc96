"""Limits for streams that continue without their client: time, number and size."""

from __future__ import annotations

import msgspec

__all__ = ["ROUTER_GRACE", "DetachSettings"]


class DetachSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for detached streams. The size of all kept events is at most `streams_max` * `bytes_max`.

    Attributes:
        seconds_max: Longest time without a reader that a request may ask for. 0: no stream outlives its client.
        streams_max: Streams of all callers at a time, including streams whose client is connected.
        streams_of_one_max: Streams of one caller at a time.
        bytes_max: Size of the kept events of one stream.
    """

    seconds_max: float = 0.0
    streams_max: int = 64  # the default number of running requests
    streams_of_one_max: int = 32
    bytes_max: int = 2**20  # about 5,000 tokens, each an event of 200 bytes


ROUTER_GRACE = DetachSettings(seconds_max=5.0, streams_max=256, streams_of_one_max=256)
"""Limits for streams that routers request. All requests of a router count as those of one caller.

Five seconds, because a client that has lost its connection retries within two or three seconds. All events of a stream
are kept, also while it has a reader. So `streams_max` bounds the memory, to 256 MiB. Streams beyond this number are
served but not kept.
"""
