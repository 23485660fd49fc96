"""Histories of a pair as data: an engine for prompts, one for responses, a router, clients, and the network between
them.

As in `history`, an event that does not apply does nothing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = [
    "HOSTS",
    "Come",
    "Continue",
    "Cut",
    "Deliver",
    "HostName",
    "Kill",
    "Leave",
    "Lose",
    "PairEvent",
    "PairHistory",
    "PairWait",
    "PairWorld",
    "Refuse",
    "Repeat",
    "Serve",
    "Start",
    "Step",
    "Stop",
]

HostName = Literal["prefill", "decode"]
HOSTS: tuple[HostName, ...] = ("prefill", "decode")


class PairWorld(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="pair"):
    """The two engines and their common model.

    Attributes:
        chunk_tokens: tokens whose KV goes over the network at a time.
        hold_seconds: how long blocks are held after the last sign of life of their reader.
        load_seconds: how long a request waits for its KV.
        fails_without_kv: whether a request without its KV ends with an error, instead of computing it.
        window_tokens: how many tokens back each token sees, or None if it sees all.
    """

    prefill_blocks: int = 16
    decode_blocks: int = 16
    prefill_block_size: int = 2
    decode_block_size: int = 2
    max_num_seqs: int = 3
    step_tokens_max: int = 8
    chunk_tokens: int = 2
    vocab_size: int = 4
    stop_period: int = 8
    enable_prefix_caching: bool = True
    hold_seconds: float = 10.0
    load_seconds: float = 10.0
    fails_without_kv: bool = False
    window_tokens: int | None = None

    @property
    def context_tokens_max(self) -> int:
        return min(self.prefill_blocks * self.prefill_block_size, self.decode_blocks * self.decode_block_size)


class Come(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="come"):
    """A client sends a request to the router."""

    id: str
    prompt: tuple[int, ...]
    output: int = 1
    stops: tuple[int, ...] = ()
    temperature: float = 0.0


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """The client leaves. The router ends everything that it has begun for it."""

    id: str


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """An engine begins a step, or ends the one in flight."""

    host: HostName


class Deliver(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="deliver"):
    """A message arrives: the first one of one direction of a connection.

    Attributes:
        index: which direction, modulo their number. The other events with an index work the same way.
    """

    index: int = 0


class Repeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="repeat"):
    """The message that would arrive next is duplicated."""

    index: int = 0


class Serve(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="serve"):
    """A holder reads the next piece that a reader has requested, and sends it."""

    index: int = 0


class Lose(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="lose"):
    """A connection dies: its messages, and all later ones, are lost. No end is notified."""

    index: int = 0


class Cut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="cut"):
    """A connection breaks, and both ends see it."""

    index: int = 0


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """SIGSTOP: the host does nothing, and its connections stay open."""

    host: HostName


class Continue(msgspec.Struct, frozen=True, kw_only=True, tag="continue"):
    host: HostName


class Kill(msgspec.Struct, frozen=True, kw_only=True, tag="kill"):
    """The host loses all of its state, and its connections break."""

    host: HostName


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The host starts again at the same address, as another engine."""

    host: HostName


class Refuse(msgspec.Struct, frozen=True, kw_only=True, tag="refuse"):
    """The host refuses the next request of the router."""

    host: HostName


class PairWait(msgspec.Struct, frozen=True, kw_only=True, tag="wait"):
    """Time passes, and everything that is due happens."""

    seconds: float


PairEvent = (
    Come | Leave | Step | Deliver | Repeat | Serve | Lose | Cut | Stop | Continue | Kill | Start | Refuse | PairWait
)


class PairHistory(msgspec.Struct, frozen=True):
    world: PairWorld
    events: tuple[PairEvent, ...]
