"""The bytes between two engines: listens for readers, connects to holders, and runs both halves as one task.

One connection carries one transfer at a time, so that a slow reader slows nobody but itself, and each has no more
memory than a chunk. What holders have to be told goes over a connection of its own: a heartbeat does not queue behind
data. Whatever a peer does (garbage, silence, an end in the middle) ends its connection and perhaps its transfer; it is
counted, and logged once for each peer and kind.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from trioserve.connectors.stream.holder import GREETING_SECONDS_MAX, Holder, MoreFrames
from trioserve.connectors.stream.options import StreamOptions
from trioserve.connectors.stream.peer_connection import Identity, Refused
from trioserve.connectors.stream.policy import StreamPolicy
from trioserve.connectors.stream.reader import MakeReader, Reader
from trioserve.connectors.stream.sources import Source
from trioserve.connectors.stream.wire import SocketWire, StreamWire, Wire
from trioserve.contracts.errors import StartupError
from trioserve.contracts.kv_transfer import Started
from trioserve.trio_tools.places import remote_address
from trioserve.trio_tools.tcp_options import end_when_vanished
from trioserve.trio_tools.tcp_stream import connect_tcp

__all__ = ["StreamTransport", "dual_listener"]

LOGGED_MAX = 200  # kinds of trouble; beyond that they are counted only
TIDY_SECONDS = 10.0

log = logging.getLogger(__name__)


class StreamTransport:
    """Raises StartupError for a key or certificates that cannot be used. more_frames: see holder. make_reader: for one
    that brings loads in another way."""

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
        """There is something to do."""
        self._has_work.set()

    async def run(self, *, task_status: Started, beside: Callable[[], Awaitable[None]] | None = None) -> None:
        """Until it is cancelled; see RunningConnector. beside: a task that lives as long."""
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
                    for load in self._policy.loads.take_new():
                        nursery.start_soon(self.reader.bring, load)
                    for source in self._policy.loads.take_urgent():
                        self.reader.tell_now(source, nursery)
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
        for other in others:  # a name with several addresses; readers are told one port
            other.socket.close()
        return first

    @trio.lowlevel.enable_ki_protection
    async def _accept(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        while True:
            stream = await self.holder.strangers.accept(listener)
            nursery.start_soon(self._accepted, stream)

    @trio.lowlevel.enable_ki_protection
    async def _accepted(self, stream: trio.SocketStream) -> None:
        address = remote_address(stream) or "?"  # it has gone already
        with contextlib.suppress(OSError):
            end_when_vanished(stream)
        try:
            await self.holder.serve(partial(self._shake_hands, stream), address)
        except Exception:
            log.exception("kv connection failed peer=%s", address)  # a fault of ours, and one connection's alone
        finally:
            stream.socket.close()

    async def _shake_hands(self, stream: trio.SocketStream) -> Wire:
        return await _wire_over(stream, self._listen_tls, None)

    async def _connect(self, source: Source) -> Wire:
        """Raises Refused where another attempt would end the same way."""
        try:
            stream = await connect_tcp(source.host, source.port)
        except ValueError as error:  # such as a label of a name that is too long
            raise Refused(f"its host cannot be looked up: {error}") from error
        except OSError as error:
            cause = error.__cause__  # of a name with several addresses, a group of causes
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
                raise Refused(f"TLS: its host is no name for a certificate: {error}") from error
            raise

    def _note(self, peer: str, trouble: str) -> None:
        """Log it, once."""
        what = (peer, trouble)
        if what not in self._logged and len(self._logged) < LOGGED_MAX:
            self._logged.add(what)
            log.warning("kv peer trouble peer=%s message=%s", peer, trouble)


async def _wire_over(stream: trio.SocketStream, tls: ssl.SSLContext | None, peer_host: str | None) -> Wire:
    """peer_host: whom to expect, on the side that has connected."""
    if tls is None:
        return SocketWire(stream, GREETING_SECONDS_MAX)
    stream_over_tls = trio.SSLStream(stream, tls, server_hostname=peer_host, server_side=peer_host is None)
    await stream_over_tls.do_handshake()
    return StreamWire(stream_over_tls, GREETING_SECONDS_MAX, stream.socket.close)


def _make_tls(options: StreamOptions) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """For those who connect to us, and for whom we connect to."""
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
    """Listen on all interfaces for IPv6 and IPv4 with one socket, so that both have the same port. Raises OSError."""
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
