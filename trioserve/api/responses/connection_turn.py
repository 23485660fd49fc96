"""One response on a websocket connection. It is an ordinary request, with its own exchange, context and end.

waiting ──► its lane is free ──► run: plan, queue, generate ──► keep and store ──► last event
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import trio

from trioserve.api.error_responses import ErrorResponse
from trioserve.api.openai.request_types import HEADERS
from trioserve.api.responses.events import Ended
from trioserve.api.responses.request_types import CreateEvent
from trioserve.api.responses.response_object import response_id
from trioserve.api.responses.response_run import ResponseRun, plan_response
from trioserve.api.responses.response_types import (
    ErrorEvent,
    RequiredInput,
    ResponseEvent,
    ResponseObject,
    SteerError,
    SteeringEvent,
)
from trioserve.api.responses.steering import HAS_ENDED, Steer, creation_failed, required_input, with_steers
from trioserve.api.responses.stored_responses import CONTINUABLE, KeptResponses
from trioserve.api.sse import encode
from trioserve.api.streams.resumption import Resumption
from trioserve.api.surface import OpenAISurface
from trioserve.contracts.errors import Overloaded, TrioserveError
from trioserve.contracts.output import Delta
from trioserve.http.exchange import Exchange, HeaderFields, Headers, WebSocket

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext
    from trioserve.engine.sessions import LiveSession

__all__ = ["ConnectionSurface", "ConnectionTurn", "NewTurn", "Turn", "TurnExchange", "connection_turns", "turn_headers"]

PATH = "/v1/responses"
TURN_HEADERS = frozenset(map(str.lower, HEADERS.values()))
NOT_FOUND = "previous_response_not_found"
"""Code with status 400 on a websocket, as in OpenAI's API. Its status over HTTP is 404."""


class ConnectionSurface(OpenAISurface):
    """Format of errors on a websocket: events of the type `error`.

    Args:
        stream_id: Lane of the message that failed. None: the default lane, or no lane.
        run: The response, if it has begun. Its error becomes the event `response.failed`.
    """

    def __init__(self, stream_id: str | None, run: ResponseRun | None = None) -> None:
        self._stream_id = stream_id
        self._run = run

    def status(self, error: ErrorResponse) -> int:
        return 400 if error.code == NOT_FOUND else error.status

    def body(self, error: ErrorResponse, request_id: str) -> bytes:
        described: dict[str, Any] = msgspec.to_builtins(error.body().error)
        event = ErrorEvent(status=self.status(error), error=described)
        if error.headers:
            # OpenAI's clients read the header fields here, and Codex reads them beside the error.
            event.headers = described["headers"] = dict(error.headers)
        return self.encode(event)

    def event(self, error: ErrorResponse, request_id: str) -> bytes:
        if self._run is None:
            return self.body(error, request_id)
        [failed], _response = self._run.fail(error)
        return self.encode(failed)

    def encode(self, event: ResponseEvent | SteeringEvent | ErrorEvent) -> bytes:
        """Return an event as a message."""
        if self._stream_id is not None:
            event.stream_id = self._stream_id
        return encode(event)


class TurnExchange(Exchange):
    """The exchange of one response. Each call of `send`, and `respond` and `finish` with data, sends one message.

    Args:
        socket: The websocket.
        headers: Header fields of the request.
        message: The client's message.
        peer: Address of the client.
    """

    http_version = "1.1"

    def __init__(self, socket: WebSocket, headers: Headers, message: bytes, peer: str) -> None:
        self.method, self.path, self.query = "POST", PATH, ""
        self.headers = headers
        self.peer = peer
        self._socket = socket
        self._message = message
        self._is_started = False

    @property
    def started(self) -> bool:
        return self._is_started

    async def body(self) -> bytes:
        await trio.lowlevel.checkpoint()
        message, self._message = self._message, b""  # The memory is freed, because the response may take long.
        return message

    async def respond(self, status: int, headers: HeaderFields, body: bytes) -> None:
        self._is_started = True
        await self.send(body)

    async def start(self, status: int, headers: HeaderFields) -> None:
        self._is_started = True
        await trio.lowlevel.checkpoint()

    async def send(self, data: bytes) -> None:
        await self._socket.send(data.decode())

    async def finish(self, last: bytes = b"") -> None:
        await self.send(last)


class Turn(Protocol):
    """One response on a connection.

    Attributes:
        stream_id: Lane of the response. None: the default lane.
        byte_count: Size of the client's message.
        steers: Input for the successor of this response.
    """

    stream_id: str | None
    byte_count: int
    steers: list[Steer]

    @property
    def exchange(self) -> Exchange:
        """Exchange of the response."""

    @property
    def response_id(self) -> str | None:
        """Id of the response. None until it has begun."""

    @property
    def steering_obstacle(self) -> SteerError | None:
        """Why a response that has begun cannot be steered. None: it can be."""

    @property
    def required_input(self) -> list[RequiredInput] | None:
        """Outputs of tool calls that a successor needs. None: the response has not ended, or cannot be continued."""

    def cancel(self) -> None:
        """End the response, also if its client reads slowly."""

    def steer(self, steer: Steer) -> bytes:
        """Take input for the successor. Cut this response, unless it has begun a tool call.

        Args:
            steer: The input.

        Returns:
            The message that acknowledges the input.
        """

    def steer_message(self, event: SteeringEvent) -> bytes:
        """Return a message about input for the successor.

        Args:
            event: The event. It gets the next number of the response.
        """

    def successor(self, exchange_of: Callable[[bytes], TurnExchange]) -> Turn:
        """Return the response that continues this one with the input of its steers and its own options.

        Args:
            exchange_of: Makes the exchange of a message.
        """

    async def respond(self, context: Any) -> None:
        """Generate the response and send its events.

        Args:
            context: The context of `exchange`.
        """


NewTurn = Callable[[TurnExchange, str | None, int, KeptResponses, dict[str, list[Steer]]], Turn]
"""Makes the response to a message, from its exchange, its lane, its size, the responses that the connection keeps, and
the input that waits for outputs of tool calls."""


class ConnectionTurn:
    """One response on a connection.

    Args:
        exchange: Exchange of the response.
        stream_id: Lane of the response. None: the default lane.
        byte_count: Size of the client's message.
        kept: Responses that the connection keeps.
        held: Input for the successor of a response, by its id, until the client sends the outputs of its tool calls.
        session: Session of the connection in the engine. None: the server has no room for one.
        body: The request of a successor that the client did not send. None: the exchange has the request.
        steers: The input of such a successor.

    Attributes:
        run: The response. None until it has begun.
        steers: Input for the successor of this response.
        response: The response object at its end.
    """

    def __init__(
        self,
        exchange: Exchange,
        stream_id: str | None,
        byte_count: int,
        kept: KeptResponses,
        held: dict[str, list[Steer]],
        *,
        session: LiveSession | None,
        body: CreateEvent | None = None,
        steers: Sequence[Steer] = (),
    ) -> None:
        self.exchange = exchange
        self.stream_id = stream_id
        self.byte_count = byte_count
        self.run: ResponseRun | None = None
        self.steers: list[Steer] = []
        self.response: ResponseObject | None = None
        self._kept = kept
        self._held = held
        self._session = session
        self._body = body
        self._own_steers = steers
        self._surface = ConnectionSurface(stream_id)
        self._context: RequestContext | None = None
        self._is_cancelled = self._is_cut = False

    @property
    def response_id(self) -> str | None:
        """Id of the response. None until it has begun."""
        return None if self.run is None else self.run.planned.head.id

    @property
    def steering_obstacle(self) -> SteerError | None:
        """Why a response that has begun cannot be steered. None: it can be."""
        if self.response is not None:
            return HAS_ENDED
        if self.run is not None and self.run.planned.head.body.return_partial:
            return SteerError(code="steering_not_supported", message="the response has return_partial")
        return None

    @property
    def required_input(self) -> list[RequiredInput] | None:
        """Outputs of tool calls that a successor needs. None: the response has not ended, or cannot be continued."""
        response = self.response
        return None if response is None or response.status not in CONTINUABLE else required_input(response.output)

    def cancel(self) -> None:
        """End the response. Its blocks are free one step later, also if its client reads slowly."""
        self._is_cancelled = True
        self._abort()

    def steer(self, steer: Steer) -> bytes:
        """Take input for the successor. Cut this response, unless it has begun a tool call.

        Args:
            steer: The input.

        Returns:
            The message that acknowledges the input.
        """
        assert self.run is not None
        self.steers.append(steer)
        if not self.run.events.has_calls:
            self._is_cut = True
            self._abort()
        return self.steer_message(SteeringEvent(type="response.steer.accepted", steer=steer.shown))

    def steer_message(self, event: SteeringEvent) -> bytes:
        """Return a message about input for the successor.

        Args:
            event: The event. It gets the next number of the response.
        """
        assert self.run is not None
        return self._surface.encode(self.run.events.number(event))

    def successor(self, exchange_of: Callable[[bytes], TurnExchange]) -> ConnectionTurn:
        """Return the response that continues this one with the input of its steers and its own options.

        Args:
            exchange_of: Makes the exchange of a message.
        """
        assert self.run is not None
        body = self.run.planned.head.body
        assert isinstance(body, CreateEvent)
        body = msgspec.structs.replace(
            body, input=with_steers(None, self.steers), previous_response_id=self.response_id, generate=None
        )
        return ConnectionTurn(
            exchange_of(b""),
            self.stream_id,
            0,
            self._kept,
            self._held,
            session=self._session,
            body=body,
            steers=tuple(self.steers),
        )

    def _abort(self) -> None:
        if self._context is not None:
            self._context.engine.abort([self._context.request_id], owner=None)

    async def respond(self, context: RequestContext) -> None:
        """Generate the response and send its events.

        Args:
            context: The context of `exchange`.
        """
        self._context = context
        context.surface = self._surface
        context.session = self._session
        try:
            run = await self._plan(context)
            last, response = await self._generate(context, run)
        except TrioserveError as error:
            if not context.exchange.started:
                for failed in creation_failed(self._own_steers, str(error)):
                    await self.exchange.send(self._surface.encode(failed))
            raise
        self.response = response
        if response.status in CONTINUABLE:
            planned = run.planned
            self._kept.keep(
                planned.head.id,
                run.stored(response).items,
                previous_id=planned.head.body.previous_response_id,
                earlier=planned.earlier,
            )
            await run.store(context, response)
        await self._send(last[:-1])
        await context.finish(self._surface.encode(last[-1]))

    async def _plan(self, context: RequestContext) -> ResponseRun:
        body = self._body
        if body is None:
            body = await context.body(CreateEvent)
        steers = self._held.get(body.previous_response_id or "", ())
        if steers:
            body = msgspec.structs.replace(body, input=with_steers(body.input, steers))
        key = context.clock_and_ids.new_request_id()
        planned = await plan_response(context, body, response_id(key), kept=self._kept)
        resumption = None
        if body.return_partial:
            resumption = Resumption(context, None, planned.turn.sampling, is_streamed=False, gives_partial=True)
        return ResponseRun(context, planned, resumption)

    async def _generate(self, context: RequestContext, run: ResponseRun) -> Ended:
        """Send all events but the last ones. Return these, and the response.

        The engine's scope is left before they are sent, so that a slow store or client holds no blocks.
        """
        try:
            # An abort has no effect before the engine knows the request.
            if not self._is_cancelled:
                async with run.turn as turn:
                    await turn.wait_until_begun()
                    await self._begin(context, run)
                    await run.read(self._send)
                return run.complete()
        except TrioserveError:
            if not (self._is_cancelled or self._is_cut):
                raise
        if self.run is None:
            await self._begin(context, run)
        return run.cancel() if self._is_cancelled else run.end_steered()

    async def _begin(self, context: RequestContext, run: ResponseRun) -> None:
        self.run = run
        self._surface = context.surface = ConnectionSurface(self.stream_id, run)
        self._held.pop(run.planned.head.body.previous_response_id or "", None)
        await context.start_events()
        await self._send(run.events.begin())

    async def _send(self, events: list[ResponseEvent], _: Delta | None = None) -> None:
        for event in events:
            await self.exchange.send(self._surface.encode(event))


@contextmanager
def connection_turns(context: RequestContext) -> Iterator[NewTurn]:
    """Open a session for a connection. The context has the function that makes the connection's responses.

    Args:
        context: The request that opens the connection.
    """
    with ExitStack() as stack:
        with suppress(Overloaded):  # Without a session, the prefix cache may evict the conversation sooner.
            stack.enter_context(context.connection_session())
        yield partial(ConnectionTurn, session=context.session)


def turn_headers(context: RequestContext) -> list[tuple[str, str]]:
    """Return the header fields of a connection that count for each of its responses, besides the trace.

    Args:
        context: The request that opened the connection.
    """
    names = TURN_HEADERS | {context.services.tenant_header}
    return [(name, value) for name, value in context.exchange.headers.items() if name in names]
