"""One HTTP/1.1 connection, with the same promises as HTTP/2: one request at a time, and a reader that never stops.
What bytes mean is H1Protocol's; here is when they are read and written, and for how long anybody waits.

The reader goes on while a response is under way, so that a close is noticed at once, even behind a pipelined request.
It stops only while a handler leaves a long body unread and has not begun to answer. A client that ends its sending half
has left: there is no telling it from one that closed, and a response that takes minutes must not be computed for
nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from trioserve.http.body_budget import BodyShare
from trioserve.http.closing import break_off, close_after, close_now
from trioserve.http.connection_setup import ConnectionSetup
from trioserve.http.counters import ConnectionRefusal, StreamRefusal
from trioserve.http.exchange import HeaderFields
from trioserve.http.handler_call import call_handler
from trioserve.http.http1.exchange import H11Exchange
from trioserve.http.http1.protocol import BadHead, H1Protocol
from trioserve.http.message_head import RequestHead, encode_fields
from trioserve.http.refusals import JSON_FIELDS, refusal_body
from trioserve.http.response_pace import ResponsePace
from trioserve.trio_tools.tcp_stream import TcpStream

__all__ = ["H11Connection"]

logger = logging.getLogger(__name__)

READ_BYTES = 65536
WRITE_BYTES = 65536  # what has to leave within one stall limit
TOO_MANY = {
    StreamRefusal.EXCHANGES_MAX: "too many requests are under way: try again shortly",
    StreamRefusal.UNKNOWN_CALLERS: "too many requests without a key are under way: send a key, or try again shortly",
}
TURN_BYTES = 4096  # so much at most goes out without a turn for the others


def _nothing() -> None:
    pass


class H11Connection:
    """One client's connection, from its first request to its end.

    received: what was read from the transport already.
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
        self._changed: trio.Event | None = None  # of what has arrived
        self._whole = trio.CancelScope()  # reader and conversation
        self._exchange: H11Exchange | None = None
        self.on_known: Callable[[], None] = _nothing  # called when a request shows a key
        self._responded_at = trio.current_time()  # the last request
        self._head_began_at = self._responded_at  # of this request
        self._exchange_began_at = self._responded_at
        self._tcp = transport if isinstance(transport, TcpStream) else None
        self._writing_bytes = 0
        self.write_count = 0
        self._nursery: trio.Nursery | None = None
        self._inserted: trio.Event | None = None  # set when a write between two others is over
        self._pace = ResponsePace(setup.limits, now=self._responded_at)  # of all that is written
        self._is_known = True  # the caller of this request
        self._is_turned_away = False  # its handler waited for the rest of it when the server left
        self._is_late = False  # this request began after the drain was announced
        self._is_last = False  # the connection ends behind this response, and bodies are not waited for
        self._is_leaving = False  # nothing is waited for any more
        self._client_gone = False
        self._lingers = True  # until the client has read the end of the last response
        self._write_broken = False  # a part of a response may be out: nothing can follow it

    # --- for the server ---

    async def serve(self) -> None:
        """Returns when the connection has ended and nothing of it is left. Raises only for faults of our own."""
        try:
            with self._whole:
                async with trio.open_nursery() as self._nursery:
                    self._nursery.start_soon(self._read)
                    await self._converse()
                    self._whole.cancel()
        except BaseException:
            await self._close(wait=False)
            raise
        await self._close(wait=True)

    def may_end_at(self) -> float | None:
        """From when on this connection may have to end for another one; None while it is in use."""
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
        """How many bytes wait here for the client, and in how many responses."""
        return self._writing_bytes, int(self._writing_bytes > 0)

    def announce_drain(self) -> None:
        """Answer this request, or the next one, with `Connection: close`, and end behind it. Never waits.

        The body of a request is not waited for: unless it has come whole, the request is refused (503).
        """
        self._is_last = True
        self._tell_change()

    def drain(self) -> None:
        """As announce_drain, but an idle connection ends at once, and half a head is refused, too."""
        self._is_last = self._is_leaving = True
        if self._exchange is None and not self.protocol.request_begun:
            self._whole.cancel()
        self._tell_change()

    def make_room(self) -> None:
        """End a connection whose place is needed, without waiting for the client to close, too."""
        self._lingers = False
        self._is_last = self._is_leaving = True
        self._whole.cancel()

    # --- for the exchange ---

    def body_at_hand(self) -> bytes | None:
        body = self.protocol.body_at_hand()
        self._tell_change()
        return body

    async def next_body_piece(self) -> bytes | None:
        if self.protocol.wants_continue:
            await self.write(self.protocol.continue_response())
        while True:
            piece = self.protocol.next_body_piece()
            self._tell_change()
            if piece != b"":
                await trio.lowlevel.checkpoint()  # a body in crumbs is work for each of them: the others have a turn
                return piece
            assert self._exchange is not None
            self._exchange.share.check_size(self.protocol.announced_body_bytes)
            if not await self._more():
                self._is_turned_away = True
                self._exchange.scope.cancel()
                await trio.sleep_forever()  # raises Cancelled

    def response_starts(self) -> bool:
        self.protocol.drop_body()
        self._tell_change()
        return self.protocol.request_ended and not self._is_last

    def body_too_slow(self) -> None:
        self._tally.connections_refused_total[ConnectionRefusal.BODY_TIMEOUT] += 1
        logger.debug("body given up peer=%s", self._peer)

    def unix_seconds(self) -> int:
        return self._setup.clock_and_ids.unix_seconds()

    async def write(self, data: bytes) -> None:
        self.write_count += 1
        while self._inserted is not None:
            await self._inserted.wait()
        if data and not (self._client_gone or self._write_broken):
            await self._write(data)
        else:
            await trio.lowlevel.checkpoint()

    def insert(self, data: bytes) -> None:
        if self._client_gone or self._write_broken or self._inserted is not None or self._nursery is None:
            return
        self._inserted = trio.Event()
        self._nursery.start_soon(self._insert, data, self._inserted)

    async def _insert(self, data: bytes, inserted: trio.Event) -> None:
        try:
            await self._write(data)
        finally:
            self._inserted = None
            inserted.set()

    async def _write(self, data: bytes) -> None:
        self._write_broken = True  # unless it comes to its end
        try:
            if self._tcp is not None and len(data) <= TURN_BYTES:
                data = data[self._tcp.try_send(data) :]
                if not data:
                    # A turn for the others after each small event would cost as much as the event.
                    self._write_broken = False
                    await trio.lowlevel.checkpoint_if_cancelled()
                    return
            for start in range(0, len(data), WRITE_BYTES):
                self._writing_bytes = len(data) - start
                piece = data[start : start + WRITE_BYTES]
                with trio.CancelScope(deadline=self._pace.run(trio.current_time())) as patience:
                    await self._transport.send_all(piece)
                if patience.cancelled_caught:
                    self._stalled(takes_some=self._pace.saw_progress)
                    await trio.lowlevel.checkpoint()
                    return
                if start + WRITE_BYTES < len(data):
                    self._pace.taken(len(piece), trio.current_time())
                else:
                    self._pace.stop(len(piece), trio.current_time())
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._client_left()
            await trio.lowlevel.checkpoint()
        self._write_broken = False
        self._writing_bytes = 0

    # --- reading ---

    async def _read(self) -> None:
        while True:
            if self.protocol.held_bytes >= self._limits.pipelined_bytes_max:
                if self._exchange is not None and self.protocol.request_ended:
                    self._tally.connections_refused_total[ConnectionRefusal.SENT_AHEAD] += 1
                    logger.info("connection ended peer=%s reason=too much sent ahead", self._peer)
                    self._client_left()
                    return
                await self._change()
                continue
            try:
                received = await self._transport.receive_some(READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                received = b""
            if not received:
                self._client_left()
                return
            self.protocol.receive(received)
            if self._exchange is not None and self._exchange.started:
                self.protocol.drop_body()
            self._tell_change()

    async def _more(self) -> bool:
        """Wait until more of a request has come; False if the server is leaving and does not wait for it."""
        while not self.protocol.held_bytes:
            if self._is_leaving or (self._is_last and self._exchange is not None):
                return False
            await self._change()
        return True

    # --- the conversation ---

    async def _converse(self) -> None:
        while True:
            head = await self._next_request()
            if head is None or not await self._respond(head) or self._is_last or not self.protocol.next_cycle():
                return

    async def _next_request(self) -> RequestHead | None:
        """None when the connection is to end; then the client was told why, if it had begun a request."""
        protocol = self.protocol
        self._is_turned_away = False
        patience = trio.CancelScope(deadline=trio.current_time() + self._limits.idle_seconds_max)
        with patience:
            try:
                while not protocol.request_begun:
                    await self._change()
                self._head_began_at = trio.current_time()
                head = protocol.next_request()
                self._tell_change()
                if head is None:
                    patience.deadline = trio.current_time() + self._limits.head_seconds_max
                while head is None:
                    if not await self._more():
                        await self._turn_away()
                        return None
                    head = protocol.next_request()
                    self._tell_change()
            except BadHead as error:
                refusal = ConnectionRefusal.HEAD_TOO_LARGE if error.status == 431 else ConnectionRefusal.MALFORMED
                self._tally.connections_refused_total[refusal] += 1
                await self._refuse(error.status, str(error))
                return None
            objection = self._objection(head)
            if objection is not None:
                status, message, fields = objection
                await self._refuse(status, message, fields)
                return None
            protocol.begin_body(head)
            return head
        if protocol.request_begun:
            self._tally.connections_refused_total[ConnectionRefusal.HEAD_TIMEOUT] += 1
            await self._refuse(408, f"the request did not arrive within {self._limits.head_seconds_max} seconds")
        return None

    def _objection(self, head: RequestHead) -> tuple[int, str, HeaderFields] | None:
        """Status, message and header fields of the response, if this request is not to reach a handler."""
        if head.http_version not in ("1.0", "1.1"):
            return 505, f"HTTP/{head.http_version} is not spoken here, only 1.0, 1.1 and 2", ()
        if head.method == "CONNECT":
            return 405, "this server is not a proxy", ()
        if "transfer-encoding" in head.headers and ("content-length" in head.headers or head.http_version == "1.0"):
            # Whoever is in between may believe the other one, and take the rest for a request (RFC 9112, 6.1).
            self._tally.connections_refused_total[ConnectionRefusal.MALFORMED] += 1
            return 400, "the length of the body is given twice: send either transfer-encoding or content-length", ()
        self._is_known = self._setup.slots.knows(head.headers)
        if self._is_known:
            self.on_known()
        refusal = self._setup.slots.refusal(is_known=self._is_known)
        if refusal is not None:
            self._tally.streams_refused_total[refusal] += 1
            return 503, TOO_MANY[refusal], (("retry-after", "1"), ("x-trioserve-reason", refusal.value))
        return None

    async def _respond(self, head: RequestHead) -> bool:
        """Run the handler. Returns whether the response is whole."""
        tally = self._tally
        slots = self._setup.slots
        slots.take(is_known=self._is_known)
        self._is_late = slots.is_draining
        exchange = H11Exchange(self, head, BodyShare(self._setup.body_budget), self._limits)
        self._exchange = exchange
        self._exchange_began_at = trio.current_time()
        try:
            with exchange.scope:
                if not await call_handler(self._setup.handler, exchange, exchange.response):
                    tally.exchanges_failed_total += 1
        finally:
            self._exchange = None
            self._responded_at = trio.current_time()
            exchange.share.release()
            slots.release(is_known=self._is_known, is_late=self._is_late)
            if exchange.started and not exchange.response.finished:
                self._write_broken = True
        if self._is_turned_away and not exchange.started:
            await self._turn_away()
        return exchange.response.finished and not self._write_broken

    async def _refuse(self, status: int, message: str, fields: HeaderFields = ()) -> None:
        if not self.protocol.can_refuse:
            return
        body = refusal_body(status, message)
        encoded = encode_fields([*JSON_FIELDS, *fields], unix_seconds=self.unix_seconds(), content_length=len(body))
        encoded.append((b"connection", b"close"))
        await self.write(self.protocol.respond(status, encoded, body, is_ordinary=False))

    async def _turn_away(self) -> None:
        """Refuse a request that has not come whole, because the server is leaving."""
        self._tally.streams_refused_total[StreamRefusal.DRAINING] += 1
        fields = (("retry-after", "1"), ("x-trioserve-reason", StreamRefusal.DRAINING.value))
        with trio.move_on_after(self._limits.close_seconds_max):  # a courtesy: leaving must not wait for it
            await self._refuse(503, "the server is shutting down: send the request to another one, or again", fields)

    # --- ending ---

    def _client_left(self) -> None:
        self._client_gone = True
        if self._exchange is not None:
            self._tally.exchanges_left_total += 1
        self._whole.cancel()

    def _stalled(self, *, takes_some: bool) -> None:
        self._tally.exchanges_stalled_total += self._exchange is not None
        reason = ConnectionRefusal.SLOW_READER if takes_some else ConnectionRefusal.STALLED
        self._tally.connections_refused_total[reason] += 1
        logger.info("client takes %s, connection ended peer=%s", "too little" if takes_some else "nothing", self._peer)
        self._whole.cancel()

    async def _close(self, *, wait: bool) -> None:
        seconds_max = self._limits.close_seconds_max
        if self._write_broken:
            await break_off(self._transport)
        elif wait and self._lingers and not self._client_gone:
            more_expected = self.protocol.held_bytes > 0 or not self.protocol.request_ended
            await close_after(self._transport, b"", seconds_max=seconds_max, more_expected=more_expected)
        else:
            await close_now(self._transport, b"", seconds_max=seconds_max)

    # --- the reader and the conversation wait for each other ---

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = trio.Event()
        await self._changed.wait()

    def _tell_change(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None
