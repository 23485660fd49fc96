"""Another server, over HTTP/1.1, as an endpoint. A cancel reaches it at once: leaving a request closes its connection.

HTTP/1.1 and not HTTP/2, since closing is the one message that every server understands at once, and since the requests
of one connection cannot hold each other up.
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
from trioserve.proxy.response_reader import BadResponse, CutOff, ResponseHead, ResponseReader
from trioserve.proxy.response_shape import InvalidAnswer
from trioserve.router.settings import SilenceSettings
from trioserve.router.silence import AwaitedResponse, Loss, SilenceWatch
from trioserve.trio_tools.tcp_stream import TcpStream, connect_tcp

__all__ = ["EndpointAddress", "EndpointSilent", "RemoteEndpoint", "RemoteRequest", "RemoteResponse", "Unreachable"]

CONNECT_SECONDS_MAX = 5.0
IDLE_CONNECTIONS_MAX = 128  # as many as are in use in a burst; each costs a socket at both ends
IDLE_SECONDS_MAX = 4.0  # below the keep-alive of common servers (uvicorn 5 s), so that they seldom close first
CLOSE_RACE_SECONDS = 0.5  # longer than a close may be on its way
RECEIVE_BYTES = 65536
SEND_BYTES = 65536  # of a request, each of which is a sign of life
LEFT_SILENT_BEATS = 1.5  # so many without a byte, and the close of a connection may be lost like the rest
UNACKNOWLEDGED = "unacknowledged"
LOSSES = {
    "silent": "sends no sign of life over a connection that is open",
    "replaced": "is another process now, at the same address",
    "not_running": "reports no request, and one waits for its response",
    "overtaken": "reports tokens, and none of them comes over this connection",
    "stalled": "has said nothing for very long in the middle of a response",
}
"""What is said of each reason for which a response is given up."""
# Nothing was acknowledged for too long, or there is no way to the machine any more.
VANISHED = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})

_TARGET = re.compile(r"[!-~]+")
_FIELDS = re.compile(r"(?:[-!#$%&'*+.^_`|~0-9A-Za-z]+: [^\0\r\n]*\r\n)*")

OpenStream = Callable[[], Awaitable[trio.abc.Stream]]


class Unreachable(EndpointLost):
    """No connection could be made: the request never got there."""


class EndpointSilent(EndpointLost):
    """Nothing comes over the connection any more, while the endpoint itself may be well. reason: see router/silence."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


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

    @property
    def has_beaten(self) -> bool:
        """Whether a beat came before its head."""
        return self._connection.has_beaten

    def next_piece(self) -> Awaitable[bytes | None]:
        """The next bytes of the body; None at its end. Raises EndpointLost when it breaks off."""
        # No coroutine of its own: it is asked for each event.
        return self._take_held() if self._held else self._connection.next_piece()

    async def _take_held(self) -> bytes:
        held, self._held = bytes(self._held), bytearray()
        return held


class RemoteEndpoint:
    """One server and the connections to it.

    Args:
        headers: sent with every request, such as an API key.
        open_stream: for tests, instead of TCP.
        silence: bounds between the bytes of a response, for whoever calls `look`. None: beats are not asked for.

    Attributes:
        watch: judges which responses are lost although their connection is open.
        on_silent: called with the reason when a response is given up.
        on_left_silent: called with the headers of a request that ends over a silent connection, whose close may not
            arrive; and how long nothing has come over it.
        on_read: called when the first response is read.
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
        self._ssl_context = ssl_context
        if address.scheme == "https" and ssl_context is None:
            self._ssl_context = ssl.create_default_context()
        self._open_stream = open_stream or self._open_tcp
        self._idle: deque[tuple[float, _Connection]] = deque()  # (since when, connection), the oldest first
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
        """Send a request, any but HEAD; the scope holds the response. Leaving it before the body's end closes the
        connection.

        Raises Unreachable if there is no connection, EndpointLost if it breaks before the head of the response, and
        InvalidRequest for a header that cannot be sent. computes: it is work that the endpoint's reports of load count.
        tries_beat: a beat is asked for at once, to see whether it arrives.
        """
        beats = [heartbeat_field(self._beat_seconds, now=tries_beat)] if self._beat_seconds else []
        return RemoteRequest(self, self._encoded(method, path, [*headers, *beats], body), headers, computes=computes)

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

    # --- silence ---

    @property
    def is_read(self) -> bool:
        """Whether a response of it is read now."""
        return bool(self._awaited)

    def note_load(self, load: EndpointLoad, asked_at: float) -> None:
        """It has reported its load. asked_at: when it was asked, or would have been."""
        self.watch.note_load(load, self._awaited, asked_at, trio.current_time())

    def look(self, now: float) -> None:
        """Give up the responses that are lost. To be called every LOOK_SECONDS while responses are read."""
        for loss in self.watch.look(self._awaited, now):
            self._awaited[loss.response].give_up(loss)
            self.on_silent(loss.reason)

    def note_instance(self, response: AwaitedResponse) -> None:
        """A response has said which process it comes from."""
        if response.instance is not None:
            self.watch.note_instance(response.instance, self._awaited, response.sent_at, trio.current_time())

    def _begin(self, connection: _Connection, headers: list[tuple[str, str]], *, computes: bool) -> None:
        awaited = AwaitedResponse(trio.current_time(), computes=computes)
        awaited.instance = connection.awaited.instance  # of the response before it
        connection.awaited, connection.headers = awaited, headers
        self._awaited[awaited] = connection
        if len(self._awaited) == 1:
            self.on_read()

    def _end(self, connection: _Connection) -> None:
        """Its response is read no more."""
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
        """Over a connection that is there, or else a new one. A server may close an idle connection just when it is
        used again; that is no fault of the request, if it comes at once and nothing of a response has come."""
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

    def give_back(self, connection: _Connection) -> None:
        """Nobody needs it any more. It is kept if it can serve another request."""
        self._end(connection)
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
            self._endpoint.give_back(connection)

    async def __aenter__(self) -> RemoteResponse:
        return await self.begin()

    async def __aexit__(self, *error: object) -> None:
        self.end()


class _Connection:
    """One connection and the request on it. heard: something of a response has come. awaited: what has come of the
    response at hand, and when. headers: of its request. has_beaten: a beat came before its head."""

    def __init__(self, stream: trio.abc.Stream, endpoint: RemoteEndpoint) -> None:
        self._stream = stream
        self._tcp = stream if isinstance(stream, TcpStream) else None
        self._endpoint = endpoint
        self.id = endpoint.id
        self._reader = ResponseReader()
        self._is_sent = True  # the whole of the last request
        self._loss: Loss | None = None
        self.heard = False
        self.has_beaten = False
        self.awaited = AwaitedResponse(0.0)
        self.headers: list[tuple[str, str]] = []

    @property
    def is_reusable(self) -> bool:
        return self._is_sent and self._reader.can_go_on

    @property
    def has_ended(self) -> bool:
        return self._reader.has_ended

    async def send(self, data: bytes) -> ResponseHead:
        """Raises EndpointLost."""
        self._reader.begin()
        self.heard = self._is_sent = self.has_beaten = False
        try:
            if self._tcp is not None:
                # Waiting for the response lets the others have a turn; before that there is nothing to wait for.
                data = data[self._tcp.try_send(data) :]
            if data:
                await self._send_rest(data)
            self._is_sent = True
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # a server that refuses early may have answered all the same
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
        """Take what a head says of beats, and of the process that it comes from."""
        for name, value in head.headers:
            if name == INSTANCE_HEADER:
                self.awaited.instance = value
                self._endpoint.note_instance(self.awaited)
            elif name == HEARTBEAT_HEADER and head.status >= 200:
                self.awaited.beats = True

    async def next_piece(self) -> bytes | None:
        try:
            while (piece := self._reader.next_piece()) is None:
                await self._receive()
        except BadResponse as error:
            raise self._lost(error) from error
        self.awaited.has_body = True
        return piece or None

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

    def give_up(self, loss: Loss) -> None:
        """Whoever reads the response gets EndpointSilent."""
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
