"""The exchange of one HTTP/2 stream, with its buffers for the request body and the response.

Response bytes wait in the stream, and not in h2, until the connection writes them. So the number of waiting bytes is
known and bounded, and the bytes of all streams of a connection are sent in one write. The Outbox decides the order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

import trio

from trioserve.http.body_budget import BodyShare, decoded_body
from trioserve.http.exchange import (
    BodyTimeout,
    Exchange,
    HeaderFields,
    RequestHead,
    ResponseState,
    WebSocket,
    encode_fields,
)
from trioserve.http.http2.frames import FrameGate
from trioserve.http.http2.protocol import H2Protocol
from trioserve.http.limits import FrontendLimits
from trioserve.http.pace import BodyPace, ResponsePace

if TYPE_CHECKING:
    from trioserve.http.framed_websocket import FramedWebSocket

__all__ = ["H2Outbox", "H2Stream", "StreamOwner"]

CREDIT_BYTES_MIN = 16384  # One window update credits a quarter of the window. An update for each frame would cost more.
MERGED_BYTES_MAX = 4096  # Small DATA frames are merged into frames up to this size.
# With fewer unsent bytes, `send` does not let other tasks run. Small events of this size cost about 100 us.
UNSCHEDULED_BYTES_MAX = 4096


class StreamOwner(Protocol):
    """The methods that a stream calls on its connection. No method waits."""

    def send_head(self, stream: H2Stream, fields: list[tuple[bytes, bytes]], *, end_stream: bool) -> None: ...

    def send_continue(self, stream: H2Stream) -> None:
        """Send 100 (Continue) to a client that waits for it before it sends the body.

        Args:
            stream: the stream of the request.
        """

    def queue(self, stream: H2Stream) -> None:
        """Queue a stream that has bytes or its end to send.

        Args:
            stream: the stream. It must not be queued already.
        """

    def credit(self, stream: H2Stream, byte_count: int) -> None:
        """Allow the client to send more bytes of the body.

        Args:
            stream: the stream of the request.
            byte_count: bytes that the handler has read.
        """

    def body_awaited(self, stream: H2Stream) -> None:
        """Refuse the stream and cancel its scope if the server drains. Called when the handler waits for the body.

        Args:
            stream: the stream of the request.
        """

    def body_too_slow(self) -> None:
        """Count a request body that missed its deadline."""

    def reset_slow(self, stream: H2Stream, *, reads_some: bool) -> None:
        """Reset a stream and cancel its scope, because the client reads too slowly.

        Args:
            stream: the stream of the response.
            reads_some: True if the client reads too slowly, False if it reads nothing.
        """

    def unix_seconds(self) -> int:
        """Return the time of day, in seconds since 1970."""

    def new_websocket(self, stream: H2Stream) -> FramedWebSocket:
        """Create the websocket that a stream opens."""

    def start_task(self, run: Callable[[], Awaitable[None]]) -> None:
        """Start a task that ends before the connection does.

        Args:
            run: function of the task.
        """

    def websocket_left(self) -> None:
        """Count a client that closed its side of a websocket without a close frame."""


class H2Stream(Exchange):
    """The exchange of one HTTP/2 stream. The connection creates the exchange and enters its scope.

    Args:
        owner: the connection.
        stream_id: id of the HTTP/2 stream.
        head: the head of the request.
        share: holds the request body.
        limits: limits of the server.
        request_ended: True if the request has no body.
        is_known: True if the caller has shown an API key, or the server requires none.
        is_late: True if the stream was opened after `announce_drain`.
        websocket_caller: see ExchangeSlots.

    Attributes:
        request_ended: True once the whole request has arrived.
        end_sent: True once the frame that ends the response has been created.
        gone: True once the stream is closed in both directions. Bytes that the handler still sends are dropped.
        queued: True while the stream is in the connection's outbox.
        unsent_bytes: bytes of the response that wait for the connection.
        sent_bytes_total: bytes of the response that the connection has taken.
    """

    def __init__(
        self,
        owner: StreamOwner,
        stream_id: int,
        head: RequestHead,
        share: BodyShare,
        limits: FrontendLimits,
        *,
        request_ended: bool,
        is_known: bool,
        is_late: bool = False,
        websocket_caller: str | None = None,
    ) -> None:
        self.id = stream_id
        self.method = head.method
        self.path = head.path
        self.query = head.query
        self.headers = head.headers
        self.http_version = head.http_version
        self.peer = head.peer
        self.is_websocket = head.is_websocket
        self.websocket_caller = websocket_caller
        self.scope = trio.CancelScope()
        self.response = ResponseState(method=head.method, is_websocket=head.is_websocket)
        self.share = share
        self.is_known = is_known
        self.is_late = is_late
        self.request_ended = request_ended
        self.end_sent = False
        self.gone = False
        self.queued = False
        self.unsent_bytes = 0
        self.sent_bytes_total = 0
        self._owner = owner
        self._limits = limits
        self._unsent: deque[bytes] = deque()
        # The unread pieces of the body, each with the number of window bytes that it used.
        self._arrived: deque[tuple[bytes, int]] = deque()
        self._changed: trio.Event | None = None
        self._websocket: FramedWebSocket | None = None
        self._is_parsing = False  # True while a task parses the frames of the websocket.
        self._uncredited_bytes = 0  # The window bytes of a websocket that were parsed and not credited.
        self._pace: ResponsePace | None = None  # The object is created when the handler first waits for the client.

    @property
    def started(self) -> bool:
        return self.response.started

    @property
    def may_be_left(self) -> bool:
        """True while a client that ends the stream leaves its handler: neither side has ended the response."""
        return not self.gone and (self._websocket is None or not self._websocket.is_closed)

    # --- methods for the handler ---

    async def body(self) -> bytes:
        self.response.check_body_readable()
        self.share.check_announced(self.headers)
        if not self.request_ended and (self.headers.get("expect") or "").lower() == "100-continue":
            self._owner.send_continue(self)
        pace = BodyPace(self._limits, now=trio.current_time())
        with trio.CancelScope(deadline=pace.deadline) as timeout:
            uncredited_bytes = 0
            while True:
                while self._arrived:
                    piece, window_bytes = self._arrived.popleft()
                    self.share.add(piece)
                    timeout.deadline = pace.arrived(len(piece), now=trio.current_time())
                    uncredited_bytes += window_bytes
                if self.request_ended and not self.gone:
                    break
                if uncredited_bytes >= CREDIT_BYTES_MIN and not self.gone:
                    self._owner.credit(self, uncredited_bytes)
                    uncredited_bytes = 0
                self._owner.body_awaited(self)
                await self._wait_for_change()
        if timeout.cancelled_caught:
            self._owner.body_too_slow()
            raise BodyTimeout(pace.timeout_message)
        await trio.lowlevel.checkpoint()
        return await decoded_body(self.share, self.headers)

    async def accept_websocket(self, headers: HeaderFields = ()) -> WebSocket:
        if not self.is_websocket:
            return await super().accept_websocket(headers)
        self.response.check_body_readable()
        fields = encode_fields(headers, unix_seconds=self._owner.unix_seconds())
        websocket = self._owner.new_websocket(self)
        self.response.accept(websocket)
        self._websocket = websocket
        self._owner.send_head(self, [(b":status", b"200"), *fields], end_stream=False)
        arrived = list(self._arrived)
        self._arrived.clear()
        for piece, window_bytes in arrived:
            self._feed(websocket, piece, window_bytes)
        if self.request_ended:
            self.request_end_arrived()
        await trio.lowlevel.checkpoint()
        return websocket

    async def respond(self, status: int, headers: HeaderFields, body: bytes) -> None:
        self._start(status, headers, content_length=len(body), end_stream=not body)
        await self.finish(body)

    async def start(self, status: int, headers: HeaderFields) -> None:
        self._start(status, headers, content_length=None, end_stream=False)
        await trio.lowlevel.checkpoint()

    async def send(self, data: bytes) -> None:
        self.response.check_open()
        await self._buffer(data)
        if self.unsent_bytes < UNSCHEDULED_BYTES_MAX:
            # After each small event, letting other tasks run would cost as much as the event.
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            await trio.lowlevel.checkpoint()

    async def finish(self, last: bytes = b"") -> None:
        self.response.check_open()
        await self._buffer(last)
        self.response.finish()
        self.queue_end()
        await trio.lowlevel.checkpoint()

    # --- methods for the connection ---

    def pop_unsent(self, byte_count_max: int) -> bytes:
        """Remove and return bytes for one DATA frame, and wake the handler if it waits to send more.

        Args:
            byte_count_max: maximum number of bytes in the frame.
        """
        unsent = self._unsent
        if self.unsent_bytes <= byte_count_max:
            taken = unsent[0] if len(unsent) == 1 else b"".join(unsent)
            unsent.clear()
        else:
            pieces = []
            wanted = byte_count_max
            while wanted:
                piece = unsent.popleft()
                if len(piece) > wanted:
                    unsent.appendleft(piece[wanted:])
                    piece = piece[:wanted]
                pieces.append(piece)
                wanted -= len(piece)
            taken = b"".join(pieces)
        self.unsent_bytes -= len(taken)
        self.sent_bytes_total += len(taken)
        if self._pace is not None and self._pace.is_running:
            if self.unsent_bytes:
                self._pace.advance(len(taken), trio.current_time())
            else:
                self._pace.stop(len(taken), trio.current_time())
        self.wake()
        return taken

    def data_arrived(self, data: bytes, window_bytes: int) -> None:
        """Keep bytes of the request body for the handler. The flow-control window of the stream bounds their number.

        Args:
            data: bytes of the body.
            window_bytes: bytes of the window that `data` and its padding used.
        """
        if self.gone:
            return
        if self._websocket is not None:
            self._feed(self._websocket, data, window_bytes)
            return
        if self.started:
            return
        if self._arrived and len(self._arrived[-1][0]) + len(data) <= MERGED_BYTES_MAX:
            # Short pieces are joined, because entries with a single byte each would take a hundred times the memory of
            # the window.
            last, last_window_bytes = self._arrived.pop()
            data, window_bytes = last + data, last_window_bytes + window_bytes
        self._arrived.append((data, window_bytes))
        self.wake()

    def request_end_arrived(self) -> None:
        self.request_ended = True
        if self._websocket is not None:
            if self.may_be_left:
                self._owner.websocket_left()
            self._websocket.leave()
        self.wake()

    def leave(self) -> None:
        """Drop all bytes of the stream and cancel its handler at once, because either side has closed the stream."""
        self.gone = True
        if self._websocket is not None:
            self._websocket.leave()
        self._unsent.clear()
        self._arrived.clear()
        self.unsent_bytes = 0
        self.scope.cancel()
        self.wake()

    def note_drain(self) -> None:
        """Wake the handler, because the server starts to drain."""
        if self._websocket is not None:
            self._websocket.draining.set()
        self.wake()

    def queue_end(self) -> None:
        """Queue the end of the response, after all bytes of it."""
        if not (self.gone or self.end_sent or self.queued):
            self._owner.queue(self)

    # --- methods for the websocket ---

    def push(self, data: bytes | bytearray) -> None:
        self._push(bytes(data))

    async def wait_for_client(self) -> None:
        await self._wait_for_client()

    def wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def drained(self) -> None:
        """Wait until the frame that ends the response has been created. The deadline for slow clients applies, as in
        `send`.
        """
        while not (self.end_sent or self.gone):
            await self._wait_for_client()

    def _start(self, status: int, headers: HeaderFields, *, content_length: int | None, end_stream: bool) -> None:
        fields = encode_fields(headers, unix_seconds=self._owner.unix_seconds(), content_length=content_length)
        self.response.start(status)
        self._arrived.clear()  # The handler cannot read the body any more.
        fields.insert(0, (b":status", b"%d" % status))
        self._owner.send_head(self, fields, end_stream=end_stream or self.response.bodiless)

    def _feed(self, websocket: FramedWebSocket, data: bytes, window_bytes: int) -> None:
        """Parse frames of a websocket. If there are many, a task parses the rest."""
        self._uncredited_bytes += window_bytes
        websocket.feed(data)
        if self._is_parsing:
            return
        if websocket.parse():
            self._is_parsing = True
            self._owner.start_task(self._parse_rest)
        else:
            self._credit_parsed()

    async def _parse_rest(self) -> None:
        assert self._websocket is not None
        while self._websocket.parse():
            await trio.lowlevel.checkpoint()
        self._is_parsing = False
        self._credit_parsed()

    def _credit_parsed(self) -> None:
        # Only parsed bytes are credited, so the window bounds the bytes that wait to be parsed.
        if self._uncredited_bytes >= CREDIT_BYTES_MIN and not self.gone:
            self._owner.credit(self, self._uncredited_bytes)
            self._uncredited_bytes = 0

    async def _buffer(self, data: bytes) -> None:
        """Append bytes of the response, and wait only if the buffer is full."""
        if self.response.bodiless:
            return
        if self.unsent_bytes + len(data) <= self._limits.stream_buffer_bytes_max:
            self._push(data)
        else:
            await self._send_in_parts(data)

    def _push(self, data: bytes) -> None:
        if data and not self.gone:
            self._unsent.append(data)
            self.unsent_bytes += len(data)
            if not self.queued:
                self._owner.queue(self)

    async def _send_in_parts(self, data: bytes) -> None:
        position = 0
        while position < len(data) and not self.gone:
            free_bytes = self._limits.stream_buffer_bytes_max - self.unsent_bytes
            if free_bytes > 0:
                self._push(data[position : position + free_bytes])
                position += free_bytes
            else:
                await self._wait_for_client()

    async def _wait_for_client(self) -> None:
        """Wait until the connection takes bytes from the buffer. Reset the stream after the deadline."""
        now = trio.current_time()
        if self._pace is None:
            self._pace = ResponsePace(self._limits, now=now)
        with trio.CancelScope(deadline=self._pace.start(now)) as timeout:
            await self._wait_for_change()
        if timeout.cancelled_caught:
            self._owner.reset_slow(self, reads_some=self._pace.saw_progress)
            await trio.lowlevel.checkpoint()  # This checkpoint raises Cancelled.

    async def _wait_for_change(self) -> None:
        if self._changed is None:
            self._changed = trio.Event()
        await self._changed.wait()


class H2Outbox:
    """The outgoing bytes of one connection.

    Args:
        protocol: h2's connection.
        gate: the frame filter, which counts the DATA frames that were sent.
        on_more: called when there may be bytes to write.
    """

    def __init__(self, protocol: H2Protocol, gate: FrameGate, on_more: Callable[[], None]) -> None:
        self._on_more = on_more
        self._protocol = protocol
        self._gate = gate
        self._framed = bytearray()
        self._ready: deque[H2Stream] = deque()  # The streams that have bytes to send, and probably an open window.

    @property
    def framed_bytes(self) -> int:
        return len(self._framed)

    def queue(self, stream: H2Stream) -> None:
        """Queue a stream that has data or its end to send.

        Args:
            stream: the stream. It must not be queued already.
        """
        stream.queued = True
        self._ready.append(stream)
        self._on_more()

    def collect(self, extra: bytes = b"") -> None:
        """Append the bytes that h2 wants to send, then `extra`. Call this after each call of h2 that may produce bytes.

        Args:
            extra: encoded frames that were created without h2.
        """
        self._framed += self._protocol.data_to_send()
        self._framed += extra
        self._on_more()

    def take(self) -> bytes:
        """Remove all frames that wait to be sent, and return their bytes for one write."""
        taken = bytes(self._framed)
        self._framed.clear()
        return taken

    def frame_ready_streams(self, byte_count_max: int) -> bool:
        """Turn bytes of the queued streams into DATA frames, one frame of each stream in turn.

        Args:
            byte_count_max: maximum number of body bytes in all frames together. The windows may allow fewer.

        Returns:
            True if the windows allow more frames now.
        """
        protocol = self._protocol
        gate = self._gate
        ready = self._ready
        left = byte_count_max
        window_closed = False
        framed = self._framed
        while ready and left > 0:
            stream = ready[0]
            if stream.gone:
                ready.popleft()
                continue
            data = b""
            if stream.unsent_bytes:
                size_max = min(protocol.window_of(stream.id), protocol.max_outbound_frame_size, left)
                if size_max <= 0:
                    if protocol.outbound_flow_control_window <= 0:
                        window_closed = True  # The window of the connection is closed, so all streams must wait.
                        break
                    ready.popleft()
                    stream.queued = False  # The stream is queued again when its window opens.
                    continue
                data = stream.pop_unsent(size_max)
            ready.popleft()
            ends = stream.response.finished and not stream.unsent_bytes
            framed += protocol.data_frame(stream.id, data, end_stream=ends)
            gate.data_frames_sent += 1
            left -= len(data)
            if stream.unsent_bytes:
                ready.append(stream)
            else:
                stream.queued = False
            if ends:
                stream.end_sent = True
                stream.wake()
        return bool(ready) and not window_closed

    def end_at_once(self, stream: H2Stream) -> bool:
        """Frame all bytes of a stream and its end, ahead of the other streams.

        Returns:
            False if the windows do not allow this now. Then nothing is framed.
        """
        protocol = self._protocol
        if stream.unsent_bytes > min(protocol.window_of(stream.id), protocol.max_outbound_frame_size):
            return False
        self.collect(protocol.data_frame(stream.id, stream.pop_unsent(stream.unsent_bytes), end_stream=True))
        stream.end_sent = True
        return True
