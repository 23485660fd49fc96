"""The whole server without sockets: front end, API and an engine without weights, connected to clients in memory.

A websocket client uses HTTP/1.1 or HTTP/2. It can leave in every way in which real clients do.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import h2.events
import trio
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes

from trioserve.api.app import BaseApp
from trioserve.api.caller import AccessRules
from trioserve.api.images.image_context import EditSlots, UnsentImages
from trioserve.api.images.image_routes import ImageApp
from trioserve.api.limits import BackgroundSettings, BatchSettings, ConnectionSettings, DetachSettings
from trioserve.api.page import PageSettings
from trioserve.api.routes import App
from trioserve.contracts.errors import TrioserveError
from trioserve.contracts.image_generation import ImageRequestLimits
from trioserve.contracts.media import ImageLimits
from trioserve.contracts.tracing import NO_TRACER, Tracer
from trioserve.http.limits import FrontendLimits
from trioserve.http.server import FrontendServer
from trioserve.store.settings import StoreSettings
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.testing.fake_image_engine import FakeImageEngine, open_fake_image_engine
from trioserve.testing.inline_work import InlineDecoder, InlineImages, InlineStore, JobGate, open_inline_store
from trioserve.testing.memory_client import MemoryClient, MemoryEnd, memory_connection
from trioserve.trio_tools.own_run import opened_once

if TYPE_CHECKING:
    from wsproto.connection import Connection

__all__ = [
    "Http1Tunnel",
    "Http2Tunnel",
    "MemoryFrontend",
    "MemoryImageServer",
    "MemoryServer",
    "MemoryWebSocket",
    "WebSocketClosed",
    "WebSocketRefused",
    "open_memory_image_server",
    "open_memory_server",
]


AUTHORITY = "memory"
KEY = base64.b64encode(b"a key of a test.")
READ_BYTES = 65_536


class WebSocketRefused(TrioserveError):
    """The server answered the opening handshake with an ordinary response.

    Args:
        status: HTTP status.
        headers: header fields of the response, with names in lower case.
        body: body of the response.
    """

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        super().__init__(f"the server refused the websocket with {status}: {body[:500]!r}")
        self.status = status
        self.headers = headers
        self.body = body


class WebSocketClosed(TrioserveError):
    """The websocket has ended, so no further message will arrive.

    Args:
        code: close code of the server's close frame. None: the connection ended without a close frame.
        reason: text of the close frame.
    """

    def __init__(self, code: int | None, reason: str) -> None:
        super().__init__(f"the server closed the websocket with {code} {reason!r}")
        self.code = code
        self.reason = reason


class Http1Tunnel:
    """The bytes of a websocket over an upgraded connection of HTTP/1.1.

    Args:
        stream: the client's end of the connection.

    Attributes:
        headers: header fields of the response, with names in lower case.
    """

    def __init__(self, stream: MemoryEnd) -> None:
        self.headers: dict[str, str] = {}
        self._stream = stream

    async def open(self, path: str, fields: Mapping[str, str]) -> bytes:
        """Send the opening handshake, and return the bytes that follow the response.

        Args:
            path: path and query.
            fields: header fields.

        Raises:
            WebSocketRefused: the server refused the websocket.
            WebSocketClosed: the connection ended before the response.
        """
        sent = {
            "Host": AUTHORITY,
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Key": KEY.decode("ascii"),
            **fields,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        await self._stream.send_all(f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1"))
        received = b""
        while b"\r\n\r\n" not in received:
            received += await self._more()
        head, _, rest = received.partition(b"\r\n\r\n")
        status_line, *field_lines = head.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in field_lines)
        self.headers = {name.lower(): value.strip() for name, _, value in pairs}
        status = int(status_line.split(" ")[1])
        if status != 101:
            while len(rest) < int(self.headers.get("content-length", "0")):
                rest += await self._more()
            raise WebSocketRefused(status, self.headers, rest)
        return rest

    async def send_all(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def receive_some(self) -> bytes:
        return await self._stream.receive_some(READ_BYTES)

    async def _more(self) -> bytes:
        piece = await self.receive_some()
        if not piece:
            raise WebSocketClosed(None, "the connection ended before the response")
        return piece


class Http2Tunnel:
    """The bytes of a websocket over one stream of HTTP/2 (RFC 8441). It grants credit for received bytes at once.

    Args:
        stream: the client's end of the connection.

    Attributes:
        headers: header fields of the response, with names in lower case.
        protocol: the state of the connection.
        stream_id: id of the websocket's stream.
    """

    def __init__(self, stream: MemoryEnd) -> None:
        self.headers: dict[str, str] = {}
        self.protocol = H2Connection(H2Configuration(client_side=True, header_encoding="latin-1"))
        self.stream_id = 1
        self._stream = stream
        self._received = bytearray()
        self._has_ended = False
        self._read_over: trio.Event | None = None  # The event is set when the current call of `_read` ends.
        self._is_flushing = False

    async def open(self, path: str, fields: Mapping[str, str]) -> bytes:
        """Send the opening handshake, and wait for the response. See Http1Tunnel.

        Args:
            path: path and query.
            fields: header fields.
        """
        protocol = self.protocol
        protocol.initiate_connection()
        await self._flush()
        while not protocol.remote_settings.enable_connect_protocol and not self._has_ended:
            await self._read()
        pseudo = {":method": "CONNECT", ":protocol": "websocket", ":scheme": "http", ":path": path}
        lower = {name.lower(): value for name, value in fields.items()}
        protocol.send_headers(self.stream_id, [*pseudo.items(), (":authority", AUTHORITY), *lower.items()])
        await self._flush()
        while not self.headers:
            if self._has_ended:
                raise WebSocketClosed(None, "the stream ended before the response")
            await self._read()
        status = int(self.headers.pop(":status"))
        if status != 200:
            while not self._has_ended:
                await self._read()
            raise WebSocketRefused(status, self.headers, bytes(self._received))
        return b""

    async def send_all(self, data: bytes) -> None:
        left = memoryview(data)
        while left and not self._has_ended:
            size = min(self.protocol.local_flow_control_window(self.stream_id), self.protocol.max_outbound_frame_size)
            if size <= 0:
                await self._read()
                continue
            self.protocol.send_data(self.stream_id, bytes(left[:size]))
            left = left[size:]
            await self._flush()

    async def send_eof(self) -> None:
        self.protocol.end_stream(self.stream_id)
        await self._flush()

    async def reset(self) -> None:
        """Reset the stream. The connection stays open."""
        self.protocol.reset_stream(self.stream_id, ErrorCodes.CANCEL)
        await self._flush()

    async def receive_some(self) -> bytes:
        while not self._received and not self._has_ended:
            await self._read()
        received = bytes(self._received)
        self._received.clear()
        return received

    async def _flush(self) -> None:
        if self._is_flushing:
            return  # The other task, which sends now, also sends these bytes.
        self._is_flushing = True
        try:
            while data := self.protocol.data_to_send():
                await self._stream.send_all(data)
        finally:
            self._is_flushing = False

    async def _read(self) -> None:
        """Read from the connection once, or wait until another task has read from it."""
        if self._read_over is not None:
            await self._read_over.wait()
            return
        self._read_over = read_over = trio.Event()
        try:
            data = await self._stream.receive_some(READ_BYTES)
        finally:
            self._read_over = None
            read_over.set()
        if not data:
            self._has_ended = True
            return
        for event in self.protocol.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived):
                self.headers = {str(name): str(value) for name, value in event.headers or ()}
            elif isinstance(event, h2.events.DataReceived):
                self._received += event.data or b""
                if event.flow_controlled_length:
                    self.protocol.acknowledge_received_data(event.flow_controlled_length, self.stream_id)
            elif isinstance(event, (h2.events.StreamEnded, h2.events.StreamReset, h2.events.ConnectionTerminated)):
                self._has_ended = True
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self._flush()


class MemoryWebSocket:
    """A websocket client with its own connection. `ServedInMemory.websocket` creates it.

    The client has no task of its own: it reads, and answers pings, only while `receive` runs.

    Args:
        stream: the client's end of the connection.
        http: 1 for HTTP/1.1, 2 for HTTP/2.

    Attributes:
        tunnel: the bytes of the websocket on their way through the connection.
        headers: header fields of the response that accepted the websocket, with names in lower case.
        pings: payloads of the server's pings.
        answers_pings: False: the client sends no pongs.
    """

    def __init__(self, stream: MemoryEnd, *, http: int = 1) -> None:
        from wsproto.connection import Connection, ConnectionType

        self.stream = stream
        self.tunnel = Http2Tunnel(stream) if http == 2 else Http1Tunnel(stream)
        self.headers: dict[str, str] = {}
        self.pings: list[bytes] = []
        self.answers_pings = True
        self._protocol: Connection = Connection(ConnectionType.CLIENT)
        self._messages: list[str | bytes] = []
        self._pieces: list[str | bytes] = []
        self._closed: WebSocketClosed | None = None

    async def open(self, path: str, headers: Mapping[str, str] | None = None) -> None:
        """Send the opening handshake, and wait for the response.

        Args:
            path: path and query.
            headers: header fields to add or to replace.

        Raises:
            WebSocketRefused: the server refused the websocket.
        """
        rest = await self.tunnel.open(path, {"Sec-WebSocket-Version": "13", **(headers or {})})
        self.headers = self.tunnel.headers
        self._take(rest)

    async def send(self, message: str | bytes) -> None:
        """Send one message.

        Args:
            message: str is sent as text, bytes as binary.
        """
        from wsproto.events import BytesMessage, TextMessage

        event = TextMessage(data=message) if isinstance(message, str) else BytesMessage(data=message)
        await self.tunnel.send_all(self._protocol.send(event))

    async def receive(self) -> str | bytes:
        """Wait for the next message.

        Raises:
            WebSocketClosed: the server has closed the websocket, or the connection has ended.
        """
        await trio.lowlevel.checkpoint()
        while not self._messages:
            if self._closed is not None:
                raise self._closed
            received = await self.receive_raw()
            if received:
                await self._answer(self._take(received))
            else:
                self._closed = WebSocketClosed(None, "the connection ended")
        return self._messages.pop(0)

    async def close(self, code: int = 1000, reason: str = "") -> WebSocketClosed:
        """Send a close frame, and wait for the close frame of the server. Messages that arrive before it are dropped.

        Args:
            code: the close code.
            reason: the text for the server.

        Returns:
            Code and reason of the server's close frame.
        """
        from wsproto.events import CloseConnection

        await self.tunnel.send_all(self._protocol.send(CloseConnection(code=code, reason=reason)))
        return await self.closed()

    async def closed(self) -> WebSocketClosed:
        """Wait until the websocket has ended. Messages that arrive before that are dropped."""
        while True:
            try:
                await self.receive()
            except WebSocketClosed as closed:
                return closed

    def leave(self) -> None:
        """Close the connection without a close frame, as when the client's process ends."""
        self.stream.close()

    def abort(self) -> None:
        """Reset the connection."""
        self.stream.abort()

    async def half_close(self) -> None:
        """Announce that no more bytes will be sent."""
        await self.tunnel.send_eof()

    async def send_raw(self, data: bytes) -> None:
        """Send bytes that this client did not encode.

        Args:
            data: bytes, such as a malformed frame.
        """
        await self.tunnel.send_all(data)

    async def receive_raw(self) -> bytes:
        """Return bytes that this client has not decoded. They are empty after the end of the connection or stream."""
        try:
            return await self.tunnel.receive_some()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""

    # --- helpers ---

    async def _answer(self, replies: bytes) -> None:
        if replies:
            try:
                await self.tunnel.send_all(replies)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return

    def _take(self, received: bytes) -> bytes:
        """Read frames, and return the bytes that answer them."""
        from wsproto.connection import ConnectionState
        from wsproto.events import BytesMessage, CloseConnection, Ping, TextMessage

        replies = b""
        if not received or self._closed is not None:
            return replies
        self._protocol.receive_data(received)
        for event in self._protocol.events():
            if isinstance(event, (TextMessage, BytesMessage)):
                self._pieces.append(event.data if isinstance(event.data, str) else bytes(event.data))
                if event.message_finished:
                    empty = "" if isinstance(event, TextMessage) else b""
                    self._messages.append(empty.join(self._pieces))  # type: ignore[arg-type]
                    self._pieces = []
            elif isinstance(event, Ping):
                self.pings.append(bytes(event.payload))
                if self.answers_pings and self._protocol.state is ConnectionState.OPEN:
                    replies += self._protocol.send(event.response())
            elif isinstance(event, CloseConnection):
                self._closed = WebSocketClosed(int(event.code), event.reason or "")
                if self._protocol.state is ConnectionState.REMOTE_CLOSING:
                    replies += self._protocol.send(event.response())
        return replies


EngineT = TypeVar("EngineT", bound=FakeEngine | FakeImageEngine)
AppT = TypeVar("AppT", bound=BaseApp[Any])


class MemoryFrontend:
    """A front end with clients in memory.

    Args:
        server: the front end.
        nursery: runs one task per connection.
    """

    def __init__(self, server: FrontendServer, nursery: trio.Nursery) -> None:
        self.server = server
        self._nursery = nursery
        self._clients: list[MemoryEnd] = []

    def client(self, *, http: int = 1, headers: dict[str, str] | None = None) -> MemoryClient:
        """Return a client with its own connection.

        Args:
            http: 1 for HTTP/1.1, 2 for HTTP/2.
            headers: headers that the client sends with every request.
        """
        return MemoryClient(self.connect(), http=http, headers=headers)

    @asynccontextmanager
    async def websocket(
        self, path: str, *, headers: Mapping[str, str] | None = None, http: int = 1
    ) -> AsyncIterator[MemoryWebSocket]:
        """Open a websocket over a connection of its own. At the end of the context, the client leaves without a close
        frame if the websocket is still open.

        Args:
            path: path and query.
            headers: additional header fields of the opening handshake.
            http: 1 for HTTP/1.1, 2 for HTTP/2.

        Raises:
            WebSocketRefused: the server refused the websocket.
        """
        websocket = MemoryWebSocket(self.connect(), http=http)
        try:
            await websocket.open(path, headers)
            yield websocket
        finally:
            websocket.leave()

    def connect(self) -> MemoryEnd:
        """Return the client's end of a new connection, for a test that writes the HTTP protocol itself."""
        client, server_end = memory_connection()
        self._nursery.start_soon(self.server.serve_connection, server_end)
        self._clients.append(client)
        return client

    async def hang_up(self) -> None:
        """Close the client's end of every connection."""
        while self._clients:
            await self._clients.pop().aclose()

    @property
    def connection_count(self) -> int:
        return len(self._nursery.child_tasks)


class ServedInMemory(MemoryFrontend, Generic[EngineT, AppT]):
    """An engine behind an API and a front end, with clients in memory.

    Args:
        server: the front end.
        app: the API.
        nursery: runs one task per connection.
    """

    def __init__(self, engine: EngineT, server: FrontendServer, app: AppT, nursery: trio.Nursery) -> None:
        super().__init__(server, nursery)
        self.engine = engine
        self.app = app

    def announce_drain(self) -> None:
        """Begin to stop, as the server does at SIGTERM. It still answers HTTP, but refuses new and queued requests."""
        self.engine.drain()
        self.server.announce_drain()

    def drain(self) -> None:
        """Stop, as the server does after its last request. It closes all connections and accepts no new connections."""
        self.engine.drain()
        self.server.drain()

    async def assert_all_free(self) -> None:
        """Assert that no request uses a resource of the engine or of the front end.

        First, this method waits until all other tasks are idle. See FakeEngine.assert_all_free.

        Raises:
            AssertionError: a resource is in use.
        """
        await self.engine.finish_step()
        self.engine.assert_all_free()
        counters = self.server.counters()
        assert counters.exchanges_open == 0, f"{counters.exchanges_open} requests are still open in the front end"
        assert counters.websockets_open == 0, f"{counters.websockets_open} websockets are still open in the front end"
        assert counters.request_body_bytes_held == 0, f"{counters.request_body_bytes_held} bytes of bodies are held"


class MemoryServer(ServedInMemory[FakeEngine, App]):
    """A text server in memory. `open_memory_server` creates it.

    Attributes:
        store: the server's store. A test can simulate a full disk.
    """

    store: InlineStore

    def announce_drain(self) -> None:
        self.app.drain()
        super().announce_drain()

    def drain(self) -> None:
        self.app.drain()
        super().drain()


class MemoryImageServer(ServedInMemory[FakeImageEngine, ImageApp]):
    """An image server in memory. `open_memory_image_server` creates it.

    Attributes:
        threads: gate of the jobs that encode images for responses.
        decoder: gate of the jobs that decode uploaded images.
    """

    threads: JobGate
    decoder: JobGate


@opened_once
async def open_memory_server(
    *,
    limits: FrontendLimits | None = None,
    api_keys: tuple[str, ...] = (),
    admin_api_key: str | None = None,
    access: AccessRules | None = None,
    page: PageSettings | None = None,
    background: BackgroundSettings | None = None,
    connections: ConnectionSettings | None = None,
    batches: BatchSettings | None = None,
    detaching: DetachSettings | None = None,
    router_grace: DetachSettings | None = None,
    store_settings: StoreSettings | None = None,
    store_directory: Path | None = None,
    tracer: Tracer = NO_TRACER,
    logs_requests: bool = False,
    **engine_options: Any,
) -> AsyncIterator[MemoryServer]:
    """Open a server in memory with an engine without weights.

    Args:
        limits, api_keys, admin_api_key, access, page, background, connections, batches, detaching, router_grace: as the
        server's flags. None: the defaults, except that the status page keeps no history.
        store_settings: limits of the store. Its times to live use the clock of the Trio program.
        store_directory: existing folder for the store. None: the store is in memory.
        tracer: receives the spans of requests.
        logs_requests: if True, write one log line per request.
        **engine_options: options of open_fake_engine.
    """
    with open_inline_store(store_directory, store_settings) as store:
        async with open_fake_engine(**engine_options) as engine:
            app = App(
                engine,
                api_keys=api_keys,
                admin_api_key=admin_api_key,
                access=access,
                page=page or PageSettings(history_seconds=0, pauses_per_cost=0),
                store=store,
                background=background,
                connections=connections,
                batches=batches,
                detaching=detaching,
                router_grace=router_grace,
                tracer=tracer,
                logs_requests=logs_requests,
            )
            engine.tracer = tracer
            async with app.running(), trio.open_nursery() as nursery:
                server = FrontendServer(app, limits=limits, knows_caller=app.knows_caller)
                served = MemoryServer(engine, server, app, nursery)
                served.store = store
                yield served
                nursery.cancel_scope.cancel()


@opened_once
async def open_memory_image_server(
    *,
    limits: FrontendLimits | None = None,
    api_keys: tuple[str, ...] = (),
    admin_api_key: str | None = None,
    access: AccessRules | None = None,
    page: PageSettings | None = None,
    uploads: ImageLimits | None = None,
    edits: EditSlots | None = None,
    unsent: UnsentImages | None = None,
    logs_requests: bool = False,
    request_limits: ImageRequestLimits | None = None,
    **engine_options: Any,
) -> AsyncIterator[MemoryImageServer]:
    """Open an image server in memory with an engine without weights.

    Args:
        limits, api_keys, admin_api_key, access, page, edits, unsent: as the server's flags. None: the defaults.
        uploads: limits of uploaded images. None: the pixel limit of the engine.
        logs_requests: if True, write one log line per request.
        request_limits: limits of the fields of a request.
        **engine_options: options of open_fake_image_engine.
    """
    async with open_fake_image_engine(limits=request_limits, **engine_options) as engine:
        threads = InlineImages()
        decoder = InlineDecoder(uploads or ImageLimits(pixels_max=engine.limits.pixels_max), engine.metrics)
        app = ImageApp(
            engine,
            decoder,
            api_keys=api_keys,
            admin_api_key=admin_api_key,
            access=access,
            page=page,
            edits=edits,
            unsent=unsent,
            threads=threads,
            logs_requests=logs_requests,
        )
        async with trio.open_nursery() as nursery:
            server = FrontendServer(app, limits=limits, knows_caller=app.knows_caller)
            served = MemoryImageServer(engine, server, app, nursery)
            served.threads, served.decoder = threads.gate, decoder.gate
            yield served
            nursery.cancel_scope.cancel()
