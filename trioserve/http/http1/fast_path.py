"""A fast parser for the heads of ordinary HTTP/1.1 requests, used instead of h11. It saves a third of the cost of a
small request.

An ordinary request uses HTTP/1.1, has one Host, no body or a body with content-length, no `Expect`, no `Upgrade`, and
keeps the connection open. Nearly all clients send such requests. h11 parses all other requests. If this parser accepts
a request, h11 would parse the request to the same result. If h11 would refuse a request, this parser does not accept
it.
"""

from __future__ import annotations

import re

from trioserve.http.headers import Headers
from trioserve.http.message_head import RequestHead, split_target

__all__ = ["plain_request"]

_REQUEST_LINE = re.compile(r"([-!#$%&'*+.^_`|~0-9A-Za-z]+) ([!-~]+) HTTP/1\.1")
# Only values of visible characters and blanks match. h11 also allows some other characters in some positions.
_FIELDS = re.compile(r"(?:\r\n[-!#$%&'*+.^_`|~0-9A-Za-z]+:[\t -~]*)*")
_LENGTH = re.compile(r"[0-9]{1,15}")
_NOT_PLAIN = frozenset({"transfer-encoding", "expect", "upgrade", "connection"})


def plain_request(
    held: bytearray, *, peer: str, head_bytes_max: int, fields_max: int
) -> tuple[RequestHead, int, int] | None:
    """Parse the head of an ordinary request.

    Args:
        held: bytes that no parser has read yet. They begin with a request.
        peer: the client's address.
        head_bytes_max: maximum size of the head in bytes.
        fields_max: maximum number of header fields.

    Returns:
        The head, its size in bytes, and the size of the body in bytes. None if the request is not ordinary or its head
        is incomplete.
    """
    end = held.find(b"\r\n\r\n", 0, head_bytes_max)
    if end < 0 or held.count(b"\n", 0, end) > fields_max:
        return None
    head = held[:end].decode("latin-1")
    line, _, rest = head.partition("\r\n")
    request_line = _REQUEST_LINE.fullmatch(line)
    if request_line is None or request_line[1] == "CONNECT" or _FIELDS.fullmatch(head, len(line)) is None:
        return None
    fields = []
    hosts = 0
    length = None
    for field in rest.split("\r\n"):
        name, _, value = field.partition(":")
        name, value = name.lower(), value.strip(" \t")
        if name == "host":
            hosts += 1
        elif name == "content-length":
            if length is not None or _LENGTH.fullmatch(value) is None:
                return None
            length = int(value)
        elif name in _NOT_PLAIN and not (name == "connection" and value.lower() == "keep-alive"):
            return None
        fields.append((name, value))
    if hosts != 1:
        return None
    path, query = split_target(request_line[2])
    plain = RequestHead(
        method=request_line[1], path=path, query=query, headers=Headers(fields), http_version="1.1", peer=peer
    )
    return plain, end + 4, length or 0
