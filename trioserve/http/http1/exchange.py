"""The exchange of one HTTP/1.1 request. It writes bytes to the connection at once, so only TCP buffers them.

A websocket on the connection also writes its bytes here.
"""

from __future__ import annotations

from typing import Protocol

import trio

from trioserve.http.body_budget import BodyShare, decoded_body
from trioserve.http.exchange import (
    Beats,
    BodyTimeout,
    Exchange,
    HeaderFields,
    RequestHead,
    ResponseState,
    WebSocket,
    encode_fields,
)
from trioserve.http.http1.protocol import EncodedFields, H1Protocol, interim_response
from trioserve.http.limits import FrontendLimits
from trioserve.http.pace import BodyPace, ResponsePace
from trioserve.http.websocket_messages import accept_fields, upgrade_fields
from trioserve.trio_tools.tcp_stream import SendsAtOnce

__all__ = ["ExchangeOwner", "H11Exchange", "H11WebSocketWire"]


class ExchangeOwner(Protocol):
    """The methods that an exchange calls on its connection."""

    def arrived_body(self) -> bytes | None:
        """Return the rest of the body, or None if a part of the body may still be missing."""

    async def next_body_piece(self) -> bytes | None:
        """Wait for the next bytes of the body.

        Returns:
            The bytes, or None at the end of the body.

        Raises:
            InvalidRequest: the framing of the body is broken.
        """

    protocol: H1Protocol
    write_count: int
    """Number of writes of the connection so far."""

    def insert(self, data: bytes) -> None:
        """Send bytes between two writes, without waiting. Does nothing while a write is unfinished.

        Args:
            data: bytes to send.
        """

    async def write(self, data: bytes) -> None:
        """Send bytes. If the client has left or reads too slowly, the exchange's scope is cancelled instead.

        Args:
            data: bytes to send.
        """

    def body_too_slow(self) -> None:
        """Count a request body that missed its deadline."""

    def response_starts(self) -> bool:
        """Skip the rest of the request body, and return True if the connection can stay open after the response."""

    def unix_seconds(self) -> int:
        """Return the time of day, in seconds since 1970."""

    async def switch_to_websocket(self, exchange: H11Exchange, fields: EncodedFields) -> WebSocket:
        """Accept a websocket, which then owns the connection.

        Args:
            exchange: the exchange that opens the websocket.
            fields: header fields of the response.
        """


class H11Exchange(Exchange):
    """The exchange of one HTTP/1.1 request. The connection creates the exchange and enters its scope.

    Args:
        owner: the connection.
        head: the head of the request.
        share: holds the request body.
        limits: limits of the server.
    """

    def __init__(self, owner: ExchangeOwner, head: RequestHead, share: BodyShare, limits: FrontendLimits) -> None:
        self.method = head.method
        self.path = head.path
        self.query = head.query
        self.headers = head.headers
        self.http_version = head.http_version
        self.peer = head.peer
        self.is_websocket = head.is_websocket
        self.scope = trio.CancelScope()
        self.response = ResponseState(method=head.method, is_websocket=head.is_websocket)
        self.share = share
        self._owner = owner
        self._limits = limits
        self._body_read = False
        self._beats: Beats | None = None
        self._body_heartbeat = b""
        self._writes_seen = -1

    def expect_beats(self, beats: Beats) -> bool:
        if self.http_version != "1.1":  # HTTP/1.0 has no interim responses.
            return False
        self._beats = beats
        self._writes_seen = self._owner.write_count
        return True

    def beat(self) -> None:
        beats, response = self._beats, self.response
        if beats is None or response.finished:
            return
        write_count = self._owner.write_count
        if write_count != self._writes_seen:
            self._writes_seen = write_count
        elif not response.started:
            self._owner.insert(interim_response(beats.fields))
        elif self._body_heartbeat:
            self._owner.insert(self._owner.protocol.send_data(self._body_heartbeat))

    @property
    def started(self) -> bool:
        return self.response.started

    async def body(self) -> bytes:
        self.response.check_body_readable()
        if not self._body_read and (whole := self._owner.arrived_body()) is not None:
            self.share.add(whole)
            self._body_read = True
        if self._body_read:
            await trio.lowlevel.checkpoint_if_cancelled()
            return await decoded_body(self.share, self.headers)
        self.share.check_announced(self.headers)
        pace = BodyPace(self._limits, now=trio.current_time())
        with trio.CancelScope(deadline=pace.deadline) as timeout:
            while not self._body_read:
                piece = await self._owner.next_body_piece()
                if piece is None:
                    self._body_read = True
                else:
                    self.share.add(piece)
                    timeout.deadline = pace.arrived(len(piece), now=trio.current_time())
        if timeout.cancelled_caught:
            self._owner.body_too_slow()
            raise BodyTimeout(pace.timeout_message)
        await trio.lowlevel.checkpoint()
        return await decoded_body(self.share, self.headers)

    async def accept_websocket(self, headers: HeaderFields = ()) -> WebSocket:
        if not self.is_websocket:
            return await super().accept_websocket(headers)
        self.response.check_body_readable()
        fields = accept_fields(self.headers) + encode_fields(headers, unix_seconds=self._owner.unix_seconds())
        return await self._owner.switch_to_websocket(self, fields)

    async def respond(self, status: int, headers: HeaderFields, body: bytes) -> None:
        fields, is_ordinary = self._begin(status, headers, content_length=len(body), has_heartbeats=True)
        body = b"" if self.response.bodiless else body
        data = self._owner.protocol.respond(status, fields, body, is_ordinary=is_ordinary)
        self.response.finish()
        await self._owner.write(data)

    async def start(self, status: int, headers: HeaderFields) -> None:
        if self._beats is not None and not self.response.bodiless:
            media_type = next((value for name, value in headers if name.lower() == "content-type"), "")
            self._body_heartbeat = self._beats.within.get(media_type.partition(";")[0].strip(), b"")
        has_heartbeats = bool(self._body_heartbeat)
        fields, is_ordinary = self._begin(status, headers, content_length=None, has_heartbeats=has_heartbeats)
        is_http_1_1 = self.http_version == "1.1"
        start = self._owner.protocol.start_response
        await self._owner.write(start(status, fields, is_ordinary=is_ordinary, is_http_1_1=is_http_1_1))

    async def send(self, data: bytes) -> None:
        response = self.response
        if response.finished or not response.started:
            response.check_open()
        if data and not response.bodiless:
            await self._owner.write(self._owner.protocol.send_data(data))
        else:
            await trio.lowlevel.checkpoint()

    async def finish(self, last: bytes = b"") -> None:
        self.response.finish()
        await self._owner.write(self._owner.protocol.end_response(b"" if self.response.bodiless else last))

    def _begin(
        self, status: int, headers: HeaderFields, *, content_length: int | None, has_heartbeats: bool
    ) -> tuple[EncodedFields, bool]:
        """Start the response.

        Args:
            status: HTTP status.
            headers: header fields from the handler.
            content_length: bytes of the body of a complete response, or None for a streamed response.
            has_heartbeats: True if the connection need not insert heartbeats: the response is complete, or its body
                contains heartbeats.

        Returns:
            The encoded fields, and the argument `is_ordinary` for the methods of H1Protocol.
        """
        if self._beats is not None and has_heartbeats:
            headers = [*headers, *self._beats.fields]
        fields = encode_fields(headers, unix_seconds=self._owner.unix_seconds(), content_length=content_length)
        fields += upgrade_fields(status)
        self.response.start(status)
        stays_open = self._owner.response_starts()
        if not stays_open:
            fields.append((b"connection", b"close"))
        return fields, stays_open and not self.response.bodiless and not _has_length(headers)


def _has_length(headers: HeaderFields) -> bool:
    """Return whether the handler set content-length. If so, h11 must check that the body has this length."""
    return any(name.lower() == "content-length" for name, _ in headers)


# One write has at most this number of bytes. After each write, the client gets more time to read the next one.
WRITE_BYTES = 65536


class WireOwner(Protocol):
    """The methods that a wire calls on its connection. No method waits."""

    def client_left(self) -> None:
        """Cancel the handler, because the client has closed the connection."""

    def stalled(self, *, reads_some: bool) -> None:
        """Cancel the handler, because the client reads too slowly.

        Args:
            reads_some: True if the client reads too slowly, False if it reads nothing.
        """


class H11WebSocketWire:
    """The outgoing bytes of one websocket. A task writes them only while the kernel does not accept them at once.

    Args:
        owner: the connection.
        transport: the stream to the client.
        nursery: runs the task.
        pace: deadline for a slow client.

    Attributes:
        is_broken: True if a part of a frame may have been sent, and no other bytes can follow.
        sent_bytes_total: see WebSocketWire.
    """

    def __init__(self, owner: WireOwner, transport: trio.abc.Stream, nursery: trio.Nursery, pace: ResponsePace) -> None:
        self.is_broken = False
        self.sent_bytes_total = 0
        self._owner = owner
        self._transport = transport
        self._sends_at_once = transport if isinstance(transport, SendsAtOnce) else None
        self._nursery = nursery
        self._pace = pace
        self._outbox = bytearray()
        self._is_writing = False
        self._is_gone = False
        self._progressed = trio.Event()

    @property
    def unsent_bytes(self) -> int:
        return len(self._outbox)

    def push(self, data: bytes | bytearray) -> None:
        if self._is_gone:
            return
        self._outbox += data
        if self._is_writing:
            return
        if self._sends_at_once is not None:
            try:
                self._taken(self._sends_at_once.try_send(bytes(self._outbox)))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self._leave()
                return
        if self._outbox:
            self._is_writing = True
            self._nursery.start_soon(self._write)

    async def wait_for_client(self) -> None:
        await self._progressed.wait()

    def pop_unsent(self) -> bytes:
        """Remove and return the bytes that no task writes, to send them when the connection is closed."""
        if self._is_writing or self.is_broken:
            return b""
        taken = bytes(self._outbox)
        self._outbox.clear()
        return taken

    async def _write(self) -> None:
        try:
            while self._outbox:
                piece = bytes(self._outbox[:WRITE_BYTES])
                self.is_broken = True  # The value is True until this write is complete.
                with trio.CancelScope(deadline=self._pace.start(trio.current_time())) as timeout:
                    await self._transport.send_all(piece)
                if timeout.cancelled_caught:
                    self._is_gone = True
                    self._owner.stalled(reads_some=self._pace.saw_progress)
                    return
                self.is_broken = False
                if len(piece) < len(self._outbox):
                    self._pace.advance(len(piece), trio.current_time())
                else:
                    self._pace.stop(len(piece), trio.current_time())
                self._taken(len(piece))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._leave()
        finally:
            self._is_writing = False

    def _taken(self, byte_count: int) -> None:
        del self._outbox[:byte_count]
        self.sent_bytes_total += byte_count
        self._progressed.set()
        self._progressed = trio.Event()

    def _leave(self) -> None:
        self._is_gone = True
        self.is_broken = False
        self._outbox.clear()
        self._owner.client_left()
