"""Tests that the fast path parses ordinary requests exactly as h11 does, and leaves all other requests to h11."""

from __future__ import annotations

import random

import h11
import pytest

from trioserve.http.exchange import RequestHead, split_target
from trioserve.http.http1.protocol import plain_request

POST = b"POST /v1/completions?a=b%20c HTTP/1.1\r\nHost: a:80\r\nContent-Type: application/json\r\nContent-Length: 4\r\n"
GET = b"GET / HTTP/1.1\r\nhost: a\r\naccept: */*\r\nx-empty:\r\nx-twice: 1\r\nX-Twice: \t2 3\t\r\n"


def plain(data: bytes, *, head_bytes_max: int = 1000) -> tuple[RequestHead, int, int] | None:
    return plain_request(bytearray(data), peer="p", head_bytes_max=head_bytes_max, fields_max=256)


def read_with_h11(data: bytes) -> h11.Request:
    http = h11.Connection(h11.SERVER)
    http.receive_data(data)
    event = http.next_event()
    assert isinstance(event, h11.Request), event
    return event


def check_is_what_h11_reads(data: bytes) -> bool:
    """Check that the fast path and h11 read the same request. Return False if the fast path left the request to h11."""
    found = plain(data)
    if found is None:
        return False
    head, head_bytes, body_bytes = found
    request = read_with_h11(data)
    assert head.method.encode() == request.method
    assert (head.path, head.query) == split_target(request.target.decode("latin-1"))
    assert head.http_version.encode() == request.http_version
    fields = [(name.decode(), value.decode("latin-1")) for name, value in request.headers]
    assert list(head.headers.items()) == fields
    assert data[:head_bytes].endswith(b"\r\n\r\n")
    assert str(body_bytes) == dict(fields).get("content-length", "0")
    return True


@pytest.mark.parametrize(
    "data", [POST + b"\r\nbody", GET + b"\r\n", GET + b"Connection: Keep-Alive\r\n\r\nGET / HTTP/1.1"]
)
def test_fast_path_parses_an_ordinary_request_as_h11_does(data):
    assert check_is_what_h11_reads(data)


@pytest.mark.parametrize("seed", range(300))
def test_fast_path_parses_a_damaged_request_as_h11_does_or_not_at_all(seed):
    chance = random.Random(seed)
    data = bytearray(chance.choice([POST + b"\r\nbody", GET + b"\r\n"]))
    for _ in range(chance.randint(1, 2)):
        place = chance.randrange(len(data))
        data[place : place + chance.randint(0, 2)] = chance.choice(
            [b"", b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"0", b"\x0b", b"\x80", b"\r\nhost: b\r\n", b","]
        )
    check_is_what_h11_reads(bytes(data))


@pytest.mark.parametrize(
    "data",
    [
        POST + b"\r",
        POST,
        POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n",
        POST.replace(b"Host: a:80\r\n", b"") + b"\r\n",
        POST + b"host: b\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\n",
        POST + b"content-length: 4\r\n\r\n",
        POST.replace(b"Content-Length: 4", b"Content-Length: +4") + b"\r\n",
        POST.replace(b"Content-Length: 4", b"Content-Length: 4, 4") + b"\r\n",
        POST + b"Expect: 100-continue\r\n\r\n",
        POST + b"Upgrade: h2c\r\n\r\n",
        POST + b"Connection: close\r\n\r\n",
        POST + b"Connection: upgrade\r\n\r\n",
        POST + b" folded\r\n\r\n",
        POST + b"x : a\r\n\r\n",
        POST + b"x: \xe9\r\n\r\n",
        POST.replace(b"POST /v1", b"POST  /v1") + b"\r\n",
        b"CONNECT a:443 HTTP/1.1\r\nhost: a\r\n\r\n",
        b"\r\n" + GET + b"\r\n",
        GET + b"x: " + b"a" * 1000 + b"\r\n\r\n",
    ],
)
def test_unusual_and_incomplete_requests_are_parsed_by_h11(data):
    assert plain(data) is None
