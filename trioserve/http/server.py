"""Accepting connections, finding out what each one speaks, and leaving in good order."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import socket
import ssl
from collections.abc import Callable, Sequence

import trio

from trioserve.http.body_budget import BodyBudget
from trioserve.http.clock_and_ids import ClockAndIds
from trioserve.http.closing import close_now
from trioserve.http.connection_setup import ConnectionSetup
from trioserve.http.counters import ConnectionRefusal, FrontendCounters, Tally
from trioserve.http.exchange import Handler
from trioserve.http.exchange_slots import ExchangeSlots, KnowsCaller
from trioserve.http.flusher import Flusher
from trioserve.http.http1.connection import H11Connection
from trioserve.http.http2.connection import H2Connection
from trioserve.http.http2.frames import PREFACE
from trioserve.http.limits import FrontendLimits
from trioserve.trio_tools.tcp_stream import TcpStream

__all__ = ["FrontendServer"]

logger = logging.getLogger(__name__)

ACCEPT_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
# What accept(2) reports of the connection that it would have returned; the next one may be well.
ACCEPT_MISHAPS = frozenset(
    {errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH}
)
ACCEPT_RETRY_SECONDS = 0.1  # a shortage ends when a connection does

# TCP asks a silent client whether it is there: a machine that lost power sends no FIN. Gone after 15 + 3 * 5 seconds.
KEEPALIVE_OPTIONS = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class FrontendServer:
    """HTTP/2 and HTTP/1.1 on the same port, for one handler. Knows nothing of engines.

    `serve` returns after `drain`, when the last connection has ended. To end sooner, cancel the scope around it: every
    exchange is cancelled, and connections get at most close_seconds_max for their GOAWAY.

    knows_caller: tells callers for whom a share of the exchanges is kept; None treats all alike.
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
        )
        self._connections: set[H2Connection | H11Connection] = set()
        self._unidentified: dict[trio.CancelScope, float] = {}  # since when
        self._accepting = trio.CancelScope()
        self._connection_limit = trio.CapacityLimiter(self._limits.connections_max)

    @property
    def draining(self) -> bool:
        return self._accepting.cancel_called

    def drain(self) -> None:
        """Stop accepting, tell the clients, let running exchanges finish, close idle connections. Never waits."""
        self._accepting.cancel()
        for scope in self._unidentified:
            scope.cancel()
        for connection in self._connections:
            connection.drain()

    def counters(self) -> FrontendCounters:
        unsent = [connection.unsent() for connection in self._connections]
        return self._setup.tally.snapshot(
            self._setup.body_budget,
            answer_bytes_held=sum(byte_count for byte_count, _ in unsent),
            exchanges_behind=sum(exchange_count for _, exchange_count in unsent),
        )

    async def serve(
        self,
        listeners: Sequence[trio.SocketListener],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve connections until drained; closes the listeners when it stops accepting. To be called once."""
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
                    # At once: a client that comes now is to be refused, not to wait in a backlog that nobody empties.
                    for listener in listeners:
                        listener.socket.close()
            helpers.cancel_scope.cancel()

    async def serve_connection(self, stream: trio.abc.Stream, *, peer: str = "unknown") -> None:
        """Serve one client's stream, in memory or from a listener of one's own; closes it. TLS comes first if set up.

        Raises nothing but cancellation: a fault is one line in the log.
        """
        tally = self._setup.tally
        tally.connections_total += 1
        tally.connections_open += 1
        try:
            connection = None
            with trio.CancelScope() as scope:
                self._unidentified[scope] = trio.current_time()
                try:
                    if not self.draining:
                        connection = await self._identify(stream, peer)
                finally:
                    del self._unidentified[scope]
            if connection is not None:
                self._connections.add(connection)
                try:
                    if self.draining:
                        connection.drain()
                    await connection.serve()
                finally:
                    self._connections.discard(connection)
        except* Exception:  # of a group, cancellation goes on
            tally.connections_failed_total += 1
            logger.exception("connection failed peer=%s", peer)
        finally:
            tally.connections_open -= 1
            await close_now(stream, b"", seconds_max=self._limits.close_seconds_max)

    # --- accepting ---

    async def _accept(self, listener: trio.SocketListener, connections: trio.Nursery) -> None:
        while True:
            await self._wait_for_place(listener, borrower := object())
            accepted = False
            try:
                stream = await listener.accept()
                connections.start_soon(self._serve_accepted, stream, borrower)
                accepted = True
            except OSError as error:
                if error.errno in ACCEPT_MISHAPS:
                    logger.debug("client gone before accept error=%s", errno.errorcode[error.errno])
                elif error.errno in ACCEPT_SHORTAGES:
                    logger.error("accept failed, trying again error=%s", errno.errorcode[error.errno])
                    await trio.sleep(ACCEPT_RETRY_SECONDS)
                else:
                    raise
            finally:
                if not accepted:
                    self._connection_limit.release_on_behalf_of(borrower)

    async def _wait_for_place(self, listener: trio.SocketListener, borrower: object) -> None:
        try:
            self._connection_limit.acquire_on_behalf_of_nowait(borrower)
            return
        except trio.WouldBlock:
            await trio.lowlevel.wait_readable(listener.socket)  # nobody has to leave before somebody has come
        while True:
            self._end_longest_idle()
            with trio.move_on_after(ACCEPT_RETRY_SECONDS):
                await self._connection_limit.acquire_on_behalf_of(borrower)
                return

    def _end_longest_idle(self) -> None:
        """End the connection that has been without a request for longest, if it is long enough."""
        idle: list[tuple[float, Callable[[], None]]] = [
            (since, scope.cancel) for scope, since in self._unidentified.items() if not scope.cancel_called
        ]
        for connection in self._connections:
            since = connection.idle_since
            if since is not None:
                idle.append((since, connection.make_room))
        since, end = min(idle, key=lambda entry: entry[0], default=(math.inf, None))
        if end is not None and since <= trio.current_time() - self._limits.crowded_idle_seconds_min:
            self._setup.tally.connections_refused_total[ConnectionRefusal.CROWDED] += 1
            end()

    async def _serve_accepted(self, stream: trio.SocketStream, borrower: object) -> None:
        peer = _peer_name(stream)
        try:
            with contextlib.suppress(OSError):  # the client may be gone already; its stream will tell
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                unacknowledged_ms_max = int(self._limits.stall_seconds_max * 1000)
                for name, value in (*KEEPALIVE_OPTIONS, ("TCP_USER_TIMEOUT", unacknowledged_ms_max)):
                    if hasattr(socket, name):
                        stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            served = TcpStream(stream) if isinstance(stream, trio.SocketStream) else stream
            await self.serve_connection(served, peer=peer)
        finally:
            self._connection_limit.release_on_behalf_of(borrower)

    # --- finding out what a connection speaks ---

    async def _identify(self, stream: trio.abc.Stream, peer: str) -> H2Connection | H11Connection | None:
        """None if the client went away, said nothing, or failed the handshake."""
        limits = self._limits
        refused = self._setup.tally.connections_refused_total
        agreed: str | None = None
        if self._ssl_context is not None:
            secure = trio.SSLStream(stream, self._ssl_context, server_side=True, https_compatible=True)
            stream = secure
            with trio.move_on_after(limits.tls_handshake_seconds_max) as patience:
                try:
                    await secure.do_handshake()
                except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                    refused[ConnectionRefusal.TLS_HANDSHAKE] += 1
                    logger.debug("TLS handshake failed peer=%s error=%s", peer, error.__cause__ or error)
                    return None
            if patience.cancelled_caught:
                refused[ConnectionRefusal.TLS_HANDSHAKE] += 1
                return None
            agreed = secure.selected_alpn_protocol()
        received = b""
        with trio.move_on_after(limits.sniff_seconds_max) as patience:
            received = await _read_opening(stream)
        if patience.cancelled_caught:
            refused[ConnectionRefusal.SILENT] += 1
        if not received:
            return None
        if agreed == "h2" or received.startswith(PREFACE):
            self._setup.tally.connections_http2_total += 1
            return H2Connection(self._setup, stream, peer=peer, received=received)
        return H11Connection(self._setup, stream, peer=peer, received=received)


async def _read_opening(stream: trio.abc.Stream) -> bytes:
    """What the client sends first, as far as it takes to know whether that is HTTP/2's preface (RFC 9113, 3.3, 3.4).

    Empty if the client left before.
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
