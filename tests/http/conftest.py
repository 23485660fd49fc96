"""HTTP/2 and HTTP/1.1 clients for a server in the same program, over streams in memory.

The clients use hyperframe, hpack and h11 directly, so that tests can also send invalid frames.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable

import h11
import hpack
import hyperframe.frame as frames
import pytest
import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from trioserve.http.exchange import Exchange, Handler
from trioserve.http.limits import FrontendLimits
from trioserve.http.server import FrontendServer

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclasses.dataclass
class H2Response:
    """The part of a response that has arrived so far."""

    status: int | None = None
    informational: list[int] = dataclasses.field(default_factory=list)
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    body: bytes = b""
    ended: bool = False
    reset_code: int | None = None

    @property
    def over(self) -> bool:
        return self.ended or self.reset_code is not None


class H2Client:
    """A client that sends any frame, and collects received frames into one H2Response per stream.

    The client sends window updates only when a test calls `credit`.
    """

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.responses: dict[int, H2Response] = {}
        self.goaways: list[frames.GoAwayFrame] = []
        self.frames: list[frames.Frame] = []
        self.reads: list[int] = []  # The number of DATA frames in each read.
        self.at_eof = False
        self._next_id = 1
        self._encoder = hpack.Encoder()
        self._decoder = hpack.Decoder()
        self._held = b""

    async def open(self, **settings: int) -> None:
        frame = frames.SettingsFrame(0)
        frame.settings = {getattr(frames.SettingsFrame, name): value for name, value in settings.items()}
        await self.stream.send_all(PREFACE + frame.serialize())

    async def send(self, *sent: frames.Frame) -> None:
        await self.stream.send_all(b"".join(frame.serialize() for frame in sent))

    def request_frames(
        self,
        path: str = "/",
        *,
        method: str = "POST",
        headers: tuple[tuple[str, str], ...] = (),
        body: bytes = b"",
        end: bool = True,
    ) -> tuple[int, list[frames.Frame]]:
        stream_id = self._next_id
        self._next_id += 2
        pseudo = ((":method", method), (":scheme", "http"), (":authority", "test"), (":path", path))
        head = frames.HeadersFrame(stream_id, data=self._encoder.encode([*pseudo, *headers]), flags=["END_HEADERS"])
        made: list[frames.Frame] = [head]
        if body:
            made.append(frames.DataFrame(stream_id, data=body))
        if end:
            made[-1].flags.add("END_STREAM")
        self.responses[stream_id] = H2Response()
        return stream_id, made

    async def request(self, path: str = "/", **arguments) -> int:
        stream_id, made = self.request_frames(path, **arguments)
        await self.send(*made)
        return stream_id

    async def data(self, stream_id: int, data: bytes, *, end: bool = False) -> None:
        await self.send(frames.DataFrame(stream_id, data=data, flags=["END_STREAM"] if end else []))

    async def reset(self, stream_id: int, code: int = 8) -> None:
        await self.send(frames.RstStreamFrame(stream_id, error_code=code))

    async def credit(self, stream_id: int, byte_count: int) -> None:
        await self.send(frames.WindowUpdateFrame(stream_id, window_increment=byte_count))

    async def receive(self) -> None:
        """Read from the stream once. At the end of the connection, set at_eof."""
        try:
            received = await self.stream.receive_some(65536)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            received = b""
        if not received:
            self.at_eof = True
            return
        self._held += received
        data_frames = 0
        while len(self._held) >= 9:
            frame, length = frames.Frame.parse_frame_header(memoryview(self._held[:9]))
            if len(self._held) < 9 + length:
                break
            frame.parse_body(memoryview(self._held[9 : 9 + length]))
            self._held = self._held[9 + length :]
            self._sort(frame)
            data_frames += isinstance(frame, frames.DataFrame)
        self.reads.append(data_frames)

    def _sort(self, frame: frames.Frame) -> None:
        self.frames.append(frame)
        if isinstance(frame, frames.GoAwayFrame):
            self.goaways.append(frame)
            return
        # Responses on streams that a test opened itself are dropped. But their headers must update the HPACK table.
        response = self.responses.get(frame.stream_id) or H2Response()
        if isinstance(frame, frames.HeadersFrame):
            fields = dict(self._decoder.decode(frame.data))
            status = int(fields.pop(":status"))
            if status < 200:
                response.informational.append(status)
            else:
                response.status = status
                response.headers = fields
        elif isinstance(frame, frames.DataFrame):
            response.body += frame.data
        elif isinstance(frame, frames.RstStreamFrame):
            response.reset_code = frame.error_code
        if "END_STREAM" in frame.flags:
            response.ended = True

    async def until(self, condition: Callable[[], bool]) -> None:
        """Read until the condition is true. Fail if the connection ends before."""
        while not condition():
            assert not self.at_eof, f"the server closed; {self.responses} {self.goaways}"
            await self.receive()

    async def response(self, stream_id: int) -> H2Response:
        response = self.responses[stream_id]
        await self.until(lambda: response.over)
        return response

    async def until_eof(self) -> None:
        while not self.at_eof:
            await self.receive()


class H11Client:
    """A client that uses h11. Its method `raw` sends any bytes."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.protocol = h11.Connection(h11.CLIENT)

    async def raw(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def request(
        self, target: str = "/", *, method: str = "POST", headers: tuple[tuple[str, str], ...] = (), body: bytes = b""
    ) -> None:
        fields = [("host", "test"), *headers]
        if body and not any(name == "transfer-encoding" for name, _ in headers):
            fields.append(("content-length", str(len(body))))
        sent = self.protocol.send(h11.Request(method=method, target=target, headers=fields))
        if body:
            sent += self.protocol.send(h11.Data(data=body))
        await self.raw(sent + self.protocol.send(h11.EndOfMessage()))

    async def event(self) -> h11.Event:
        while True:
            event = self.protocol.next_event()
            if event is not h11.NEED_DATA:
                return event
            try:
                received = await self.stream.receive_some(65536)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                received = b""
            self.protocol.receive_data(received)

    async def response(self, *, next_cycle: bool = True) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body. Raise h11.RemoteProtocolError if the response breaks off."""
        head = await self.event()
        while isinstance(head, h11.InformationalResponse):
            head = await self.event()
        assert isinstance(head, h11.Response), head
        body = b""
        while isinstance(event := await self.event(), h11.Data):
            body += event.data
        if next_cycle and self.protocol.our_state is h11.DONE and self.protocol.their_state is h11.DONE:
            self.protocol.start_next_cycle()
        return head.status_code, {k.decode(): v.decode() for k, v in head.headers}, body


class Front:
    """A server, and the nursery of its connections. Each connection is one task in this nursery."""

    def __init__(self, handler: Handler, limits: FrontendLimits, nursery: trio.Nursery) -> None:
        self.server = FrontendServer(handler, limits=limits)
        self.nursery = nursery
        self._scopes: list[trio.CancelScope] = []

    def cancel(self) -> None:
        """Cancel all connections."""
        for scope in self._scopes:
            scope.cancel()

    def connect(self, pair: Callable[[], tuple[trio.abc.Stream, trio.abc.Stream]] = memory_stream_pair):
        ours, theirs = pair()
        self.nursery.start_soon(self._serve, theirs)
        return ours

    async def _serve(self, stream: trio.abc.Stream) -> None:
        with trio.CancelScope() as scope:
            self._scopes.append(scope)
            await self.server.serve_connection(stream, peer="test")

    async def h2(self, **settings: int) -> H2Client:
        client = H2Client(self.connect())
        await client.open(**settings)
        return client

    def h11(self) -> H11Client:
        return H11Client(self.connect())

    @property
    def connection_count(self) -> int:
        return len(self.nursery.child_tasks)

    async def settle(self) -> None:
        await wait_all_tasks_blocked()


@pytest.fixture
async def front(autojump_clock) -> AsyncIterator[Callable[..., Front]]:
    """Return a function front(handler, **limits) -> Front. After the test, all connections must have ended."""
    # pytest-trio uses the clock only if the test itself has the fixture as a parameter.
    assert trio.lowlevel.current_clock() is autojump_clock, "a test with `front` also needs `autojump_clock`"
    fronts: list[Front] = []
    async with trio.open_nursery() as nursery:

        def make(handler: Callable[[Exchange], Awaitable[None]], **limits) -> Front:
            # The test clients do not answer PINGs by themselves, so the server sends none by default.
            limits = {"ping_seconds": 86_400.0, **limits}
            fronts.append(Front(handler, FrontendLimits(**limits), nursery))
            return fronts[-1]

        yield make
        nursery.cancel_scope.cancel()
    for front in fronts:
        counters = front.server.counters()
        assert (counters.connections_open, counters.exchanges_open, counters.request_body_bytes_held) == (0, 0, 0)


class Watched:
    """A handler that records whether it began, ended, and was cancelled. By default it waits forever."""

    def __init__(self, handler: Handler | None = None) -> None:
        self.begun = trio.Event()
        self.ended = trio.Event()
        self.cancelled = False
        self.running = 0
        self._handler = handler or self._wait

    @staticmethod
    async def _wait(exchange: Exchange) -> None:
        await trio.sleep_forever()

    async def __call__(self, exchange: Exchange) -> None:
        self.running += 1
        self.begun.set()
        try:
            await self._handler(exchange)
        except trio.Cancelled:
            self.cancelled = True
            raise
        finally:
            self.running -= 1
            self.ended.set()

    async def passes_until_ended(self) -> int:
        """Return the number of passes of the scheduler until the handler has ended."""
        passes = 0
        while not self.ended.is_set():
            await trio.lowlevel.checkpoint()
            passes += 1
            assert passes < 100, "the handler did not end"
        return passes


@pytest.fixture
def watched() -> type[Watched]:
    return Watched


@pytest.fixture
def h2_client() -> type[H2Client]:
    return H2Client


@pytest.fixture
def h11_client() -> type[H11Client]:
    return H11Client
