"""A websocket whose frames this server parses: over an HTTP/1.1 connection, or over one stream of HTTP/2."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Protocol

import trio

from trioserve.http.connection_setup import TIMER_SECONDS, ConnectionSetup
from trioserve.http.counters import ConnectionRefusal
from trioserve.http.exchange import WebSocket
from trioserve.http.websocket_messages import Broken, MessageReader, UnreadMessages

__all__ = ["FramedWebSocket", "WebSocketWire"]

logger = logging.getLogger(__name__)

GOING_AWAY, POLICY, FAILED = 1001, 1008, 1011
CLOSE_CODES = frozenset({1000, 1001, 1002, 1003, *range(1007, 1015), *range(3000, 5000)})
# With fewer unsent bytes, `send` does not let other tasks run. After each small event, that would cost as much as the
# event.
UNSCHEDULED_BYTES_MAX = 4096


class WebSocketWire(Protocol):
    """The bytes of one websocket on their way to the client. Only `wait_for_client` waits."""

    @property
    def unsent_bytes(self) -> int: ...

    sent_bytes_total: int
    """Bytes that the connection has taken so far."""

    def push(self, data: bytes | bytearray) -> None:
        """Send bytes as soon as possible. Bytes for a client that has left are dropped.

        Args:
            data: bytes to send.
        """

    async def wait_for_client(self) -> None:
        """Wait until the number of unsent bytes becomes smaller. If the client is too slow, the connection cancels the
        handler's scope instead.
        """


class FramedWebSocket(WebSocket):
    """A websocket whose frames this server parses. The exchange creates it.

    Args:
        wire: sends bytes.
        scope: the scope of the handler.
        setup: objects that all connections of the server share.
        nursery: the nursery of the connection.
        is_known: True if the caller has shown an API key, or the server requires none.
        peer: the client's address, shown in the log.

    Attributes:
        is_closed: True once this server has sent a close frame, or the client has left.
        is_over: True once nothing more is read: the client has left, or the websocket was broken off.
    """

    def __init__(
        self,
        wire: WebSocketWire,
        scope: trio.CancelScope,
        setup: ConnectionSetup,
        nursery: trio.Nursery,
        *,
        is_known: bool,
        peer: str,
    ) -> None:
        now, limits = trio.current_time(), setup.limits
        self.draining = trio.Event()
        self._wire = wire
        self._scope = scope
        self._limits = limits
        self._tally = setup.tally
        self._slots = setup.slots
        self._timer = setup.websocket_timer
        self._is_known = is_known
        self._peer = peer
        self._unread = UnreadMessages(setup.body_budget, limits)
        self._reader = MessageReader(self._unread, limits, now=now)
        self.is_closed = False
        self.is_over = False
        self._is_released = False
        self._changed: trio.Event | None = None
        self._received_at = now  # The time at which the client's last bytes arrived.
        self._message_at = now  # The time of the last message in either direction.
        self._responses_running = 0
        self._ping_at: float | None = None  # The time of the unanswered ping, or of the last progress after it.
        self._ping_sent_bytes = 0
        setup.slots.open_websocket(is_known=is_known)
        setup.websocket_timer.add(self, self._next_check_at(), nursery)

    # --- methods for the handler ---

    async def receive(self) -> str | bytes:
        self._unread.release_received()
        while True:
            await self._check_open()
            if self._unread:
                return self._unread.take()
            await self._wait_for_change()

    async def send(self, message: str | bytes) -> None:
        wire, unsent_bytes_max = self._wire, self._limits.stream_buffer_bytes_max
        while True:
            await self._check_open()
            if wire.unsent_bytes <= unsent_bytes_max:
                break
            await wire.wait_for_client()
        frame = self._reader.message_frame(message)
        self._push(frame)
        self._message_at = trio.current_time()
        self._tally.websocket_messages_sent_total += 1
        if len(frame) < UNSCHEDULED_BYTES_MAX and wire.unsent_bytes < UNSCHEDULED_BYTES_MAX:
            await trio.lowlevel.checkpoint_if_cancelled()
            return
        await trio.lowlevel.checkpoint()
        while wire.unsent_bytes > unsent_bytes_max:
            await wire.wait_for_client()

    async def close(self, code: int = 1000, reason: str = "") -> None:
        if code not in CLOSE_CODES:
            raise ValueError(f"the close code is {code}, allowed is 1000 to 1003, 1007 to 1014, and 3000 to 4999")
        self._send_close(code, reason)
        while self._wire.unsent_bytes and not self.is_over:
            await self._wire.wait_for_client()
        with trio.move_on_after(self._limits.close_seconds_max):
            while not (self._reader.closed_by_client or self.is_over):
                await self._wait_for_change()
        self.is_over = True
        self._notify_change()

    def take_slot(self) -> Callable[[], None]:
        release_slot = self._slots.take_for_response(is_known=self._is_known)
        self._responses_running += 1

        def end() -> None:
            release_slot()
            self._responses_running -= 1
            self._message_at = trio.current_time()
            self._timer.check_by(self, self._next_check_at())

        return end

    def release(self) -> None:
        if self._is_released:
            return
        self._is_released = True
        if not self.is_over:
            self._send_close(GOING_AWAY, "the server is shutting down")
        self.is_over = True
        self._timer.remove(self)
        self._unread.release()
        self._slots.close_websocket(is_known=self._is_known)

    # --- methods for the connection ---

    def feed(self, data: bytes | bytearray) -> None:
        """Keep bytes of the client. Call `parse` after this method.

        Args:
            data: the next bytes.
        """
        if self.is_over:
            return
        self._received_at = trio.current_time()
        if self._ping_at is not None:
            self._ping_at = None
            self._timer.check_by(self, self._next_check_at())
        self._tally.websocket_bytes_received_total += len(data)
        self._reader.feed(data)

    def parse(self) -> bool:
        """Read a limited number of frames, and wake the handler.

        Returns:
            True if there may be more whole frames. Then let other tasks run, and call this method again.
        """
        if self.is_over:
            return False
        reader = self._reader
        message_count = reader.message_count
        may_have_more = False
        broken: Broken | None = None
        try:
            may_have_more = reader.parse(self._received_at)
        except Broken as error:
            broken = error
        if reader.replies:
            self._push(reader.replies)
            reader.replies = bytearray()
        if reader.message_count != message_count:
            self._message_at = self._received_at
            self._tally.websocket_messages_received_total += reader.message_count - message_count
        if broken is not None:
            self._break_off(broken)
        elif reader.pace is not None:
            self._timer.check_by(self, reader.pace.deadline)
        if reader.closed_by_client and not self.is_over:
            self.is_over = True
            if not self.is_closed:
                self._tally.exchanges_left_total += 1
                self._end()
        self._notify_change()
        return may_have_more

    def leave(self) -> bool:
        """Stop reading, because the client has left without a close frame. Cancel the handler, unless it has closed the
        websocket.

        Returns:
            True if the handler has closed the websocket.
        """
        self.is_over = True
        if self.is_closed:
            self._notify_change()
            return True
        self._end()
        return False

    def check(self, now: float) -> float:
        """Ping a silent client, and end the websocket if its client does not answer, is idle, or is too slow to send a
        message. The timer calls this method.

        Args:
            now: current time, in Trio's seconds.

        Returns:
            The time of the next check.
        """
        if not self.is_closed:
            self._check_times(now)
        return self._next_check_at()

    # --- helpers ---

    @property
    def _idle_at(self) -> float:
        """The time at which the websocket ends because it is idle."""
        return math.inf if self._responses_running else self._message_at + self._limits.websocket_idle_seconds_max

    def _next_check_at(self) -> float:
        if self.is_closed:
            return math.inf  # The call of `close` has its own time limit.
        limits, pace = self._limits, self._reader.pace
        if self._ping_at is None:
            alive_until = self._received_at + limits.websocket_ping_seconds
        else:
            alive_until = self._ping_at + limits.websocket_pong_seconds_max
        return min(
            alive_until,
            self._idle_at,
            math.inf if pace is None else pace.deadline,
        )

    def _check_times(self, now: float) -> None:
        limits, reader = self._limits, self._reader
        if reader.pace is not None and now >= reader.pace.deadline:
            reason = (
                f"a message did not arrive in time: it may fall behind {limits.body_bytes_per_second_min} bytes per "
                f"second by at most {limits.body_wait_seconds_max:g} seconds"
            )
            self._break_off(Broken(reason, close_code=POLICY, refusal=ConnectionRefusal.BODY_TIMEOUT))
        elif now >= self._idle_at:
            reason = f"no message for {limits.websocket_idle_seconds_max:g} seconds"
            self._break_off(Broken(reason, close_code=GOING_AWAY, refusal=ConnectionRefusal.WEBSOCKET_IDLE))
        elif self._ping_at is None:
            # The ping may be a little early, so that each ping needs one check.
            if now >= self._received_at + limits.websocket_ping_seconds - TIMER_SECONDS:
                self._ping_at = now
                self._push(reader.ping_frame())
                self._ping_sent_bytes = self._wire.sent_bytes_total
        elif now >= self._ping_at + limits.websocket_pong_seconds_max:
            if self._wire.unsent_bytes and self._wire.sent_bytes_total > self._ping_sent_bytes:
                # The client still reads earlier bytes. ResponsePace bounds the time for them.
                self._ping_at, self._ping_sent_bytes = now, self._wire.sent_bytes_total
            else:
                reason = f"no reply to a ping for {limits.websocket_pong_seconds_max:g} seconds"
                self._break_off(Broken(reason, close_code=FAILED, refusal=ConnectionRefusal.PING_UNANSWERED))

    def _break_off(self, error: Broken) -> None:
        """Send a close frame, read nothing more, and cancel the handler."""
        self._tally.connections_refused_total[error.refusal] += 1
        logger.info("websocket ended peer=%s reason=%s", self._peer, error)
        self._send_close(error.close_code, str(error))
        self.is_over = True
        self._end()

    def _send_close(self, code: int, reason: str) -> None:
        self.is_closed = True
        self._push(self._reader.close_frame(code, reason))

    def _push(self, data: bytes | bytearray) -> None:
        if data:
            self._tally.websocket_bytes_sent_total += len(data)
            self._wire.push(data)

    def _end(self) -> None:
        self.is_closed = True
        self._scope.cancel()
        self._notify_change()

    async def _check_open(self) -> None:
        """Check for cancellation. Cancel the handler's scope if it has closed the websocket itself."""
        if self.is_closed:
            self._scope.cancel()
        await trio.lowlevel.checkpoint_if_cancelled()

    async def _wait_for_change(self) -> None:
        if self._changed is None:
            self._changed = trio.Event()
        await self._changed.wait()

    def _notify_change(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None
