"""One response on a websocket connection to the router. An endpoint generates it for an ordinary POST request.

So a response has what every routed request has: the queue, a lease, retries, and another endpoint after a failure. The
router keeps the items of a connection's responses, and sends the whole conversation with each request. So a connection
outlives its endpoints, because no endpoint knows the connection. Endpoints know its session. When the connection ends,
the router ends the session at the endpoints that it used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import trio
from msgspec import UNSET

from trioserve.api.openai.request_types import decode_body
from trioserve.api.operations.sessions import SESSION_PATH
from trioserve.api.responses.connection_turn import NOT_FOUND, NewTurn, TurnExchange
from trioserve.api.responses.response_types import RequiredInput, SteerError, SteeringEvent
from trioserve.api.responses.steering import HAS_ENDED, Steer, creation_failed, with_steers
from trioserve.api.responses.stored_responses import CONTINUABLE, KeptResponses
from trioserve.api.session_fields import SESSION_HEADER
from trioserve.api.sse import encode
from trioserve.contracts.arguments import shown
from trioserve.contracts.errors import InvalidRequest, TrioserveError
from trioserve.http.exchange import Exchange, HeaderFields, Headers
from trioserve.proxy.forwarding import forward
from trioserve.proxy.peers.kept_stream import SessionEndNotice
from trioserve.proxy.routed_body import rewritten
from trioserve.proxy.router_context import endpoint_session, request_headers
from trioserve.proxy.streams.client_events import EventSplitter

if TYPE_CHECKING:
    from trioserve.api.responder import Responder
    from trioserve.contracts.endpoint import EndpointId
    from trioserve.proxy.router_context import RouterContext

__all__ = ["routed_turns", "turn_headers"]

Item = dict[str, Any]
"""An item as the client or the endpoint sent it. The endpoint checks it."""
MISSING_CODES = frozenset({"not_found", NOT_FOUND})
DONE = b"[DONE]"
"""Last event of some servers. It is no JSON."""
_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
OF_HANDSHAKE = frozenset({"connection", "content-type", "origin", "upgrade"})
"""Header fields that concern only the request that opens a websocket. So do those that begin with "sec-"."""
PLACE = ("item_id", "output_index", "content_index", "summary_index")
"""Fields of an event that say to which part of the output it belongs."""
OF_INPUT = ("input", "previous_response_id", "generate")
"""Fields of a message that its successor has not."""
ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})
OF_MESSAGE = ("type", "stream_id")
"""Fields that a message has, and a body has not."""


class CreateMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a message that the router reads. The endpoint checks all others.

    Attributes:
        input: Input of the response.
        previous_response_id: Response that it continues.
        background: Refused on a websocket.
        resume: Refused on a websocket.
        return_partial: Such a response cannot be steered.
    """

    type: Literal["response.create"]
    input: str | list[Item] | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    resume: Any = None
    return_partial: Any = None


class _Event(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of an endpoint's event that the router reads."""

    type: str
    sequence_number: int = 0
    item: Item | None = None
    response: dict[str, Any] | None = None
    part: dict[str, Any] | None = None
    delta: Any = None


class _Output:
    """The output of a response so far, from its events.

    Attributes:
        items: Complete items.
        has_calls: True if the response has begun a tool call.
    """

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.has_calls = False
        self._item: Item | None = None  # The item that grows.
        self._part: dict[str, Any] = {}  # The event that began the part of this item which grows.
        self._pieces: list[str] = []
        self._kind = ""  # Type of this part's events, without ".delta".

    def take(self, read: _Event, event: bytes) -> None:
        """Note an event.

        Args:
            read: Its fields.
            event: The event as JSON.
        """
        if read.type.endswith("text.delta") and isinstance(read.delta, str):
            self._pieces.append(read.delta)
            self._kind = read.type.removesuffix(".delta")
        elif read.type.endswith("part.added"):
            self._part, self._pieces = msgspec.json.decode(event), []
        elif read.type == "response.output_item.added" and read.item is not None:
            self._item, self._part, self._pieces = read.item, {}, []
            self.has_calls |= _is_call(read.item)
        elif read.type == "response.output_item.done" and read.item is not None:
            self.items.append(read.item)
            self._item = None

    def close(self) -> list[dict[str, Any]]:
        """End the text that grows. Return its last events, without their numbers."""
        item, self._item = self._item, None
        if item is None or not self._pieces or not self._part:
            return []
        added = self._part
        text = "".join(self._pieces)
        part = {**added["part"], "text": text}
        place = {name: added[name] for name in PLACE if name in added}
        name = "summary" if "summary_index" in added else "content"
        self.items.append({**item, "status": "incomplete", name: [part]})
        part_event = added["type"].removesuffix(".added")
        return [
            {"type": f"{self._kind}.done", **place, "text": text},
            {"type": f"{part_event}.done", **place, "part": part},
            {"type": "response.output_item.done", "output_index": place["output_index"], "item": self.items[-1]},
        ]


def _is_call(item: Item) -> bool:
    return "call_id" in item and str(item.get("type")).endswith("_call")


class RoutedConnection:
    """State that all turns of one connection share.

    Args:
        session: Session of the connection, by the name that endpoints get from the router. None: the client names one,
            which may outlive the connection.

    Attributes:
        home: Endpoint that got the last request. It has most of the KV of the next one.
        used: Endpoints that got a request.
    """

    def __init__(self, session: str | None) -> None:
        self.session = session
        self.home: EndpointId | None = None
        self.used: set[EndpointId] = set()

    def note_endpoint(self, id: EndpointId | None) -> None:
        """Record the endpoint of a request.

        Args:
            id: The endpoint. None: the request has none yet.
        """
        if id is not None:
            self.home = id
            self.used.add(id)

    def end(self, context: RouterContext) -> None:
        """Notify the endpoints that the session has ended, so that they free its blocks at once. This never waits.

        Args:
            context: The request that opened the connection.
        """
        if self.session is None:
            return
        path = SESSION_PATH + endpoint_session(context, self.session)
        headers = request_headers(context, None, with_body=False)
        fleet = context.services.fleet
        for id in self.used & fleet.specs().keys():
            context.services.notices.send(SessionEndNotice(fleet.remote(id), path, headers))


class RoutedTurn:
    """One response on a connection.

    The router steers a response itself: it cuts the stream of the endpoint, and sends the next request.

    Args:
        exchange: Exchange of the response.
        stream_id: Lane of the response. None: the default lane.
        byte_count: Size of the client's message.
        kept: Responses that the connection keeps.
        held: Input for the successor of a response, by its id, until the client sends the outputs of its tool calls.
        own_steers: Input that the message already has, if this is the successor of a steered response.

    Attributes:
        response_id: Id of the response. None until it has begun.
        steers: Input for the successor of this response.
        own_steers: As the argument.
        required_input: Outputs of tool calls that a successor needs. None: the response has not ended, or cannot be
            continued.
    """

    def __init__(
        self,
        exchange: TurnExchange,
        stream_id: str | None,
        byte_count: int,
        kept: KeptResponses,
        held: dict[str, list[Steer]],
        *,
        connection: RoutedConnection,
        own_steers: Sequence[Steer] = (),
    ) -> None:
        self.exchange = _EventExchange(exchange, self, connection.session)
        self.stream_id = stream_id
        self.byte_count = byte_count
        self.response_id: str | None = None
        self.steers: list[Steer] = []
        self.own_steers = own_steers
        self.required_input: list[RequiredInput] | None = None
        self._connection = connection
        self._kept = kept
        self._held = held
        self._options = b""
        self._message: CreateMessage | None = None
        self._own: list[Item] = []
        self._earlier: list[Item] | None = []
        self._output = _Output()
        self._begun: dict[str, Any] = {}
        self._last_number = 0
        self._added_count = 0  # Events that the router has added to those of the endpoint.
        self._context: RouterContext | None = None
        self._has_ended = self._is_cancelled = self._is_cut = False

    @property
    def steering_obstacle(self) -> SteerError | None:
        """Why a response that has begun cannot be steered. None: it can be."""
        if self._has_ended:
            return HAS_ENDED
        if self._earlier is None:
            message = "only an endpoint has the response that this one continues"
        elif self._message is not None and self._message.return_partial:
            message = "the response has return_partial"
        else:
            return None
        return SteerError(code="steering_not_supported", message=message)

    def cancel(self) -> None:
        """End the response. Its endpoint sees a closed connection."""
        self._is_cancelled = True
        self._abort()

    def _abort(self) -> None:
        if self._context is not None:
            self._context.services.fleet.dispatch.abort([self._context.request_id], owner=None)

    def steer(self, steer: Steer) -> bytes:
        """Take input for the successor. Cut this response, unless it has begun a tool call.

        Args:
            steer: The input.

        Returns:
            The message that acknowledges the input.
        """
        self.steers.append(steer)
        if not self._output.has_calls:
            self._is_cut = True
            self._abort()
        return self.steer_message(SteeringEvent(type="response.steer.accepted", steer=steer.shown))

    def steer_message(self, event: SteeringEvent) -> bytes:
        """Return a message about input for the successor.

        Args:
            event: The event. It gets the next number of the response.
        """
        event.sequence_number = self._next_number()
        return self.on_lane(event)

    def on_lane(self, event: SteeringEvent) -> bytes:
        """Return an event as a message, with the lane of the response."""
        if self.stream_id is not None:
            event.stream_id = self.stream_id
        return encode(event)

    def _next_number(self) -> int:
        self._added_count += 1
        self._last_number += 1
        return self._last_number

    def successor(self, exchange_of: Callable[[bytes], TurnExchange]) -> RoutedTurn:
        """Return the response that continues this one with the input of its steers and its own options.

        Args:
            exchange_of: Makes the exchange of a message.
        """
        fields: dict[str, object] = {
            "input": with_steers(None, self.steers),
            "previous_response_id": self.response_id,
        }
        message = rewritten(self._options, fields)
        return RoutedTurn(
            exchange_of(message),
            self.stream_id,
            0,
            self._kept,
            self._held,
            connection=self._connection,
            own_steers=tuple(self.steers),
        )

    @property
    def unknown_id(self) -> str | None:
        """Earlier response that the request continues, if the connection does not have it."""
        return None if self._earlier is not None or self._message is None else self._message.previous_response_id

    async def respond(self, context: RouterContext) -> None:
        """Send the response of an endpoint, as events.

        Args:
            context: The context of `exchange`.
        """
        self._context = context
        context.preferred = self._connection.home
        try:
            await forward(context)
        except TrioserveError:
            if not (self._is_cancelled or self._is_cut) or self.response_id is None:
                raise
            await self._end()
        finally:
            self._connection.note_endpoint(context.endpoint)

    async def _end(self) -> None:
        """Send the last events of a response that its client has cancelled or steered."""
        if self._has_ended:
            return  # The endpoint was faster than the abort.
        events = self._output.close()
        end: dict[str, Any] = {"status": "incomplete", "incomplete_details": {"reason": "steered"}}
        if self._is_cancelled:
            events, end = [], {"status": "cancelled"}
        response = {**self._begun, **end, "output": self._output.items}
        self._note_end(response)
        lane = {} if self.stream_id is None else {"stream_id": self.stream_id}
        for event in [*events, {"type": "response.incomplete", "response": response}]:
            await self.exchange.send_message(encode({**event, "sequence_number": self._next_number(), **lane}))

    def body(self, message: bytes) -> bytes:
        """Return the body for endpoints: the message with the items of the earlier responses before its own.

        Args:
            message: The client's message.

        Raises:
            InvalidRequest: The message has a field that only POST /v1/responses has.
        """
        read = decode_body(message, CreateMessage)
        self._options = rewritten(message, {}, without=OF_INPUT)
        for name, value in (("background", read.background), ("resume", read.resume)):
            if value:
                raise InvalidRequest(
                    f"{name} is set, but a response on a websocket begins and ends with its messages: leave {name} "
                    "out, or send POST /v1/responses",
                    param=name,
                )
        self._message = read
        own = read.input if read.input is not None else []
        self._own = [{"type": "message", "role": "user", "content": own}] if isinstance(own, str) else own
        if steers := self._held.get(read.previous_response_id or ""):
            self._own = with_steers(self._own, steers)
        fields: dict[str, object] = {"stream": True}
        if steers:
            fields["input"] = self._own
        without: tuple[str, ...] = OF_MESSAGE
        if read.previous_response_id is not None:
            before = self._kept.find(read.previous_response_id)
            self._earlier = None if before is None else before.conversation
        if self._earlier:
            fields["input"] = [*self._earlier, *self._own]
            without = (*OF_MESSAGE, "previous_response_id")
        return rewritten(message, fields, without=without)

    def take(self, event: bytes) -> bytes:
        """Read an event of the response. Return it as the client gets it.

        Args:
            event: The event as JSON.
        """
        read = msgspec.json.decode(event, type=_Event)
        changed: dict[str, object] = {} if self.stream_id is None else {"stream_id": self.stream_id}
        if self._added_count and read.type != "error":
            changed["sequence_number"] = read.sequence_number + self._added_count
        self._last_number = read.sequence_number + self._added_count
        if self._context is not None:
            self._connection.note_endpoint(self._context.endpoint)
        response = read.response
        if response is not None:
            response["previous_response_id"] = None if self._message is None else self._message.previous_response_id
            changed["response"] = response
            if read.type == "response.created":
                self._begun = response
                self.response_id = response.get("id")
                self._held.pop(response["previous_response_id"] or "", None)
            elif read.type in ENDS:
                self._note_end(response)
        else:
            self._output.take(read, event)
        return rewritten(event, changed)

    def _note_end(self, response: dict[str, Any]) -> None:
        self._has_ended = True
        if response.get("status") in CONTINUABLE:
            self._keep(response)
            self.required_input = [
                RequiredInput(type=f"{item['type']}_output", call_id=item["call_id"], name=item.get("name", UNSET))
                for item in response.get("output", ())
                if _is_call(item)
            ]

    def _keep(self, response: dict[str, Any]) -> None:
        # An earlier response that only an endpoint stores is continued there, by its id.
        if self._earlier is not None and self._message is not None:
            items = [*self._own, *response.get("output", ())]
            previous = self._message.previous_response_id
            self._kept.keep(response["id"], items, previous_id=previous, earlier=self._earlier)
            if previous is not None and self._context is not None:
                self._context.services.kept.note_previous(response["id"], previous)


class _EventExchange(Exchange):
    """Exchange whose server-sent events become messages, without comments, names and ids.

    Args:
        inner: Exchange of the client's message.
        turn: The response.
        session: Session of the request. None: a header names one.
    """

    http_version = "1.1"

    def __init__(self, inner: TurnExchange, turn: RoutedTurn, session: str | None) -> None:
        self.method, self.path, self.query = inner.method, inner.path, inner.query
        self.headers = inner.headers
        if session is not None:
            self.headers = Headers([*inner.headers.items(), (SESSION_HEADER, session)])
        self.peer = inner.peer
        self._inner = inner
        self._turn = turn
        self._events = EventSplitter()
        self._body: bytes | None = None

    @property
    def started(self) -> bool:
        return self._inner.started

    async def body(self) -> bytes:
        if self._body is None:
            self._body = self._turn.body(await self._inner.body())
        return self._body

    async def respond(self, status: int, headers: HeaderFields, body: bytes) -> None:
        await self._inner.start(status, headers)
        answer = msgspec.json.decode(body, type=dict[str, Any])
        if status < 400:  # An endpoint that knows no streams has sent the whole response.
            await self._send({"type": "response.completed", "sequence_number": 0, "response": answer})
            return
        error = answer.get("error", answer)
        lacking = self._turn.unknown_id
        if status == 404 and lacking is not None and error.get("code") in MISSING_CODES:
            status = 400
            error = error | {
                "code": NOT_FOUND,
                "param": "previous_response_id",
                "message": f"neither this connection nor an endpoint has the response {shown(lacking)}: send the whole "
                "input without previous_response_id",
            }
        for failed in creation_failed(self._turn.own_steers, str(error.get("message"))):
            await self.send_message(self._turn.on_lane(failed))
        await self._send({"type": "error", "sequence_number": 0, "status": status, "error": error})

    async def start(self, status: int, headers: HeaderFields) -> None:
        await self._inner.start(status, headers)

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        for event in _END.split(self._events.feed(data)):
            lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
            if lines and lines != [DONE]:
                await self._send_bytes(_as_message(b"\n".join(lines)))

    async def finish(self, last: bytes = b"") -> None:
        await self.send(last)

    async def _send(self, event: dict[str, Any]) -> None:
        await self._send_bytes(encode(event))

    async def _send_bytes(self, event: bytes) -> None:
        await self.send_message(self._turn.take(event))

    async def send_message(self, message: bytes) -> None:
        """Send a message that is no event of an endpoint."""
        await self._inner.send(message)


def _as_message(event: bytes) -> bytes:
    """Return an event of a stream as a message. An error that ends the stream has no type there.

    Args:
        event: The event as JSON.
    """
    return (
        rewritten(event, {"type": "error", "sequence_number": 0, "status": 500})
        if event.startswith(b'{"error":')
        else event
    )


@contextmanager
def routed_turns(context: RouterContext) -> Iterator[NewTurn]:
    """Open the context of a connection. It has the function that makes the connection's responses.

    All requests to endpoints belong to one session, so that an endpoint prefers to keep the blocks of the connection.

    Args:
        context: The request that opens the connection.
    """
    is_named = SESSION_HEADER in context.exchange.headers
    connection = RoutedConnection(None if is_named else f"connection-{context.clock_and_ids.new_request_id()}")
    try:
        yield partial(RoutedTurn, connection=connection)
    finally:
        connection.end(context)


def turn_headers(context: Responder) -> list[tuple[str, str]]:
    """Return the header fields of each request that a connection sends to endpoints.

    Args:
        context: The request that opened the connection.
    """
    trace = {name for name, _ in context.span.headers()}
    headers = [
        (name, value)
        for name, value in context.exchange.headers.items()
        if name not in OF_HANDSHAKE and not name.startswith("sec-") and name not in trace
    ]
    return [*headers, ("content-type", "application/json")]
