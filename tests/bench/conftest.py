"""Fixtures with a server whose responses a test writes. The client is connected in memory or by sockets."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import h11
import pytest
import trio
import trio.testing

from trioserve.bench.settings import BenchSettings


class Call:
    """One request at the scripted server. A test can answer it in several ways."""

    def __init__(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.raw_body = body
        self.left: str | None = None  # how the client disconnected, if it did so before the response was complete
        self.left_at: float | None = None
        self.sent_count = 0
        self.scope = trio.CancelScope()

    @property
    def body(self) -> Any:
        return json.loads(self.raw_body)

    def leave(self, how: str) -> None:
        self.left, self.left_at = how, trio.current_time()
        self.scope.cancel()

    async def start(self, status: int) -> None:
        raise NotImplementedError

    async def send(self, data: bytes) -> None:
        raise NotImplementedError

    async def finish(self) -> None:
        raise NotImplementedError

    async def drop(self) -> None:
        """Close the connection, which ends all requests on it."""
        raise NotImplementedError

    async def respond(self, status: int, content: object) -> None:
        await self.start(status)
        await self.send(json.dumps(content).encode())
        await self.finish()

    async def chunk(self, content: object) -> None:
        await self.send(b"data: " + json.dumps(content).encode() + b"\n\n")
        self.sent_count += 1

    async def done(self, usage: dict[str, Any] | None = None) -> None:
        if usage is not None:
            await self.chunk({"choices": [], "usage": usage})
        await self.send(b"data: [DONE]\n\n")
        await self.finish()


Handler = Callable[[Call], Awaitable[None]]


async def stream_tokens(
    call: Call, *, first_seconds: float = 0.0, gap_seconds: float = 0.0, with_usage: bool = True
) -> None:
    """Stream the requested number of tokens, one per chunk, as a completions server does."""
    await call.start(200)
    count = call.body["max_tokens"]
    for index in range(count):
        await trio.sleep(gap_seconds if index else first_seconds)
        last = index == count - 1
        await call.chunk({"choices": [{"text": f" t{index}", "finish_reason": "length" if last else None}]})
    prompt = call.body["prompt"]
    usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
    await call.done(usage if with_usage else None)


class ScriptedServer:
    """A server with one HTTP version. A handler answers streamed requests, and other responses are fixed."""

    def __init__(self, nursery: trio.Nursery, handler: Handler, http: int) -> None:
        self._nursery = nursery
        self._handler = handler
        self._http = http
        self.calls: list[Call] = []
        self._locks: dict[trio.abc.Stream, trio.Lock] = {}
        self.connection_count = 0
        self.open_count = 0
        self.in_flight = 0
        self.in_flight_max = 0
        self.models: list[str] | None = ["first-model", "other"]
        self.takes_ids = True
        self.streams_max: int | None = None
        self.piece_bytes: int | None = None  # size of the pieces in which the server sends its bytes
        # number of requests after which the server sends GOAWAY or closes the connection
        self.requests_per_connection: int | None = None
        self.window_bytes = 65_535

    async def open_stream(self) -> trio.abc.Stream:
        client, server = trio.testing.memory_stream_pair()
        self._nursery.start_soon(self.serve, server)
        return client

    async def serve(self, stream: trio.abc.Stream) -> None:
        self.connection_count += 1
        self.open_count += 1
        try:
            await (self._serve_http1(stream) if self._http == 1 else self._serve_http2(stream))
        finally:
            self.open_count -= 1
            with trio.CancelScope(shield=True), contextlib.suppress(trio.BrokenResourceError):
                await trio.aclose_forcefully(stream)

    async def _respond(self, call: Call) -> None:
        streamed = call.method == "POST" and call.body.get("stream", False)
        if call.path.endswith("/v1/models"):
            if self.models is None:
                await call.respond(404, {"detail": "Not Found"})
            else:
                await call.respond(200, {"object": "list", "data": [{"id": name} for name in self.models]})
        elif not streamed:
            refused = not self.takes_ids and isinstance(call.body.get("prompt"), list)
            content = {"error": {"message": "prompt must be text"}} if refused else {"choices": []}
            await call.respond(400 if refused else 200, content)
        else:
            self.calls.append(call)
            self.in_flight += 1
            self.in_flight_max = max(self.in_flight_max, self.in_flight)
            try:
                with call.scope:
                    await self._handler(call)
            finally:
                self.in_flight -= 1

    async def write(self, stream: trio.abc.Stream, take: Callable[[], bytes]) -> None:
        """Call `take` and send the returned bytes, after earlier writers have finished.

        A shield prevents cancellation, since half a frame would break the frames of other requests.
        """
        lock = self._locks.setdefault(stream, trio.Lock())
        gone = contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError)
        with trio.CancelScope(shield=True), gone:
            async with lock:
                data = take()
                size = self.piece_bytes or len(data) or 1
                for start in range(0, len(data), size):
                    await stream.send_all(data[start : start + size])

    # --- HTTP/1.1 ---

    async def _serve_http1(self, stream: trio.abc.Stream) -> None:
        http = h11.Connection(h11.SERVER)
        handled_count = 0
        while True:
            request, body = None, b""
            while True:
                event = http.next_event()
                if event is h11.NEED_DATA:
                    try:
                        http.receive_data(await stream.receive_some())
                    except trio.BrokenResourceError:
                        return
                elif isinstance(event, h11.Request):
                    request = event
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    break
                else:
                    return
            assert request is not None
            headers = {name.decode(): value.decode() for name, value in request.headers}
            call = _Http1Call(request.method.decode(), request.target.decode(), headers, body)
            call.server, call.stream, call.http = self, stream, http

            async def watch(call: Call = call) -> None:
                data = b""
                with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    data = await stream.receive_some()
                if data:  # The client sent its next request before this server closed the connection of the last one.
                    http.receive_data(data)
                else:
                    call.leave("close")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch)
                await self._respond(call)
                nursery.cancel_scope.cancel()
            handled_count += 1
            if handled_count == self.requests_per_connection or http.our_state is not h11.DONE:
                return
            http.start_next_cycle()

    # --- HTTP/2 ---

    async def _serve_http2(self, stream: trio.abc.Stream) -> None:
        http = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        codes = h2.settings.SettingCodes
        values = {codes.INITIAL_WINDOW_SIZE: self.window_bytes}
        if self.streams_max is not None:
            values[codes.MAX_CONCURRENT_STREAMS] = self.streams_max
        http.local_settings = h2.settings.Settings(client=False, initial_values=values)
        http.initiate_connection()
        await self.write(stream, http.data_to_send)
        calls: dict[int, Call] = {}
        bodies: dict[int, bytes] = {}
        heads: dict[int, dict[str, str]] = {}
        handled_count = 0
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    data = await stream.receive_some()
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    data = b""
                if not data:
                    break
                for event in http.receive_data(data):
                    if isinstance(event, h2.events.RequestReceived):
                        heads[event.stream_id] = dict(event.headers)
                        bodies[event.stream_id] = b""
                    elif isinstance(event, h2.events.DataReceived):
                        bodies[event.stream_id] += event.data
                        http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    elif isinstance(event, h2.events.StreamEnded) and handled_count != self.requests_per_connection:
                        head = heads[event.stream_id]
                        call = _Http2Call(head[":method"], head[":path"], head, bodies[event.stream_id])
                        call.server, call.stream, call.http, call.stream_id = self, stream, http, event.stream_id
                        calls[event.stream_id] = call
                        handled_count += 1
                        nursery.start_soon(self._respond, call)
                        if handled_count == self.requests_per_connection:
                            # Like a server that leaves gracefully: GOAWAY first, then the responses. h2 itself could
                            # not continue after close_connection, so the frame is written by hand.
                            goaway = b"\0\0\x08\x07\0\0\0\0\0" + event.stream_id.to_bytes(4) + bytes(4)
                            await self.write(stream, lambda frame=goaway: frame)
                    elif isinstance(event, h2.events.StreamReset) and event.stream_id in calls:
                        calls[event.stream_id].leave(f"reset {h2.errors.ErrorCodes(event.error_code).name}")
                await self.write(stream, http.data_to_send)
            for call in calls.values():
                if call.left is None:
                    call.leave("close")


class _Http1Call(Call):
    server: ScriptedServer
    stream: trio.abc.Stream
    http: h11.Connection

    async def _write(self, event: h11.Event) -> None:
        await self.server.write(self.stream, lambda: self.http.send(event) or b"")

    async def start(self, status: int) -> None:
        await self._write(h11.Response(status_code=status, headers=[("transfer-encoding", "chunked")]))

    async def send(self, data: bytes) -> None:
        await self._write(h11.Data(data=data))

    async def finish(self) -> None:
        await self._write(h11.EndOfMessage())

    async def drop(self) -> None:
        await trio.aclose_forcefully(self.stream)


class _Http2Call(Call):
    server: ScriptedServer
    stream: trio.abc.Stream
    http: h2.connection.H2Connection
    stream_id: int

    async def _flush(self) -> None:
        await self.server.write(self.stream, self.http.data_to_send)

    async def start(self, status: int) -> None:
        self.http.send_headers(self.stream_id, [(":status", str(status))])
        await self._flush()

    async def send(self, data: bytes) -> None:
        for start in range(0, len(data), 16_384):
            self.http.send_data(self.stream_id, data[start : start + 16_384])
        await self._flush()

    async def finish(self) -> None:
        self.http.end_stream(self.stream_id)
        await self._flush()

    async def reset(self, code: h2.errors.ErrorCodes) -> None:
        self.http.reset_stream(self.stream_id, code)
        await self._flush()

    async def drop(self) -> None:
        await trio.aclose_forcefully(self.stream)


@pytest.fixture
async def start_server() -> AsyncIterator[Callable[..., ScriptedServer]]:
    """Function start_server(handler, http=1) that returns a server, to which its open_stream connects."""
    async with trio.open_nursery() as nursery:

        def start(handler: Handler, *, http: int) -> ScriptedServer:
            return ScriptedServer(nursery, handler, http)

        yield start
        nursery.cancel_scope.cancel()


@pytest.fixture
def start_server_type() -> type[ScriptedServer]:
    """Class of the server, for tests with their own nursery."""
    return ScriptedServer


@pytest.fixture
def tokens() -> Callable[..., Awaitable[None]]:
    return stream_tokens


@pytest.fixture
def bench_settings() -> Callable[..., BenchSettings]:
    """Function that returns the settings of a small measurement, with the changes of a test."""

    def make(**changes: Any) -> BenchSettings:
        small = {"requests": 4, "concurrency": 2, "prompt_tokens": 6, "output_tokens": 3, "abort_after_tokens": 2}
        return BenchSettings(**{**small, **changes})

    return make
