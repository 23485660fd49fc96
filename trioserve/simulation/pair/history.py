"""Histories of a prefill engine and a decode engine, with their router, clients and network, as data.

As in the history of a core, an event that does not apply does nothing.
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
    """Settings of the two engines and of their common model.

    Attributes:
        chunk_tokens: number of tokens whose KV is sent in one message.
        hold_seconds: how long blocks are held after the last message from their reader.
        load_seconds: how long a request may wait for its KV.
        fails_without_kv: True: a request whose KV does not arrive ends with an error. False: the engine computes the
            KV.
        window_tokens: length of the sliding window of attention. None: no window.
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
    """The client disconnects. The router ends every stage that it has begun for this client."""

    id: str


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """An engine begins a step, or ends the step in flight."""

    host: HostName


class Deliver(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="deliver"):
    """The oldest message in one direction of a connection arrives.

    Attributes:
        index: index of the direction among all directions with messages, modulo their number. Other events with an
            index choose in the same way.
    """

    index: int = 0


class Repeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="repeat"):
    """The network duplicates the oldest message in one direction."""

    index: int = 0


class Serve(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="serve"):
    """The engine that holds blocks sends the next chunk that another engine has requested."""

    index: int = 0


class Lose(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="lose"):
    """A connection dies silently: its present and future messages are lost, and neither end is notified."""

    index: int = 0


class Cut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="cut"):
    """A connection breaks, and both ends are notified."""

    index: int = 0


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """The host is stopped, as by SIGSTOP: it does nothing, and its connections stay open."""

    host: HostName


class Continue(msgspec.Struct, frozen=True, kw_only=True, tag="continue"):
    host: HostName


class Kill(msgspec.Struct, frozen=True, kw_only=True, tag="kill"):
    """The host is killed: it loses all of its state, and its connections break."""

    host: HostName


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The host starts again at the same address, with a new engine id."""

    host: HostName


class Refuse(msgspec.Struct, frozen=True, kw_only=True, tag="refuse"):
    """The host will refuse the next request from the router."""

    host: HostName


class PairWait(msgspec.Struct, frozen=True, kw_only=True, tag="wait"):
    """Time passes. Timers and deadlines expire."""

    seconds: float


PairEvent = (
    Come | Leave | Step | Deliver | Repeat | Serve | Lose | Cut | Stop | Continue | Kill | Start | Refuse | PairWait
)


class PairHistory(msgspec.Struct, frozen=True):
    world: PairWorld
    events: tuple[PairEvent, ...]
