"""Connector `tcp`: listens for readers, connects to holders, and runs both parts in one task.

One connection carries one transfer at a time, so a slow reader slows down only itself. A transfer needs memory for one
chunk. Heartbeats to a holder use a separate connection, so they do not wait behind data. If a peer sends garbage, stops
sending or disconnects, only its connection and its transfer fail. The failure is counted, and logged once per peer and
message.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import trio

from trioserve.connectors.settings import StreamOptions, read_options
from trioserve.connectors.stream.holder import GREETING_SECONDS_MAX, Holder, MoreFrames
from trioserve.connectors.stream.peer_connection import Identity, Refused, SocketWire, StreamWire, Wire
from trioserve.connectors.stream.policy import StreamPolicy
from trioserve.connectors.stream.reader import MakeReader, Reader
from trioserve.connectors.stream.signature import Source, signing_key
from trioserve.contracts.errors import StartupError
from trioserve.contracts.kv_transfer import ConnectorSetup, Started
from trioserve.trio_tools.connection_limit import remote_address
from trioserve.trio_tools.tcp_stream import connect_tcp, end_when_vanished

__all__ = ["StreamTransport", "dual_listener", "TcpConnector", "make_connector"]

LOGGED_MAX = 200  # maximum number of logged pairs of peer and message; further problems are only counted
TIDY_SECONDS = 10.0

log = logging.getLogger(__name__)


class StreamTransport:
    """Network side of a connector.

    Args:
        policy: Holds, loads and totals of this engine.
        more_frames: Handles frames of another connector (see Holder). None if there are none.
        make_reader: Makes the reader. Another connector may pass its own reader.

    Raises:
        StartupError: the key or the certificates cannot be used.
    """

    def __init__(
        self, policy: StreamPolicy, more_frames: MoreFrames | None = None, make_reader: MakeReader = Reader
    ) -> None:
        setup, options = policy.setup, policy.options
        self._policy = policy
        self._options = options
        identity = Identity(setup.engine_id, setup.pages.layout, options.read_key())
        self._listen_tls, self._dial_tls = _make_tls(options)
        self._has_work = trio.Event()
        self._logged: set[tuple[str, str]] = set()
        self.holder = Holder(policy, identity, self._note, more_frames)
        self.reader = make_reader(policy, identity, self._note, self._connect)

    def wake(self) -> None:
        """Notify the transport that there are new loads or messages."""
        self._has_work.set()

    async def run(self, *, task_status: Started, beside: Callable[[], Awaitable[None]] | None = None) -> None:
        """Listen and transfer until cancelled (see RunningConnector).

        Args:
            task_status: Receives the address once the engine listens.
            beside: Second task to run for the same time. None runs no second task.

        Raises:
            StartupError: the address cannot be used.
        """
        listener = await self._listen()
        try:
            async with trio.open_nursery() as nursery:
                if beside is not None:
                    nursery.start_soon(beside)
                nursery.start_soon(self._accept, listener, nursery)
                host, port = self._policy.address = (self._options.advertised, listener.socket.getsockname()[1])
                task_status.started(f"{host}:{port}")
                while True:
                    self._has_work = trio.Event()
                    for load in self._policy.loads.pop_new():
                        nursery.start_soon(self.reader.fetch, load)
                    for source in self._policy.loads.pop_urgent():
                        self.reader.notify_now(source, nursery)
                    self.reader.close_idle(trio.current_time())
                    with trio.move_on_after(TIDY_SECONDS if self.reader.has_idle else float("inf")):
                        await self._has_work.wait()
        finally:
            listener.socket.close()
            self.reader.close()
            self._policy.stop()

    async def _listen(self) -> trio.SocketListener:
        options = self._options
        try:
            if options.host == "::":
                return dual_listener(options.port)
            first, *others = await trio.open_tcp_listeners(options.port, host=options.host)
        except OSError as error:
            raise StartupError(
                f"KV connector: {options.host}:{options.port} cannot be listened on: {error.strerror or error}"
            ) from error
        for other in others:  # The host name has several addresses, but readers can use only one port.
            other.socket.close()
        return first

    @trio.lowlevel.enable_ki_protection
    async def _accept(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        while True:
            stream = await self.holder.strangers.accept(listener)
            nursery.start_soon(self._accepted, stream)

    @trio.lowlevel.enable_ki_protection
    async def _accepted(self, stream: trio.SocketStream) -> None:
        address = remote_address(stream) or "?"  # The address is unknown if the peer has already disconnected.
        with contextlib.suppress(OSError):
            end_when_vanished(stream)
        try:
            await self.holder.serve(partial(self._shake_hands, stream), address)
        except Exception:
            # This error is a bug of the connector. It ends only this connection.
            log.exception("kv connection failed peer=%s", address)
        finally:
            stream.socket.close()

    async def _shake_hands(self, stream: trio.SocketStream) -> Wire:
        return await _wire_over(stream, self._listen_tls, None)

    async def _connect(self, source: Source) -> Wire:
        """Connect to a holder.

        Raises:
            Refused: a retry would fail the same way. Other errors are in BROKEN.
        """
        try:
            stream = await connect_tcp(source.host, source.port)
        except ValueError as error:  # The host name is not valid. For example, one of its labels is too long.
            raise Refused(f"its host cannot be looked up: {error}") from error
        except OSError as error:
            cause = error.__cause__  # The cause is an exception group if the host name has several addresses.
            causes = cause.exceptions if isinstance(cause, BaseExceptionGroup) else (cause,)
            if all(isinstance(one, ConnectionRefusedError) for one in causes):
                raise ConnectionRefusedError("nobody listens there") from error
            raise
        try:
            return await _wire_over(stream, self._dial_tls, source.host)
        except BaseException as error:
            stream.socket.close()
            cause = error.__cause__
            if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError):
                raise Refused(f"TLS: {cause.reason or cause}") from error
            if isinstance(error, ValueError):
                raise Refused(f"TLS: its host is not a valid name for a certificate: {error}") from error
            raise

    def _note(self, peer: str, trouble: str) -> None:
        """Log a problem once per peer and message."""
        what = (peer, trouble)
        if what not in self._logged and len(self._logged) < LOGGED_MAX:
            self._logged.add(what)
            log.warning("kv peer trouble peer=%s message=%s", peer, trouble)


async def _wire_over(stream: trio.SocketStream, tls: ssl.SSLContext | None, peer_host: str | None) -> Wire:
    """Wrap a stream, after a TLS handshake if there is TLS.

    Args:
        stream: TCP connection.
        tls: TLS settings, or None for plain TCP.
        peer_host: Host name that the certificate must have. None on the side that accepted the connection.
    """
    if tls is None:
        return SocketWire(stream, GREETING_SECONDS_MAX)
    stream_over_tls = trio.SSLStream(stream, tls, server_hostname=peer_host, server_side=peer_host is None)
    await stream_over_tls.do_handshake()
    return StreamWire(stream_over_tls, GREETING_SECONDS_MAX, stream.socket.close)


def _make_tls(options: StreamOptions) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """Return the TLS settings for accepted connections and for our connections to holders. None without TLS."""
    if options.certfile is None:
        return None, None
    try:
        listen = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=options.ca_certs)
        listen.load_cert_chain(options.certfile, options.keyfile)
        dial = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=options.ca_certs)
        if options.ca_certs is not None:
            listen.verify_mode = ssl.CERT_REQUIRED
            dial.load_cert_chain(options.certfile, options.keyfile)
    except OSError as error:
        raise StartupError(f"TLS of the KV connector: certfile, keyfile or ca_certs cannot be used: {error}") from error
    return listen, dial


def dual_listener(port: int) -> trio.SocketListener:
    """Listen on all interfaces for IPv6 and IPv4 with one socket, so that both use the same port.

    Args:
        port: Port to listen on. 0 picks a free port.

    Raises:
        OSError: the port cannot be used.
    """
    listening = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("::", port))
        listening.listen()
        return trio.SocketListener(trio.socket.from_stdlib_socket(listening))
    except BaseException:
        listening.close()
        raise


class TcpConnector(StreamPolicy):
    """RunningConnector (see contracts.kv_transfer) that moves KV over TCP.

    Args:
        setup: Engine id, KV cache and wake function of the engine.
        options: Options of the connector.
    """

    def __init__(self, setup: ConnectorSetup, options: StreamOptions) -> None:
        super().__init__(setup, options, lambda: self._transport.wake(), key=signing_key(options))
        self._transport = StreamTransport(self)

    def run(self, *, task_status: Started) -> Coroutine[Any, Any, None]:
        return self._transport.run(task_status=task_status)


def make_connector(setup: ConnectorSetup) -> TcpConnector:
    """Make the connector `tcp`. This function is its ConnectorFactory.

    Args:
        setup: Setup of the engine. Its options must match StreamOptions.

    Raises:
        StartupError: an option is unknown, or its value is not allowed.
    """
    return TcpConnector(setup, read_options(StreamOptions, setup.options))
