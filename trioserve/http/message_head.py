"""How the head of a message is read and written: the request's target, the fields of a response, the date."""

from __future__ import annotations

import email.utils
import functools
import http
import re
import urllib.parse

import msgspec

from trioserve.http.exchange import HeaderFields
from trioserve.http.headers import Headers

__all__ = ["REASONS", "RequestHead", "encode_fields", "printable", "split_target"]

TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # RFC 9110, 5.6.2
REASONS = {status.value: status.phrase.encode("ascii") for status in http.HTTPStatus}
"""HTTP/1.1's words for a status; some clients do not see a status without them."""
LOGGED_CHARACTERS_MAX = 200
BREAKS = re.compile(r"[\0\r\n]")
FRAMING_FIELDS = frozenset({"connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"})


class RequestHead(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a request that is known before its body; fields as in Exchange."""

    method: str
    path: str
    query: str
    headers: Headers
    http_version: str
    peer: str


def split_target(target: str) -> tuple[str, str]:
    """Path, percent-decoded, and query of a request target: "/a%20b?c=d", "http://host/a?c=d" (a proxy's form), "*".

    What has no path ("host:443", of CONNECT) comes back as it is.
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
    """The fields of a response as they go out: lower-case names, checked, with a date, and content-length if it is
    given and the handler did not set it (for HEAD it knows the length of a body that is not there). unix_seconds: the
    date.

    Raises ValueError for a name or value that would break the message, and for fields that the connection itself sets.
    """
    encoded = []
    names = set()
    for name, value in fields:
        name = name.lower()
        if not TOKEN.fullmatch(name) or BREAKS.search(value):
            raise ValueError(f"header field {name!r}: {value!r} cannot be sent: a line break or a wrong character")
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
    """What a client sent, for a log line: no line breaks, no escape sequences, not long."""
    return text[:LOGGED_CHARACTERS_MAX].encode("unicode_escape").decode("ascii")


@functools.lru_cache(maxsize=1)
def _date(unix_seconds: int) -> bytes:
    return email.utils.formatdate(unix_seconds, usegmt=True).encode("ascii")
