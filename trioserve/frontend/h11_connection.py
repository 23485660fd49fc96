"""One HTTP/1.1 connection, with the same promises as HTTP/2: one request at a time, and a reader that never stops.

The reader goes on while an answer is under way, so that a close is noticed at once, even behind a pipelined request.
It stops only while a handler leaves a long body unread and has not begun to answer. A client that ends its sending half
has left: there is no telling it from one that closed, and an answer that takes minutes must not be computed for nobody.
"""

from __future__ import annotations

import logging

import h11
import trio

from trioserve.contracts.errors import InvalidRequest
from trioserve.frontend.body_budget import BodyShare
from trioserve.frontend.chunk_sizes import ChunkSizes
from trioserve.frontend.closing import break_off, close_after, close_now
from trioserve.frontend.connection_setup import ConnectionSetup
from trioserve.frontend.counters import ConnectionRefusal, StreamRefusal
from trioserve.frontend.exchange import HeaderFields
from trioserve.frontend.h11_exchange import H11Exchange
from trioserve.frontend.handler_call import call_handler
from trioserve.frontend.headers import Headers
from trioserve.frontend.message_head import REASONS, RequestHead, encode_fields, split_target
from trioserve.frontend.plain_request import plain_request
from trioserve.frontend.refusals import JSON_FIELDS, refusal_body
from trioserve.frontend.response_pace import ResponsePace
from trioserve.runtime.tcp_stream import TcpStream

__all__ = ["H11Connection"]

logger = logging.getLogger(__name__)

READ_BYTES = 65536
WRITE_BYTES = 65536  # what has to leave within one stall limit
TOO_MANY = {
    StreamRefusal.EXCHANGES_MAX: "too many requests are under way: try again shortly",
    StreamRefusal.UNKNOWN_CALLERS: "too many requests without a key are under way: send a key, or try again shortly",
}
TURN_BYTES = 4096  # so much at most goes out without a turn for the others


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
        self._protocol = self._new_protocol()
        self.answers_by_hand = False
        self._passed_h11 = False  # an answer did, or a request: it does not know where the conversation is
        self._is_plain = False  # the request: its head and body were read by hand
        self._plain_body_bytes = 0  # what is left of that
        self._chunk_sizes: ChunkSizes | None = None  # of a body whose length is not told beforehand
        self._untold_head = b""  # of a plain request, as long as h11 has not seen it
        self._held = bytearray(received)  # read, not yet given to h11
        self._changed: trio.Event | None = None  # of _held
        self._whole = trio.CancelScope()  # reader and conversation
        self._exchange: H11Exchange | None = None
        self._answered_at = trio.current_time()  # the last request
        self._tcp = transport if isinstance(transport, TcpStream) else None
        self._writing_bytes = 0
        self._pace = ResponsePace(setup.limits, now=self._answered_at)  # of all that is written
        self._is_known = True  # the caller of this request
        self._request_ended = False
        self._request_broken = False
        self._is_turned_away = False  # its handler waited for the rest of it when the server left
        self._draining = False
        self._client_gone = False
        self._lingers = True  # until the client has read the end of the last answer
        self._write_broken = False  # a part of an answer may be out: nothing can follow it

    # --- for the server ---

    async def serve(self) -> None:
        """Returns when the connection has ended and nothing of it is left. Raises only for faults of our own."""
        try:
            with self._whole:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._read)
                    await self._converse()
                    self._whole.cancel()
        except BaseException:
            await self._close(wait=False)
            raise
        await self._close(wait=True)

    @property
    def idle_since(self) -> float | None:
        """None while a request is under way, or the connection is on its way out."""
        is_busy = self._exchange is not None or self._draining or self._request_begun()
        return None if is_busy else self._answered_at

    def unsent(self) -> tuple[int, int]:
        """How many bytes wait here for the client, and in how many answers."""
        return self._writing_bytes, int(self._writing_bytes > 0)

    def drain(self) -> None:
        """Answer the request that has come, say so with `Connection: close`, and end. Never waits.

        A request that has not come whole is not waited for: it is refused (503).
        """
        self._draining = True
        if self._exchange is None and not self._request_begun():
            self._whole.cancel()
        self._tell_change()

    def make_room(self) -> None:
        """End an idle connection whose seat is needed, without waiting for the client to close, too."""
        self._lingers = False
        self.drain()

    # --- for the exchange ---

    def body_at_hand(self) -> bytes | None:
        if not self._is_plain or len(self._held) < self._plain_body_bytes:
            return None
        return b"" if self._request_ended else self._take_plain_body()

    async def next_body_piece(self) -> bytes | None:
        if self._request_ended:
            return None
        if self._is_plain:
            await self._more_of_body()
            return self._take_plain_body()
        if self._protocol.they_are_waiting_for_100_continue:
            await self.write(h11.InformationalResponse(status_code=100, headers=[]))
        try:
            while (event := self._protocol.next_event()) is h11.NEED_DATA:
                self._check_announced()
                await self._more_of_body()
                self._feed()
        except h11.RemoteProtocolError as error:
            self._request_broken = True
            raise InvalidRequest(f"the request body cannot be read: {error}") from None
        if isinstance(event, h11.Data):
            return bytes(event.data)
        assert isinstance(event, h11.EndOfMessage)
        self._request_ended = True
        return None

    def answer_starts(self) -> bool:
        self._drop_body()
        self._tell_change()
        return self._request_ended and not self._draining

    def body_too_slow(self) -> None:
        self._tally.connections_refused_total[ConnectionRefusal.BODY_TIMEOUT] += 1
        logger.debug("body given up peer=%s", self._peer)

    def unix_seconds(self) -> int:
        return self._setup.surroundings.unix_seconds()

    async def write(self, *events: h11.Event) -> None:
        if self._client_gone or self._write_broken:
            await trio.lowlevel.checkpoint()
            return
        if self._untold_head:
            # An answer that is not ordinary: for that h11 has to know what was asked.
            self._protocol.receive_data(self._untold_head)
            self._protocol.next_event()
            self._untold_head = b""
        data = b"".join(self._protocol.send(event) or b"" for event in events)
        if data:
            await self._write(data)
        else:
            await trio.lowlevel.checkpoint()

    async def write_by_hand(self, data: bytes) -> None:
        self._passed_h11 = True
        if self._client_gone or self._write_broken:
            await trio.lowlevel.checkpoint()
        else:
            await self._write(data)

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
            if len(self._held) >= self._limits.pipelined_bytes_max:
                if self._exchange is not None and self._request_ended:
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
            self._held += received
            if self._exchange is not None and self._exchange.started:
                self._drop_body()
            self._tell_change()

    async def _more(self) -> bool:
        """Wait until more of a request has come; False if it is not to be waited for, since the server is leaving."""
        while not self._held:
            if self._draining:
                return False
            await self._change()
        return True

    async def _more_of_body(self) -> None:
        if not await self._more():
            assert self._exchange is not None
            self._is_turned_away = True
            self._exchange.scope.cancel()
            await trio.lowlevel.checkpoint()

    def _check_announced(self) -> None:
        """Raises BodyTooLarge for a chunk that is, as soon as its size has come."""
        if self._chunk_sizes is not None and self._exchange is not None:
            self._exchange.share.check_size(self._chunk_sizes.announced_bytes)

    def _feed(self) -> None:
        byte_count = len(self._held)
        if self._exchange is None:
            # h11 looks at the size of a head only when it wants more of it.
            byte_count = self._limits.head_bytes_max + 1 - len(self._protocol.trailing_data[0])
        fed = bytes(self._held[:byte_count])
        del self._held[:byte_count]
        self._protocol.receive_data(fed)
        if self._chunk_sizes is not None:
            self._chunk_sizes.feed(fed)
        self._tell_change()

    def _take_plain_body(self) -> bytes:
        piece = bytes(self._held[: self._plain_body_bytes])
        del self._held[: self._plain_body_bytes]
        self._plain_body_bytes -= len(piece)
        self._request_ended = not self._plain_body_bytes
        self._tell_change()
        return piece

    def _drop_body(self) -> None:
        """Pass over what has arrived of a body that nobody will read."""
        if self._is_plain:
            if not self._request_ended:
                self._take_plain_body()
            return
        try:
            while not (self._request_ended or self._request_broken):
                event = self._protocol.next_event()
                if event is h11.NEED_DATA:
                    if not self._held:
                        return
                    self._feed()
                elif isinstance(event, h11.EndOfMessage):
                    self._request_ended = True
        except h11.RemoteProtocolError:
            self._request_broken = True

    # --- the conversation ---

    def _new_protocol(self) -> h11.Connection:
        return h11.Connection(h11.SERVER, max_incomplete_event_size=self._limits.head_bytes_max)

    async def _converse(self) -> None:
        while True:
            head = await self._next_request()
            if head is None or not await self._answer(head) or self._draining:
                return
            if not self._request_ended:
                return
            state = self._protocol.our_state
            if self._passed_h11:
                # It has seen the request or its answer, but not both: the next one begins with what it has left.
                if state is h11.MUST_CLOSE:
                    return
                if state is not h11.IDLE:
                    rest, _ = self._protocol.trailing_data
                    self._protocol = self._new_protocol()
                    if rest:
                        self._protocol.receive_data(rest)
                self._passed_h11 = False
            elif state is h11.DONE:
                self._protocol.start_next_cycle()
            else:
                return

    async def _next_request(self) -> RequestHead | None:
        """None when the connection is to end; then the client was told why, if it had begun a request."""
        self._request_ended = self._is_plain = self._is_turned_away = False
        self._chunk_sizes = None
        self._untold_head = b""
        patience = trio.CancelScope(deadline=trio.current_time() + self._limits.idle_seconds_max)
        with patience:
            try:
                while not self._request_begun():
                    await self._change()
                head = self._plain_request()
                if head is None:
                    if self._held:
                        self._feed()
                    event: object = self._protocol.next_event()
                    if event is h11.NEED_DATA:
                        patience.deadline = trio.current_time() + self._limits.head_seconds_max
                    while event is h11.NEED_DATA:
                        if not await self._more():
                            await self._turn_away()
                            return None
                        self._feed()
                        event = self._protocol.next_event()
                    assert isinstance(event, h11.Request), event
                    head = _request_head(event, self._peer)
            except h11.RemoteProtocolError as error:
                is_large = error.error_status_hint == 431
                refusal = ConnectionRefusal.HEAD_TOO_LARGE if is_large else ConnectionRefusal.MALFORMED
                self._tally.connections_refused_total[refusal] += 1
                await self._refuse(error.error_status_hint, f"the request cannot be read: {error}")
                return None
            objection = self._objection(head)
            if objection is not None:
                status, message, fields = objection
                await self._refuse(status, message, fields)
                return None
            if self._is_plain:
                self._request_ended = not self._plain_body_bytes
            elif (head.headers.get("content-length") or "0") == "0" and "transfer-encoding" not in head.headers:
                # Known from the start, so that what comes next counts as sent ahead.
                end = self._protocol.next_event()
                assert isinstance(end, h11.EndOfMessage), end
                self._request_ended = True
            elif "transfer-encoding" in head.headers:
                self._chunk_sizes = ChunkSizes()
                self._chunk_sizes.feed(self._protocol.trailing_data[0])
            return head
        if self._request_begun():
            self._tally.connections_refused_total[ConnectionRefusal.HEAD_TIMEOUT] += 1
            await self._refuse(408, f"the request did not arrive within {self._limits.head_seconds_max} seconds")
        return None

    def _plain_request(self) -> RequestHead | None:
        """The next request, if it is an ordinary one whose head is here and h11 has nothing of it."""
        if self._protocol.our_state is not h11.IDLE or self._protocol.trailing_data[0]:
            return None
        plain = plain_request(self._held, peer=self._peer, head_bytes_max=self._limits.head_bytes_max)
        if plain is None:
            return None
        head, head_bytes, self._plain_body_bytes = plain
        self._untold_head = bytes(self._held[:head_bytes])
        del self._held[:head_bytes]
        self._is_plain = self._passed_h11 = True
        self._tell_change()
        return head

    def _objection(self, head: RequestHead) -> tuple[int, str, HeaderFields] | None:
        """Status, message and header fields of the answer, if this request is not to reach a handler."""
        if head.http_version not in ("1.0", "1.1"):
            return 505, f"HTTP/{head.http_version} is not spoken here, only 1.0, 1.1 and 2", ()
        if head.method == "CONNECT":
            return 405, "this server is not a proxy", ()
        if "transfer-encoding" in head.headers and ("content-length" in head.headers or head.http_version == "1.0"):
            # Whoever is in between may believe the other one, and take the rest for a request (RFC 9112, 6.1).
            self._tally.connections_refused_total[ConnectionRefusal.MALFORMED] += 1
            return 400, "the length of the body is given twice: send either transfer-encoding or content-length", ()
        self._is_known = self._setup.slots.knows(head.headers)
        refusal = self._setup.slots.refusal(is_known=self._is_known)
        if refusal is not None:
            self._tally.streams_refused_total[refusal] += 1
            return 503, TOO_MANY[refusal], (("retry-after", "1"), ("x-trioserve-reason", refusal.value))
        return None

    async def _answer(self, head: RequestHead) -> bool:
        """Run the handler. Returns whether the answer is whole."""
        tally = self._tally
        slots = self._setup.slots
        slots.take(is_known=self._is_known)
        exchange = H11Exchange(self, head, BodyShare(self._setup.body_budget), self._limits)
        # Of an ordinary request. All others are h11's: it knows when their connection has to end.
        keeps_alive = (head.headers.get("connection") or "keep-alive").lower() == "keep-alive"
        self.answers_by_hand = head.http_version == "1.1" and keeps_alive
        self._exchange = exchange
        try:
            with exchange.scope:
                if not await call_handler(self._setup.handler, exchange, exchange.answer):
                    tally.exchanges_failed_total += 1
        finally:
            self._exchange = None
            self._answered_at = trio.current_time()
            exchange.share.release()
            slots.give_back(is_known=self._is_known)
            if exchange.started and not exchange.answer.finished:
                self._write_broken = True
        if self._is_turned_away and not exchange.started:
            await self._turn_away()
        return exchange.answer.finished and not self._write_broken

    def _request_begun(self) -> bool:
        return bool(self._held) or bool(self._protocol.trailing_data[0])

    async def _refuse(self, status: int, message: str, fields: HeaderFields = ()) -> None:
        if self._protocol.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        body = refusal_body(status, message)
        encoded = encode_fields([*JSON_FIELDS, *fields], unix_seconds=self.unix_seconds(), content_length=len(body))
        encoded.append((b"connection", b"close"))
        head = h11.Response(status_code=status, headers=encoded, reason=REASONS.get(status, b""))
        await self.write(head, h11.Data(data=body), h11.EndOfMessage())

    async def _turn_away(self) -> None:
        """Refuse a request that has not come whole, because the server is leaving."""
        self._tally.streams_refused_total[StreamRefusal.DRAINING] += 1
        fields = (("retry-after", "1"), ("x-trioserve-reason", StreamRefusal.DRAINING.value))
        with trio.move_on_after(self._limits.close_seconds_max):  # last words: leaving must not wait for them
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
            more_expected = bool(self._held) or not self._request_ended
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


def _request_head(request: h11.Request, peer: str) -> RequestHead:
    path, query = split_target(request.target.decode("latin-1"))
    return RequestHead(
        method=request.method.decode("ascii"),
        path=path,
        query=query,
        headers=Headers((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers),
        http_version=request.http_version.decode("ascii"),
        peer=peer,
    )
