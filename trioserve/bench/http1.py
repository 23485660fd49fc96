"""Requests over HTTP/1.1, a connection each at a time; leaving one closes it."""

from __future__ import annotations

import h11
import trio

from trioserve.bench.client import RECEIVE_BYTES, Failure, FailureKind, Listener, OpenStream, disconnected, opened

__all__ = ["Http1Client"]


class Http1Client:
    """One connection for each request in flight, kept alive between requests."""

    def __init__(self, open_stream: OpenStream, headers: list[tuple[str, str]]) -> None:
        """headers: sent with every request, Host included."""
        self._open_stream = open_stream
        self._headers = headers
        self._idle: list[_Http1Connection] = []

    async def request(
        self, method: str, path: str, body: bytes, listener: Listener, *, withheld_bytes: int = 0
    ) -> Failure | None:
        request = h11.Request(method=method, target=path, headers=[*self._headers, ("content-length", str(len(body)))])
        sent = body[: len(body) - withheld_bytes]
        while self._idle:
            connection = self._idle.pop()
            failure = await self._exchange(connection, request, sent, listener, is_whole=not withheld_bytes)
            # A server may close an idle connection just when it is used again; that is no fault of the request.
            if failure is None or failure.kind is not FailureKind.UNPROCESSED:
                return failure
        stream = await opened(self._open_stream)
        if isinstance(stream, Failure):
            return stream
        return await self._exchange(_Http1Connection(stream), request, sent, listener, is_whole=not withheld_bytes)

    async def _exchange(
        self, connection: _Http1Connection, request: h11.Request, body: bytes, listener: Listener, *, is_whole: bool
    ) -> Failure | None:
        try:
            failure = await connection.exchange(request, body, listener, is_whole=is_whole)
        finally:
            if not connection.reusable:
                await trio.aclose_forcefully(connection.stream)  # closes before anything waits, cancelled or not
        if connection.reusable:
            self._idle.append(connection)
        return failure

    async def aclose(self) -> None:
        """Close the idle connections; those in use are closed by leaving their requests."""
        while self._idle:
            await trio.aclose_forcefully(self._idle.pop().stream)


class _Http1Connection:
    """One connection and the request on it."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.reusable = False
        self._http = h11.Connection(h11.CLIENT)
        self._was_used = False

    async def exchange(
        self, request: h11.Request, body: bytes, listener: Listener, *, is_whole: bool
    ) -> Failure | None:
        """is_whole: False if the body is only the beginning of what the head announces."""
        self.reusable = False
        silent_end = FailureKind.UNPROCESSED if self._was_used else FailureKind.DISCONNECT
        self._was_used = True
        http = self._http
        sent = [http.send(request), http.send(h11.Data(data=body)) if body else b""]
        if is_whole:
            sent.append(http.send(h11.EndOfMessage()))
        try:
            await self.stream.send_all(b"".join(data for data in sent if data))
        except trio.BrokenResourceError:
            http.send_failed()  # a server that refuses early may have answered all the same
        now_seconds = 0.0
        heard, at_end = False, False
        while True:
            try:
                event = http.next_event()
            except h11.RemoteProtocolError as error:
                if at_end:
                    return disconnected(FailureKind.DISCONNECT if heard else silent_end)
                return Failure(FailureKind.PROTOCOL, f"the answer is not HTTP/1.1: {error}")
            if event is h11.NEED_DATA:
                try:
                    data = await self.stream.receive_some(RECEIVE_BYTES)
                except trio.BrokenResourceError:
                    return disconnected(FailureKind.DISCONNECT if heard else silent_end)
                now_seconds = trio.current_time()
                heard, at_end = heard or bool(data), not data
                http.receive_data(bytes(data))
            elif isinstance(event, h11.Data):
                if not listener.body(bytes(event.data), now_seconds):
                    return None
            elif isinstance(event, h11.Response):
                listener.head(event.status_code)
            elif isinstance(event, h11.EndOfMessage):
                if http.our_state is h11.DONE and http.their_state is h11.DONE:
                    http.start_next_cycle()
                    self.reusable = True
                return None
            elif isinstance(event, h11.ConnectionClosed):
                return disconnected(FailureKind.DISCONNECT if heard else silent_end)
