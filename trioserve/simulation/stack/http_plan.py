"""Who comes over HTTP in a simulation of the stack, what they ask, and how they leave: drawn from a seed beforehand."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec

from trioserve.http.limits import FrontendLimits

__all__ = ["Ask", "Connection", "Delete", "Front", "drawn_asks", "drawn_connection", "drawn_front"]

FOR_GOOD_SECONDS = 100.0  # longer than any limit: who stalls for so long is given up
WAYS_HTTP1 = ("close", "half-close", "abort")
WAYS_HTTP2 = ("reset", "reset", "close", "half-close", "abort", "goaway", "goaway")


class Front(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of the front end that differ from its own. wire_bytes: on their way in one direction of a connection
    before the sender has to wait."""

    stall_seconds: float = 0.2
    body_seconds: float = 0.3
    buffer_bytes: int = 4096
    wire_bytes: int = 65536

    def limits(self) -> FrontendLimits:
        return FrontendLimits(
            stall_seconds_max=self.stall_seconds,
            body_wait_seconds_max=self.body_seconds,
            stream_buffer_bytes_max=self.buffer_bytes,
        )


class Connection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="connection"):
    """A client's connection, for the asks that name its number; one without an entry of its own is as plain as this.

    http: 1 or 2. pieces: bytes are sent and read in pieces of so many, in turn; empty: as they come. window: bytes of
    a response that may be on their way, HTTP/2. is_pipelined: HTTP/1.1, asks without waiting for responses. stalls_at,
    stall_seconds: reads nothing from then on, for so long. ends: what it does when all responses have come, or,
    "goaway", when all is asked.
    """

    number: int
    at: float = 0.0
    http: int = 2
    pieces: tuple[int, ...] = ()
    window: int = 65535
    is_pipelined: bool = False
    stalls_at: float | None = None
    stall_seconds: float = 0.0
    ends: str = "close"


class Ask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="ask"):
    """A request for completions. at: seconds after its connection, or on HTTP/1.1 after the response before.

    id: None lets the server choose. prompts: one or more. pause: seconds in the middle of the body. withheld: the
    body's last byte never comes. in_headers: where the deadlines are. way: how it leaves, when `patience` seconds have
    passed since it began, or when `leaves_after` bytes of its response have come; "reset" leaves the others on its
    connection alone. stalls_after: bytes after which it takes nothing for stall_seconds, or, if it trickles, a byte now
    and then, where the protocol can. form: its response is one of these texts; none: it is free. stops: stop
    strings. known_count: so many tokens of each choice are known, as of a response that began elsewhere; 0: it begins
    here. has_tools: it is a chat with tools, and its only prompt one that calls.py has drawn.
    """

    number: int
    connection: int
    prompts: tuple[tuple[int, ...], ...]
    output: int
    at: float = 0.0
    id: str | None = None
    choices: int = 1
    streamed: bool = False
    priority: int = 0
    salt: str | None = None
    temperature: float = 0.0
    shows_tokens: bool = False
    shows_usage: bool = False
    timeout: float | None = None
    queue_timeout: float | None = None
    in_headers: bool = False
    pause: float = 0.0
    withheld: bool = False
    way: str = "reset"
    patience: float | None = None
    leaves_after: int | None = None
    stalls_after: int | None = None
    stall_seconds: float = 0.0
    trickles: bool = False
    form: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    known_count: int = 0
    has_tools: bool = False

    @property
    def place_count(self) -> int:
        return len(self.prompts) * self.choices


class Delete(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="delete"):
    """An operator aborts by an id, over HTTP."""

    at: float
    id: str


Moment = Callable[[float], float]


def drawn_front(rng: Random) -> Front:
    return Front(
        stall_seconds=rng.choice((0.1, 0.2, 0.4)),
        body_seconds=rng.choice((0.1, 0.3)),
        buffer_bytes=rng.choice((1024, 4096)),
        wire_bytes=rng.choice((64, 400, 65536)),
    )


def drawn_connection(rng: Random, number: int, *, span: float, moment: Moment) -> Connection:
    is_stalled = rng.random() < 0.1
    return Connection(
        number=number,
        at=moment(span),
        http=rng.choice((1, 2, 2)),
        pieces=tuple(rng.choice((3, 20, 90, 700)) for _ in range(3)) if rng.random() < 0.25 else (),
        window=rng.choice((40, 300, 65535)),
        is_pipelined=rng.random() < 0.3,
        stalls_at=moment(span) if is_stalled else None,
        stall_seconds=_stall_seconds(rng) if is_stalled else 0.0,
        ends=rng.choice(("close", "close", "half-close", "abort", "goaway", "goaway", "wait")),
    )


def drawn_asks(
    rng: Random,
    connection: Connection,
    numbers: range,
    *,
    span: float,
    moment: Moment,
    prompt: Callable[[], tuple[int, ...]],
    context: int,
) -> list[Ask]:
    def maybe(chance: float) -> float | None:
        return round(moment(span) + 0.005, 3) if rng.random() < chance else None

    asks = []
    for number in numbers:
        prompts = tuple(prompt() for _ in range(rng.choice((1, 1, 1, 1, 2))))
        is_stalled = rng.random() < 0.2
        leaves_chance = 0.05 if is_stalled else 0.18  # who stalls is mostly there to be given up
        leaves_after = rng.randint(0, 2000) if rng.random() < leaves_chance else None
        asks.append(
            Ask(
                number=number,
                connection=connection.number,
                prompts=prompts,
                output=rng.randint(1, min(12, context - max(map(len, prompts)))),
                at=moment(span / 2) if rng.random() < 0.5 else 0.0,
                id=f"h{number}" if rng.random() < 0.9 else None,
                choices=rng.choice((1, 1, 1, 2)),
                streamed=rng.random() < 0.7,
                priority=rng.choice((0, 0, 0, -1)),
                salt=rng.choice((None, None, None, "s")),
                temperature=rng.choice((0.0, 1.0)),
                shows_tokens=rng.random() < 0.5,
                shows_usage=rng.random() < 0.3,
                timeout=maybe(0.12),
                queue_timeout=maybe(0.08),
                in_headers=rng.random() < 0.5,
                pause=moment(0.05) if rng.random() < 0.15 else 0.0,
                withheld=rng.random() < 0.05,
                way=rng.choice(WAYS_HTTP1 if connection.http == 1 else WAYS_HTTP2),
                patience=maybe(leaves_chance),
                leaves_after=leaves_after,
                stalls_after=rng.randint(0, 400) if is_stalled else None,
                stall_seconds=_stall_seconds(rng) if is_stalled else 0.0,
                trickles=is_stalled and number % 3 == 0,
            )
        )
    return asks


def _stall_seconds(rng: Random) -> float:
    return rng.choice((0.01, 0.05, FOR_GOOD_SECONDS, FOR_GOOD_SECONDS))
