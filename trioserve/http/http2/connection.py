"""One HTTP/2 connection: h2 in the middle, a task and a scope per stream, bounded bytes.

One task reads, one writes. The reader acts on an event where it reads it: a reset cancels the stream's scope before
anything else runs. The writer sends what all streams have to say in one write, and then looks again; since a step of an
engine wakes all handlers in one pass of the scheduler, its tokens leave in one write of the next pass.
What goes wrong here ends this connection and no other.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable

import h2.events
import h2.exceptions
import trio
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from trioserve.http.body_budget import BodyShare
from trioserve.http.closing import break_off, close_after, close_now
from trioserve.http.connection_setup import ConnectionSetup
from trioserve.http.counters import ConnectionRefusal, StreamRefusal
from trioserve.http.handler_call import call_handler
from trioserve.http.http2.errors import error_code_of, refusal_of
from trioserve.http.http2.frames import PING, PREFACE, Flood, FrameGate, frame, goaway_frame
from trioserve.http.http2.outbox import H2Outbox
from trioserve.http.http2.protocol import initiated_protocol, request_head
from trioserve.http.http2.stream import H2Stream
from trioserve.http.message_head import printable
from trioserve.http.rate_bucket import RateBucket
from trioserve.http.refusals import JSON_FIELDS, refusal_body
from trioserve.trio_tools.tcp_stream import TcpStream

__all__ = ["H2Connection"]

logger = logging.getLogger(__name__)

READ_BYTES = 16384
WRITE_BYTES = 65536  # DATA taken from the streams for one write; also what has to leave within one stall limit
CREDIT_BYTES_MIN = 16384
PING_PAYLOAD = b"alive?\0\0"
LAST_PING_PAYLOAD = b"the end?"
PING_LOOK_SECONDS = 2.5  # between two looks whether a PING was delivered and answered
# CPU time that reading is worth, which is not charged: of a request that is opened, and of a byte of its body.
REQUEST_CPU_SECONDS = 0.001
BODY_BYTE_CPU_SECONDS = 1e-7


def _nothing() -> None:
    pass


class H2Connection:
    """One client's connection, from its preface to its end.

    received: what was read from the transport already, the preface first.
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
        self._cpu_earned = 0.0  # seconds, by what the frames of this piece brought
        self._streams: dict[int, H2Stream] = {}
        self._outbox = H2Outbox(self._protocol, self._gate, self._more_to_write)
        self._tcp = transport if isinstance(transport, TcpStream) else None  # which the flusher can write to
        self._is_flushing = False  # the flusher knows
        self._is_writing = False  # the writer does, and can wait
        self._wake = trio.Event()  # of the writer
        self._fault: Exception | None = None  # of a flush
        self._unwritten = b""  # taken from the outbox, and not by the kernel
        self._patience = trio.CancelScope()  # of the reader; its deadline ends a connection without streams
        self._whole = trio.CancelScope()  # reader, writer and streams
        self._uncredited_bytes = 0
        self.on_known: Callable[[], None] = _nothing  # called when a request shows a key
        self._has_known = False  # a request on it has shown a key
        self._busy_since = now  # there are streams, if there are any
        self._ended_at = now  # of the last stream
        self._heard_at = now  # the client's last bytes
        self._has_streams = trio.Event()  # for the task that asks whether the client reads
        self._is_last = False  # the connection ends when it has no stream
        self._is_leaving = False  # no more streams are accepted
        self._last_stream_id: int | None = None  # of our GOAWAY
        self._has_read_all = False  # the client answered the PING behind its last response
        self._client_gone = False
        self._lingers = True  # until the client has read our GOAWAY
        self._write_broken = False  # a part of a frame may be out: nothing can follow it

    # --- for the server ---

    async def serve(self) -> None:
        """Returns when the connection has ended and nothing of it is left. Raises only for faults of our own."""
        close_seconds_max = self._limits.close_seconds_max
        try:
            with self._whole:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    nursery.start_soon(self._write)
                    nursery.start_soon(self._ask_for_life)
                    await self._read()
        except BaseException:
            # The caller ends us, or we are broken. The streams' tasks have left and with that reset their streams.
            await close_now(self._transport, self._final_bytes(), seconds_max=close_seconds_max)
            raise
        if self._write_broken:
            await break_off(self._transport)
        elif self._client_gone or not self._lingers:
            await close_now(self._transport, self._final_bytes(), seconds_max=close_seconds_max)
        else:
            await close_after(self._transport, self._final_bytes(), seconds_max=close_seconds_max, more_expected=True)

    def may_end_at(self) -> float | None:
        """From when on this connection may have to end for another one; None while it is in use."""
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
        """How many bytes wait here for the client, and in how many streams."""
        waiting = [stream.unsent_bytes for stream in self._streams.values() if stream.unsent_bytes]
        return sum(waiting) + self._outbox.framed_bytes, len(waiting)

    def announce_drain(self) -> None:
        """End with a GOAWAY as soon as no stream runs behind another request. Never waits.

        Streams are still accepted until then. A stream that is open now and whose request has not come whole is
        refused.
        """
        self._is_last = True
        for stream in self._streams.values():
            stream.wake()

    def drain(self) -> None:
        """Accept no more streams, and end with a GOAWAY when those that run have ended. Never waits.

        Some clients (httpcore) drop every stream that they have not taken to its end when they read a GOAWAY. So it is
        sent when the client has answered a PING behind the last response, or close_seconds_max later. A stream whose
        request has not come whole is refused.
        """
        self._is_last = True
        if not self._is_leaving:
            self._is_leaving = True
            if not self._streams:
                self._go_away(ErrorCodes.NO_ERROR)
            for stream in self._streams.values():
                stream.wake()

    def make_room(self) -> None:
        """End a connection whose place is needed: a GOAWAY, and no waiting for the client to close, too."""
        self._lingers = False
        if self._streams:
            self._end(ErrorCodes.ENHANCE_YOUR_CALM)
        else:
            self.drain()

    # --- for the streams ---

    def send_head(self, stream: H2Stream, fields: list[tuple[bytes, bytes]], *, end_stream: bool) -> None:
        if not stream.gone:
            self._outbox.collect(self._protocol.head_frames(stream.id, fields, end_stream=end_stream))
            stream.end_sent = end_stream

    def go_on(self, stream: H2Stream) -> None:
        if not stream.gone:
            self._protocol.send_headers(stream.id, [(b":status", b"100")])
            self._outbox.collect()

    def queue(self, stream: H2Stream) -> None:
        self._outbox.queue(stream)

    def credit(self, stream: H2Stream, byte_count: int) -> None:
        if not stream.request_ended:
            self._protocol.increment_flow_control_window(byte_count, stream.id)
            self._outbox.collect()

    def give_up(self, stream: H2Stream, *, takes_some: bool) -> None:
        if not stream.gone:
            self._tally.exchanges_stalled_total += 1
            self._tally.connections_refused_total[ConnectionRefusal.SLOW_READER] += takes_some
            what = "too little" if takes_some else "nothing"
            logger.info("client takes %s, stream reset peer=%s path=%s", what, self._peer, printable(stream.path))
            self._reset(stream, ErrorCodes.CANCEL)

    def body_awaited(self, stream: H2Stream) -> None:
        if (self._is_leaving or (self._is_last and not stream.is_late)) and not stream.gone:
            self._tally.streams_refused_total[StreamRefusal.DRAINING] += 1
            self._reset(stream, ErrorCodes.REFUSED_STREAM)

    def body_too_slow(self) -> None:
        self._tally.connections_refused_total[ConnectionRefusal.BODY_TIMEOUT] += 1
        logger.debug("body given up peer=%s", self._peer)

    def unix_seconds(self) -> int:
        return self._setup.clock_and_ids.unix_seconds()

    # --- reading ---

    async def _read(self) -> None:
        """Until the connection is to end: the client left, was idle, or broke the protocol."""
        with self._patience:
            try:
                self._protocol.receive_data(self._received[: len(PREFACE)])
                received: bytes | bytearray = self._received[len(PREFACE) :]
                while True:
                    await self._take(received)
                    received = await self._transport.receive_some(READ_BYTES)
                    self._heard_at = trio.current_time()
                    if not received:
                        self._client_left()
                        return
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self._client_left()
            except h2.exceptions.ProtocolError as error:
                self._tally.connections_refused_total[refusal_of(error)] += 1
                logger.info("connection ended peer=%s reason=%s", self._peer, printable(str(error)))
                self._protocol.clear_outbound_data_buffer()  # h2's own GOAWAY, for which it knows fewer codes
                self._end(error_code_of(error))
        if self._patience.cancelled_caught:
            if self._gate.header_block_since is not None:
                self._tally.connections_refused_total[ConnectionRefusal.HEAD_TIMEOUT] += 1
            self._end(ErrorCodes.NO_ERROR)

    async def _take(self, received: bytes | bytearray) -> None:
        """Act on all frames that a read brought, with a turn for other tasks after each few milliseconds of work."""
        now = trio.current_time()
        cpu_clock = self._setup.clock_and_ids.cpu_clock
        began_at = cpu_clock()
        is_first = True
        for piece in self._gate.pieces(received, now):
            if not is_first:
                await trio.lowlevel.checkpoint()
                began_at = cpu_clock()
            is_first = False
            self._cpu_earned = 0.0
            for event in self._protocol.receive_data(piece):
                self._act_on(event, now)
            self._outbox.collect()
            if self._outbox.framed_bytes > self._limits.control_bytes_max:
                raise Flood("the client does not read the responses to its frames", ConnectionRefusal.RESPONSES_UNREAD)
            if not self._cpu.take(trio.current_time(), max(0.0, cpu_clock() - began_at - self._cpu_earned)):
                raise Flood("the frames of this connection cost too much work", ConnectionRefusal.FRAME_WORK)
        self._set_patience()

    def _act_on(self, event: h2.events.Event, now: float) -> None:
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
                self._tally.exchanges_left_total += 1
                stream.leave()
            self._count_reset(now)
        elif isinstance(event, h2.events.PingAckReceived):
            if event.ping_data == LAST_PING_PAYLOAD and self._is_leaving and not self._streams:
                self._has_read_all = True
                self._more_to_write()  # the writer ends the connection
        elif isinstance(event, h2.events.RemoteSettingsChanged):
            if SettingCodes.INITIAL_WINDOW_SIZE in event.changed_settings:
                self._window_opened(0)
        elif isinstance(event, h2.events.TrailersReceived) and event.headers and event.headers[0][0].startswith(b":"):
            raise h2.exceptions.ProtocolError("a request's head came for trailers")  # FieldDecoder took it for a head

    def _open_stream(self, event: h2.events.RequestReceived, now: float) -> None:
        refusal = self._stream_refusal()
        if refusal is not None:
            self._refuse_stream(event.stream_id, refusal, now)
            return
        head = request_head(event, self._peer)
        is_known = self._setup.slots.knows(head.headers)
        if is_known and not self._has_known:
            self._has_known = True
            self.on_known()
        refusal = self._setup.slots.refusal(is_known=is_known)
        if refusal is not None:
            self._refuse_stream(event.stream_id, refusal, now)
            return
        if event.stream_ended is not None and head.headers.get("content-length") not in (None, "0"):
            # Malformed (RFC 9113, 8.1.1); h2 compares lengths only when DATA comes.
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
            is_late=self._setup.slots.is_draining,
        )
        if not self._streams:
            self._busy_since = now
            self._has_streams.set()
        self._streams[stream.id] = stream
        self._cpu_earned += REQUEST_CPU_SECONDS
        self._setup.slots.take(is_known=is_known)
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
        # Credited at once, read or not: one stream whose handler does not read must not close the window of the others.
        self._uncredited_bytes += window_bytes
        if self._uncredited_bytes >= CREDIT_BYTES_MIN:
            self._protocol.increment_flow_control_window(self._uncredited_bytes)
            self._uncredited_bytes = 0
        stream = self._streams.get(event.stream_id)
        if stream is not None:
            data = event.data or b""
            self._cpu_earned += len(data) * BODY_BYTE_CPU_SECONDS
            stream.data_arrived(data, window_bytes)

    def _window_opened(self, stream_id: int) -> None:
        """stream_id 0: the connection's window, or through a changed setting every stream's."""
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
            raise Flood("too many streams opened in vain", ConnectionRefusal.RESETS)

    def _set_patience(self) -> None:
        deadline = math.inf if self._streams else self._ended_at + self._limits.idle_seconds_max
        if self._gate.header_block_since is not None:
            deadline = min(deadline, self._gate.header_block_since + self._limits.head_seconds_max)
        if self._patience.deadline != deadline:
            self._patience.deadline = deadline

    # --- running ---

    async def _run_stream(self, stream: H2Stream) -> None:
        try:
            with stream.scope:
                if stream.gone:
                    return  # reset in the same read that opened it
                if stream.method == "CONNECT":
                    await stream.respond(405, JSON_FIELDS, refusal_body(405, "this server is not a proxy"))
                elif not await call_handler(self._setup.handler, stream, stream.response):
                    self._tally.exchanges_failed_total += 1
                if stream.response.finished:
                    await stream.drained()
                else:
                    self._reset(stream, ErrorCodes.INTERNAL_ERROR)
        finally:
            self._close_stream(stream)

    def _close_stream(self, stream: H2Stream) -> None:
        if not stream.end_sent:
            self._reset(stream, ErrorCodes.CANCEL)
        elif not stream.request_ended:
            # The response is complete, and the rest of the request is of no use (RFC 9113, 8.1).
            self._reset(stream, ErrorCodes.NO_ERROR)
        stream.gone = True
        stream.share.release()
        del self._streams[stream.id]
        self._setup.slots.release(is_known=stream.is_known, is_late=stream.is_late)
        if not self._streams:
            if self._is_last and self._last_stream_id is None:
                self._is_leaving = True
                self._outbox.collect(frame(PING, 0, 0, LAST_PING_PAYLOAD))
            self._ended_at = trio.current_time()
            self._has_streams = trio.Event()
            self._set_patience()
            self._more_to_write()  # the writer ends a connection that takes no more streams

    def _reset(self, stream: H2Stream, code: ErrorCodes) -> None:
        if not stream.gone:
            # h2 refuses after a protocol error, when the GOAWAY speaks for all streams.
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
        """Called by the flusher: write what the kernel takes at once, and leave the rest to the writer."""
        self._is_flushing = False
        if self._is_writing:
            self._wake.set()
            return
        try:
            self._flush()
        except Exception as error:  # the flusher goes on for the others; our own writer raises it
            self._fault = error
            self._wake.set()

    def _flush(self) -> None:
        assert not self._unwritten, "what is left over is the writer's, and goes before anything new"
        if self._outbox.frame_ready_streams(WRITE_BYTES):
            self._wake.set()  # more than goes into one write: the others have their turn in between
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
        """To be called when everything is written: end a connection without streams that takes no more of them."""
        if not self._streams:
            if self._has_read_all or self._last_stream_id is not None or self._gate.goaway_received:
                self._whole.cancel()
            elif self._is_leaving:
                deadline = trio.current_time() + self._limits.close_seconds_max
                self._whole.deadline = min(self._whole.deadline, deadline)

    async def _write(self) -> None:
        with trio.CancelScope() as patience:  # one for all writes: a scope for each would cost as much as its event
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
                    await self._send(data, patience)
                self._is_writing = False
                if not self._wake.is_set():
                    self._end_if_over()
        if patience.cancelled_caught:
            self._tally.exchanges_stalled_total += len(self._streams)
            self._tally.connections_refused_total[ConnectionRefusal.STALLED] += 1
            logger.info("client takes nothing, connection ended peer=%s", self._peer)
            self._whole.cancel()

    async def _send(self, data: bytes, patience: trio.CancelScope) -> None:
        self._write_broken = True  # unless it comes to its end
        try:
            for start in range(0, len(data), WRITE_BYTES):
                patience.deadline = trio.current_time() + self._limits.stall_seconds_max
                await self._transport.send_all(data[start : start + WRITE_BYTES])
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._client_left()
        patience.deadline = math.inf
        self._write_broken = False

    # --- whether the client still reads ---

    async def _ask_for_life(self) -> None:
        """Send a PING to a silent client with running streams, and end a connection that does not answer.

        Only the time after TCP has delivered the PING counts: a slow network is another bound's business
        (stall_seconds_max, vanished_seconds_max).
        """
        limits = self._limits
        while True:
            await self._has_streams.wait()
            await trio.sleep_until(self._heard_at + limits.ping_seconds)
            asked_at = trio.current_time()
            if not self._streams or self._heard_at + limits.ping_seconds > asked_at:
                continue
            self._outbox.collect(frame(PING, 0, 0, PING_PAYLOAD))
            ends_at: float | None = None  # of the sent bytes, in the count of TCP
            delivered_at = asked_at
            while self._streams and self._heard_at < asked_at:
                await trio.sleep_until(
                    min(trio.current_time() + PING_LOOK_SECONDS, delivered_at + limits.ping_answer_seconds_max)
                )
                now = trio.current_time()
                is_written = not (self._unwritten or self._is_writing or self._outbox.framed_bytes)
                tcp_bytes = self._tcp_bytes()
                if tcp_bytes is not None and is_written and ends_at is None:
                    ends_at = sum(tcp_bytes)
                if not is_written or (tcp_bytes is not None and ends_at is not None and tcp_bytes[0] < ends_at):
                    delivered_at = now
                elif now >= delivered_at + limits.ping_answer_seconds_max and self._heard_at < asked_at:
                    self._tally.connections_refused_total[ConnectionRefusal.PING_UNANSWERED] += 1
                    logger.info("client answers no PING, connection ended peer=%s", self._peer)
                    self._lingers = False
                    self._client_left()
                    return

    def _tcp_bytes(self) -> tuple[int, int] | None:
        transport: object = self._transport
        while isinstance(transport, trio.SSLStream):
            transport = transport.transport_stream
        return transport.delivered_bytes() if isinstance(transport, TcpStream) else None

    # --- ending ---

    def _client_left(self) -> None:
        self._client_gone = True
        for stream in self._streams.values():
            if not stream.gone:
                self._tally.exchanges_left_total += 1
                stream.leave()
        self._whole.cancel()

    def _end(self, code: ErrorCodes) -> None:
        """Reset every stream, say why, and give the writer a moment to get it out."""
        for stream in self._streams.values():
            self._reset(stream, ErrorCodes.CANCEL)
        self._go_away(code)
        self._whole.deadline = trio.current_time() + self._limits.close_seconds_max

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
