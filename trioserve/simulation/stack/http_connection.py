"""Clients over HTTP in a plan of the stack, and the connection of such a client.

A plan is drawn from a seed before the run. It has the clients' connections, their requests, and how they disconnect.

The connection of a client can send and read in pieces, stop reading for a while, and end. It reads HTTP strictly: bytes
that a server must not send raise AssertionError.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from random import Random

import h2.exceptions
import h11
import msgspec
import trio

from trioserve.http.limits import FrontendLimits
from trioserve.testing.memory_client import MemoryEnd
from trioserve.trio_tools.http2_client import Http2ClientProtocol
from trioserve.trio_tools.http_client import Fields, Http1ClientProtocol, ResponseEnd, ResponseResult

__all__ = [
    "Ask",
    "Caller",
    "Connection",
    "Delete",
    "Front",
    "Response",
    "StrictClient",
    "WatchedEnd",
    "drawn_asks",
    "drawn_connection",
    "drawn_front",
]


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


AUTHORITY = "simulated"


class Response:
    """The received part of one response. The object is the listener of the HTTP protocol.

    Attributes:
        number: number of the request.
        status: HTTP status, or None before the head has arrived.
        headers: response headers.
        body: received bytes.
        is_complete: True after the whole body has arrived.
        lost: reason why the rest of the response will not come. None: the rest may still come.
    """

    def __init__(self) -> None:
        self.number = 0
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.is_complete = False
        self.lost: str | None = None

    @property
    def is_over(self) -> bool:
        return self.is_complete or self.lost is not None

    def on_head(self, status: int, fields: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.headers = {name.decode(): value.decode() for name, value in fields}

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_end(self, end: ResponseEnd) -> None:
        if end.result is ResponseResult.COMPLETE:
            self.is_complete = True
        elif end.result is ResponseResult.DISCONNECTED:
            self.lost = "the connection ended"
        else:
            self.lost = f"{end.result.value}: {end.error}"


class StrictClient:
    """The client's side of a connection.

    Args:
        http: HTTP version. A connection of version 1 carries one request after another. Version 2 has a stream per
            request.
        window: over HTTP/2, number of bytes of a response that the server may send before it gets credit.
    """

    def __init__(self, *, http: int, window: int = 65_535) -> None:
        self._protocol: Http1ClientProtocol | Http2ClientProtocol
        if http == 1:
            self._protocol = Http1ClientProtocol(authority=AUTHORITY)
        else:
            self._protocol = Http2ClientProtocol(authority=AUTHORITY, window_bytes=window)

    def begin(self, response: Response, method: str, path: str, fields: Fields, *, has_body: bool) -> None:
        response.number = self._protocol.begin(method, path, fields, response, has_body=has_body)

    def send_body(self, response: Response, data: bytes, *, is_last: bool) -> None:
        self._protocol.send_body(response.number, data, is_last=is_last)

    def reset(self, response: Response) -> None:
        assert self._protocol.reset(response.number), "HTTP/1.1 has no reset of one request"

    def receive(self, data: bytes) -> None:
        """Process received bytes.

        Args:
            data: the bytes. Empty: the server has ended the connection, or the connection broke.
        """
        try:
            self._protocol.receive(data)
        except h11.RemoteProtocolError as error:
            raise AssertionError(f"the server broke HTTP/1.1: {error}") from error
        except h2.exceptions.ProtocolError as error:
            raise AssertionError(f"the server broke HTTP/2: {error}") from error
        if isinstance(self._protocol, Http1ClientProtocol):
            assert not self._protocol.informational_count, "the server sent 1xx to a client that did not request it"

    def withhold_credit(self, response: Response) -> bool:
        """Grant no further credit for a response.

        Returns:
            False if the protocol has no credit for responses.
        """
        return self._protocol.withhold_credit(response.number)

    def grant_one_byte(self, response: Response) -> None:
        """Grant credit for one more byte. Call this method only for HTTP/2.

        Args:
            response: response whose credit is withheld.
        """
        assert isinstance(self._protocol, Http2ClientProtocol)
        self._protocol.grant_one_byte(response.number)

    def grant_credit(self, response: Response) -> None:
        self._protocol.grant_credit(response.number)

    def send_goaway(self) -> None:
        """Send GOAWAY. Call this method only for HTTP/2."""
        assert isinstance(self._protocol, Http2ClientProtocol)
        self._protocol.send_goaway()

    def unsent(self) -> bytes:
        return self._protocol.pop_unsent()


READ_BYTES = 65536


class WatchedEnd(trio.abc.HalfCloseableStream):
    """The server's end of a connection, which reports all sent bytes.

    Args:
        end: the server's real end of the connection.
        on_sent: called in order with all bytes and events that the server sends.
    """

    def __init__(self, end: MemoryEnd, on_sent: Callable[[str, bytes], None]) -> None:
        self._end = end
        self._on_sent = on_sent
        self._is_sending = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        assert not self._is_sending, "the server sends from two tasks at the same time"
        self._on_sent("sends", bytes(data))
        self._is_sending = True
        try:
            await self._end.send_all(data)
        finally:
            self._is_sending = False

    async def wait_send_all_might_not_block(self) -> None:
        await self._end.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        self._on_sent("ends", b"")
        await self._end.send_eof()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return await self._end.receive_some(max_bytes)

    async def aclose(self) -> None:
        self._on_sent("closes", b"")
        await self._end.aclose()


class Caller:
    """The client of one connection. Its method `read` runs as a task.

    Args:
        end: the client's end of the connection.
        connection: settings of the connection.
        ask_count: number of requests on this connection.

    Attributes:
        changed: wakes tasks that wait for a response.
        asks_left: number of requests that have not begun.
        is_over: True if the server will send nothing more.
        reads_again_at: time until which the client does not read.
    """

    def __init__(self, end: MemoryEnd, connection: Connection, *, ask_count: int) -> None:
        self.end = end
        self.connection = connection
        self.protocol = StrictClient(http=connection.http, window=connection.window)
        self.changed = trio.lowlevel.ParkingLot()
        self.asks_left = ask_count
        self.is_over = False
        self.reads_again_at = 0.0
        self._sending = trio.Lock()
        self._sizes: Iterator[int] = itertools.cycle(connection.pieces or (READ_BYTES,))

    async def read(self) -> None:
        """Read until the end of the connection."""
        while not self.is_over:
            await trio.sleep_until(self.reads_again_at)
            try:
                received = await self.end.receive_some(next(self._sizes))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                received = b""
            self.protocol.receive(received)
            self.is_over = not received
            self.changed.unpark_all()
            if not self.is_over:
                await self.flush()

    def stop_reading(self, seconds: float) -> None:
        self.reads_again_at = max(self.reads_again_at, trio.current_time() + seconds)

    async def begin(self, response: Response, method: str, path: str, fields: Fields, body: bytes) -> None:
        """Send the head of a request and the first part of its body.

        Args:
            response: receives the response.
            method: HTTP method.
            path: path of the request.
            fields: header fields.
            body: first part of the body.
        """
        self.protocol.begin(response, method, path, fields, has_body=bool(fields) and method == "POST")
        await self.send_body(response, body, is_last=False)

    async def send_body(self, response: Response, data: bytes, *, is_last: bool) -> None:
        if data and not response.is_over:
            self.protocol.send_body(response, data, is_last=is_last)
        await self.flush()

    async def flush(self) -> None:
        async with self._sending:
            data = self.protocol.unsent()
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                while data:
                    size = next(self._sizes)
                    piece, data = data[:size], data[size:]
                    await self.end.send_all(piece)

    async def send_goaway(self) -> None:
        self.protocol.send_goaway()
        await self.flush()

    async def end_sending(self) -> None:
        async with self._sending:
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self.end.send_eof()
