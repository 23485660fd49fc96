"""The I/O of one HTTP/2 connection: tasks, deadlines, and cancellation. The h2 library parses the frames.

Each stream has its own task and cancel scope. The reader task handles each event when it reads it: a reset cancels the
scope of its stream before another task runs. The writer sends the bytes of all streams in one write. An engine step
wakes all handlers in one pass of Trio's scheduler. So the tokens of the step are sent in one write in the next pass.

An error in a connection ends only this connection.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import h2.events
import h2.exceptions
import trio
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from trioserve.http.body_budget import BodyShare
from trioserve.http.connection_setup import ConnectionSetup, break_off, close_after, close_now
from trioserve.http.counters import ConnectionRefusal, StreamRefusal
from trioserve.http.exchange import printable
from trioserve.http.handler_call import JSON_FIELDS, call_handler, refusal_body
from trioserve.http.http2.frames import PING, PREFACE, Flood, FrameGate, frame, goaway_frame
from trioserve.http.http2.protocol import error_code_of, initiated_protocol, refusal_of, request_head
from trioserve.http.http2.stream import H2Outbox, H2Stream
from trioserve.http.pace import RateBucket
from trioserve.http.websocket_messages import handshake_fault
from trioserve.trio_tools.tcp_stream import TcpStream

if TYPE_CHECKING:
    from trioserve.http.framed_websocket import FramedWebSocket

__all__ = ["H2Connection"]

logger = logging.getLogger(__name__)

READ_BYTES = 16384
# One write has at most this number of bytes of DATA. The client must read them within stall_seconds_max.
WRITE_BYTES = 65536
# One window update of the connection credits at least this number of bytes. An update for each frame would cost more.
CREDIT_BYTES_MIN = 16384
PING_PAYLOAD = b"alive?\0\0"
LAST_PING_PAYLOAD = b"the end?"
PING_POLL_SECONDS = 2.5  # The interval of the checks whether a PING was delivered and answered.
# These CPU times do not count against frame_cpu_share_max: the time for reading one request, and the time for reading
# one byte of its body.
REQUEST_CPU_SECONDS = 0.001
BODY_BYTE_CPU_SECONDS = 1e-7


class H2Connection:
    """One client's connection, from its preface to its end.

    Args:
        setup: objects that all connections of the server share.
        transport: the stream to the client, after the TLS handshake if there is one.
        peer: the client's address, shown in the log and to handlers.
        received: bytes that have already been read from the transport. They begin with the preface of HTTP/2.

    Attributes:
        on_known: called when a request shows an API key for the first time.
    """

    def __init__(self, setup: ConnectionSetup, transport: trio.abc.Stream, *, peer: str, received: bytes) -> None:
        now = trio.current_time()
        limits = setup.limits
        self._setup = setup
        self._limits = limits
        self._tally = setup.tally
        self._transport = transport
        self._peer = peer
        self._received = received
        self._protocol = initiated_protocol(limits)
        self._gate = FrameGate(limits, now=now)
        self._resets = RateBucket(per_second=limits.resets_per_second_max, burst=limits.resets_burst_max, now=now)
        self._cpu = RateBucket(per_second=limits.frame_cpu_share_max, burst=limits.frame_cpu_burst_seconds_max, now=now)
        self._cpu_credit = 0.0  # The CPU seconds that requests and bodies in the current read's bytes may cost.
        self._streams: dict[int, H2Stream] = {}
        self._outbox = H2Outbox(self._protocol, self._gate, self._more_to_write)
        self._tcp = transport if isinstance(transport, TcpStream) else None  # The flusher writes only to TCP.
        self._is_flushing = False  # True if the flusher will call `flush`.
        self._is_writing = False  # True while the writer task writes.
        self._wake = trio.Event()  # The event wakes the writer task.
        self._fault: Exception | None = None  # An error in `flush`, which the writer task raises.
        self._unwritten = b""  # The bytes that were taken from the outbox and that the kernel did not accept.
        # The scope contains the reader. Its deadline ends a connection without streams.
        self._read_timeout = trio.CancelScope()
        self._scope = trio.CancelScope()  # The scope contains the reader, the writer and the streams.
        self._uncredited_bytes = 0
        self.on_known: Callable[[], None] | None = None
        self._has_known = False  # True if a request on this connection has shown an API key.
        self._busy_since = now  # The time since which there is at least one stream.
        self._ended_at = now  # The time at which the last stream ended.
        self._received_at = now  # The time at which the client's last bytes arrived.
        self._has_streams = trio.Event()  # The event wakes the task that sends PINGs.
        self._is_last = False  # If True, the connection ends when it has no stream.
        self._is_leaving = False  # If True, the connection accepts no more streams.
        # The number of the last stream in the GOAWAY that was sent. None: no GOAWAY was sent.
        self._last_stream_id: int | None = None
        self._has_read_all = False  # True if the client has answered the PING that followed its last response.
        self._client_gone = False
        self._lingers = True  # If True, the connection waits at its end until the client has read the GOAWAY.
        self._write_broken = False  # If True, a part of a frame may have been sent, and no other bytes can follow.

    # --- methods for the server ---

    async def serve(self) -> None:
        """Serve streams until the connection ends. Raises only for faults of the server itself."""
        close_seconds_max = self._limits.close_seconds_max
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    nursery.start_soon(self._write)
                    nursery.start_soon(self._ping_silent_client)
                    await self._read()
        except BaseException:
            # The caller has cancelled `serve`, or a fault occurred. The tasks of the streams have ended and have reset
            # their streams.
            await close_now(self._transport, self._final_bytes(), seconds_max=close_seconds_max)
            raise
        if self._write_broken:
            await break_off(self._transport)
        elif self._client_gone or not self._lingers:
            await close_now(self._transport, self._final_bytes(), seconds_max=close_seconds_max)
        else:
            await close_after(self._transport, self._final_bytes(), seconds_max=close_seconds_max, more_expected=True)

    def may_end_at(self) -> float | None:
        """Return the time from which this connection may be closed to accept another connection, or None while it is in
        use.
        """
        limits = self._limits
        if self._is_leaving:
            return None
        if self._streams:
            if self._has_known or self._setup.slots.treats_callers_equally:
                return None
            return self._busy_since + limits.crowded_exchange_seconds_min
        if self._gate.header_block_since is not None:
            return self._gate.header_block_since + limits.crowded_head_seconds_min
        return self._ended_at + limits.crowded_idle_seconds_min

    def unsent(self) -> tuple[int, int]:
        """Return the number of bytes that wait for the client, and the number of streams that these bytes belong to."""
        waiting = [stream.unsent_bytes for stream in self._streams.values() if stream.unsent_bytes]
        return sum(waiting) + self._outbox.framed_bytes, len(waiting)

    def announce_drain(self) -> None:
        """Begin to drain: end the connection with a GOAWAY when the last stream has ended. Never waits.

        New streams are accepted until the connection ends. A stream that is open now is refused if its handler needs a
        missing part of the body.
        """
        self._is_last = True
        for stream in self._streams.values():
            stream.note_drain()

    def drain(self) -> None:
        """Accept no more streams, and end the connection with a GOAWAY when the running streams have ended. Never
        waits.

        Some clients (httpcore) drop all streams that they have not read to the end when they read a GOAWAY. So the
        GOAWAY is sent when the client has answered a PING after the last response, or close_seconds_max later. A stream
        is refused if its handler needs a missing part of the body.
        """
        self._is_last = True
        if not self._is_leaving:
            self._is_leaving = True
            if not self._streams:
                self._go_away(ErrorCodes.NO_ERROR)
            for stream in self._streams.values():
                stream.note_drain()

    def make_room(self) -> None:
        """End the connection with a GOAWAY to accept another connection. Does not wait until the client closes."""
        self._lingers = False
        if self._streams:
            self._end(ErrorCodes.ENHANCE_YOUR_CALM)
        else:
            self.drain()

    # --- methods for the streams ---

    def send_head(self, stream: H2Stream, fields: list[tuple[bytes, bytes]], *, end_stream: bool) -> None:
        if not stream.gone:
            self._outbox.collect(self._protocol.head_frames(stream.id, fields, end_stream=end_stream))
            stream.end_sent = end_stream

    def send_continue(self, stream: H2Stream) -> None:
        if not stream.gone:
            self._protocol.send_headers(stream.id, [(b":status", b"100")])
            self._outbox.collect()

    def queue(self, stream: H2Stream) -> None:
        self._outbox.queue(stream)

    def credit(self, stream: H2Stream, byte_count: int) -> None:
        if not stream.request_ended:
            self._protocol.increment_flow_control_window(byte_count, stream.id)
            self._outbox.collect()

    def reset_slow(self, stream: H2Stream, *, reads_some: bool) -> None:
        if not stream.gone:
            self._tally.exchanges_stalled_total += 1
            self._tally.connections_refused_total[ConnectionRefusal.SLOW_READER] += reads_some
            amount = "too little" if reads_some else "nothing"
            logger.info("client reads %s, stream reset peer=%s path=%s", amount, self._peer, printable(stream.path))
            self._reset(stream, ErrorCodes.CANCEL)

    def body_awaited(self, stream: H2Stream) -> None:
        if (self._is_leaving or (self._is_last and not stream.is_late)) and not stream.gone:
            self._tally.streams_refused_total[StreamRefusal.DRAINING] += 1
            self._reset(stream, ErrorCodes.REFUSED_STREAM)

    def body_too_slow(self) -> None:
        self._tally.connections_refused_total[ConnectionRefusal.BODY_TIMEOUT] += 1
        logger.debug("request body too slow peer=%s", self._peer)

    def unix_seconds(self) -> int:
        return self._setup.clock_and_ids.unix_seconds()

    def new_websocket(self, stream: H2Stream) -> FramedWebSocket:
        # The first websocket loads wsproto.
        from trioserve.http.framed_websocket import FramedWebSocket

        websocket = FramedWebSocket(
            stream, stream.scope, self._setup, self._nursery, is_known=stream.is_known, peer=self._peer
        )
        if self._setup.slots.is_draining:
            websocket.draining.set()
        return websocket

    def start_task(self, run: Callable[[], Awaitable[None]]) -> None:
        self._nursery.start_soon(run)

    def websocket_left(self) -> None:
        self._tally.exchanges_left_total += 1

    # --- reading ---

    async def _read(self) -> None:
        """Read until the client leaves, is idle for too long, or breaks the protocol."""
        with self._read_timeout:
            try:
                self._protocol.receive_data(self._received[: len(PREFACE)])
                received: bytes | bytearray = self._received[len(PREFACE) :]
                while True:
                    await self._handle_frames(received)
                    received = await self._transport.receive_some(READ_BYTES)
                    self._received_at = trio.current_time()
                    if not received:
                        self._client_left()
                        return
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self._client_left()
            except h2.exceptions.ProtocolError as error:
                self._tally.connections_refused_total[refusal_of(error)] += 1
                logger.info("connection ended peer=%s reason=%s", self._peer, printable(str(error)))
                # The GOAWAY that h2 prepared is dropped, because it may have a wrong error code.
                self._protocol.clear_outbound_data_buffer()
                self._end(error_code_of(error))
        if self._read_timeout.cancelled_caught:
            if self._gate.header_block_since is not None:
                self._tally.connections_refused_total[ConnectionRefusal.HEAD_TIMEOUT] += 1
            self._end(ErrorCodes.NO_ERROR)

    async def _handle_frames(self, received: bytes | bytearray) -> None:
        """Handle all frames of one read, and let other tasks run after every few milliseconds of work."""
        now = trio.current_time()
        cpu_clock = self._setup.clock_and_ids.cpu_clock
        began_at = cpu_clock()
        is_first = True
        for piece in self._gate.pieces(received, now):
            if not is_first:
                await trio.lowlevel.checkpoint()
                began_at = cpu_clock()
            is_first = False
            self._cpu_credit = 0.0
            for event in self._protocol.receive_data(piece):
                self._handle_event(event, now)
            self._outbox.collect()
            if self._outbox.framed_bytes > self._limits.control_bytes_max:
                raise Flood("the client does not read the responses to its frames", ConnectionRefusal.RESPONSES_UNREAD)
            if not self._cpu.take(trio.current_time(), max(0.0, cpu_clock() - began_at - self._cpu_credit)):
                raise Flood("the frames of this connection cost too much work", ConnectionRefusal.FRAME_WORK)
        self._update_read_timeout()

    def _handle_event(self, event: h2.events.Event, now: float) -> None:
        if isinstance(event, h2.events.WindowUpdated):
            self._window_opened(event.stream_id)
        elif isinstance(event, h2.events.DataReceived):
            self._data_arrived(event)
        elif isinstance(event, h2.events.RequestReceived):
            self._open_stream(event, now)
        elif isinstance(event, h2.events.StreamEnded):
            stream = self._streams.get(event.stream_id)
            if stream is not None:
                stream.request_end_arrived()
        elif isinstance(event, h2.events.StreamReset):
            stream = self._streams.get(event.stream_id)
            if stream is not None and not stream.gone:
                self._tally.exchanges_left_total += stream.may_be_left
                stream.leave()
            self._count_reset(now)
        elif isinstance(event, h2.events.PingAckReceived):
            if event.ping_data == LAST_PING_PAYLOAD and self._is_leaving and not self._streams:
                self._has_read_all = True
                self._more_to_write()  # The writer then ends the connection.
        elif isinstance(event, h2.events.RemoteSettingsChanged):
            if SettingCodes.INITIAL_WINDOW_SIZE in event.changed_settings:
                self._window_opened(0)
        elif isinstance(event, h2.events.TrailersReceived) and event.headers and event.headers[0][0].startswith(b":"):
            # FieldDecoder accepted the trailers as a request's head, without h2's checks.
            raise h2.exceptions.ProtocolError("the trailers contain the head of a request")

    def _open_stream(self, event: h2.events.RequestReceived, now: float) -> None:
        refusal = self._stream_refusal()
        if refusal is not None:
            self._refuse_stream(event.stream_id, refusal, now)
            return
        head = request_head(event, self._peer)
        slots = self._setup.slots
        is_known = slots.knows_caller is None or slots.knows_caller(head.headers)
        if is_known and not self._has_known:
            self._has_known = True
            if self.on_known is not None:
                self.on_known()
        websocket_caller = slots.websocket_caller(head, is_known=is_known) if head.is_websocket else None
        refusal = slots.refusal(is_known=is_known, websocket_caller=websocket_caller)
        if refusal is not None:
            self._refuse_stream(event.stream_id, refusal, now)
            return
        if event.stream_ended is not None and head.headers.get("content-length") not in (None, "0"):
            # The request is malformed (RFC 9113, 8.1.1). h2 compares content-length with the size of the body only when
            # DATA arrives.
            self._protocol.reset_stream(event.stream_id, ErrorCodes.PROTOCOL_ERROR)
            self._count_reset(now)
            return
        stream = H2Stream(
            self,
            event.stream_id,
            head,
            BodyShare(self._setup.body_budget),
            self._limits,
            request_ended=event.stream_ended is not None,
            is_known=is_known,
            is_late=slots.is_draining,
            websocket_caller=websocket_caller,
        )
        if not self._streams:
            self._busy_since = now
            self._has_streams.set()
        self._streams[stream.id] = stream
        self._cpu_credit += REQUEST_CPU_SECONDS
        slots.take(is_known=is_known, websocket_caller=websocket_caller)
        self._nursery.start_soon(self._run_stream, stream)

    def _stream_refusal(self) -> StreamRefusal | None:
        if self._is_leaving:
            return StreamRefusal.DRAINING
        if len(self._streams) >= self._limits.streams_max:
            return StreamRefusal.STREAMS_MAX
        return None

    def _refuse_stream(self, stream_id: int, refusal: StreamRefusal, now: float) -> None:
        self._tally.streams_refused_total[refusal] += 1
        self._protocol.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
        self._count_reset(now)

    def _data_arrived(self, event: h2.events.DataReceived) -> None:
        window_bytes = event.flow_controlled_length or 0
        # These bytes are credited at once, because a handler that does not read must not block the other streams of the
        # connection.
        self._uncredited_bytes += window_bytes
        if self._uncredited_bytes >= CREDIT_BYTES_MIN:
            self._protocol.increment_flow_control_window(self._uncredited_bytes)
            self._uncredited_bytes = 0
        stream = self._streams.get(event.stream_id)
        if stream is not None:
            data = event.data or b""
            self._cpu_credit += len(data) * BODY_BYTE_CPU_SECONDS
            stream.data_arrived(data, window_bytes)

    def _window_opened(self, stream_id: int) -> None:
        """Queue streams whose window has opened. Stream 0 means all streams (the window of the connection, or the
        initial size of all windows).
        """
        if stream_id:
            stream = self._streams.get(stream_id)
            opened = [] if stream is None else [stream]
        else:
            opened = list(self._streams.values())
        for stream in opened:
            if stream.unsent_bytes and not stream.queued:
                self._outbox.queue(stream)

    def _count_reset(self, now: float) -> None:
        if not self._resets.take(now):
            raise Flood("too many streams were opened and reset", ConnectionRefusal.RESETS)

    def _update_read_timeout(self) -> None:
        deadline = math.inf if self._streams else self._ended_at + self._limits.idle_seconds_max
        if self._gate.header_block_since is not None:
            deadline = min(deadline, self._gate.header_block_since + self._limits.head_seconds_max)
        if self._read_timeout.deadline != deadline:
            self._read_timeout.deadline = deadline

    # --- running streams ---

    async def _run_stream(self, stream: H2Stream) -> None:
        try:
            with stream.scope:
                if stream.gone:
                    return  # The client reset the stream in the same read that opened the stream.
                if stream.method == "CONNECT":
                    await stream.respond(405, JSON_FIELDS, refusal_body(405, "this server is not a proxy"))
                elif stream.is_websocket and (fault := handshake_fault(stream.headers, has_key=False)) is not None:
                    status, message, fields = fault
                    await stream.respond(status, [*JSON_FIELDS, *fields], refusal_body(status, message))
                elif not await call_handler(self._setup.handler, stream, stream.response):
                    self._tally.exchanges_failed_total += 1
                if stream.response.finished:
                    stream.queue_end()
                    await stream.drained()
                else:
                    self._reset(stream, ErrorCodes.INTERNAL_ERROR)
        finally:
            self._close_stream(stream)

    def _close_stream(self, stream: H2Stream) -> None:
        if stream.response.websocket is not None:
            stream.response.websocket.release()
        if not (stream.end_sent or self._ends_websocket(stream)):
            self._reset(stream, ErrorCodes.CANCEL)
        elif not stream.request_ended:
            # The response is complete, so the rest of the request is not needed (RFC 9113, 8.1).
            self._reset(stream, ErrorCodes.NO_ERROR)
        stream.gone = True
        stream.share.release()
        del self._streams[stream.id]
        self._setup.slots.release(
            is_known=stream.is_known, is_late=stream.is_late, websocket_caller=stream.websocket_caller
        )
        if not self._streams:
            if self._is_last and self._last_stream_id is None:
                self._is_leaving = True
                self._outbox.collect(frame(PING, 0, 0, LAST_PING_PAYLOAD))
            self._ended_at = trio.current_time()
            self._has_streams = trio.Event()
            self._update_read_timeout()
            self._more_to_write()  # The writer then ends the connection if it accepts no more streams.

    def _ends_websocket(self, stream: H2Stream) -> bool:
        """Send the last frames of a websocket and the end of its stream, and return True if the windows allow that."""
        if stream.response.websocket is None or stream.gone:
            return False
        with contextlib.suppress(h2.exceptions.ProtocolError):  # After a protocol error, h2 sends nothing more.
            return self._outbox.end_at_once(stream)
        return False

    def _reset(self, stream: H2Stream, code: ErrorCodes) -> None:
        if not stream.gone:
            # After a protocol error, h2 refuses a reset. Then the GOAWAY ends all streams.
            with contextlib.suppress(h2.exceptions.ProtocolError):
                self._protocol.reset_stream(stream.id, code)
            self._outbox.collect()
            stream.leave()

    # --- writing ---

    def _more_to_write(self) -> None:
        if self._tcp is None or self._is_writing or self._unwritten:
            self._wake.set()
        elif not self._is_flushing:
            self._is_flushing = True
            self._setup.flusher.add(self)

    def flush(self) -> None:
        """Write the bytes that the kernel accepts at once, and leave the rest to the writer. The flusher calls it."""
        self._is_flushing = False
        if self._is_writing:
            self._wake.set()
            return
        try:
            self._flush()
        except Exception as error:  # The flusher must continue, so the writer task raises the error.
            self._fault = error
            self._wake.set()

    def _flush(self) -> None:
        assert not self._unwritten, "the writer must send unwritten bytes before new bytes"
        if self._outbox.frame_ready_streams(WRITE_BYTES):
            # There are too many bytes for one write. The writer sends the rest after other connections have written.
            self._wake.set()
        assert self._tcp is not None
        data = self._outbox.take()
        if data:
            try:
                self._unwritten = data[self._tcp.try_send(data) :]
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self._client_left()
        if self._unwritten:
            self._write_broken = True
            self._wake.set()
        else:
            self._end_if_over()

    def _end_if_over(self) -> None:
        """End the connection if it has no streams and accepts no more streams. Call this method when all bytes are
        written.
        """
        if not self._streams:
            if self._has_read_all or self._last_stream_id is not None or self._gate.goaway_received:
                self._scope.cancel()
            elif self._is_leaving:
                deadline = trio.current_time() + self._limits.close_seconds_max
                self._scope.deadline = min(self._scope.deadline, deadline)

    async def _write(self) -> None:
        # One scope is used for all writes, because a scope for each write would cost as much as an event.
        with trio.CancelScope() as stall_scope:
            while True:
                await self._wake.wait()
                if self._fault is not None:
                    raise self._fault
                self._wake = trio.Event()
                self._is_writing = True
                if self._outbox.frame_ready_streams(WRITE_BYTES):
                    self._wake.set()
                data = self._unwritten + self._outbox.take()
                self._unwritten = b""
                if data:
                    await self._send(data, stall_scope)
                self._is_writing = False
                if not self._wake.is_set():
                    self._end_if_over()
        if stall_scope.cancelled_caught:
            self._tally.exchanges_stalled_total += len(self._streams)
            self._tally.connections_refused_total[ConnectionRefusal.STALLED] += 1
            logger.info("client reads nothing, connection ended peer=%s", self._peer)
            self._scope.cancel()

    async def _send(self, data: bytes, stall_scope: trio.CancelScope) -> None:
        self._write_broken = True  # The value is True until this write is complete.
        try:
            for start in range(0, len(data), WRITE_BYTES):
                stall_scope.deadline = trio.current_time() + self._limits.stall_seconds_max
                await self._transport.send_all(data[start : start + WRITE_BYTES])
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._client_left()
        stall_scope.deadline = math.inf
        self._write_broken = False

    # --- checking that the client still reads ---

    async def _ping_silent_client(self) -> None:
        """Send a PING to a silent client with running streams, and end the connection if the client does not answer.

        Only the time after TCP has delivered the PING counts. Other limits handle a slow network (stall_seconds_max,
        vanished_seconds_max).
        """
        limits = self._limits
        while True:
            await self._has_streams.wait()
            await trio.sleep_until(self._received_at + limits.ping_seconds)
            ping_at = trio.current_time()
            if not self._streams or self._received_at + limits.ping_seconds > ping_at:
                continue
            self._outbox.collect(frame(PING, 0, 0, PING_PAYLOAD))
            ping_end_bytes: int | None = None  # The number of the byte after the PING, as TCP counts the bytes.
            delivered_at = ping_at
            while self._streams and self._received_at < ping_at:
                await trio.sleep_until(
                    min(trio.current_time() + PING_POLL_SECONDS, delivered_at + limits.ping_answer_seconds_max)
                )
                now = trio.current_time()
                is_written = not (self._unwritten or self._is_writing or self._outbox.framed_bytes)
                tcp_bytes = self._tcp_bytes()
                if tcp_bytes is not None and is_written and ping_end_bytes is None:
                    ping_end_bytes = sum(tcp_bytes)
                is_in_flight = tcp_bytes is not None and ping_end_bytes is not None and tcp_bytes[0] < ping_end_bytes
                if not is_written or is_in_flight:
                    delivered_at = now
                elif now >= delivered_at + limits.ping_answer_seconds_max and self._received_at < ping_at:
                    self._tally.connections_refused_total[ConnectionRefusal.PING_UNANSWERED] += 1
                    logger.info("client answers no PING, connection ended peer=%s", self._peer)
                    self._lingers = False
                    self._client_left()
                    return

    def _tcp_bytes(self) -> tuple[int, int] | None:
        """Return the number of bytes that the client's kernel has acknowledged, and the number of bytes in flight. None
        if the transport is not TCP.
        """
        transport: object = self._transport
        while isinstance(transport, trio.SSLStream):
            transport = transport.transport_stream
        return transport.delivered_bytes() if isinstance(transport, TcpStream) else None

    # --- ending ---

    def _client_left(self) -> None:
        self._client_gone = True
        for stream in self._streams.values():
            if not stream.gone:
                self._tally.exchanges_left_total += stream.may_be_left
                stream.leave()
        self._scope.cancel()

    def _end(self, code: ErrorCodes) -> None:
        """Reset all streams and send a GOAWAY with the reason. The writer has close_seconds_max to write them."""
        for stream in self._streams.values():
            self._reset(stream, ErrorCodes.CANCEL)
        self._go_away(code)
        self._scope.deadline = trio.current_time() + self._limits.close_seconds_max

    def _go_away(self, code: ErrorCodes) -> None:
        self._is_leaving = True
        if self._last_stream_id is None:
            self._last_stream_id = self._protocol.highest_inbound_stream_id
        self._outbox.collect(goaway_frame(self._last_stream_id, code))

    def _final_bytes(self) -> bytes:
        if self._write_broken or self._client_gone:
            return b""
        if self._last_stream_id is None:
            self._go_away(ErrorCodes.NO_ERROR)
        self._outbox.collect()
        return self._outbox.take()
