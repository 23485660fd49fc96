"""The clients of frontend_cost, in a separate process: plain sockets, one thread per connection, no library.

The process reads its load as JSON from its input, and prints how many events it received.
"""

from __future__ import annotations

import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

__all__: list[str] = []

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
WINDOW_BYTES = 2**31 - 1
READ_BYTES = 262_144
DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
ACK = 1
END_STREAM, END_HEADERS = 1, 4
INITIAL_WINDOW_SIZE = 4
EVENT = b"data: {"


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream_id.to_bytes(4) + payload


def _header(name: bytes, value: bytes) -> bytes:
    """Return a literal header without indexing (RFC 7541, 6.2.2). Name and value must be shorter than 127 bytes."""
    return bytes((0, len(name))) + name + bytes((len(value),)) + value


def _http2_request(stream_id: int, body: bytes) -> bytes:
    method, path = (b"POST", b"/v1/completions") if body else (b"GET", b"/v1/models")
    fields = {b":method": method, b":scheme": b"http", b":authority": b"bench", b":path": path}
    block = b"".join(_header(name, value) for name, value in fields.items())
    head = _frame(HEADERS, END_HEADERS | (0 if body else END_STREAM), stream_id, block)
    return head + (_frame(DATA, END_STREAM, stream_id, body) if body else b"")


def _http2(port: int, streams: int, body: bytes, repeats: int) -> int:
    events = 0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        settings = _frame(SETTINGS, 0, 0, INITIAL_WINDOW_SIZE.to_bytes(2) + WINDOW_BYTES.to_bytes(4))
        window = _frame(WINDOW_UPDATE, 0, 0, (WINDOW_BYTES - 65_535).to_bytes(4))
        connection.sendall(PREFACE + settings + window + _frame(SETTINGS, ACK, 0, b""))
        rest = b""
        stream_id = 1
        for _ in range(repeats):
            connection.sendall(b"".join(_http2_request(stream_id + 2 * index, body) for index in range(streams)))
            stream_id += 2 * streams
            ended = 0
            while ended < streams:
                rest += _received(connection)
                position = 0
                while len(rest) - position >= 9 and len(rest) - position >= 9 + int.from_bytes(
                    rest[position : position + 3]
                ):
                    end = position + 9 + int.from_bytes(rest[position : position + 3])
                    kind, flags = rest[position + 3], rest[position + 4]
                    if kind == DATA:
                        events += rest.count(EVENT, position + 9, end)
                    elif kind == PING and not flags & ACK:  # a server ends a connection that does not answer
                        connection.sendall(_frame(PING, ACK, 0, rest[position + 9 : end]))
                    ended += kind in (DATA, HEADERS) and bool(flags & END_STREAM)
                    position = end
                rest = rest[position:]
    return events


def _http1(port: int, body: bytes, repeats: int) -> int:
    method, path = ("POST", "/v1/completions") if body else ("GET", "/v1/models")
    head = f"{method} {path} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n"
    end = b"\r\n0\r\n\r\n" if body else b"}"
    events = 0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for _ in range(repeats):
            connection.sendall(head.encode() + body)
            response = b""
            while not response.endswith(end):
                response += _received(connection)
            assert response.startswith(b"HTTP/1.1 200"), response[:300]
            events += response.count(EVENT)
    return events


def _received(connection: socket.socket) -> bytes:
    received = connection.recv(READ_BYTES)
    assert received, "the server closed the connection"
    return received


def main() -> int:
    load = json.load(sys.stdin)
    port, body, repeats = load["port"], load["body"].encode(), load["repeats"]
    with ThreadPoolExecutor(load["connections"]) as pool:
        if load["http"] == 1:
            assert load["streams"] == 1, "HTTP/1.1 has one response at a time"
            jobs = [pool.submit(_http1, port, body, repeats) for _ in range(load["connections"])]
        else:
            jobs = [pool.submit(_http2, port, load["streams"], body, repeats) for _ in range(load["connections"])]
        print(sum(job.result() for job in jobs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
