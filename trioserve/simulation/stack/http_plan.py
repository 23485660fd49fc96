"""Clients over HTTP in a plan of the stack: their connections, their requests, and how they disconnect.

A plan is drawn from a seed before the run.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec

from trioserve.http.limits import FrontendLimits

__all__ = ["Ask", "Connection", "Delete", "Front", "drawn_asks", "drawn_connection", "drawn_front"]

# seconds for which some clients stop reading. The server must give up such a client, since every limit is shorter.
FOR_GOOD_SECONDS = 100.0
WAYS_HTTP1 = ("close", "half-close", "abort")
WAYS_HTTP2 = ("reset", "reset", "close", "half-close", "abort", "goaway", "goaway")


class Front(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits of the HTTP front end that differ from its defaults.

    `wire_bytes` is the capacity of a connection in one direction.
    """

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
    """A client's connection for all requests with its number. A number without a Connection gets the defaults.

    Attributes:
        number: number of the connection.
        at: start time.
        http: HTTP version.
        pieces: sizes of the pieces in which bytes are sent and read, used in turn. Empty: bytes are not divided.
        window: over HTTP/2, number of bytes of a response that the server may send before it gets credit.
        is_pipelined: True if requests do not wait for responses. Only over HTTP/1.1.
        stalls_at: time at which the client stops reading. None: it always reads.
        stall_seconds: seconds for which the client does not read.
        ends: how the client ends the connection after all responses have come. "goaway" is sent after all requests.
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
    """A request for completions over HTTP.

    Attributes:
        number: number of the request.
        connection: number of the connection.
        prompts: token ids of one or more prompts.
        output: maximum number of tokens.
        at: start time in seconds after the connection. Over HTTP/1.1, it counts from the end of the previous response.
        id: id of the request. None: the server chooses an id.
        choices: number of choices.
        streamed: True if the response is streamed.
        priority: priority of the request.
        salt: cache salt.
        temperature: sampling temperature.
        shows_tokens: True if the client requests token ids.
        shows_usage: True if the client requests usage.
        timeout: the request's own deadline in seconds, or None.
        queue_timeout: the request's own queue deadline in seconds, or None.
        in_headers: True if the deadlines are sent in headers. False: they are in the body.
        pause: seconds of a pause in the middle of the body.
        withheld: True if the client never sends the last byte of the body.
        way: how the client disconnects. "reset" ends only this request of the connection.
        patience: seconds after which the client disconnects. None: never.
        leaves_after: number of bytes of the response after which the client disconnects. None: never.
        stalls_after: number of bytes after which the client stops reading. None: it always reads.
        stall_seconds: seconds for which the client does not read.
        trickles: True if the client accepts single bytes meanwhile. Only over HTTP/2.
        form: allowed texts. Empty: free text.
        stops: stop strings.
        known_count: number of known tokens of each choice, if the request resumes a response. 0: it does not.
        has_tools: True if the request is a chat with tools. Its prompt is then from calls.py.
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


class Delete(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="delete"):
    """An operator aborts by id, over HTTP."""

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
        # Most clients that stop reading stay connected until the server gives them up.
        leaves_chance = 0.05 if is_stalled else 0.18
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
