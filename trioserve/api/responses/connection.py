"""Websocket connections of the Responses API (OpenAI's WebSocket mode). A connection is a scope: its responses, the
responses that it keeps, and its places in the queue end with it.

Messages name a lane (`stream_id`). The responses of one lane run one after the other, and lanes run side by side.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from trioserve.api.caller import Caller
from trioserve.api.error_responses import Refusal, error_response, refusal
from trioserve.api.limits import ConnectionSettings
from trioserve.api.openai.request_types import decode_body
from trioserve.api.responses.connection_turn import ConnectionSurface, NewTurn, Turn, TurnExchange
from trioserve.api.responses.response_types import SteerError, SteeringEvent
from trioserve.api.responses.steering import HAS_ENDED, UNKNOWN, Steer, SteerEvent, steer_failed
from trioserve.api.responses.stored_responses import KeptMemory, KeptResponses
from trioserve.api.route_table import Handler
from trioserve.api.sse import encode
from trioserve.contracts.arguments import shown
from trioserve.contracts.errors import InvalidRequest, Overloaded, TrioserveError
from trioserve.http.exchange import Exchange, Headers, WebSocket
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped

if TYPE_CHECKING:
    from trioserve.api.responder import Responder

__all__ = ["ResponseConnections"]

STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
QUEUE_FULL = "connection_queue_full"
"""Reason of a refusal."""
QUEUE_RETRY_SECONDS = 1
GOING_AWAY = 1001
"""Close code (RFC 6455, 7.4.1). OpenAI's client opens a new connection after this code."""

ServeTurn = Callable[[Exchange, Caller, "Handler[Any]"], Awaitable[None]]
"""Function that answers an exchange of an authorized caller with a handler, as any request."""


class ResponseConnections:
    """All open connections.

    Args:
        settings: Limits.
        serve: Answers the exchange of one response.
        turn_headers: Returns the header fields that each response of a connection gets, besides the trace, from the
            request that opened it.
        turns: Opens the context of a connection, which has the function that makes its responses.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        serve: ServeTurn,
        turn_headers: Callable[[Any], list[tuple[str, str]]],
        turns: Callable[[Any], AbstractContextManager[NewTurn]],
    ) -> None:
        self._settings = settings
        self._serve = serve
        self._turn_headers = turn_headers
        self._turns = turns
        self.memory = KeptMemory(settings.all_kept_bytes_max)

    async def serve(self, context: Responder) -> None:
        """Accept the websocket of a request, and serve it to its end.

        Args:
            context: The request that opens the websocket.
        """
        kept = self.memory.open(self._settings)
        try:
            with self._turns(context) as new_turn:
                socket = await context.accept_websocket()
                headers = self._turn_headers(context)
                await _Connection(context, socket, kept, self._settings, self._serve, headers, new_turn).run()
        finally:
            kept.close()


class ClientEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that decide what becomes of a message.

    Attributes:
        type: Kind of the message.
        stream_id: Lane.
        response_id: Response to cancel.
    """

    type: str
    stream_id: Any = None
    response_id: str | None = None


class _Connection:
    """One connection.

    Args:
        context: The request that opened it.
        socket: The websocket.
        kept: Responses that the connection keeps.
        settings: Limits.
        serve: Answers the exchange of one response.
        turn_headers: Header fields of each response, besides the trace.
        new_turn: Makes the responses.
    """

    def __init__(
        self,
        context: Responder,
        socket: WebSocket,
        kept: KeptResponses,
        settings: ConnectionSettings,
        serve: ServeTurn,
        turn_headers: list[tuple[str, str]],
        new_turn: NewTurn,
    ) -> None:
        self._context = context
        self._socket = socket
        self._kept = kept
        self._settings = settings
        self._serve = serve
        self._turn_headers = turn_headers
        self._new_turn = new_turn
        self._lanes: set[str] = set()
        self._waiting: deque[Turn] = deque()
        self._waiting_bytes = 0
        self._running: dict[str | None, Turn] = {}
        self._held: dict[str, list[Steer]] = {}
        self._idle = trio.Event()
        self._is_too_old = False
        self._nursery: trio.Nursery

    async def run(self) -> None:
        """Read messages until the connection is too old, or the server drains and no response runs."""
        with errors_unwrapped():
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._read)
                await self._wait_for_end()
                self._nursery.cancel_scope.cancel()
        if self._is_too_old:
            await self._send_error(_too_old(self._settings), None)
            await self._socket.close(GOING_AWAY, "the connection reached its highest age: open a new one")
        else:
            await self._socket.close(GOING_AWAY, "the server is shutting down: open a new connection")

    async def _wait_for_end(self) -> None:
        with trio.move_on_after(self._settings.seconds_max):
            await self._socket.draining.wait()
        if not self._socket.draining.is_set():
            self._is_too_old = True
            waiting, self._waiting = self._waiting, deque()
            for turn in waiting:
                await self._send_error(_too_old(self._settings), turn.stream_id)
        while self._running:
            self._idle = trio.Event()
            await self._idle.wait()

    # --- messages ---

    async def _read(self) -> None:
        while True:
            message = await self._socket.receive()
            lane: str | None = None
            try:
                if isinstance(message, bytes):
                    raise InvalidRequest("the message is binary: send JSON as a text message")
                raw = message.encode()
                event = decode_body(raw, ClientEvent)
                if event.type == "response.steer":
                    await self._socket.send(self._steer(raw).decode())
                    continue
                lane = self._lane(event)
                self._take(event, raw, lane)
            except TrioserveError as error:
                await self._send_error(error, lane)

    def _take(self, event: ClientEvent, raw: bytes, lane: str | None) -> None:
        if self._is_too_old:
            raise _too_old(self._settings)
        if event.type == "response.create":
            self._add(raw, lane)
        elif event.type == "response.cancel":
            self._cancel(event, lane)
        elif event.type != "response.processed":  # Clients acknowledge a response with it. No answer is expected.
            allowed = "response.create, response.cancel and response.steer"
            raise InvalidRequest(f"type is {shown(event.type)}, allowed are {allowed}", param="type")

    def _lane(self, event: ClientEvent) -> str | None:
        lane = event.stream_id
        if lane is None:
            return None
        if not isinstance(lane, str) or not STREAM_ID.fullmatch(lane):
            raise refusal(
                "invalid_stream_id",
                f"stream_id is {shown(lane)}, allowed are 1 to 256 letters, digits, underscores, hyphens and periods; "
                "leave it out for the default lane",
                param="stream_id",
            )
        return lane

    def _add(self, raw: bytes, lane: str | None) -> None:
        settings = self._settings
        if lane is not None and lane not in self._lanes:
            if len(self._lanes) >= settings.lanes_max:
                raise refusal(
                    "websocket_stream_limit_reached",
                    f"stream_id is {shown(lane)}, but this connection already has {settings.lanes_max} others: use one "
                    "of them, or open another connection",
                    param="stream_id",
                )
            self._lanes.add(lane)
        waiting_bytes = self._waiting_bytes + len(raw)
        are_too_large = bool(self._waiting) and waiting_bytes > settings.waiting_bytes_max
        if len(self._waiting) >= settings.waiting_max or are_too_large:
            raise Overloaded(
                f"{len(self._waiting)} responses of this connection wait (allowed: {settings.waiting_max}), and their "
                f"messages would have {waiting_bytes} bytes (allowed: {settings.waiting_bytes_max}): wait until one "
                "ends",
                reason=QUEUE_FULL,
                retry_after_seconds=QUEUE_RETRY_SECONDS,
            )
        self._waiting.append(self._new_turn(self._exchange(raw), lane, len(raw), self._kept, self._held))
        self._waiting_bytes = waiting_bytes
        self._start_ready()

    def _cancel(self, event: ClientEvent, lane: str | None) -> None:
        turns = self._running.values()
        if event.response_id is None:
            found = self._running.get(lane)
        else:
            found = next((turn for turn in turns if turn.response_id == event.response_id), None)
        if found is None:
            raise refusal(
                "response_not_found",
                f"response_id is {shown(event.response_id)} and stream_id is {shown(lane)}, but no such response runs "
                "on this connection",
                param="response_id",
            )
        found.cancel()

    def _steer(self, raw: bytes) -> bytes:
        """Take input for the successor of a response. Return the message that answers it.

        Raises:
            InvalidRequest: The message is invalid, so it has no input that could be returned.
        """
        event = decode_body(raw, SteerEvent)
        target = next((turn for turn in self._running.values() if turn.response_id == event.previous_response_id), None)
        try:
            event.check()
        except InvalidRequest as error:
            return self._steer_failed(event, SteerError(code="invalid_input", message=str(error)), target)
        if target is None:
            is_kept = self._kept.find(event.previous_response_id) is not None
            return self._steer_failed(event, HAS_ENDED if is_kept else UNKNOWN, None)
        obstacle = target.steering_obstacle
        if obstacle is not None:
            return self._steer_failed(event, obstacle, target)
        pending = [steer for turn in self._running.values() for steer in turn.steers]
        pending += [steer for steers in self._held.values() for steer in steers]
        byte_count = len(raw) + sum(steer.byte_count for steer in pending)
        if len(pending) >= self._settings.steers_max or byte_count > self._settings.waiting_bytes_max:
            message = (
                f"{len(pending)} inputs wait (allowed: {self._settings.steers_max}), and they would have {byte_count} "
                f"bytes (allowed: {self._settings.waiting_bytes_max})"
            )
            return self._steer_failed(event, SteerError(code="too_many_pending_steers", message=message), target)
        steer_id = f"steer_{self._context.clock_and_ids.new_request_id()}"
        return target.steer(Steer(id=steer_id, event=event, byte_count=len(raw)))

    def _steer_failed(self, event: SteerEvent, error: SteerError, target: Turn | None) -> bytes:
        failed = steer_failed(event, error)
        return encode(failed) if target is None else target.steer_message(failed)

    def _exchange(self, raw: bytes) -> TurnExchange:
        """Return the exchange of a response. It has its own request id, and is part of the connection's trace.

        Args:
            raw: The client's message.
        """
        headers = Headers([*self._turn_headers, *self._context.span.headers()])
        return TurnExchange(self._socket, headers, raw, self._context.exchange.peer)

    # --- responses ---

    def _start_ready(self) -> None:
        """Start the responses whose lane is free, in the order of their messages."""
        busy = set(self._running)
        waiting, self._waiting = self._waiting, deque()
        for turn in waiting:
            if turn.stream_id in busy or len(self._running) >= self._settings.running_max:
                self._waiting.append(turn)
            else:
                self._waiting_bytes -= turn.byte_count
                self._running[turn.stream_id] = turn
                self._nursery.start_soon(self._work, turn)
            busy.add(turn.stream_id)

    async def _work(self, turn: Turn) -> None:
        try:
            await self._respond(turn)
        finally:
            del self._running[turn.stream_id]
        self._start_ready()
        if not self._running:
            self._idle.set()

    async def _respond(self, turn: Turn) -> None:
        """Make a response, and the responses that follow it because it is steered."""
        try:
            release_slot = self._socket.take_slot()
        except Overloaded as error:
            await self._send_error(error, turn.stream_id)
            return
        try:
            following: Turn | None = turn
            while following is not None:
                turn = self._running[turn.stream_id] = following
                await self._serve(turn.exchange, self._context.caller, turn.respond)
                following = await self._successor(turn)
        finally:
            release_slot()

    async def _successor(self, turn: Turn) -> Turn | None:
        """Return the response that follows a steered response at once, if any."""
        if not turn.steers:
            return None
        required = turn.required_input
        if required is None or self._is_too_old:
            message = "the response failed, was cancelled, or its connection is too old"
            error = SteerError(code="response_not_active", message=message)
            for steer in turn.steers:
                failed = steer_failed(steer.event, error, steer_id=steer.id)
                await self._socket.send(turn.steer_message(failed).decode())
            return None
        if not required:
            return turn.successor(self._exchange)
        assert turn.response_id is not None
        self._held[turn.response_id] = turn.steers
        for steer in turn.steers:
            pending = SteeringEvent(
                type="response.steer.pending",
                steer=steer.shown,
                reason="waiting_for_required_input",
                required_input=required,
            )
            await self._socket.send(turn.steer_message(pending).decode())
        return None

    async def _send_error(self, error: Exception, lane: str | None) -> None:
        await self._socket.send(ConnectionSurface(lane).body(error_response(error), self._context.request_id).decode())


def _too_old(settings: ConnectionSettings) -> Refusal:
    return refusal(
        "websocket_connection_limit_reached",
        f"the connection has reached its highest age of {settings.seconds_max:g} seconds: open a new connection",
    )
