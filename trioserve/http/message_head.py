"""Message heads: parsing the request target, and encoding the header fields and the date of a response."""

from __future__ import annotations

import email.utils
import functools
import http
import re
import urllib.parse

import msgspec

from trioserve.http.exchange import HeaderFields, Headers

__all__ = ["REASONS", "RequestHead", "encode_fields", "printable", "split_target"]

TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # RFC 9110, 5.6.2 defines a token.
REASONS = {status.value: status.phrase.encode("ascii") for status in http.HTTPStatus}
"""Reason phrases of HTTP/1.1. Some clients reject a status line without a phrase."""
LOGGED_CHARACTERS_MAX = 200
BREAKS = re.compile(r"[\0\r\n]")
FRAMING_FIELDS = frozenset({"connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"})


class RequestHead(msgspec.Struct, frozen=True, kw_only=True):
    """A request without its body.

    Attributes:
        method, path, query, headers, http_version, peer, is_websocket: see Exchange.
    """

    method: str
    path: str
    query: str
    headers: Headers
    http_version: str
    peer: str
    is_websocket: bool = False


def split_target(target: str) -> tuple[str, str]:
    """Split a request target into path and query.

    Args:
        target: "/a%20b?c=d", "http://host/a?c=d" (as sent to a proxy), "*", or "host:443" (of CONNECT).

    Returns:
        The percent-decoded path, and the query as sent. A target without a path ("host:443") is returned as the path.
    """
    if not target.startswith(("/", "*")) and "://" in target:
        _, _, rest = target.partition("://")
        slash = re.search(r"[/?]", rest)
        target = rest[slash.start() :] if slash else "/"
        if target.startswith("?"):
            target = "/" + target
    path, _, query = target.partition("#")[0].partition("?")
    return urllib.parse.unquote(path, errors="replace"), query


def encode_fields(
    fields: HeaderFields, *, unix_seconds: int, content_length: int | None = None
) -> list[tuple[bytes, bytes]]:
    """Check and encode the header fields of a response.

    Args:
        fields: names and values of the header fields, from the handler.
        unix_seconds: the time for the field `date`, which is added unless the handler set it.
        content_length: bytes of the body. Ignored if the handler set content-length, which it may do for HEAD. If None,
            no content-length is added.

    Returns:
        Fields with lower-case names, in the order of `fields`, then content-length and date.

    Raises:
        ValueError: a name or a value would break the message, or the handler set a field that only the connection may
            set.
    """
    encoded = []
    names = set()
    for name, value in fields:
        name = name.lower()
        if not TOKEN.fullmatch(name) or BREAKS.search(value):
            raise ValueError(
                f"header field {name!r}: {value!r} cannot be sent: it has a line break or a wrong character"
            )
        if name in FRAMING_FIELDS:
            raise ValueError(f"header field {name!r} is set by the connection: leave it out")
        names.add(name)
        encoded.append((name.encode("ascii"), value.strip(" \t").encode("latin-1")))
    if content_length is not None and "content-length" not in names:
        encoded.append((b"content-length", str(content_length).encode("ascii")))
    if "date" not in names:
        encoded.append((b"date", _date(unix_seconds)))
    return encoded


def printable(text: str) -> str:
    """Escape text from a client, so that the text is safe in a log line.

    Args:
        text: any text.

    Returns:
        At most LOGGED_CHARACTERS_MAX characters of `text`, with line breaks and control characters escaped.
    """
    return text[:LOGGED_CHARACTERS_MAX].encode("unicode_escape").decode("ascii")


@functools.lru_cache(maxsize=1)
def _date(unix_seconds: int) -> bytes:
    return email.utils.formatdate(unix_seconds, usegmt=True).encode("ascii")
