"""The HTTP server: it accepts connections, detects their protocol, and drains them."""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import ssl
from collections.abc import Sequence

import trio

from trioserve.http.body_budget import BodyBudget
from trioserve.http.connection_setup import (
    ConnectionSetup,
    ExchangeSlots,
    Flusher,
    KnowsCaller,
    WebSocketTimer,
    close_now,
)
from trioserve.http.counters import ConnectionRefusal, FrontendCounters, Tally
from trioserve.http.exchange import ClockAndIds, Handler
from trioserve.http.http1.connection import H11Connection
from trioserve.http.http2.connection import H2Connection
from trioserve.http.http2.frames import PREFACE
from trioserve.http.limits import FrontendLimits
from trioserve.http.pace import RateBucket
from trioserve.trio_tools.connection_limit import ConnectionLimit, Place, remote_address
from trioserve.trio_tools.tcp_stream import TcpStream, end_when_vanished

__all__ = ["FrontendServer"]

logger = logging.getLogger(__name__)

NO_TLS_REASONS = frozenset({"HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "WRONG_VERSION_NUMBER"})
"""OpenSSL reports one of these reasons if the first bytes are not TLS. It detects GET, HEAD, POST, PUT and CONNECT."""
TLS_OPENING = b"\x16\x03"  # A TLS ClientHello begins with these bytes in all TLS versions.


class FrontendServer:
    """A server for HTTP/2 and HTTP/1.1 on one port. It does not depend on engines.

    Stopping has two phases. After `announce_drain`, the server still accepts connections and the handler still answers
    requests. So load balancers and people can see why the server refuses work. After `drain`, the server accepts no
    connections. `serve` returns when the last connection has ended. To end sooner, cancel the scope around `serve`.
    This cancels all exchanges, and each connection has close_seconds_max to send its GOAWAY.

    Args:
        handler: answers each request.
        limits: limits of the server. If None, the default limits.
        ssl_context: the TLS context. If None, connections do not use TLS.
        clock_and_ids: sources of time and ids. If None, the real clocks and random ids.
        knows_caller: returns True for callers with an API key. A share of the connections and exchanges is reserved for
            these callers. None if the server requires no keys.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        limits: FrontendLimits | None = None,
        ssl_context: ssl.SSLContext | None = None,
        clock_and_ids: ClockAndIds | None = None,
        knows_caller: KnowsCaller | None = None,
    ) -> None:
        self._limits = limits or FrontendLimits()
        tally = Tally()
        self._ssl_context = ssl_context
        self._setup = ConnectionSetup(
            handler=handler,
            limits=self._limits,
            tally=tally,
            slots=ExchangeSlots(self._limits, tally, knows_caller),
            body_budget=BodyBudget(self._limits),
            clock_and_ids=clock_and_ids or ClockAndIds(),
            flusher=Flusher(),
            websocket_timer=WebSocketTimer(),
        )
        self._connections: set[H2Connection | H11Connection] = set()
        self._unidentified: set[trio.CancelScope] = set()
        self._accepting = trio.CancelScope()
        # The bucket limits the number of log lines, because misconfigured clients and scanners connect again and again.
        self._protocol_reports = RateBucket(per_second=1 / 60, burst=3, now=0.0)
        connections_max = self._limits.connections_max
        strangers_share = 1.0 if knows_caller is None else self._limits.unknown_connections_share_max
        self._places = ConnectionLimit(
            connections_max=connections_max,
            strangers_max=max(1, int(connections_max * strangers_share)),
            per_address_max=self._limits.connections_per_address_max,
            on_crowded=lambda: self._count_refusal(ConnectionRefusal.CROWDED),
            on_shortage=self._count_shortage,
        )

    @property
    def draining(self) -> bool:
        return self._accepting.cancel_called

    def use_tls(self, ssl_context: ssl.SSLContext) -> None:
        """Replace the certificates for future connections. Open connections keep their certificates.

        Args:
            ssl_context: a context that tls_context returned.
        """
        self._ssl_context = ssl_context

    def announce_drain(self) -> None:
        """Begin to drain: keep answering requests, and end each connection after its response. Never waits.

        HTTP/1.1 responses contain `Connection: close`. An HTTP/2 connection sends its GOAWAY when its last stream has
        ended, because some clients (httpcore) drop running streams when they read a GOAWAY. A request that began before
        this call is refused if a part of it is missing.
        """
        self._setup.slots.begin_drain()
        for connection in self._connections:
            connection.announce_drain()

    async def wait_until_answered(self) -> None:
        """Wait until all exchanges that were open at `announce_drain` have ended. Later exchanges do not count."""
        await self._setup.slots.wait_until_early_ended()

    def drain(self) -> None:
        """Stop accepting connections, let running exchanges finish, and close idle connections. Never waits."""
        self._accepting.cancel()
        for scope in self._unidentified:
            scope.cancel()
        for connection in self._connections:
            connection.drain()

    def counters(self) -> FrontendCounters:
        unsent = [connection.unsent() for connection in self._connections]
        return self._setup.tally.snapshot(
            self._setup.body_budget,
            connections_known_open=self._places.known_count,
            connections_max=self._limits.connections_max,
            websockets_max=self._limits.websockets_max,
            answer_bytes_held=sum(byte_count for byte_count, _ in unsent),
            exchanges_behind=sum(exchange_count for _, exchange_count in unsent),
        )

    async def serve(
        self,
        listeners: Sequence[trio.SocketListener],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve connections until the server is drained. Call this once.

        Args:
            listeners: listening sockets. The server closes them when it stops accepting connections.
            task_status: reported as started when the server accepts connections.
        """
        async with trio.open_nursery() as helpers:
            helpers.start_soon(self._setup.flusher.run)
            async with trio.open_nursery() as connections:
                try:
                    with self._accepting:
                        async with trio.open_nursery() as accept_loops:
                            for listener in listeners:
                                accept_loops.start_soon(self._accept, listener, connections)
                            task_status.started()
                finally:
                    # The sockets are closed at once, so that the kernel refuses new clients. Otherwise new clients
                    # would wait in the backlog.
                    for listener in listeners:
                        listener.socket.close()
            helpers.cancel_scope.cancel()

    async def serve_connection(
        self, stream: trio.abc.Stream, *, peer: str = "unknown", place: Place | None = None
    ) -> None:
        """Serve one client's stream, and close it. `serve` calls this, and tests call it with a stream in memory.

        Raises only Cancelled: a fault becomes one line in the log.

        Args:
            stream: the connection, before the TLS handshake if the server has certificates.
            peer: the client's address, shown in the log and to handlers.
            place: the connection's entry in the count of connections. If None, the connection does not count against
                the limit.
        """
        tally = self._setup.tally
        tally.connections_total += 1
        tally.connections_open += 1
        counted_place, place = place, place or Place(None)
        try:
            connection = None
            with trio.CancelScope() as scope:
                self._unidentified.add(scope)
                may_end_at = trio.current_time() + self._limits.crowded_head_seconds_min
                place.may_end_at, place.end = (lambda: may_end_at), scope.cancel
                try:
                    if not self.draining:
                        connection = await self._identify(stream, peer)
                finally:
                    self._unidentified.discard(scope)
            # While the first bytes arrived, the server may have chosen this connection to end, to accept another
            # connection.
            if connection is not None and not place.is_ending:
                self._connections.add(connection)
                if counted_place is not None and not self._setup.slots.treats_callers_equally:
                    connection.on_known = functools.partial(self._places.know, counted_place)
                place.may_end_at, place.end = connection.may_end_at, connection.make_room
                try:
                    if self.draining:
                        connection.drain()
                    elif self._setup.slots.is_draining:
                        connection.announce_drain()
                    await connection.serve()
                finally:
                    self._connections.discard(connection)
        except* Exception:  # If Cancelled is in an exception group with errors, this statement still raises Cancelled.
            tally.connections_failed_total += 1
            logger.exception("connection failed peer=%s", peer)
        finally:
            tally.connections_open -= 1
            await close_now(stream, b"", seconds_max=self._limits.close_seconds_max)

    def _count_refusal(self, reason: ConnectionRefusal) -> None:
        self._setup.tally.connections_refused_total[reason] += 1

    def _count_shortage(self) -> None:
        self._setup.tally.accepts_failed_total += 1

    # --- accepting ---

    async def _accept(self, listener: trio.SocketListener, connections: trio.Nursery) -> None:
        while True:
            stream = await self._places.accept(listener)
            place = self._places.enter(remote_address(stream))
            if place is None:
                self._count_refusal(ConnectionRefusal.ADDRESS)
                stream.socket.close()
            else:
                connections.start_soon(self._serve_accepted, stream, place)

    async def _serve_accepted(self, stream: trio.SocketStream, place: Place) -> None:
        peer = _peer_name(stream)
        try:
            with contextlib.suppress(OSError):  # If the client has left, the next read from its stream fails.
                limits = self._limits
                end_when_vanished(stream, limits.vanished_seconds_max, unread_seconds=limits.stall_seconds_max)
            served = TcpStream(stream) if isinstance(stream, trio.SocketStream) else stream
            await self.serve_connection(served, peer=peer, place=place)
        finally:
            self._places.leave(place)

    # --- detecting the protocol ---

    async def _identify(self, stream: trio.abc.Stream, peer: str) -> H2Connection | H11Connection | None:
        """Return a connection of the protocol that the client uses, or None if the client left, sent nothing, or failed
        the handshake.
        """
        limits = self._limits
        refused = self._setup.tally.connections_refused_total
        agreed: str | None = None
        if self._ssl_context is not None:
            secure = trio.SSLStream(stream, self._ssl_context, server_side=True, https_compatible=True)
            stream = secure
            with trio.move_on_after(limits.tls_handshake_seconds_max) as timeout:
                try:
                    await secure.do_handshake()
                except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                    refused[ConnectionRefusal.TLS_HANDSHAKE] += 1
                    if getattr(error.__cause__, "reason", None) in NO_TLS_REASONS:
                        self._report_protocol("a client does not speak TLS at a port with TLS", "https://", peer)
                    else:
                        logger.debug("TLS handshake failed peer=%s error=%s", peer, error.__cause__ or error)
                    return None
            if timeout.cancelled_caught:
                refused[ConnectionRefusal.TLS_HANDSHAKE] += 1
                return None
            agreed = secure.selected_alpn_protocol()
        received = b""
        with trio.move_on_after(limits.sniff_seconds_max) as timeout:
            received = await _read_opening(stream)
        if timeout.cancelled_caught:
            refused[ConnectionRefusal.SILENT] += 1
        if not received:
            return None
        if received.startswith(TLS_OPENING):
            self._report_protocol("a client speaks TLS at a port without TLS", "http://", peer)
        if agreed == "h2" or received.startswith(PREFACE):
            self._setup.tally.connections_http2_total += 1
            return H2Connection(self._setup, stream, peer=peer, received=received)
        return H11Connection(self._setup, stream, peer=peer, received=received)

    def _report_protocol(self, happened: str, scheme: str, peer: str) -> None:
        """Log that a client uses another protocol than its port. The number of such lines is limited."""
        if self._protocol_reports.take(trio.current_time()):
            logger.warning("%s: give the client a URL that begins with %s peer=%s", happened, scheme, peer)


async def _read_opening(stream: trio.abc.Stream) -> bytes:
    """Read enough bytes to know whether the client sends HTTP/2's preface (RFC 9113, 3.3, 3.4).

    Returns:
        The bytes read so far. They are empty if the client left before it sent any.
    """
    received = bytearray()
    while True:
        try:
            piece = await stream.receive_some(16384)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""
        if not piece:
            return b""
        received += piece
        if len(received) >= len(PREFACE) or not PREFACE.startswith(received):
            return bytes(received)


def _peer_name(stream: trio.SocketStream) -> str:
    if stream.socket.family == socket.AF_UNIX:
        return "unix"
    try:
        host, port, *_ = stream.socket.getpeername()
    except OSError:
        return "unknown"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
