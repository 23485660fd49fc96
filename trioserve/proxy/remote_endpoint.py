"""HTTP/1.1 client for an endpoint that is another server.

Leaving a request closes its connection, which cancels the request at the endpoint. HTTP/1.1 is used instead of HTTP/2
for two reasons: every server notices at once that a connection was closed, and requests on separate connections cannot
block each other.
"""

from __future__ import annotations

import errno
import re
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import msgspec
import trio

from trioserve.api.heartbeat import HEARTBEAT_HEADER, INSTANCE_HEADER, heartbeat_field
from trioserve.contracts.endpoint import NOT_A_PAGE_HEADER, EndpointId, EndpointLoad
from trioserve.contracts.errors import EndpointLost, InvalidRequest, StartupError
from trioserve.proxy.response_reader import BadResponse, IncompleteResponse, ResponseHead, ResponseReader
from trioserve.proxy.response_shape import InvalidAnswer
from trioserve.router.settings import SilenceSettings
from trioserve.router.silence import AwaitedResponse, Loss, SilenceWatch
from trioserve.trio_tools.tcp_stream import TcpStream, connect_tcp

__all__ = [
    "KEY_HEADERS",
    "PATH_CHARACTERS",
    "EndpointAddress",
    "EndpointSilent",
    "RemoteEndpoint",
    "RemoteRequest",
    "RemoteResponse",
    "Unreachable",
]

CONNECT_SECONDS_MAX = 5.0
# 128 idle connections cover a burst of requests. Each connection costs a socket at both ends.
IDLE_CONNECTIONS_MAX = 128
# The router drops idle connections earlier than common servers do (uvicorn after 5 s), so servers seldom close first.
IDLE_SECONDS_MAX = 4.0
CLOSE_RACE_SECONDS = 0.5  # If a server closes an idle connection, the close arrives within CLOSE_RACE_SECONDS.
RECEIVE_BYTES = 65536
# One send call gets at most this many bytes of a request. Each send shows that the connection is alive.
SEND_BYTES = 65536
# After this many heartbeat intervals without a byte, a close of the connection may not arrive at the endpoint.
LEFT_SILENT_BEATS = 1.5
UNACKNOWLEDGED = "unacknowledged"
LOSSES = {
    "silent": "sends no heartbeat over an open connection",
    "replaced": "is another process now, at the same address",
    "not_running": "reports no running request, although a response is awaited",
    "overtaken": "reports new tokens, but none arrives over this connection",
    "stalled": "has sent nothing for very long in the middle of a response",
}
"""Message for each reason to give up a response."""
# The kernel reports these errors if it got no acknowledgement for too long, or has no route to the machine.
VANISHED = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})

KEY_HEADERS = ("authorization", "x-api-key")  # A client sends its API key in one of these headers.
PATH_CHARACTERS = "/:@!$&'()*+,;=~"  # A path may contain these characters unescaped (RFC 3986, 3.3).
_TARGET = re.compile(r"[!-~]+")
_FIELDS = re.compile(r"(?:[-!#$%&'*+.^_`|~0-9A-Za-z]+: [^\0\r\n]*\r\n)*")

OpenStream = Callable[[], Awaitable[trio.abc.Stream]]


class Unreachable(EndpointLost):
    """The endpoint accepted no connection. The request was not sent."""


class EndpointSilent(EndpointLost):
    """A connection is silent, although the endpoint itself may be healthy.

    Args:
        message: Text for logs and clients.
        reason: Key of LOSSES, or UNACKNOWLEDGED. trioserve/router/silence.py explains the reasons.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class EndpointAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Address of a server.

    Attributes:
        scheme: "http" or "https".
        host: Host name or IP address.
        port: TCP port.
        path: Path before "/v1", without a slash at the end.
    """

    scheme: str
    host: str
    port: int
    path: str = ""

    @classmethod
    def parse(cls, url: str) -> EndpointAddress:
        """Parse a URL.

        Args:
            url: http://HOST[:PORT][/PATH]. A "/v1" at the end is removed.

        Raises:
            StartupError: The URL is invalid.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise StartupError(f'the endpoint "{url}" is no URL: {error}') from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StartupError(f'the endpoint "{url}" is no URL such as http://10.0.0.7:8000')
        if parts.username or parts.query or parts.fragment:
            raise StartupError(f'the endpoint "{url}" has more than scheme, host, port and path: leave the rest out')
        if port == 0:
            raise StartupError(f'the endpoint "{url}" has port 0, allowed are 1 to 65535')
        path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(
            scheme=parts.scheme,
            host=parts.hostname,
            port=port or (443 if parts.scheme == "https" else 80),
            path=path,
        )

    @property
    def authority(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.scheme == "https" else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


class RemoteResponse:
    """Response of an endpoint, after its head has arrived.

    Args:
        head: Status and headers.
        connection: Connection that receives the body.

    Attributes:
        status: HTTP status.
        headers: Names in lower case, and values.
        next_piece: Reads the next bytes of the body. It returns None at the end of the body. It raises EndpointLost if
            the connection broke before. This is the connection's own method, because it is called for every event.
    """

    def __init__(self, head: ResponseHead, connection: _Connection) -> None:
        self.status = head.status
        self.headers = head.headers
        self.next_piece = connection.next_piece
        self._connection = connection

    @property
    def endpoint(self) -> EndpointId:
        """Endpoint that sends the response."""
        return self._connection.id

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def has_ended(self) -> bool:
        """True if the end of the body has arrived."""
        return self._connection.has_ended

    async def whole(self, bytes_max: int) -> bytes | None:
        """Read the rest of the body.

        Args:
            bytes_max: Limit of the length.

        Returns:
            The rest, or None if it is longer than the limit. `next_piece` then returns the bytes that were read.

        Raises:
            EndpointLost: The connection broke before the end.
        """
        whole = bytearray()
        while len(whole) <= bytes_max:
            piece = await self.next_piece()
            if piece is None:
                return bytes(whole)
            whole += piece
        self._connection.unread(bytes(whole))
        return None

    @property
    def has_beaten(self) -> bool:
        """True if the endpoint sent a heartbeat before the head."""
        return self._connection.has_beaten


class RemoteEndpoint:
    """HTTP client for one server, with its connections.

    Args:
        id: Name of the endpoint at the router.
        address: Address of the server.
        headers: Headers for every request, such as an API key, which replaces the key of the client.
        ssl_context: TLS settings. None: the default settings for https.
        open_stream: Replaces TCP in tests.
        silence: Time limits between the bytes of a response, which `look` applies. None: no heartbeats are requested.

    Attributes:
        watch: Decides which responses are lost although their connection is open.
        on_silent: Called with the reason when a response is given up.
        on_left_silent: Called when a request ends although its connection is silent, because the close may not arrive.
            The arguments are the headers of the request and the seconds of silence.
        on_read: Called when reading begins while no other response is being read.
    """

    def __init__(
        self,
        id: EndpointId,
        address: EndpointAddress,
        *,
        headers: tuple[tuple[str, str], ...] = (),
        ssl_context: ssl.SSLContext | None = None,
        open_stream: OpenStream | None = None,
        silence: SilenceSettings | None = None,
    ) -> None:
        self.id = id
        self.address = address
        self._headers = [("host", address.authority), (NOT_A_PAGE_HEADER, "router"), *headers]
        self._has_own_key = any(name in KEY_HEADERS for name, _ in headers)
        self._ssl_context = ssl_context
        if address.scheme == "https" and ssl_context is None:
            self._ssl_context = ssl.create_default_context()
        self._open_stream = open_stream or self._open_tcp
        # Each entry is (time of the last use, connection). The oldest entry is first.
        self._idle: deque[tuple[float, _Connection]] = deque()
        self._is_closed = False
        self._beat_seconds = 0.0 if silence is None else silence.beat_seconds
        self._awaited: dict[AwaitedResponse, _Connection] = {}
        self.watch = SilenceWatch(silence or SilenceSettings())
        self.on_silent: Callable[[str], None] = lambda reason: None
        self.on_left_silent: Callable[[list[tuple[str, str]], float], None] = lambda headers, seconds: None
        self.on_read: Callable[[], None] = lambda: None

    def request(
        self,
        method: str,
        path: str,
        headers: list[tuple[str, str]],
        body: bytes,
        *,
        computes: bool = False,
        tries_beat: bool = False,
    ) -> RemoteRequest:
        """Make a request with any method except HEAD. The returned scope holds the response.

        Leaving the scope before the end of the body closes the connection.

        Args:
            method: HTTP method.
            path: Path and query, below the path of the address.
            headers: Headers in addition to those of the endpoint.
            body: Bytes of the body.
            computes: Whether the endpoint counts the request in its load reports.
            tries_beat: Ask for an immediate heartbeat, to check that heartbeats arrive.

        Raises:
            InvalidRequest: A header or the path contains characters that cannot be sent.
            Unreachable: On entering the scope: no connection can be made.
            EndpointLost: On entering the scope: the connection broke before the head of the response.
        """
        beats = [heartbeat_field(self._beat_seconds, now=tries_beat)] if self._beat_seconds else []
        return RemoteRequest(self, self._encoded(method, path, [*headers, *beats], body), headers, computes=computes)

    def _encoded(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> bytes:
        target = self.address.path + path
        if _TARGET.fullmatch(target) is None:
            raise InvalidRequest(f"the target {target[:80]!r} has characters that no request can have")
        if self._has_own_key:  # Clients of a router without keys may send any key, as OpenAI's client always does.
            headers = [(name, value) for name, value in headers if name not in KEY_HEADERS]
        lines = [f"{name}: {value}\r\n" for name, value in (*self._headers, *headers)]
        fields = "".join(lines)
        if _FIELDS.fullmatch(fields) is None or fields.count("\r\n") != len(lines):
            # With a line break, a client could add a second request that is not checked.
            raise InvalidRequest("a header field has a line break or a character that no header can have")
        head = f"{method} {target} HTTP/1.1\r\n{fields}content-length: {len(body)}\r\n\r\n"
        try:
            return head.encode("latin-1") + body
        except UnicodeEncodeError:
            raise InvalidRequest("a header field has a character beyond latin-1: leave it out") from None

    # --- methods for silent connections ---

    @property
    def is_read(self) -> bool:
        """True if a response of this endpoint is being read."""
        return bool(self._awaited)

    def note_load(self, load: EndpointLoad, asked_at: float) -> None:
        """Use a load report to decide which responses are lost.

        Args:
            load: Report of the endpoint.
            asked_at: Time at which the router asked for the report, or would have asked for a pushed report.
        """
        self.watch.note_load(load, self._awaited, asked_at, trio.current_time())

    def abandon_lost(self, now: float) -> None:
        """Give up the responses that are lost. The owner calls this every LOOK_SECONDS while responses are being read.

        Args:
            now: Time of Trio's clock.
        """
        for loss in self.watch.find_lost(self._awaited, now):
            self._awaited[loss.response].abandon(loss)
            self.on_silent(loss.reason)

    def note_instance(self, response: AwaitedResponse) -> None:
        """Use the process name in a response to decide which responses of an earlier process are lost.

        Args:
            response: Response that contains the name of the process.
        """
        if response.instance is not None:
            self.watch.note_instance(response.instance, self._awaited, response.sent_at, trio.current_time())

    def _begin(self, connection: _Connection, headers: list[tuple[str, str]], *, computes: bool) -> None:
        awaited = AwaitedResponse(trio.current_time(), computes=computes)
        # Until the endpoint reports its process, assume the process that sent the previous response.
        awaited.instance = connection.awaited.instance
        connection.awaited, connection.headers = awaited, headers
        self._awaited[awaited] = connection
        if len(self._awaited) == 1:
            self.on_read()

    def _end(self, connection: _Connection) -> None:
        """Stop watching the response of a connection."""
        awaited = connection.awaited
        if self._awaited.pop(awaited, None) is None:
            return
        self.watch.forget(awaited)
        is_silent = awaited.silent_seconds > LEFT_SILENT_BEATS * self._beat_seconds > 0
        if is_silent and awaited.computes and not connection.has_ended:
            self.on_left_silent(connection.headers, awaited.silent_seconds)

    async def send(
        self, data: bytes, headers: list[tuple[str, str]], *, computes: bool
    ) -> tuple[_Connection, ResponseHead]:
        """Send a request over an idle connection, or over a new one.

        A server may close an idle connection just when the router uses it again. If the connection closes at once and
        before a byte of a response, the request is sent again over another connection.

        Args:
            data: Encoded request.
            headers: Headers of the request, for `on_left_silent`.
            computes: Whether the endpoint counts the request in its load reports.

        Returns:
            The connection and the head of the response.
        """
        while (idle := self._take_idle()) is not None:
            race_ends_at = trio.current_time() + CLOSE_RACE_SECONDS
            self._begin(idle, headers, computes=computes)
            try:
                return idle, await idle.send(data)
            except EndpointLost:
                self._drop(idle)
                if idle.heard or trio.current_time() > race_ends_at:
                    raise
            except BaseException:
                self._drop(idle)
                raise
        connection = _Connection(await self._connect(), self)
        self._begin(connection, headers, computes=computes)
        try:
            return connection, await connection.send(data)
        except BaseException:
            self._drop(connection)
            raise

    def _drop(self, connection: _Connection) -> None:
        self._end(connection)
        connection.close()

    def return_connection(self, connection: _Connection) -> None:
        """Return a connection after its request. The connection is kept for later requests if possible, and closed
        otherwise.

        Args:
            connection: Connection whose request has ended.
        """
        self._end(connection)
        if connection.is_reusable and not self._is_closed and len(self._idle) < IDLE_CONNECTIONS_MAX:
            self._idle.append((trio.current_time(), connection))
        else:
            connection.close()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            # The newest idle connection is the one that the server has least likely closed.
            since, connection = self._idle.pop()
            if trio.current_time() - since <= IDLE_SECONDS_MAX:
                return connection
            connection.close()
        return None

    async def _connect(self) -> trio.abc.Stream:
        try:
            with trio.fail_after(CONNECT_SECONDS_MAX):
                return await self._open_stream()
        except trio.TooSlowError:
            raise Unreachable(
                f'the endpoint "{self.id}" ({self.address}) accepted no connection within {CONNECT_SECONDS_MAX:g} s'
            ) from None
        # A ValueError means that the host name is invalid for every resolver.
        except (OSError, ValueError, trio.BrokenResourceError) as error:
            raise Unreachable(
                f'the endpoint "{self.id}" ({self.address}) cannot be reached: {error.__cause__ or error}'
            ) from error

    async def _open_tcp(self) -> trio.abc.Stream:
        stream = await connect_tcp(self.address.host, self.address.port)
        if self._ssl_context is None:
            return TcpStream(stream)
        secure = trio.SSLStream(stream, self._ssl_context, server_hostname=self.address.host, https_compatible=True)
        try:
            await secure.do_handshake()
        except BaseException:
            _close_now(secure)
            raise
        return secure

    def close(self) -> None:
        """Close the idle connections. Connections in use are closed when their requests end."""
        self._is_closed = True
        while self._idle:
            self._idle.pop()[1].close()


class RemoteRequest:
    """Scope of one request, with its connection and response.

    Callers that cannot use `async with` call `begin`, and later `end`. `end` never waits and may be called twice.
    """

    __slots__ = ("_computes", "_connection", "_data", "_endpoint", "_headers")

    def __init__(
        self, endpoint: RemoteEndpoint, data: bytes, headers: list[tuple[str, str]], *, computes: bool
    ) -> None:
        self._endpoint = endpoint
        self._data = data
        self._headers = headers
        self._computes = computes
        self._connection: _Connection | None = None

    async def begin(self) -> RemoteResponse:
        self._connection, head = await self._endpoint.send(self._data, self._headers, computes=self._computes)
        return RemoteResponse(head, self._connection)

    def end(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._endpoint.return_connection(connection)

    async def __aenter__(self) -> RemoteResponse:
        return await self.begin()

    async def __aexit__(self, *error: object) -> None:
        self.end()


class _Connection:
    """One connection and the request on it.

    Attributes:
        heard: True if bytes of the response have arrived.
        has_beaten: True if a heartbeat arrived before the head of the response.
        awaited: Progress of the current response.
        headers: Headers of the current request.
    """

    def __init__(self, stream: trio.abc.Stream, endpoint: RemoteEndpoint) -> None:
        self._stream = stream
        self._tcp = stream if isinstance(stream, TcpStream) else None
        self._endpoint = endpoint
        self.id = endpoint.id
        self._reader = ResponseReader()
        self._is_sent = True  # True if the whole last request was sent.
        self._unread = b""
        self._loss: Loss | None = None
        self.heard = False
        self.has_beaten = False
        self.awaited = AwaitedResponse(0.0)
        self.headers: list[tuple[str, str]] = []

    @property
    def is_reusable(self) -> bool:
        return self._is_sent and self._reader.is_reusable

    @property
    def has_ended(self) -> bool:
        return self._reader.has_ended

    async def send(self, data: bytes) -> ResponseHead:
        """Send a request and wait for the head of its response.

        Raises:
            EndpointLost: The connection broke, or the response is invalid.
        """
        self._reader.begin()
        self.heard = self._is_sent = self.has_beaten = False
        self._unread = b""
        try:
            if self._tcp is not None:
                # No checkpoint is needed here, because other tasks run while this task waits for the response.
                data = data[self._tcp.try_send(data) :]
            if data:
                await self._send_rest(data)
            self._is_sent = True
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # The server may have responded before it read the whole request.
        try:
            while (head := self._reader.next_head()) is None:
                await self._receive()
                if self._reader.interim is not None:
                    self._note_process(self._reader.interim)
                    self.has_beaten = self.awaited.instance is not None
        except BadResponse as error:
            raise self._lost(error) from error
        self._note_process(head)
        return head

    async def _send_rest(self, data: bytes) -> None:
        awaited = self.awaited
        awaited.is_sending = awaited.is_waiting = True
        try:
            for begin in range(0, len(data), SEND_BYTES):
                await self._stream.send_all(data[begin : begin + SEND_BYTES])
                awaited.pieces += 1
        finally:
            awaited.is_sending = awaited.is_waiting = False

    def _note_process(self, head: ResponseHead) -> None:
        """Read from a response's head whether the server sends heartbeats, and the name of its process."""
        for name, value in head.headers:
            if name == INSTANCE_HEADER:
                self.awaited.instance = value
                self._endpoint.note_instance(self.awaited)
            elif name == HEARTBEAT_HEADER and head.status >= 200:
                self.awaited.beats = True

    async def next_piece(self) -> bytes | None:
        reader, awaited = self._reader, self.awaited
        if self._unread:
            held, self._unread = self._unread, b""
            return held
        try:
            while reader.is_drained or (piece := reader.next_piece()) is None:
                # The loop repeats the code of _receive, because Python re-enters each frame above the event loop for
                # every event.
                awaited.is_waiting = True
                try:
                    data = bytes(await self._stream.receive_some(RECEIVE_BYTES))
                finally:
                    awaited.is_waiting = False
                awaited.pieces += 1
                reader.feed(data)
        except BadResponse as error:
            raise self._lost(error) from error
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise self._broken(error) from error
        awaited.has_body = True
        return piece or None

    def unread(self, piece: bytes) -> None:
        """Let the next call of `next_piece` return bytes that were read before.

        Args:
            piece: The bytes.
        """
        self._unread = piece

    async def _receive(self) -> None:
        awaited = self.awaited
        awaited.is_waiting = True
        try:
            data = bytes(await self._stream.receive_some(RECEIVE_BYTES))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise self._broken(error) from error
        finally:
            awaited.is_waiting = False
        awaited.pieces += 1
        self.heard = self.heard or bool(data)
        self._reader.feed(data)

    def abandon(self, loss: Loss) -> None:
        """Close the connection. The reader of the response gets EndpointSilent."""
        self._loss = loss
        self.close()

    def _broken(self, error: Exception) -> EndpointLost:
        if self._loss is not None:
            return EndpointSilent(f'the endpoint "{self.id}" {LOSSES[self._loss.reason]}', self._loss.reason)
        said = f'the connection to the endpoint "{self.id}" broke: {error}'
        if getattr(error.__cause__, "errno", None) in VANISHED:
            self._endpoint.on_silent(UNACKNOWLEDGED)
            return EndpointSilent(said, UNACKNOWLEDGED)
        return EndpointLost(said)

    def _lost(self, error: BadResponse) -> EndpointLost:
        if not isinstance(error, IncompleteResponse):
            return InvalidAnswer(self.id, "not_http", str(error))
        return EndpointLost(f'the endpoint "{self.id}" broke off its response: {error}')

    def close(self) -> None:
        """Close the connection without waiting. The close tells the server to cancel the request."""
        self._is_sent = False
        _close_now(self._stream)


def _close_now(stream: trio.abc.Stream) -> None:
    """Close the socket below all TLS layers. A TLS close message would have to wait, and no server needs it."""
    while isinstance(stream, trio.SSLStream):
        stream = stream.transport_stream
    if isinstance(stream, trio.SocketStream):
        stream.socket.close()
    else:
        closing = getattr(stream, "close", None)
        if closing is not None:
            closing()
