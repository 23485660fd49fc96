"""The I/O of one HTTP/1.1 connection: tasks, deadlines, and cancellation. H1Protocol parses and encodes the bytes.

A connection runs one request at a time. The reader task keeps reading during a response. So it notices at once that the
client closed the connection, even if the client has already sent another request. The reader pauses only while a
handler neither reads a long body nor starts a response.

A client that closes its sending half counts as a client that left. The server cannot distinguish these two cases, and
must not compute a response for minutes if the client left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from trioserve.http.body_budget import BodyShare
from trioserve.http.connection_setup import RETRY_SECONDS, TOO_MANY, ConnectionSetup, break_off, close_after, close_now
from trioserve.http.counters import ConnectionRefusal, StreamRefusal
from trioserve.http.exchange import HeaderFields, RequestHead, WebSocket, encode_fields
from trioserve.http.handler_call import JSON_FIELDS, call_handler, refusal_body
from trioserve.http.http1.exchange import H11Exchange, H11WebSocketWire
from trioserve.http.http1.protocol import BadHead, EncodedFields, H1Protocol
from trioserve.http.pace import ResponsePace
from trioserve.http.websocket_messages import handshake_fault, upgrade_fields
from trioserve.trio_tools.tcp_stream import SendsAtOnce

if TYPE_CHECKING:
    from trioserve.http.framed_websocket import FramedWebSocket

__all__ = ["H11Connection"]

logger = logging.getLogger(__name__)

READ_BYTES = 65536
# One write has at most this number of bytes. After each write, the client gets more time to read the next one.
WRITE_BYTES = 65536
UNSCHEDULED_BYTES_MAX = 4096  # A write up to this size does not let other tasks run.


class H11Connection:
    """One client's connection, from its first request to its end.

    Args:
        setup: objects that all connections of the server share.
        transport: the stream to the client, after the TLS handshake if there is one.
        peer: the client's address, shown in the log and to handlers.
        received: bytes that have already been read from the transport.

    Attributes:
        on_known: called when a request shows an API key. None: such connections are not counted.
        protocol, write_count: see ExchangeOwner.
    """

    def __init__(self, setup: ConnectionSetup, transport: trio.abc.Stream, *, peer: str, received: bytes) -> None:
        self._setup = setup
        self._limits = setup.limits
        self._tally = setup.tally
        self._transport = transport
        self._peer = peer
        self.protocol = H1Protocol(
            peer=peer,
            head_bytes_max=setup.limits.head_bytes_max,
            fields_max=setup.limits.fields_max,
            received=received,
        )
        # The event is set when bytes arrive or are read, and when the server drains.
        self._changed: trio.Event | None = None
        self._scope = trio.CancelScope()  # The scope contains the reader task and the task that serves requests.
        self._exchange: H11Exchange | None = None
        self.on_known: Callable[[], None] | None = None
        self._responded_at = trio.current_time()  # The time at which the last response ended.
        self._head_began_at = self._responded_at
        self._exchange_began_at = self._responded_at
        self._sends_at_once = transport if isinstance(transport, SendsAtOnce) else None
        self._writing_bytes = 0
        self.write_count = 0
        self._nursery: trio.Nursery | None = None
        self._inserted: trio.Event | None = None  # The event is set when the current call of `insert` ends.
        self._pace = ResponsePace(setup.limits, now=self._responded_at)  # All writes of the connection share this pace.
        self._is_known = True  # True if the caller has shown an API key, or if the server requires none.
        self._is_body_unfinished = False  # True if the server drains while the handler waits for bytes of the body.
        self._is_late = False  # True if the current request began after the drain was announced.
        # If True, the connection ends after the current response, and does not wait for a missing body.
        self._is_last = False
        self._is_leaving = False  # If True, the connection waits for no more bytes of any request.
        self._client_gone = False
        self._lingers = True  # If True, the connection waits at its end until the client has read the last response.
        # If True, a part of a response may have been sent, and no other response can follow.
        self._write_broken = False
        self._websocket: FramedWebSocket | None = None  # A websocket owns the connection until its end.
        self._wire: H11WebSocketWire | None = None
        self._websocket_caller: str | None = None  # See ExchangeSlots.

    # --- methods for the server ---

    async def serve(self) -> None:
        """Serve requests until the connection ends. Raises only for faults of the server itself."""
        try:
            with self._scope:
                async with trio.open_nursery() as self._nursery:
                    self._nursery.start_soon(self._read)
                    is_open = True
                    while is_open:
                        head = await self._next_request()
                        is_open = head is not None and await self._respond(head)
                        is_open = is_open and not self._is_last and self.protocol.next_cycle()
                    self._scope.cancel()
        except BaseException:
            await self._close(wait=False)
            raise
        await self._close(wait=True)

    def may_end_at(self) -> float | None:
        """Return the time from which this connection may be closed to accept another connection, or None while it is in
        use.
        """
        limits = self._limits
        if self._exchange is not None:
            if self._is_known or self._setup.slots.treats_callers_equally:
                return None
            return self._exchange_began_at + limits.crowded_exchange_seconds_min
        if self._is_leaving:
            return None
        if self.protocol.request_begun:
            return self._head_began_at + limits.crowded_head_seconds_min
        return self._responded_at + limits.crowded_idle_seconds_min

    def unsent(self) -> tuple[int, int]:
        """Return the number of bytes that wait for the client, and the number of responses to which they belong."""
        byte_count = self._writing_bytes if self._wire is None else self._wire.unsent_bytes
        return byte_count, int(byte_count > 0)

    def announce_drain(self) -> None:
        """Answer the current or else the next request with `Connection: close`, and end the connection after that.
        Never waits.

        If a part of the request body is missing when the handler needs it, the request is refused (503).
        """
        self._is_last = True
        if self._websocket is not None:
            self._websocket.draining.set()
        self._notify_change()

    def drain(self) -> None:
        """Drain as after `announce_drain`. Also end an idle connection, and refuse a request whose head is incomplete.
        Never waits.
        """
        self._is_last = self._is_leaving = True
        if self._exchange is None and not self.protocol.request_begun:
            self._scope.cancel()
        if self._websocket is not None:
            self._websocket.draining.set()
        self._notify_change()

    def make_room(self) -> None:
        """End the connection to accept another connection. Does not wait until the client closes."""
        self._lingers = False
        self._is_last = self._is_leaving = True
        self._scope.cancel()

    # --- methods for the exchange ---

    def arrived_body(self) -> bytes | None:
        body = self.protocol.arrived_body()
        if self._changed is not None:
            self._notify_change()
        return body

    async def next_body_piece(self) -> bytes | None:
        if self.protocol.wants_continue:
            await self.write(self.protocol.continue_response())
        while True:
            piece = self.protocol.next_body_piece()
            self._notify_change()
            if piece != b"":
                # Reading many small pieces takes long, so other tasks must run in between.
                await trio.lowlevel.checkpoint()
                return piece
            assert self._exchange is not None
            self._exchange.share.check_size(self.protocol.announced_body_bytes)
            if not await self._wait_for_bytes():
                self._is_body_unfinished = True
                self._exchange.scope.cancel()
                await trio.sleep_forever()  # The cancelled scope makes this call raise Cancelled.

    def response_starts(self) -> bool:
        self.protocol.drop_body()
        self._notify_change()
        return self.protocol.request_ended and not self._is_last

    def body_too_slow(self) -> None:
        self._tally.connections_refused_total[ConnectionRefusal.BODY_TIMEOUT] += 1
        logger.debug("request body too slow peer=%s", self._peer)

    def unix_seconds(self) -> int:
        return self._setup.clock_and_ids.unix_seconds()

    async def write(self, data: bytes, *, is_inserted: bool = False) -> None:
        # This is one method for all writes, because Python re-enters each frame above a wait for every event.
        if not is_inserted:
            self.write_count += 1
            while self._inserted is not None:
                await self._inserted.wait()
        if not data or self._client_gone or self._write_broken:
            await trio.lowlevel.checkpoint()
            return
        self._write_broken = True  # The value is True until this write is complete.
        try:
            if self._sends_at_once is not None and len(data) <= UNSCHEDULED_BYTES_MAX:
                data = data[self._sends_at_once.try_send(data) :]
                if not data:
                    # Letting other tasks run after each small event would cost as much as the event.
                    self._write_broken = False
                    await trio.lowlevel.checkpoint_if_cancelled()
                    return
            for start in range(0, len(data), WRITE_BYTES):
                self._writing_bytes = len(data) - start
                piece = data[start : start + WRITE_BYTES]
                with trio.CancelScope(deadline=self._pace.start(trio.current_time())) as timeout:
                    await self._transport.send_all(piece)
                if timeout.cancelled_caught:
                    self.stalled(reads_some=self._pace.saw_progress)
                    await trio.lowlevel.checkpoint()
                    return
                if start + WRITE_BYTES < len(data):
                    self._pace.advance(len(piece), trio.current_time())
                else:
                    self._pace.stop(len(piece), trio.current_time())
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.client_left()
            await trio.lowlevel.checkpoint()
        self._write_broken = False
        self._writing_bytes = 0

    def insert(self, data: bytes) -> None:
        if self._client_gone or self._write_broken or self._inserted is not None or self._nursery is None:
            return
        self._inserted = trio.Event()
        self._nursery.start_soon(self._insert, data, self._inserted)

    async def _insert(self, data: bytes, inserted: trio.Event) -> None:
        try:
            await self.write(data, is_inserted=True)
        finally:
            self._inserted = None
            inserted.set()

    async def switch_to_websocket(self, exchange: H11Exchange, fields: EncodedFields) -> WebSocket:
        # The first websocket loads wsproto.
        from trioserve.http.framed_websocket import FramedWebSocket

        assert self._nursery is not None
        setup = self._setup
        await trio.lowlevel.checkpoint()
        while self._inserted is not None:
            await self._inserted.wait()
        head, following = self.protocol.switch_protocols(fields)
        self._is_last = True
        self._wire = H11WebSocketWire(self, self._transport, self._nursery, self._pace)
        self._websocket = FramedWebSocket(
            self._wire, exchange.scope, setup, self._nursery, is_known=self._is_known, peer=self._peer
        )
        exchange.response.accept(self._websocket)
        if setup.slots.is_draining:
            self._websocket.draining.set()
        self._wire.push(head)
        self._websocket.feed(following)
        self._nursery.start_soon(self._parse_frames, self._websocket)
        self._notify_change()
        return self._websocket

    async def _parse_frames(self, websocket: FramedWebSocket) -> None:
        while websocket.parse():
            await trio.lowlevel.checkpoint()

    def client_left(self) -> None:
        self._client_gone = True
        if self._websocket is not None and self._websocket.leave():
            return  # The handler has closed the websocket, and may return.
        if self._exchange is not None:
            self._tally.exchanges_left_total += 1
        self._scope.cancel()

    def stalled(self, *, reads_some: bool) -> None:
        self._tally.exchanges_stalled_total += self._exchange is not None
        reason = ConnectionRefusal.SLOW_READER if reads_some else ConnectionRefusal.STALLED
        self._tally.connections_refused_total[reason] += 1
        logger.info("client reads %s, connection ended peer=%s", "too little" if reads_some else "nothing", self._peer)
        self._scope.cancel()

    # --- reading ---

    async def _read(self) -> None:
        while True:
            if self._websocket is not None:
                await self._parse_frames(self._websocket)
                if self._websocket.is_over:
                    return
            elif self.protocol.held_bytes >= self._limits.pipelined_bytes_max:
                if self._exchange is not None and self.protocol.request_ended:
                    self._tally.connections_refused_total[ConnectionRefusal.SENT_AHEAD] += 1
                    logger.info("connection ended peer=%s reason=too many pipelined bytes", self._peer)
                    self.client_left()
                    return
                await self._wait_for_change()
                continue
            try:
                received = await self._transport.receive_some(READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                received = b""
            if not received:
                self.client_left()
                return
            if self._websocket is not None:
                self._websocket.feed(received)
                continue
            self.protocol.receive(received)
            if self._exchange is not None and self._exchange.started:
                self.protocol.drop_body()
            self._notify_change()

    async def _wait_for_bytes(self) -> bool:
        """Wait for more bytes of a request. Return False if the server drains and does not wait for these bytes."""
        while not self.protocol.held_bytes:
            if self._is_leaving or (self._is_last and self._exchange is not None):
                return False
            await self._wait_for_change()
        return True

    # --- serving requests ---

    async def _next_request(self) -> RequestHead | None:
        """Wait for the head of the next request.

        Returns:
            The head, or None if the connection must end. If the client had begun a request, an error response has been
            sent.
        """
        protocol = self.protocol
        self._is_body_unfinished = False
        timeout = trio.CancelScope(deadline=trio.current_time() + self._limits.idle_seconds_max)
        with timeout:
            try:
                while not protocol.request_begun:
                    await self._wait_for_change()
                self._head_began_at = trio.current_time()
                head = protocol.next_request()
                if self._changed is not None:
                    self._notify_change()
                if head is None:
                    timeout.deadline = trio.current_time() + self._limits.head_seconds_max
                while head is None:
                    if not await self._wait_for_bytes():
                        await self._refuse_unfinished()
                        return None
                    head = protocol.next_request()
                    self._notify_change()
            except BadHead as error:
                refusal = ConnectionRefusal.HEAD_TOO_LARGE if error.status == 431 else ConnectionRefusal.MALFORMED
                self._tally.connections_refused_total[refusal] += 1
                await self._refuse(error.status, str(error))
                return None
            refused = self._refused(head)
            if refused is not None:
                status, message, fields = refused
                await self._refuse(status, message, fields)
                return None
            protocol.begin_body(head)
            return head
        if protocol.request_begun:
            self._tally.connections_refused_total[ConnectionRefusal.HEAD_TIMEOUT] += 1
            await self._refuse(408, f"the request did not arrive within {self._limits.head_seconds_max} seconds")
        return None

    def _refused(self, head: RequestHead) -> tuple[int, str, HeaderFields] | None:
        """Return status, message and header fields of an error response if this request must not reach a handler, or
        None.
        """
        if head.http_version not in ("1.0", "1.1"):
            return 505, f"the request has HTTP/{head.http_version}, supported are 1.0, 1.1 and 2", ()
        if head.method == "CONNECT":
            return 405, "this server is not a proxy", ()
        headers = head.headers
        has_length = headers.get("content-length") is not None
        if headers.get("transfer-encoding") is not None and (has_length or head.http_version == "1.0"):
            # A proxy may use the other length and read the rest of the body as a request (smuggling, RFC 9112, 6.1).
            self._tally.connections_refused_total[ConnectionRefusal.MALFORMED] += 1
            return 400, "the request gives two body lengths: send either transfer-encoding or content-length", ()
        if head.is_websocket and (fault := handshake_fault(headers, has_key=True)) is not None:
            return fault
        slots = self._setup.slots
        if slots.knows_caller is not None:
            self._is_known = slots.knows_caller(headers)
            if self._is_known and self.on_known is not None:
                self.on_known()
        self._websocket_caller = slots.websocket_caller(head, is_known=self._is_known) if head.is_websocket else None
        refusal = slots.refusal(is_known=self._is_known, websocket_caller=self._websocket_caller)
        if refusal is not None:
            self._tally.streams_refused_total[refusal] += 1
            return *TOO_MANY[refusal], (("retry-after", str(RETRY_SECONDS)), ("x-trioserve-reason", refusal.value))
        return None

    async def _respond(self, head: RequestHead) -> bool:
        """Run the handler. Return True if the response is complete and another request may follow."""
        tally = self._tally
        slots = self._setup.slots
        slots.take(is_known=self._is_known, websocket_caller=self._websocket_caller)
        self._is_late = slots.is_draining
        exchange = H11Exchange(self, head, BodyShare(self._setup.body_budget), self._limits)
        self._exchange = exchange
        self._exchange_began_at = trio.current_time()
        try:
            with exchange.scope:
                if not await call_handler(self._setup.handler, exchange, exchange.response):
                    tally.exchanges_failed_total += 1
            if self._wire is not None:
                await self._send_last_frames(self._wire)
        finally:
            if self._websocket is not None:
                self._websocket.release()
            self._exchange = None
            self._responded_at = trio.current_time()
            exchange.share.release()
            slots.release(is_known=self._is_known, is_late=self._is_late, websocket_caller=self._websocket_caller)
            if self._wire is not None:
                self._write_broken = self._wire.is_broken
            elif exchange.started and not exchange.response.finished:
                self._write_broken = True
        if self._is_body_unfinished and not exchange.started:
            await self._refuse_unfinished()
        return exchange.response.finished and not self._write_broken

    async def _send_last_frames(self, wire: H11WebSocketWire) -> None:
        """Wait until the client has the last frames of a websocket, at most close_seconds_max."""
        with trio.move_on_after(self._limits.close_seconds_max):
            while wire.unsent_bytes and not self._client_gone:
                await wire.wait_for_client()

    async def _refuse(self, status: int, message: str, fields: HeaderFields = ()) -> None:
        if not self.protocol.can_refuse:
            return
        body = refusal_body(status, message)
        encoded = encode_fields([*JSON_FIELDS, *fields], unix_seconds=self.unix_seconds(), content_length=len(body))
        encoded += [*upgrade_fields(status), (b"connection", b"close")]
        await self.write(self.protocol.respond(status, encoded, body, is_ordinary=False))

    async def _refuse_unfinished(self) -> None:
        """Refuse an incomplete request, because the server drains."""
        self._tally.streams_refused_total[StreamRefusal.DRAINING] += 1
        fields = (("retry-after", "1"), ("x-trioserve-reason", StreamRefusal.DRAINING.value))
        with trio.move_on_after(self._limits.close_seconds_max):  # The error response must not delay the shutdown.
            message = "the server is shutting down: send the request again, or to another server"
            await self._refuse(503, message, fields)

    # --- ending ---

    async def _close(self, *, wait: bool) -> None:
        seconds_max = self._limits.close_seconds_max
        final_bytes = b"" if self._wire is None else self._wire.pop_unsent()
        if self._write_broken:
            await break_off(self._transport)
        elif wait and self._lingers and not self._client_gone:
            more_expected = self.protocol.held_bytes > 0 or not self.protocol.request_ended
            await close_after(self._transport, final_bytes, seconds_max=seconds_max, more_expected=more_expected)
        else:
            await close_now(self._transport, final_bytes, seconds_max=seconds_max)

    # --- the reader and the task that serves requests wait for each other ---

    async def _wait_for_change(self) -> None:
        if self._changed is None:
            self._changed = trio.Event()
        await self._changed.wait()

    def _notify_change(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None
