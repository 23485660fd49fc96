"""Requests of a soak, drawn from its seed, and the clients that send them and leave."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import trio

from trioserve.bench.client import RECEIVE_BYTES, Client, Http1Client, Http2Client, OpenStream
from trioserve.bench.load import SPECIAL_TOKENS_MAX, PlannedRequest
from trioserve.bench.runner import common_headers, http1_client
from trioserve.bench.settings import SoakSettings

__all__ = ["Leave", "Moment", "Slice", "SoakClients", "SoakPlan", "SoakRequest", "LeaveMethod"]

LONG_PROMPT_SHARE = 0.03
SLICE_REQUESTS = 500  # A slice takes about half a minute with a small model on two cores.
CONTROL_SHARE = 0.3  # number of requests of a control slice, as a fraction of the slice before it
# A control slice has at least this many times the concurrency, since its first requests do not count.
CONTROL_FULL_LINES_MIN = 4

HTTP2_SHARE = 0.5
HALF_CLOSE_SHARE = 0.25  # fraction of the HTTP/1.1 clients that disconnect with a half-close
HANG_UP_SHARE = 0.1  # fraction of the HTTP/2 clients that disconnect by closing the whole connection


class Moment(enum.Enum):
    """When a client leaves."""

    BODY = "before its body is complete"
    WAIT = "a time after it was sent"  # The request most often still waits in the queue.
    # trioserve sends the head when the request first runs, so its prompt is computed at this moment.
    HEAD = "a time after its head"
    TOKENS = "after some tokens"


MOMENT_WEIGHTS = {Moment.BODY: 0.1, Moment.WAIT: 0.35, Moment.HEAD: 0.2, Moment.TOKENS: 0.35}
DELAYS_MAX = {Moment.BODY: 0.5, Moment.WAIT: 1.5, Moment.HEAD: 0.2, Moment.TOKENS: 0.0}
"""The longest delay before a client leaves, as a multiple of the typical time to the first token in the warm-up."""


class LeaveMethod(enum.Enum):
    """How a client leaves."""

    CLOSE = "HTTP/1.1, close"
    HALF_CLOSE = "HTTP/1.1, half-close"
    RESET = "HTTP/2, reset"
    HANG_UP = "HTTP/2, close of the connection, with all that runs on it"


class Leave(msgspec.Struct, frozen=True, kw_only=True):
    """When and how a client leaves.

    Attributes:
        moment: the event after which it leaves.
        way: how it leaves.
        delay: time after that event, as a multiple of the typical time to the first token.
        after_tokens: tokens after which it leaves. None unless the moment is TOKENS.
    """

    moment: Moment
    way: LeaveMethod
    delay: float
    after_tokens: int | None


class SoakRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One client.

    Attributes:
        planned: its request. None: it sends nothing and only waits for the delay.
        http: HTTP version.
        leave: when and how it leaves. None: it stays.
        delay: delay of its departure, as a multiple of the typical time to the first token.
        withheld_bytes: bytes at the end of its body that are announced but never sent.
        is_survivor: True if it stays in both the soak and the control.
    """

    planned: PlannedRequest | None
    http: int
    leave: Leave | None
    delay: float
    withheld_bytes: int
    is_survivor: bool


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the load.

    Attributes:
        is_control: True if no client leaves.
        is_warmup: True if it comes before the judged slices.
        request_indices: indexes of its clients.
    """

    is_control: bool
    is_warmup: bool = False
    request_indices: range


class SoakPlan:
    """All clients of a soak. Equal settings give equal clients, whatever the server does. Clients are made when they
    are needed.

    Args:
        settings: settings of the soak.
        model: name of the model.
    """

    def __init__(self, settings: SoakSettings, *, model: str) -> None:
        self._settings = settings
        self._model = model

    def warmup(self) -> Slice:
        return Slice(is_control=False, is_warmup=True, request_indices=range(self._settings.warmup_requests))

    def slices(self) -> list[Slice]:
        """Return the slices in order. A control slice follows each slice in which clients leave."""
        settings = self._settings
        round_count = max(2, round(settings.requests / SLICE_REQUESTS))
        begin = settings.warmup_requests
        slices = []
        for number in range(round_count):
            count = settings.requests * (number + 1) // round_count - settings.requests * number // round_count
            control_count = max(round(count * CONTROL_SHARE), CONTROL_FULL_LINES_MIN * settings.concurrency)
            for is_control, request_count in ((False, count), (True, control_count)):
                slices.append(Slice(is_control=is_control, request_indices=range(begin, begin + request_count)))
                begin += request_count
        return slices

    def requests(self, piece: Slice) -> Iterator[SoakRequest]:
        for index in piece.request_indices:
            request = self._request(index)
            yield self._control_version(request) if piece.is_control else request

    def _request(self, index: int) -> SoakRequest:
        settings = self._settings
        draws = random.Random(f"{settings.seed}/soak/{index}")
        is_long = draws.random() < LONG_PROMPT_SHARE
        longest = settings.long_prompt_tokens
        prompt_count = (
            draws.randint((longest + 1) // 2, longest) if is_long else draws.randint(1, settings.prompt_tokens)
        )
        output_count = draws.randint(1, settings.output_tokens)
        leaves = draws.random() < settings.abort_fraction
        http = 2 if draws.random() < HTTP2_SHARE else 1
        leave = self._leave(draws, http) if leaves else None
        if leave is not None:
            # The response is long enough that it does not end before the client disconnects.
            output_count = settings.output_tokens
        body = self._body(draws, prompt_count, output_count)
        withheld_bytes = 0
        if leave is not None and leave.moment is Moment.BODY:
            withheld_bytes = draws.randint(1, len(body))
        return SoakRequest(
            planned=PlannedRequest(
                index=index,
                arrival_seconds=None,
                body=body,
                prompt_token_count=prompt_count,
                abort_after_tokens=None if leave is None else leave.after_tokens,
            ),
            http=http,
            leave=leave,
            delay=0.0 if leave is None else leave.delay,
            withheld_bytes=withheld_bytes,
            is_survivor=leave is None,
        )

    def _leave(self, draws: random.Random, http: int) -> Leave:
        moment = draws.choices(list(MOMENT_WEIGHTS), list(MOMENT_WEIGHTS.values()))[0]
        if http == 2:
            way = LeaveMethod.HANG_UP if draws.random() < HANG_UP_SHARE else LeaveMethod.RESET
        else:
            way = LeaveMethod.HALF_CLOSE if draws.random() < HALF_CLOSE_SHARE else LeaveMethod.CLOSE
        return Leave(
            moment=moment,
            way=way,
            delay=draws.uniform(0.0, DELAYS_MAX[moment]),
            after_tokens=draws.randint(1, self._settings.output_tokens - 1) if moment is Moment.TOKENS else None,
        )

    def _control_version(self, request: SoakRequest) -> SoakRequest:
        """Return the control's version of a client. It requests only the tokens that it would have received before it
        left, and stays.

        So both slices give the server about the same work, and the difference between them is the cost of leaving. A
        client that leaves before its body is complete, or before its first token is expected, is assumed to receive
        nothing. In the control, it sends nothing and only waits. A client that leaves during prefill, or later without
        counting tokens, requests one token, which needs the whole prompt.
        """
        leave, planned = request.leave, request.planned
        if leave is None or planned is None:
            return request
        control_request: PlannedRequest | None = None
        if leave.moment in (Moment.HEAD, Moment.TOKENS) or (leave.moment is Moment.WAIT and leave.delay >= 1.0):
            body = msgspec.json.decode(planned.body)
            body["max_tokens"] = leave.after_tokens or 1
            control_request = msgspec.structs.replace(planned, body=msgspec.json.encode(body), abort_after_tokens=None)
        return msgspec.structs.replace(
            request,
            planned=control_request,
            leave=None,
            delay=0.0 if control_request else leave.delay,
            withheld_bytes=0,
        )

    def _body(self, draws: random.Random, prompt_count: int, output_count: int) -> bytes:
        settings = self._settings
        low = min(SPECIAL_TOKENS_MAX, settings.vocab_size // 2)
        content: dict[str, Any] = {
            "model": self._model,
            "prompt": [draws.randrange(low, settings.vocab_size) for _ in range(prompt_count)],
            "max_tokens": output_count,
            "temperature": settings.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return msgspec.json.encode(content)


HTTP2_CONNECTIONS = 4  # Several connections are needed, since a server limits the resets on each connection.
HALF_CLOSE_SECONDS_MAX = 10.0  # trioserve closes the connection at once. This limit allows for a busy machine.


class SoakClients:
    """The clients of a soak.

    Attributes:
        unanswered_half_closes: connections that the server did not close after the client's half-close.
        hang_up_count: number of times that the hanging-up client closed its connection.
    """

    def __init__(self, nursery: trio.Nursery, settings: SoakSettings, opener: Callable[[int], OpenStream]) -> None:
        """Make the clients. They open connections when they are used.

        Args:
            nursery: runs the tasks of HTTP/2 connections.
            settings: settings of the soak.
            opener: returns, for an HTTP version, a function that opens a connection with that version.
        """
        target = settings.target
        api_key = settings.api_key
        self.unanswered_half_closes = 0
        self.hang_up_count = 0
        open_http1, open_http2 = opener(1), opener(2)

        async def open_half_closing() -> trio.abc.Stream:
            stream = await open_http1()
            if isinstance(stream, trio.abc.HalfCloseableStream):
                return _HalfClosing(stream, self._note_unanswered)
            return stream  # TLS has no half-close, so clients over TLS close the connection.

        def http1(open_stream: OpenStream) -> Http1Client:
            return http1_client(target, api_key=api_key, open_stream=open_stream)

        def http2(connections: int) -> Http2Client:
            return Http2Client(
                nursery,
                open_http2,
                common_headers(api_key),
                scheme=target.scheme,
                authority=target.authority,
                connections=connections,
            )

        self.observer = http1(open_http1)
        """Reads the server's metrics through its own connection."""
        self._http1 = http1(open_http1)
        self._half_closing = http1(open_half_closing)
        self._http2 = http2(HTTP2_CONNECTIONS)
        self._hanging_up = http2(1)

    def client_for(self, request: SoakRequest) -> Client:
        way = None if request.leave is None else request.leave.way
        if way is LeaveMethod.HALF_CLOSE:
            return self._half_closing
        if way is LeaveMethod.HANG_UP:
            return self._hanging_up
        return self._http1 if request.http == 1 else self._http2

    def hang_up(self) -> None:
        """Close the connection of the clients that hang up, with all requests on it."""
        self.hang_up_count += 1
        self._hanging_up.hang_up()

    async def close_all_but_observer(self) -> None:
        clients: tuple[Client, ...] = (self._http1, self._half_closing, self._http2, self._hanging_up)
        for client in clients:
            await client.aclose()

    def _note_unanswered(self) -> None:
        self.unanswered_half_closes += 1


class _HalfClosing(trio.abc.Stream):
    """A connection that its client leaves with a half-close. The client then waits for the server to close."""

    def __init__(self, stream: trio.abc.HalfCloseableStream, on_unanswered: Callable[[], None]) -> None:
        self._stream = stream
        self._on_unanswered = on_unanswered

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        try:
            # A client disconnects by cancellation. The shield lets this code still close the connection.
            with trio.move_on_after(HALF_CLOSE_SECONDS_MAX, shield=True) as patience:
                await self._stream.send_eof()
                while await self._stream.receive_some(RECEIVE_BYTES):
                    pass
            if patience.cancelled_caught:
                self._on_unanswered()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # The server has closed the connection first.
        finally:
            await trio.aclose_forcefully(self._stream)
