"""Another server, over HTTP/1.1, as an endpoint. A cancel reaches it at once: leaving a request closes its connection.

HTTP/1.1 and not HTTP/2, since closing is the one message that every server understands at once, and since the requests
of one connection cannot hold each other up.
"""

from __future__ import annotations

import re
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import msgspec
import trio

from trioserve.api.gate import NOT_A_PAGE_HEADER
from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import EndpointLost, InvalidRequest, StartupError
from trioserve.proxy.response_reader import BadResponse, CutOff, ResponseHead, ResponseReader
from trioserve.proxy.response_shape import InvalidAnswer
from trioserve.trio_tools.tcp_stream import TcpStream, connect_tcp

__all__ = ["RemoteRequest", "EndpointAddress", "RemoteResponse", "RemoteEndpoint", "Unreachable"]

CONNECT_SECONDS_MAX = 5.0
IDLE_CONNECTIONS_MAX = 128  # as many as are in use in a burst; each costs a socket at both ends
IDLE_SECONDS_MAX = 4.0  # below the keep-alive of common servers (uvicorn 5 s), so that they seldom close first
CLOSE_RACE_SECONDS = 0.5  # longer than a close may be on its way
RECEIVE_BYTES = 65536

_TARGET = re.compile(r"[!-~]+")
_FIELDS = re.compile(r"(?:[-!#$%&'*+.^_`|~0-9A-Za-z]+: [^\0\r\n]*\r\n)*")

OpenStream = Callable[[], Awaitable[trio.abc.Stream]]


class Unreachable(EndpointLost):
    """No connection could be made: the request never got there."""


class EndpointAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a server is. path: before "/v1", without a slash at its end."""

    scheme: str
    host: str
    port: int
    path: str = ""

    @classmethod
    def parse(cls, url: str) -> EndpointAddress:
        """http://HOST[:PORT][/PATH]; a "/v1" at the end is taken off. Raises StartupError."""
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
        """As the Host header has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.scheme == "https" else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


class RemoteResponse:
    """A response whose head is here. headers: names in lower case."""

    def __init__(self, head: ResponseHead, connection: _Connection) -> None:
        self.status = head.status
        self.headers = head.headers
        self._connection = connection
        self._held = bytearray()

    @property
    def endpoint(self) -> EndpointId:
        """The endpoint that sends it."""
        return self._connection.id

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def has_ended(self) -> bool:
        """Whether its end has come."""
        return self._connection.has_ended

    async def whole(self, bytes_max: int) -> bytes | None:
        """The rest of the body; None, with nothing lost, if it is not there within so many bytes (see next_piece)."""
        while len(self._held) <= bytes_max:
            piece = await self._connection.next_piece()
            if piece is None:
                whole, self._held = bytes(self._held), bytearray()
                return whole
            self._held += piece
        return None

    def next_piece(self) -> Awaitable[bytes | None]:
        """The next bytes of the body; None at its end. Raises EndpointLost when it breaks off."""
        # No coroutine of its own: it is asked for each event.
        return self._take_held() if self._held else self._connection.next_piece()

    async def _take_held(self) -> bytes:
        held, self._held = bytes(self._held), bytearray()
        return held


class RemoteEndpoint:
    """One server and the connections to it.

    headers: sent with every request, such as an API key. open_stream: for tests, instead of TCP.
    """

    def __init__(
        self,
        id: EndpointId,
        address: EndpointAddress,
        *,
        headers: tuple[tuple[str, str], ...] = (),
        ssl_context: ssl.SSLContext | None = None,
        open_stream: OpenStream | None = None,
    ) -> None:
        self.id = id
        self.address = address
        self._headers = [("host", address.authority), (NOT_A_PAGE_HEADER, "router"), *headers]
        self._ssl_context = ssl_context
        if address.scheme == "https" and ssl_context is None:
            self._ssl_context = ssl.create_default_context()
        self._open_stream = open_stream or self._open_tcp
        self._idle: deque[tuple[float, _Connection]] = deque()  # (since when, connection), the oldest first
        self._is_closed = False

    def request(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> RemoteRequest:
        """Send a request, any but HEAD; the scope holds the response. Leaving it before the body's end closes the
        connection.

        Raises Unreachable if there is no connection, EndpointLost if it breaks before the head of the response, and
        InvalidRequest for a header that cannot be sent.
        """
        return RemoteRequest(self, self._encoded(method, path, headers, body))

    def _encoded(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> bytes:
        target = self.address.path + path
        if _TARGET.fullmatch(target) is None:
            raise InvalidRequest(f"the target {target[:80]!r} has characters that no request can have")
        lines = [f"{name}: {value}\r\n" for name, value in (*self._headers, *headers)]
        fields = "".join(lines)
        if _FIELDS.fullmatch(fields) is None or fields.count("\r\n") != len(lines):
            # A line break here would be a request that nobody checked.
            raise InvalidRequest("a header field has a line break or a character that no header can have")
        head = f"{method} {target} HTTP/1.1\r\n{fields}content-length: {len(body)}\r\n\r\n"
        try:
            return head.encode("latin-1") + body
        except UnicodeEncodeError:
            raise InvalidRequest("a header field has a character beyond latin-1: leave it out") from None

    async def send(self, data: bytes) -> tuple[_Connection, ResponseHead]:
        """Over a connection that is there, or else a new one. A server may close an idle connection just when it is
        used again; that is no fault of the request, if it comes at once and nothing of a response has come."""
        while (idle := self._take_idle()) is not None:
            race_ends_at = trio.current_time() + CLOSE_RACE_SECONDS
            try:
                return idle, await idle.send(data)
            except EndpointLost:
                idle.close()
                if idle.heard or trio.current_time() > race_ends_at:
                    raise
            except BaseException:
                idle.close()
                raise
        connection = _Connection(await self._connect(), self.id)
        try:
            return connection, await connection.send(data)
        except BaseException:
            connection.close()
            raise

    def give_back(self, connection: _Connection) -> None:
        """Nobody needs it any more. It is kept if it can serve another request."""
        if connection.is_reusable and not self._is_closed and len(self._idle) < IDLE_CONNECTIONS_MAX:
            self._idle.append((trio.current_time(), connection))
        else:
            connection.close()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            since, connection = self._idle.pop()  # the youngest: it is the least likely to be closed
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
                f'the endpoint "{self.id}" ({self.address}) took no connection within {CONNECT_SECONDS_MAX:g} s'
            ) from None
        except (OSError, ValueError, trio.BrokenResourceError) as error:  # ValueError: no resolver can have such a name
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
        """Close the idle connections; those in use are closed by leaving their requests."""
        self._is_closed = True
        while self._idle:
            self._idle.pop()[1].close()


class RemoteRequest:
    """The scope of one request: holds its response, and its connection. For those whose scope is no `async with` block,
    there are `begin`, and `end` from then on at any moment, also again."""

    __slots__ = ("_connection", "_data", "_endpoint")

    def __init__(self, endpoint: RemoteEndpoint, data: bytes) -> None:
        self._endpoint = endpoint
        self._data = data
        self._connection: _Connection | None = None

    async def begin(self) -> RemoteResponse:
        self._connection, head = await self._endpoint.send(self._data)
        return RemoteResponse(head, self._connection)

    def end(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._endpoint.give_back(connection)

    async def __aenter__(self) -> RemoteResponse:
        return await self.begin()

    async def __aexit__(self, *error: object) -> None:
        self.end()


class _Connection:
    """One connection and the request on it. heard: something of a response has come."""

    def __init__(self, stream: trio.abc.Stream, id: EndpointId) -> None:
        self._stream = stream
        self._tcp = stream if isinstance(stream, TcpStream) else None
        self.id = id
        self._reader = ResponseReader()
        self._is_sent = True  # the whole of the last request
        self.heard = False

    @property
    def is_reusable(self) -> bool:
        return self._is_sent and self._reader.can_go_on

    @property
    def has_ended(self) -> bool:
        return self._reader.has_ended

    async def send(self, data: bytes) -> ResponseHead:
        """Raises EndpointLost."""
        self._reader.begin()
        self.heard = self._is_sent = False
        try:
            if self._tcp is not None:
                # Waiting for the response lets the others have a turn; before that there is nothing to wait for.
                data = data[self._tcp.try_send(data) :]
            if data:
                await self._stream.send_all(data)
            self._is_sent = True
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # a server that refuses early may have answered all the same
        try:
            while (head := self._reader.next_head()) is None:
                await self._receive()
        except BadResponse as error:
            raise self._lost(error) from error
        return head

    async def next_piece(self) -> bytes | None:
        try:
            while (piece := self._reader.next_piece()) is None:
                await self._receive()
        except BadResponse as error:
            raise self._lost(error) from error
        return piece or None

    async def _receive(self) -> None:
        try:
            data = bytes(await self._stream.receive_some(RECEIVE_BYTES))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise EndpointLost(f'the connection to the endpoint "{self.id}" broke: {error}') from error
        self.heard = self.heard or bool(data)
        self._reader.feed(data)

    def _lost(self, error: BadResponse) -> EndpointLost:
        if not isinstance(error, CutOff):
            return InvalidAnswer(self.id, "not_http", str(error))
        return EndpointLost(f'the endpoint "{self.id}" broke off its response: {error}')

    def close(self) -> None:
        """At once, without waiting: this is what tells the server that nobody wants the rest."""
        self._is_sent = False
        _close_now(self._stream)


def _close_now(stream: trio.abc.Stream) -> None:
    """Close the socket below. A TLS farewell would have to wait, and says nothing that the close does not."""
    while isinstance(stream, trio.SSLStream):
        stream = stream.transport_stream
    if isinstance(stream, trio.SocketStream):
        stream.socket.close()
    else:
        closing = getattr(stream, "close", None)
        if closing is not None:
            closing()
