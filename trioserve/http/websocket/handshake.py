"""The opening handshake of a websocket: RFC 6455, 4.2 on HTTP/1.1, and RFC 8441 on HTTP/2."""

from __future__ import annotations

import base64
import binascii
import hashlib

from trioserve.http.exchange import HeaderFields, Headers

__all__ = ["accept_fields", "asks_for_websocket", "handshake_fault", "upgrade_fields"]

VERSION = "13"
KEY_BYTES = 16
SUFFIX = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, 1.3 defines this text.


def asks_for_websocket(method: str, http_version: str, headers: Headers) -> bool:
    """Return True if an HTTP/1.1 request asks to upgrade its connection to a websocket.

    Args:
        method: method of the request.
        http_version: version of the request.
        headers: header fields of the request.
    """
    return (
        method == "GET"
        and http_version == "1.1"
        and "websocket" in _words(headers.get("upgrade"))
        and "upgrade" in _words(headers.get("connection"))
    )


def handshake_fault(headers: Headers, *, has_key: bool) -> tuple[int, str, HeaderFields] | None:
    """Check the fields of a request that opens a websocket.

    Args:
        headers: header fields of the request.
        has_key: True on HTTP/1.1. Over HTTP/2, the handshake has no key.

    Returns:
        Status, message and header fields of the response that refuses the websocket, or None.
    """
    version = headers.get("sec-websocket-version")
    if version != VERSION:
        message = f"sec-websocket-version is {(version or '')[:40]!r}, allowed is {VERSION}"
        return 426, message, (("sec-websocket-version", VERSION),)
    if has_key and not _is_key(headers.get("sec-websocket-key") or ""):
        return 400, f"sec-websocket-key must be {KEY_BYTES} bytes in base64: use a websocket client", ()
    if "transfer-encoding" in headers or (headers.get("content-length") or "0") != "0":
        return 400, "the request opens a websocket and has a body: send the body as a message", ()
    return None


def accept_fields(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return the header fields that accept a websocket on HTTP/1.1.

    Args:
        headers: header fields of the request, which `handshake_fault` has checked.
    """
    key = (headers.get("sec-websocket-key") or "").encode("ascii")
    token = base64.b64encode(hashlib.sha1(key + SUFFIX, usedforsecurity=False).digest())
    return [(b"upgrade", b"websocket"), (b"connection", b"Upgrade"), (b"sec-websocket-accept", token)]


def upgrade_fields(status: int) -> list[tuple[bytes, bytes]]:
    """Return the header fields that name the required protocol in a response 426 on HTTP/1.1 (RFC 9110, 15.5.22).

    Args:
        status: status of any response. Other responses get no fields.
    """
    return [(b"upgrade", b"websocket"), (b"connection", b"Upgrade")] if status == 426 else []


def _is_key(key: str) -> bool:
    try:
        return len(base64.b64decode(key, validate=True)) == KEY_BYTES
    except (binascii.Error, ValueError):
        return False


def _words(value: str | None) -> list[str]:
    return [word.strip().lower() for word in (value or "").split(",")]
