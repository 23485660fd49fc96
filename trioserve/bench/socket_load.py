"""Clients of small requests that cost next to nothing: plain sockets, in one thread, without a library.

What is measured is what stands between them and the response, down to some ten microseconds; a client that spends more
than that on a request would be measured itself. They look at every response's status, and read it to its end.
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
    "Response",
    "Asked",
    "LoadFailed",
    "Planned",
    "WireRequest",
    "ask",
    "at_a_time",
    "at_moments",
    "opened",
]

RECEIVE_BYTES = 262_144
RESPONSE_SECONDS_MAX = 60.0  # without one the measurement is given up

_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_REASON = re.compile(rb"\r\nx-trioserve-reason: *([^\r\n]+)", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
_LAST_CHUNK = b"\r\n0\r\n\r\n"

Address = tuple[str, int]


class LoadFailed(Exception):
    """The figures would mean nothing: a response was wrong, or none came. One sentence."""


class Response:
    """One response in the making. Its body's bytes, chunk sizes included where there are any, are in `body`."""

    __slots__ = ("_body_at", "_is_chunked", "_length", "_received", "status")

    def __init__(self) -> None:
        self.status = 0
        self._received = b""
        self._body_at = 0
        self._length = 0
        self._is_chunked = False

    def feed(self, data: bytes) -> bool:
        """Whether it is whole now. Raises LoadFailed for what has no end that is known."""
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
                raise LoadFailed(f"a response tells no length: {received[:end]!r}")
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
        """Why it is no 200."""
        found = _REASON.search(self._received, 0, self._body_at)
        return f"{self.status} {found[1].decode('ascii', 'replace')}" if found else str(self.status)


class WireRequest:
    """A request as its bytes. events: how many its response has to have; None: it is not streamed."""

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
        """Raises LoadFailed."""
        events = None if self.events is None else response.body.count(b"data: {")
        if response.status != 200 or events != self.events:
            raise LoadFailed(
                f"a response has status {response.status} and {events} events, not 200 and {self.events}: "
                f"{response.body[:300]!r}"
            )


class Asked(msgspec.Struct, frozen=True):
    """One request that was answered. key: of the plan. outcome: empty for status 200, else status and reason."""

    key: int
    outcome: str
    seconds: float


class Planned(msgspec.Struct, frozen=True):
    """A request that is to be sent at a moment, seconds from the beginning."""

    at_seconds: float
    key: int
    request: WireRequest


def ask(connection: socket.socket, request: WireRequest) -> Response:
    """Send it over a connection that is free, and wait for the whole response, whatever its status."""
    connection.sendall(request.data)
    response = Response()
    while not response.feed(_received(connection)):
        pass
    return response


@contextlib.contextmanager
def opened(address: Address, count: int) -> Iterator[list[socket.socket]]:
    """So many connections."""
    connections: list[socket.socket] = []
    try:
        for _ in range(count):
            connections.append(_opened(address))
        yield connections
    finally:
        for connection in connections:
            connection.close()


def at_a_time(connections: Sequence[socket.socket], request: WireRequest, *, requests: int) -> list[float]:
    """So many requests, each connection with one at a time. The seconds of each. Raises LoadFailed."""
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
    """Every request at its moment, whatever became of those before it, and over a connection of its own while it lives.

    A request's seconds begin at its planned moment: a client that is late must not make the server look fast.
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
                    if connection not in flights:  # the server ends one that nobody uses
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
    """is_due: that nothing comes is no failure, since something is to be sent then."""
    chosen = selector.select(patience)
    if not chosen and not is_due:
        raise LoadFailed(f"no response came for {patience:g} s")
    return [key.fileobj for key, _ in chosen if isinstance(key.fileobj, socket.socket)]


def _received(connection: socket.socket) -> bytes:
    try:
        data = connection.recv(RECEIVE_BYTES)
    except TimeoutError:
        raise LoadFailed(f"no response came for {RESPONSE_SECONDS_MAX:g} s") from None
    if not data:
        raise LoadFailed("a connection was closed before its response was complete")
    return data
