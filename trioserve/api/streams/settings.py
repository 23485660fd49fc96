"""Whether a streamed response may go on without its client, for how long, and how much of it is kept."""

from __future__ import annotations

import msgspec

__all__ = ["ROUTER_GRACE", "DetachSettings"]


class DetachSettings(msgspec.Struct, frozen=True, kw_only=True):
    """seconds_max: what a request may ask for; 0: nothing goes on. streams_max: at a time, of all callers, those whose
    clients are there included; streams_of_one_max: of one. bytes_max: of the events of one; so of all together, and of
    one caller, the product is the bound."""

    seconds_max: float = 0.0
    streams_max: int = 64  # as many as run at a time by default
    streams_of_one_max: int = 32
    bytes_max: int = 2**20  # some 5,000 tokens, each an event of 200 bytes


ROUTER_GRACE = DetachSettings(seconds_max=5.0, streams_max=256, streams_of_one_max=256)
"""Of streams that a router asks for, which are those of all its clients. Five seconds: a client that has lost its
connection asks again within two or three. All of a stream is kept, also while it is read, so the number bounds the
bytes, 256 MiB; streams beyond it are served, and not kept."""
