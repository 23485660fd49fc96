"""Heads of ordinary HTTP/1.1 requests, read by hand; all others are h11's. It is a third of what a small one costs.

Ordinary is what nearly every client sends: HTTP/1.1, one Host, no body or one with a content-length, no expectation, no
upgrade, and a connection that stays. Whatever is read here, h11 reads alike; what it would refuse is left to it.
"""

from __future__ import annotations

import re

from trioserve.http.headers import Headers
from trioserve.http.message_head import RequestHead, split_target

__all__ = ["plain_request"]

_REQUEST_LINE = re.compile(r"([-!#$%&'*+.^_`|~0-9A-Za-z]+) ([!-~]+) HTTP/1\.1")
# Values in visible characters and blanks: h11 allows some others, and refuses some of those.
_FIELDS = re.compile(r"(?:\r\n[-!#$%&'*+.^_`|~0-9A-Za-z]+:[\t -~]*)*")
_LENGTH = re.compile(r"[0-9]{1,15}")
_NOT_PLAIN = frozenset({"transfer-encoding", "expect", "upgrade", "connection"})


def plain_request(
    held: bytearray, *, peer: str, head_bytes_max: int, fields_max: int
) -> tuple[RequestHead, int, int] | None:
    """The request that begins here, how long its head is, and its body, in bytes; None if it is not an ordinary one or
    its head is not whole."""
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
