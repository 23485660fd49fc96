"""Websockets of an ASGI host. The host parses frames, answers pings, and pings silent clients.

The other limits of FrontendLimits apply here: size and number of unread messages, idle time, and slow readers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from trioserve.http.asgi.exchange import AsgiExchange, Message, Receive, Send
from trioserve.http.body_budget import BodyBudget, BodyShare
from trioserve.http.counters import ConnectionRefusal, Tally
from trioserve.http.exchange import HeaderFields, RequestHead, WebSocket, encode_fields
from trioserve.http.limits import FrontendLimits
from trioserve.http.websocket_messages import Broken, UnreadMessages

__all__ = ["AsgiWebSocketExchange"]

GOING_AWAY, TOO_BIG = 1001, 1009


class AsgiWebSocketExchange(AsgiExchange):
    """The exchange of one ASGI websocket. AsgiApp uses it like the exchange of a request.

    Args:
        head: the head of the request.
        share: holds no bytes, because the request has no body.
        limits: limits of the app.
        budget: counts the bytes of messages.
        tally: counters of the app.
        can_respond: True if the host can send a refusal with a body. Otherwise the client gets 403 for every refusal.
    """

    def __init__(
        self,
        head: RequestHead,
        share: BodyShare,
        limits: FrontendLimits,
        *,
        budget: BodyBudget,
        tally: Tally,
        can_respond: bool,
    ) -> None:
        super().__init__(head, share, limits)
        self._budget = budget
        self._tally = tally
        self._can_respond = can_respond
        self._websocket: AsgiWebSocket | None = None

    async def accept_websocket(self, headers: HeaderFields = ()) -> WebSocket:
        self.response.check_body_readable()
        fields = encode_fields(headers, unix_seconds=self._clock_and_ids.unix_seconds())
        websocket = AsgiWebSocket(self, self._budget, self._limits, self._tally)
        self.response.accept(websocket)
        self._websocket = websocket
        websocket.push({"type": "websocket.accept", "headers": fields}, 0)
        await trio.lowlevel.checkpoint()
        return websocket

    @property
    def unsent_bytes(self) -> int:
        return len(self._unsent) if self._websocket is None else self._websocket.unsent_bytes

    async def watch(self, receive: Receive) -> None:
        while True:
            message = await receive()
            websocket = self._websocket
            if message["type"] == "websocket.disconnect":
                if websocket is not None and websocket.is_closed:
                    websocket.leave()
                elif not self._end_passed:
                    self.gone = True
                    self.scope.cancel()
                return
            if message["type"] == "websocket.receive" and websocket is not None:
                text = message.get("text")
                websocket.arrived(text if text is not None else message["bytes"])

    async def forward(self, send: Send) -> None:
        while not self.started:
            await self._wait_for_change()
        if self._websocket is not None:
            await self._websocket.forward(send)
        elif self._can_respond:
            await super().forward(lambda message: send({**message, "type": f"websocket.{message['type']}"}))
        else:
            self._end_passed = True
            await send({"type": "websocket.close"})
            self._end_sent = True
            self.wake()

    async def drained(self) -> None:
        if self._websocket is None:
            await super().drained()

    async def send_last_messages(self) -> None:
        if self._websocket is not None and not self.gone:
            with trio.move_on_after(self._limits.close_seconds_max):
                while self._websocket.has_unsent:
                    await self._wait_for_change()

    def wake(self) -> None:
        self._notify_change()

    async def wait_for_host(self) -> None:
        """Wait until the host takes a message. If it takes none for too long, cancel the handler."""
        await self._wait_for_client()

    async def wait_for_change(self) -> None:
        await self._wait_for_change()

    def note_taken(self, byte_count: int, *, is_last: bool) -> None:
        """Move the deadline for slow clients after the host has taken a message.

        Args:
            byte_count: size of the message.
            is_last: True if no other message waits.
        """
        if self._pace.is_running:
            now = trio.current_time()
            if is_last:
                self._pace.stop(byte_count, now)
            else:
                self._pace.advance(byte_count, now)
        self.wake()


class AsgiWebSocket(WebSocket):
    """A websocket whose frames the ASGI host parses.

    Args:
        exchange: the exchange that accepts the websocket.
        budget: counts the bytes of messages.
        limits: limits of the app.
        tally: counters of the app.

    Attributes:
        is_closed: True once the handler or this class has closed the websocket.
        unsent_bytes: bytes of messages that wait for the host.
    """

    def __init__(
        self, exchange: AsgiWebSocketExchange, budget: BodyBudget, limits: FrontendLimits, tally: Tally
    ) -> None:
        self.draining = exchange.draining
        self.is_closed = False
        self.unsent_bytes = 0
        self._exchange = exchange
        self._limits = limits
        self._tally = tally
        self._unread = UnreadMessages(budget, limits)
        self._outgoing: deque[tuple[Message, int]] = deque()
        self._is_passing = False  # True while the host's `send` runs.
        self._has_left = False
        self._is_released = False
        self._responses_running = 0
        self._message_at = trio.current_time()  # The time of the last message in either direction.
        tally.websockets_open += 1
        tally.websockets_total += 1

    @property
    def has_unsent(self) -> bool:
        return bool(self._outgoing) or self._is_passing

    # --- methods for the handler ---

    async def receive(self) -> str | bytes:
        self._unread.release_received()
        while True:
            with trio.CancelScope(deadline=self._idle_at):
                while True:
                    await self._check_open()
                    if self._unread:
                        return self._unread.take()
                    await self._exchange.wait_for_change()
            if trio.current_time() >= self._idle_at:
                reason = f"no message for {self._limits.websocket_idle_seconds_max:g} seconds"
                self._break_off(Broken(reason, close_code=GOING_AWAY, refusal=ConnectionRefusal.WEBSOCKET_IDLE))

    @property
    def _idle_at(self) -> float:
        """The time at which the websocket ends because it is idle. It moves while a response runs."""
        now = trio.current_time()
        return (now if self._responses_running else self._message_at) + self._limits.websocket_idle_seconds_max

    def take_slot(self) -> Callable[[], None]:
        self._responses_running += 1

        def end() -> None:
            self._responses_running -= 1
            self._message_at = trio.current_time()

        return end

    async def send(self, message: str | bytes) -> None:
        while True:
            await self._check_open()
            if self.unsent_bytes <= self._limits.stream_buffer_bytes_max:
                break
            await self._exchange.wait_for_host()
        is_text = isinstance(message, str)
        byte_count = len(message.encode("utf-8")) if isinstance(message, str) else len(message)
        self.push({"type": "websocket.send", "text" if is_text else "bytes": message}, byte_count)
        self._message_at = trio.current_time()
        self._tally.websocket_messages_sent_total += 1
        self._tally.websocket_bytes_sent_total += byte_count
        await trio.lowlevel.checkpoint()
        while self.unsent_bytes > self._limits.stream_buffer_bytes_max:
            await self._exchange.wait_for_host()

    async def close(self, code: int = 1000, reason: str = "") -> None:
        self._push_close(code, reason)
        while self.has_unsent and not self._has_left:
            await self._exchange.wait_for_host()

    def release(self) -> None:
        if self._is_released:
            return
        self._is_released = True
        self._push_close(GOING_AWAY, "the server is shutting down")
        self._unread.release()
        self._tally.websockets_open -= 1

    # --- methods for the exchange ---

    def arrived(self, message: str | bytes) -> None:
        """Keep a message of the client for the handler."""
        if self.is_closed:
            return
        byte_count = len(message.encode("utf-8")) if isinstance(message, str) else len(message)
        self._message_at = trio.current_time()
        self._tally.websocket_messages_received_total += 1
        self._tally.websocket_bytes_received_total += byte_count
        try:
            if byte_count > self._limits.websocket_message_bytes_max:
                raise Broken(
                    f"a message has more than {self._limits.websocket_message_bytes_max} bytes",
                    close_code=TOO_BIG,
                    refusal=ConnectionRefusal.MESSAGE_TOO_LARGE,
                )
            self._unread.hold(byte_count)
            self._unread.add(message, byte_count)
        except Broken as error:
            self._break_off(error)
        self._exchange.wake()

    def leave(self) -> None:
        """Stop sending, because the client has left after the handler had closed the websocket."""
        self._has_left = True
        self._exchange.wake()

    def push(self, message: Message, byte_count: int) -> None:
        self._outgoing.append((message, byte_count))
        self.unsent_bytes += byte_count
        self._exchange.wake()

    async def forward(self, send: Send) -> None:
        """Pass messages to the host until the close message.

        Args:
            send: ASGI's `send`.
        """
        while True:
            while not self._outgoing:
                await self._exchange.wait_for_change()
            message, byte_count = self._outgoing.popleft()
            self._is_passing = True
            await send(message)
            self._is_passing = False
            self.unsent_bytes -= byte_count
            self._exchange.note_taken(byte_count, is_last=not self._outgoing)
            if message["type"] == "websocket.close":
                return

    # --- helpers ---

    def _push_close(self, code: int, reason: str) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.push({"type": "websocket.close", "code": code, "reason": reason}, 0)

    def _break_off(self, error: Broken) -> None:
        self._tally.connections_refused_total[error.refusal] += 1
        self._push_close(error.close_code, str(error))
        self._exchange.response.finished = True
        self._exchange.scope.cancel()

    async def _check_open(self) -> None:
        if self.is_closed:
            self._exchange.scope.cancel()
        await trio.lowlevel.checkpoint_if_cancelled()
