"""Cheap clients of small requests: plain sockets in one thread, without a library.

They can measure a server that takes only some ten microseconds per request. A slower client would mostly measure
itself. The clients check the status of every response, and read every response to its end.
"""

from __future__ import annotations

import contextlib
import re
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import msgspec

__all__ = [
    "Address",
    "Asked",
    "LoadFailed",
    "Planned",
    "Response",
    "WireRequest",
    "ask",
    "at_a_time",
    "at_moments",
    "opened",
]

RECEIVE_BYTES = 262_144
RESPONSE_SECONDS_MAX = 60.0  # A measurement fails if no response arrives for this time.

_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_REASON = re.compile(rb"\r\nx-trioserve-reason: *([^\r\n]+)", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
_LAST_CHUNK = b"\r\n0\r\n\r\n"

Address = tuple[str, int]


class LoadFailed(Exception):
    """A response was wrong or missing, so the figures would have no meaning. The message is one sentence."""


class Response:
    """A response that is being received.

    Attributes:
        status: HTTP status. 0 before the head has arrived.
    """

    __slots__ = ("_body_at", "_is_chunked", "_length", "_received", "status")

    def __init__(self) -> None:
        self.status = 0
        self._received = b""
        self._body_at = 0
        self._length = 0
        self._is_chunked = False

    def feed(self, data: bytes) -> bool:
        """Add received bytes, and return True if the response is complete.

        Args:
            data: the bytes.

        Raises:
            LoadFailed: the response has no known end.
        """
        self._received += data
        received = self._received
        if not self._body_at:
            end = received.find(_HEAD_END)
            if end < 0:
                return False
            self._body_at = end + len(_HEAD_END)
            self.status = int(received[9:12])
            length = _LENGTH.search(received, 0, end + 2)
            self._is_chunked = length is None and _CHUNKED.search(received, 0, end + 2) is not None
            if length is None and not self._is_chunked:
                raise LoadFailed(f"a response has no length: {received[:end]!r}")
            self._length = 0 if length is None else int(length[1])
        if self._is_chunked:
            return received.endswith(_LAST_CHUNK)
        return len(received) >= self._body_at + self._length

    @property
    def body(self) -> bytes:
        return self._received[self._body_at :]

    @property
    def closes(self) -> bool:
        return _CLOSES.search(self._received, 0, self._body_at) is not None

    @property
    def reason(self) -> str:
        """Status and the server's reason, for a status other than 200."""
        found = _REASON.search(self._received, 0, self._body_at)
        return f"{self.status} {found[1].decode('ascii', 'replace')}" if found else str(self.status)


class WireRequest:
    """A request as bytes.

    Args:
        path: path and query.
        body: value that is sent as JSON. None: the method is GET.
        headers: additional headers.
        events: number of events that the response must have. None: the response is not streamed.
    """

    def __init__(
        self, path: str, body: object = None, *, headers: Iterable[tuple[str, str]] = (), events: int | None = None
    ) -> None:
        method, content = ("GET", b"") if body is None else ("POST", msgspec.json.encode(body))
        lines = [
            f"{method} {path} HTTP/1.1",
            "host: 127.0.0.1",
            "user-agent: trioserve-bench",
            "content-type: application/json",
            *(f"{name}: {value}" for name, value in headers),
            f"content-length: {len(content)}",
        ]
        self.data = "\r\n".join(lines).encode() + _HEAD_END + content
        self.events = events

    def check(self, response: Response) -> None:
        """Check the status and the number of events of a response.

        Args:
            response: a whole response.

        Raises:
            LoadFailed: the response is wrong.
        """
        events = None if self.events is None else response.body.count(b"data: {")
        if response.status != 200 or events != self.events:
            raise LoadFailed(
                f"a response has status {response.status} and {events} events, not 200 and {self.events}: "
                f"{response.body[:300]!r}"
            )


class Asked(msgspec.Struct, frozen=True):
    """A request that was answered.

    Attributes:
        key: key of the planned request.
        outcome: "" for status 200, otherwise status and reason.
        seconds: time from the planned moment to the end of the response.
    """

    key: int
    outcome: str
    seconds: float


class Planned(msgspec.Struct, frozen=True):
    """A request with its planned time.

    Attributes:
        at_seconds: seconds after the start.
        key: copied into the result.
        request: the request.
    """

    at_seconds: float
    key: int
    request: WireRequest


def ask(connection: socket.socket, request: WireRequest) -> Response:
    """Send a request over a free connection, and return the whole response with any status.

    Args:
        connection: a connection without a request.
    """
    connection.sendall(request.data)
    response = Response()
    while not response.feed(_received(connection)):
        pass
    return response


@contextlib.contextmanager
def opened(address: Address, count: int) -> Iterator[list[socket.socket]]:
    """Open connections, and close them at the end of the context.

    Args:
        address: address of the server.
        count: number of connections.
    """
    connections: list[socket.socket] = []
    try:
        for _ in range(count):
            connections.append(_opened(address))
        yield connections
    finally:
        for connection in connections:
            connection.close()


def at_a_time(connections: Sequence[socket.socket], request: WireRequest, *, requests: int) -> list[float]:
    """Send a request many times, on each connection one at a time.

    Args:
        requests: number of requests.

    Returns:
        Seconds of each request.

    Raises:
        LoadFailed: a response is wrong or missing.
    """
    seconds: list[float] = []
    left = requests
    began: dict[socket.socket, float] = {}
    responses: dict[socket.socket, Response] = {}

    def send(connection: socket.socket) -> None:
        nonlocal left
        left -= 1
        responses[connection] = Response()
        began[connection] = time.perf_counter()
        connection.sendall(request.data)

    with selectors.DefaultSelector() as selector:
        for connection in connections[:requests]:
            selector.register(connection, selectors.EVENT_READ)
            send(connection)
        while len(seconds) < requests:
            for connection in _ready(selector):
                response = responses[connection]
                if not response.feed(_received(connection)):
                    continue
                seconds.append(time.perf_counter() - began[connection])
                request.check(response)
                if left > 0:
                    send(connection)
    return seconds


def at_moments(address: Address, plan: Sequence[Planned]) -> list[Asked]:
    """Send every request at its planned time, whether earlier ones have ended or not. Each has a connection of its own.

    The time of a request starts at its planned time. Otherwise a client that is late would make the server look fast.

    Args:
        address: address of the server.
        plan: the requests.

    Returns:
        The answered requests, in order of their end.

    Raises:
        LoadFailed: a response is missing.
    """
    asked: list[Asked] = []
    pending = deque(sorted(plan, key=lambda planned: planned.at_seconds))
    idle: list[socket.socket] = []
    flights: dict[socket.socket, tuple[Planned, Response]] = {}
    with selectors.DefaultSelector() as selector:
        try:
            began_at = time.perf_counter()
            while len(asked) < len(plan):
                now = time.perf_counter() - began_at
                while pending and pending[0].at_seconds <= now:
                    planned = pending.popleft()
                    connection = idle.pop() if idle else _opened(address)
                    if connection not in selector.get_map():
                        selector.register(connection, selectors.EVENT_READ)
                    flights[connection] = (planned, Response())
                    connection.sendall(planned.request.data)
                patience = max(0.0, pending[0].at_seconds - now) if pending else RESPONSE_SECONDS_MAX
                for connection in _ready(selector, patience, is_due=bool(pending)):
                    if connection not in flights:  # The server has closed an idle connection.
                        selector.unregister(connection)
                        idle.remove(connection)
                        connection.close()
                        continue
                    planned, response = flights[connection]
                    if not response.feed(_received(connection)):
                        continue
                    seconds = time.perf_counter() - began_at - planned.at_seconds
                    outcome = "" if response.status == 200 else response.reason
                    asked.append(Asked(planned.key, outcome, seconds))
                    del flights[connection]
                    if response.closes:
                        selector.unregister(connection)
                        connection.close()
                    else:
                        idle.append(connection)
        finally:
            for connection in (*idle, *flights):
                connection.close()
    return asked


def _opened(address: Address) -> socket.socket:
    connection = socket.create_connection(address, timeout=RESPONSE_SECONDS_MAX)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _ready(
    selector: selectors.BaseSelector, patience: float = RESPONSE_SECONDS_MAX, *, is_due: bool = False
) -> list[socket.socket]:
    """Wait for connections that can be read. With is_due, none need become ready, since a request is due then."""
    chosen = selector.select(patience)
    if not chosen and not is_due:
        raise LoadFailed(f"no response arrived within {patience:g} s")
    return [key.fileobj for key, _ in chosen if isinstance(key.fileobj, socket.socket)]


def _received(connection: socket.socket) -> bytes:
    try:
        data = connection.recv(RECEIVE_BYTES)
    except TimeoutError:
        raise LoadFailed(f"no response arrived within {RESPONSE_SECONDS_MAX:g} s") from None
    if not data:
        raise LoadFailed("a connection was closed before its response was complete")
    return data
